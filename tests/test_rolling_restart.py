"""A rolling restart of three engines behind a gateway with 60 streams: no request is lost, no stream is cut.

The engines are whole but for their cores, which say what the test tells them, when it tells them to.
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest

from engine.api.http.server import Engine
from engine.config import EngineConfig
from gateway.app import Gateway
from gateway.config.whole import load
from shared.process import logs
from shared.process.listening import bound_socket
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from tests.engine.api.fake_core import FakeCore
from tests.engine.api.tiny import EOS, write_model_dir
from tests.gateway.conftest import KEY, settings, until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ENGINES = 3
CALLERS = 200
HEADERS = {"authorization": f"Bearer {KEY}"}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure("gateway", stream=stream)
    yield stream
    logs.close()


class Place:
    """Where an engine serves, one after the other."""

    def __init__(self, model_dir: Path) -> None:
        self.held = bound_socket("127.0.0.1", 0)  # keeps the port from others while no engine listens
        self.port: int = self.held.getsockname()[1]
        self._model_dir = model_dir
        self._tokenizer = Tokenizer(TokenizerBundle.from_dir(model_dir))

    async def start(self) -> None:
        script = self._tokenizer.encode("the quick brown fox" + EOS, add_special_tokens=False)
        self.core = FakeCore(lambda _: list(script), vocab_size=self._tokenizer.vocab_size)
        config = EngineConfig(
            model=str(self._model_dir), served_model_name="tiny", port=self.port, drain_timeout_s=PATIENCE_S
        )
        self.engine = Engine(config, lambda _: self._model_dir, lambda *_: self.core)
        await self.engine.start()

    async def restart(self) -> None:
        """Drain an engine that has streams, and start another in its place."""
        self.core.is_held = True
        await until(lambda: self.core.left > 0)  # one that is live may have had its last step before
        drain = asyncio.create_task(self.engine.drain())
        await until(lambda: self.engine.state.load().draining)
        assert not drain.done(), "streams are open"
        self.core.release()
        assert await drain, "no answer was cut"
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        await self.engine.stop()


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[list[Place]]:
    model_dir = write_model_dir(tmp_path)
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(ENGINES):
            place = Place(model_dir)
            stack.callback(place.held.close)
            await place.start()
            stack.push_async_callback(place.stop)
            found.append(place)
        yield found


async def test_a_rolling_restart_under_load_cuts_no_stream(places: list[Place], log: io.StringIO) -> None:
    urls = [f"http://127.0.0.1:{place.port}" for place in places]
    config = load(settings(*urls), {})
    is_over = False
    served = 0

    async def call(client: aiohttp.ClientSession, url: str, name: int) -> None:
        nonlocal served
        turn = 0
        while not is_over:
            turn += 1
            messages = [{"role": "user", "content": f"{name} {turn}"}]
            body = {"model": "tiny", "stream": True, "messages": messages}
            async with client.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
                text = await answer.read()
                assert answer.status == 200, text
                assert text.endswith(DONE), text
            served += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        asyncio.timeout(PATIENCE_S),
        Gateway(config) as gateway,
        aiohttp.ClientSession(connector=connector) as client,
    ):
        await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
        url = f"http://127.0.0.1:{gateway.port}"
        async with asyncio.TaskGroup() as callers:
            for name in range(CALLERS):
                callers.create_task(call(client, url, name))
            for place in places:
                await place.restart()
                before = served
                await until(lambda: served > before + CALLERS)  # noqa: B023
            is_over = True
    lines = [msgspec.json.decode(line) for line in log.getvalue().splitlines()]
    completed = [line for line in lines if line["event"] == "request.completed" and "replica" in line]
    assert len({line["replica"] for line in completed}) == ENGINES
    assert {line["end_reason"] for line in completed} == {"ok"}
    assert all(line["attempts"] <= ENGINES for line in completed)


def test_a_port_is_kept_while_nobody_listens_on_it() -> None:
    with bound_socket("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with bound_socket("127.0.0.1", port) as listening:
            listening.listen()
            socket.create_connection(("127.0.0.1", port)).close()
