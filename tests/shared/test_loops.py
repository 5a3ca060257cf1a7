"""Which loop a service runs on."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from shared.loops import loop_factory, loop_name


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
