"""Which loop a service runs on, and how late it is."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from shared.process.clock import SYSTEM_CLOCK
from shared.process.loops import (
    IDLE_TICK_S,
    SWITCH_S,
    TICK_S,
    WORK_S,
    LagMeter,
    loop_factory,
    loop_name,
    watch_lag,
)


async def running() -> tuple[type, str]:
    return type(asyncio.get_running_loop()), loop_name()


def test_uvloop_where_it_is_installed() -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(running()) == (uvloop.Loop, "uvloop")


def test_asyncios_own_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        kind, name = runner.run(running())
    assert issubclass(kind, asyncio.SelectorEventLoop)
    assert name == "asyncio"


async def test_a_loop_that_is_held_up_is_told_once() -> None:
    now_s = 0.0
    meter = LagMeter(lambda: now_s, lambda: now_s)
    assert meter.pop_longest_s() == 0.0
    meter.start()
    now_s = 7.0 + TICK_S
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(2 * TICK_S, done.set_result, None)
    await done
    assert meter.pop_longest_s() == pytest.approx(7.0)
    assert meter.pop_longest_s() == 0.0


async def test_an_idle_loop_is_seldom_woken_and_a_busy_one_often() -> None:
    used_s = 0.0
    meter = LagMeter(lambda: 0.0, lambda: used_s)
    for _ in range(10):
        meter._tick(0.0)
    assert meter._tick_s == IDLE_TICK_S
    used_s = IDLE_TICK_S
    meter._tick(0.0)
    assert meter._tick_s == TICK_S


@pytest.mark.parametrize("share", [0.03, 0.1, 0.16, 0.4])
async def test_a_tick_comes_whenever_the_thread_has_worked_for_so_long(share: float) -> None:
    used_s = 0.0
    meter = LagMeter(lambda: 0.0, lambda: used_s)
    for _ in range(10):
        used_s += share * meter._tick_s
        meter._tick(0.0)
        assert TICK_S <= meter._tick_s <= IDLE_TICK_S
    assert share * meter._tick_s == pytest.approx(WORK_S)


async def test_threads_let_go_of_the_interpreter_soon() -> None:
    before_s = sys.getswitchinterval()
    try:
        watch_lag()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before_s)


async def test_the_system_clock_runs() -> None:
    before = SYSTEM_CLOCK.monotonic()
    await SYSTEM_CLOCK.sleep(0)
    assert SYSTEM_CLOCK.monotonic() >= before
    assert SYSTEM_CLOCK.wall() > 1_700_000_000
