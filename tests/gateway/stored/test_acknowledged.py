"""Responses of many tenants, stored by gateways that are killed meanwhile: what was acknowledged is there,
what has expired is gone, and Redis holds no more than its bound.

With `DRAWN=whole`, 10,000 responses of 100 tenants.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.whole import load
from gateway.identity.keys import hash_key
from shared.process.setting_values import to_toml
from tests.effort import drawn
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.redis_server import RedisServer
from tests.gateway.stored.test_stored_responses import Engine
from tests.services import Service, service
from tests.waiting import until

TENANTS = drawn(8, whole=100)
RESPONSES = drawn(160, whole=10_000)
GATEWAYS = 2
KILLS = drawn(1, whole=12)
AT_ONCE = 16
TENANT_LEN_MAX = 256 * 1024
GREEDY = drawn(1, whole=5)
"""Tenants that store as much as all others together, and long ones, so that they have no room for all."""
EXPIRED_SHARE = 0.1
TTL_MS = 3_600_000


@dataclass
class World:
    """Gateways before an engine, each a process, and what they have acknowledged."""

    urls: list[str]
    processes: list[Service]
    client: aiohttp.ClientSession
    start: Any
    stored: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """The responses of each tenant that said that they are kept, in order."""
    cut: int = 0
    """Those whose gateway died before it had answered."""

    async def ask(self, draw: random.Random, tenant: str, length: int) -> None:
        """Store a response, which may go on with the last of its tenant's."""
        body = {"model": "tiny", "input": "x" * length, "stream": draw.random() < 0.5}
        if (before := self.stored[tenant]) and draw.random() < 0.3:
            body["previous_response_id"] = before[-1]["id"]
        key = {"authorization": f"Bearer {tenant}"}
        try:
            async with self.client.post(
                f"{draw.choice(self.urls)}/v1/responses", json=body, headers=key
            ) as answer:
                assert answer.status == 200, await answer.text()
                if body["stream"]:
                    whole = last_of(await answer.read())
                else:
                    whole = await answer.json()
        except (aiohttp.ClientError, ConnectionError):
            self.cut += 1
            return
        if whole is None:
            self.cut += 1
        elif whole["store"]:
            self.stored[tenant].append(whole)

    async def retrieved(self, url: str, tenant: str, id_: str) -> dict[str, Any] | None:
        key = {"authorization": f"Bearer {tenant}"}
        async with self.client.get(f"{url}/v1/responses/{id_}", headers=key) as answer:
            assert answer.status in (200, 404)
            told: dict[str, Any] | None = await answer.json() if answer.status == 200 else None
            return told

    async def replace(self, at: int) -> None:
        """Kill a gateway, and start another in its place."""
        self.processes[at].process.kill()
        self.processes[at].wait()
        self.urls[at] = self.urls[1 - at]
        self.urls[at], self.processes[at] = await asyncio.to_thread(self.start)


def last_of(data: bytes) -> dict[str, Any] | None:
    """The response in the last event of a stream. None of one that was cut off."""
    events = [one for one in data.split(b"\n\n") if one.startswith(b"event: response.completed")]
    if not events:
        return None
    told: dict[str, Any] = json.loads(events[0].partition(b"\ndata: ")[2])["response"]
    return told


@contextmanager
def starting(url: str, redis: RedisServer, prefix: str) -> Iterator[Any]:
    tenants = [f"t{number}" for number in range(TENANTS)]
    settings: Mapping[str, Any] = {
        "listen": {"port": 0},
        "models": [{"name": "tiny", "replicas": [url]}],
        "tenants": [{"id": one} for one in tenants],
        "keys": [{"id": one, "hash": hash_key(one), "tenant": one} for one in tenants],
        "redis": {"url": redis.url, "key_prefix": prefix},
        "responses": {"store": "redis", "tenant_len_max": TENANT_LEN_MAX, "response_len_max": 64 * 1024},
    }
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        file = Path(directory) / "gateway.toml"
        file.write_text(to_toml(load(settings, {})))

        def start() -> tuple[str, Service]:
            started = stack.enter_context(service(["gateway", "--config", str(file)]))
            return f"http://127.0.0.1:{started.line('gateway.listening')['port']}", started

        yield start


