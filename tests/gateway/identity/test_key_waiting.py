"""The requests that wait for an issuer's keys, by themselves."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack

from gateway.identity.waiting import WAITING_MAX, Waiting
from shared.fairness.fair_turns import BEGIN_MAX


async def test_those_who_wait_go_on_a_few_in_each_turn_of_the_loop() -> None:
    """Thousands of answers that are written in one turn would hold up every stream."""
    waiting, count = Waiting(), 1000
    gone_on: list[int] = []

    async def wait(number: int) -> None:
        assert await waiting.called(math.inf)
        gone_on.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(count)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.sleep(0)
    waiting.call()
    late = asyncio.create_task(wait(count))
    while len(gone_on) < count - 1:
        before = len(gone_on)
        await asyncio.sleep(0)
        assert len(gone_on) - before <= BEGIN_MAX
    assert gone_on == [number for number in range(count) if number != 3]
    assert not late.done(), "it came after the call"
    waiting.call()
    await late
    assert not waiting._asleep
    assert not waiting._called


def test_the_places_of_one_issuer_are_bounded_whoever_asks() -> None:
    waiting = Waiting()
    with ExitStack() as stack:
        places = [stack.enter_context(waiting.place(str(number))) for number in range(WAITING_MAX + 1)]
        assert not places[-1]
    assert len(waiting) == 0
