from __future__ import annotations

import inspect
import io
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import aiohttp
import msgspec
import pytest

from gateway.admission.guarded_store import SharedStore
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import QuotaStore, Scope, Subject
from gateway.admission.redis_store import RedisStore
from gateway.app import Gateway
from gateway.config.quotas import QuotaLimits
from gateway.config.whole import load
from gateway.directory.accounts import IdentityOf
from gateway.identity.keys import hash_key
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.ids import TenantId
from tests import waiting
from tests.effort import IS_WHOLE
from tests.fakes import VirtualClock
from tests.gateway.fake_engine import FakeEngine, byte_bundle
from tests.gateway.redis_server import RedisServer, redis_server, redis_store
from tests.waiting import PATIENCE_S as PATIENCE_S


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """A Redis that the tests of a process share: each has keys of its own, and leaves the server as it is."""
    with redis_server() as server:
        yield server


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A Redis of the test's own, to make fail, to change, or to look at as a whole."""
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def clock_and_store(
    request: pytest.FixtureRequest, redis: RedisServer
) -> AsyncIterator[tuple[VirtualClock, QuotaStore]]:
    clock = VirtualClock()
    if request.param == "memory":
        yield clock, MemoryStore(clock)
        return
    async with redis_store(redis, clock=clock) as store:
        yield clock, store


KEY = "dev-key"
OTHER_KEY = "other-key"
CONVERSATIONS = 16
"""Conversations of which some are at home at either of two engines, whatever their ports."""

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = "user:hi\nassistant:"
"""The prompt that the fake engine's template makes of `CHAT`, with one token per byte."""


