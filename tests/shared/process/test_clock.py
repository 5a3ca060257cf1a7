from __future__ import annotations

import asyncio

from shared.process.clock import SYSTEM_CLOCK
from tests.fakes import VirtualClock


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_virtual_sleepers_wake_in_deadline_order() -> None:
    clock = VirtualClock()
    woken: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    tasks = [asyncio.create_task(sleeper(f"{s}", s)) for s in (3, 1, 2)]
    await settle()
    assert clock.sleeping == 3
    clock.advance(0.5)
    await settle()
    assert woken == []
    clock.advance(1.5)
    await settle()
    assert woken == ["1", "2"]
    clock.advance(1)
    await asyncio.gather(*tasks)
    assert woken == ["1", "2", "3"]
    assert clock.sleeping == 0


async def test_a_cancelled_sleeper_is_passed_over() -> None:
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep(1))
    await settle()
    task.cancel()
    await settle()
    assert clock.sleeping == 0
    clock.advance(2)


def test_virtual_time_moves_only_when_told() -> None:
    clock = VirtualClock()
    before = clock.monotonic(), clock.wall()
    clock.advance(2.5)
    assert (clock.monotonic() - before[0], clock.wall() - before[1]) == (2.5, 2.5)


async def test_the_system_clock_runs() -> None:
    before = SYSTEM_CLOCK.monotonic()
    await SYSTEM_CLOCK.sleep(0)
    assert SYSTEM_CLOCK.monotonic() >= before
    assert SYSTEM_CLOCK.wall() > 1_700_000_000