@pytest.fixture
async def world(own: RedisServer) -> AsyncIterator[World]:
    async with FakeEngine() as engine, aiohttp.ClientSession() as client:
        engine.script = Engine()
        with starting(engine.url, own, f"test-{uuid.uuid4().hex}") as start:
            started = await asyncio.gather(*(asyncio.to_thread(start) for _ in range(GATEWAYS)))
            urls, processes = [url for url, _ in started], [one for _, one in started]
            yield World(urls, processes, client, start)


@pytest.mark.slow
async def test_what_was_acknowledged_is_there(world: World, own: RedisServer) -> None:
    draw = random.Random(53)
    before = own.admin.info("memory")["used_memory"]
    greedy = [f"t{number}" for number in range(GREEDY)]
    asked = [(f"t{number % TENANTS}", draw.randrange(400)) for number in range(RESPONSES)]
    asked += [(draw.choice(greedy), draw.randrange(8_000, 30_000)) for _ in range(RESPONSES // 10)]
    draw.shuffle(asked)
    kill_at = {(number + 1) * len(asked) // (KILLS + 1) for number in range(KILLS)}
    running: set[asyncio.Task[None]] = set()
    replacing: list[asyncio.Task[None]] = []
    for at, (tenant, length) in enumerate(asked):
        if at in kill_at:
            await asyncio.gather(*replacing)
            replacing = [asyncio.create_task(world.replace(draw.randrange(GATEWAYS)))]
        running.add(asyncio.create_task(world.ask(draw, tenant, length)))
        if len(running) >= AT_ONCE:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*running, *replacing)
    stored = sum(map(len, world.stored.values()))
    assert stored >= len(asked) - world.cut, f"{world.cut} were cut off"
    assert world.cut <= 2 * KILLS * AT_ONCE

    await all_is_there(world, draw, greedy)
    raw: Any = own.raw
    [prefix] = {key.decode().partition(":")[0] for key in raw.keys("*")}
    sizes = [int(raw.hget(key, b"")) for key in raw.keys(f"{prefix}:*:responses-sizes")]
    held = own.admin.info("memory")["used_memory"] - before
    assert max(sizes) <= TENANT_LEN_MAX
    assert held <= sum(sizes) + own.admin.info("memory")["mem_clients_normal"] + 2 * 1024 * 1024
    await what_has_expired_is_gone(world, draw, own, prefix)


async def all_is_there(world: World, draw: random.Random, greedy: list[str]) -> None:
    """All of each tenant's, or the latest of one that stored more than it has room for."""
    for tenant, responses in world.stored.items():
        url = draw.choice(world.urls)
        found = [await world.retrieved(url, tenant, one["id"]) for one in responses]
        kept = [one for one in found if one is not None]
        assert all(told in (None, one) for told, one in zip(found, responses, strict=True))
        if tenant in greedy:
            assert len(kept) < len(responses)
            assert sum(len(str(one)) for one in kept) > TENANT_LEN_MAX // 40
        else:
            assert kept == responses, f"{tenant} has {len(kept)} of {len(responses)}"
    other = next(one for tenant, ones in world.stored.items() if tenant != "t7" for one in ones)
    assert await world.retrieved(world.urls[0], "t7", other["id"]) is None


async def what_has_expired_is_gone(world: World, draw: random.Random, own: RedisServer, prefix: str) -> None:
    """Some expire sooner than the others, as time is not to be waited for."""
    values: Any = list(own.raw.keys(f"{prefix}:*:responses:*"))
    assert all(0 < own.raw.pttl(key) <= 24 * TTL_MS for key in values)
    gone = draw.sample(values, int(EXPIRED_SHARE * len(values)))
    for key in gone:
        own.raw.pexpire(key, 1)
    await until(lambda: not own.raw.exists(*gone), pause_s=0.01)
    for key in gone:
        tenant, id_ = key.decode().split("{")[1].partition("}")[0], key.decode().rpartition(":")[2]
        assert await world.retrieved(world.urls[0], tenant, id_) is None
    assert len(own.raw.keys(f"{prefix}:*:responses:*")) == len(values) - len(gone)
