from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.api.http.server import Engine
from engine.config import EngineConfig
from gateway.relay.http2_client import Http2Transport
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire.completed_line import EVENT
from tests.engine.api.fake_core import FakeCore, Script
from tests.engine.api.tiny import EOS, write_model_dir
from tests.shared.http2.loopback import OverHttp2
from tests.waiting import PATIENCE_S as PATIENCE_S
from tests.waiting import until as until

MODEL = "tiny"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(TokenizerBundle.from_dir(model_dir))


@pytest.fixture
def config(model_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(model_dir), served_model_name=MODEL, port=0, drain_timeout_s=20.0)


@dataclass
class Served:
    """An engine with a fake core behind a real socket, and clients for it."""

    engine: Engine
    core: FakeCore
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    clients: AsyncExitStack

    @cached_property
    def sdk(self) -> openai.AsyncOpenAI:
        """The official SDK. Made when it is used: it takes longer than most tests."""
        sdk = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.engine.port}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        )
        self.clients.push_async_callback(sdk.close)
        return sdk

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def says(self, text: str, *, ends: bool = True) -> None:
        """From now on every sequence answers this text, and then ends by itself or goes silent."""
        script = self.ids(text) + (self.ids(EOS) if ends else [])
        self.core.script = lambda _: list(script)

    def assert_nothing_leaks(self) -> None:
        state = self.engine.state
        assert (state.core.live, state.core.waiting) == (0, 0)
        assert state._generations == {}
        assert state._working == 0


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(config: EngineConfig, model_dir: Path, tokenizer: Tokenizer) -> Serve:
    """`async with serve(max_queue_len=2, script=...) as served:`"""

    @asynccontextmanager
    async def run(
        *,
        script: Script | None = None,
        core: dict[str, Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        directory: Path = model_dir,
        **changes: Any,
    ) -> AsyncIterator[Served]:
        eos = tokenizer.encode(EOS)
        fake = FakeCore(script or (lambda _: eos), **({"vocab_size": tokenizer.vocab_size} | (core or {})))
        engine = Engine(replace(config, **changes), lambda _: directory, lambda *_: fake, clock)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(engine.stop)
            await engine.start()
            url = f"http://127.0.0.1:{engine.port}"
            # without `verify` it would load a trust store for every test
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, verify=False))
            yield Served(engine, fake, http, tokenizer, stack)

    return run


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as served:
        yield served
        served.assert_nothing_leaks()


@pytest.fixture
async def http2(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{served.engine.port}"
    async with httpx.AsyncClient(base_url=url, transport=OverHttp2(Http2Transport()), timeout=20) as client:
        yield client


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The completed lines, as they are written."""
    completed: list[dict[str, Any]] = []
    write = logs.write

    def keep(event: str, fields: Mapping[str, Any], level: str = "info") -> None:
        if event == EVENT:
            completed.append(dict(fields))
        write(event, fields, level)

    monkeypatch.setattr(logs, "write", keep)
    return completed