def settings(
    *urls: str,
    protocol: str = "http2",
    model: Mapping[str, Any] | None = None,
    tenant: Mapping[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """A configuration as TOML would give it, for replicas at `urls`. `model` and `tenant`: more settings
    of the model and of the first tenant."""
    tiny = {"name": "tiny", "replicas": list(urls), "aliases": ["small"], "protocol": protocol}
    settings: dict[str, Any] = {
        "listen": {"port": 0},
        "models": [{**tiny, **(model or {})}],
        "tenants": [{"id": "acme", **(tenant or {})}, {"id": "other"}],
        "keys": [
            {"id": "k1", "hash": hash_key(KEY), "tenant": "acme"},
            {"id": "k2", "hash": hash_key(OTHER_KEY), "tenant": "other"},
        ],
    }
    return settings | sections


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error of an answer, in the names of OpenAI's envelope, in whichever it came."""
    assert answer.headers["x-request-id"]
    body = await answer.json()
    if body.get("type") == "error":
        assert body.keys() == {"type", "error", "request_id"}
        assert body["request_id"] == answer.headers["x-request-id"]
        told, details = body["error"], body["error"]["details"]
        return {
            "message": told["message"],
            "type": told["type"],
            "param": details.get("param"),
            "code": details["error_code"],
        }
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def until(condition: Callable[[], bool]) -> None:
    """Let everybody run, Redis and other processes too, until it holds."""
    await waiting.until(condition, pause_s=0.001)


@dataclass
class House:
    """A gateway before a fake engine, and a client in front of it."""

    gateway: Gateway
    engine: FakeEngine
    client: aiohttp.ClientSession
    log: io.StringIO
    headers: dict[str, str] = field(default_factory=lambda: {"authorization": f"Bearer {KEY}"})
    redis: RedisServer | None = None
    """The server that keeps the quotas; None where they are in memory."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def store_is_well(self) -> bool:
        """True if the shared store of quotas can be asked."""
        guarded = self.gateway._guarded
        return guarded is not None and guarded.is_well

    def chat(self, body: Any = None, **fields: Any) -> aiohttp.client._RequestContextManager:
        headers = self.headers | fields.pop("headers", {})
        return self.client.post(
            f"{self.url}/v1/chat/completions", json={**CHAT, **(body or {}), **fields}, headers=headers
        )

    def get(self, path: str, **headers: str) -> aiohttp.client._RequestContextManager:
        return self.client.get(f"{self.url}{path}", headers=self.headers | headers)

    async def lines(self, count: int = 1) -> list[dict[str, Any]]:
        """The completed lines, once there are so many."""
        await until(lambda: len(self._lines()) >= count)
        found = self._lines()
        assert len(found) == count, found
        return found

    async def line(self) -> dict[str, Any]:
        return (await self.lines())[0]

    def _lines(self) -> list[dict[str, Any]]:
        lines = [msgspec.json.decode(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == "request.completed"]

    @property
    def store(self) -> MemoryStore:
        assert isinstance(self.gateway.quotas, MemoryStore)
        return self.gateway.quotas

    async def at_rest(self) -> None:
        """Nothing is in progress and nothing is held, anywhere."""
        await until(lambda: not len(self.gateway.live) and not self.engine.active)
        assert all(r.view.is_idle for r in self.gateway.replicas._by_url.values())
        if self.redis is not None:
            await self._at_rest_in(self.redis)
            return
        assert self.store.live == 0
        ledger = self.store.ledger
        assert ledger.balanced
        assert ledger.outstanding == 0

    async def _at_rest_in(self, server: RedisServer) -> None:
        """Redis has no lease and no seat of the tenant's, and what it has counted, against the budget and as
        usage, is what the lines say."""
        store, tenant = self.gateway.quotas, TenantId("acme")
        assert isinstance(store, RedisStore)
        await store.settled()
        assert not server.admin.exists(*store._lease_keys(tenant))
        settled = sum(line["settled_tokens"] for line in self._lines())
        subject = Subject(Scope.TENANT, tenant, QuotaLimits(), tenant)
        account: Any = server.raw.get(store._account(subject))
        _, _, _, live, spent, *_ = struct.unpack(">9d", account or bytes(72))
        assert (live, spent) == (0, settled)
        today = int(SYSTEM_CLOCK.wall()) // 86_400
        rows = [row async for row in store.usage(tenant, today - 1, today)]
        assert sum(row.totals.total_tokens for row in rows) == settled


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure("gateway", level="debug", stream=stream)
    yield stream
    logs.close()


Open = Callable[..., Any]


PROTOCOLS = ("http2", "http1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for the protocol runs over both, and so do those that are marked `both_protocols`;
    one that is marked `hop` runs over the one that the mark names."""
    test = metafunc.definition
    given = [mark.args[0] for mark in test.iter_markers("parametrize")]
    if test.get_closest_marker("hop") or "protocol" in (*given, *vars(metafunc.module)):
        return
    is_about_it = "protocol" in inspect.signature(metafunc.function).parameters
    is_marked = test.get_closest_marker("both_protocols") is not None
    if "protocol" in metafunc.fixturenames and (IS_WHOLE or is_about_it or is_marked):
        metafunc.parametrize("protocol", PROTOCOLS, indirect=True)


@pytest.fixture
def protocol(request: pytest.FixtureRequest) -> str:
    """What the gateway speaks to the engine. Half of the tests that it makes no difference to run over each;
    by command, all run over both."""
    if (hop := request.node.get_closest_marker("hop")) is not None:
        return str(hop.args[0])
    by_name = PROTOCOLS[crc32(request.function.__name__.encode()) % 2]
    return str(getattr(request, "param", by_name))


@pytest.fixture
async def open_house(log: io.StringIO, protocol: str) -> AsyncIterator[Open]:
    """`await open_house(timeouts={...})`: with a tokenizer unless `bundle=None`."""
    async with AsyncExitStack() as stack:

        async def open_(
            *more_urls: str,
            bundle: Any = ...,
            max_model_len: int = 4096,
            context_len: int | None = None,
            owned_by: str | None = None,
            capabilities: dict[str, bool] | None = None,
            store: SharedStore | None = None,
            identity_of: IdentityOf | None = None,
            clock: Clock = SYSTEM_CLOCK,
            **sections: Any,
        ) -> House:
            engine = FakeEngine(
                bundle=byte_bundle() if bundle is ... else bundle,
                max_model_len=max_model_len,
                context_len=context_len,
            )
            engine.owned_by, engine.capabilities = owned_by, capabilities
            await stack.enter_async_context(engine)
            config = load(settings(engine.url, *more_urls, protocol=protocol, **sections), {})
            gateway = await stack.enter_async_context(
                Gateway(config, quotas=store, identity_of=identity_of, clock=clock)
            )
            await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return House(gateway, engine, client, log)

        yield open_


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house()
    assert isinstance(house, House)
    return house
