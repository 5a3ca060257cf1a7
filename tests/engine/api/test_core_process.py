"""The wire to the core: a core that is faster than this process leaves everybody else their turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.api.core.process import TURN_S, CoreProcess
from engine.config import CoreStart, EngineConfig, ModelTokens
from engine.contract.messages import Pong
from tests.fakes import VirtualClock

TOKENS = ModelTokens("{}", 0, ())


class TickingClock(VirtualClock):
    """On it each look takes a while."""

    def monotonic(self) -> float:
        self.advance(TURN_S / 8)
        return super().monotonic()


@contextmanager
def wire(directory: Path) -> Iterator[tuple[CoreProcess, zmq.Socket[bytes]]]:
    """The API process's end, and the socket of a core."""
    config = EngineConfig(model="m")
    start = CoreStart(config, f"ipc://{directory}/in", f"ipc://{directory}/out", parent_pid=1)
    process = CoreProcess(config, TOKENS, TickingClock())
    process._bind(start)
    with zmq.Context() as context, context.socket(zmq.PUSH) as core:
        core.connect(start.outbox)
        yield process, core


async def test_others_have_turns_while_messages_are_ready(short_tmp: Path) -> None:
    messages = 400
    with wire(short_tmp) as (process, core):
        for number in range(messages):
            core.send(msgspec.msgpack.encode(Pong(number)))
        assert process._receiver is not None
        assert await process.receive() == Pong(0)
        turns = itertools.count()

        async def live_on() -> None:
            while True:
                next(turns)
                await asyncio.sleep(0)

        other = asyncio.create_task(live_on())
        for number in range(1, messages):
            assert await process.receive() == Pong(number)
        other.cancel()
        await process.close(0.0)
    assert next(turns) >= messages // 10


async def test_a_turn_is_taken_in_one_go(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are there together are written together: a turn for each would cost a crowd its pace."""
    with wire(short_tmp) as (process, core):
        monkeypatch.setattr(process, "_clock", VirtualClock())
        for number in range(20):
            core.send(msgspec.msgpack.encode(Pong(number)))
        assert await process.receive() == Pong(0)
        other = asyncio.create_task(asyncio.sleep(0))
        assert process._receiver is not None
        for number in range(1, 20):
            while not process._receiver.poll(0):  # not here yet: ZeroMQ's thread has a part in it
                pass
            assert await process.receive() == Pong(number)
        assert not other.done()
        await process.close(0.0)
