"""The row `revoking` of `python -m tests.bench edge`: how long a change of a key takes to count everywhere.

Two gateways, each a process of its own, are on one Redis. A key is created, and later revoked, through the
admin listener of one; the other one, which looks at Redis once a second, is asked with it again and again. It
is the key of a tenant that has its streams ended (`on_revoke = "end"`), and one runs at the other gateway.

Each time begins when the change is sent to the first gateway. Changes come at moments that have nothing to do
with the second one's looks. What is told is the longest time of several changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec

from gateway.directory.accounts import POLL_S
from gateway.directory.development import ID, development_config, development_key
from tests.bench.client import ApiServer, TimedRequest
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.redis_servers import eventually, redis_machine
from tests.bench.gateway.subjects import LIMITS, Engine, ServerUnderTest, gateway_of
from tests.bench.services import free_port
from tests.bench.streams import BenchFailed

CHANGES: Final = 10
EVERYWHERE_TARGET: Final = at_most(5)
PATIENCE_S: Final = 30.0
_KEYS: Final = "/admin/v1/keys"
_REVOKED: Final = b'"code":"key_revoked"'


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway, and its operator."""

    url: str
    operator: httpx.AsyncClient

    async def until(self, key: str, status: int) -> float:
        """The moment of the first answer of this status to a caller with this key, on `time.perf_counter`.
        Raises BenchFailed."""
        bearer = {"authorization": f"Bearer {key}"}

        async def is_so() -> bool:
            answer = await self.operator.get(f"{self.url}/models", headers=bearer)
            return answer.status_code == status

        await eventually(is_so, PATIENCE_S, f"no {status} for a key at another gateway")
        return time.perf_counter()

    async def change(self, method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        answer = await self.operator.request(method, path, content=msgspec.json.encode(fields))
        changed: dict[str, Any] = answer.raise_for_status().json()
        return changed


@dataclass(frozen=True, slots=True)
class Took:
    """The times of one key, from the change until the other gateway's answer, in seconds."""

    accepted_s: float
    refused_s: float
    ended_s: float
    """The time until the end of the stream that ran."""
    is_named: bool
    """True if the stream ended with the error `key_revoked`."""


async def revoking(engine: Engine, changes: int = CHANGES) -> list[Figure]:
    async with redis_machine() as redis, contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(_gateway(engine, redis.url))
        other = await stack.enter_async_context(_gateway(engine, redis.url))
        took = []
        for _ in range(changes):
            took.append(await _key_of(one, other))
            await asyncio.sleep(random.uniform(0, POLL_S))
    return figures_of(took)


@contextlib.asynccontextmanager
async def _gateway(engine: Engine, redis_url: str) -> AsyncIterator[Gateway]:
    port, admin_port, admin_key = free_port(), free_port(), development_key()
    config = development_config(
        port=port,
        key=development_key(),
        model=MODEL,
        engine_url=engine.url,
        limits=LIMITS,
        redis=redis_url,
        admin=(admin_port, admin_key),
    )
    config = replace(config, tenants=tuple(replace(one, on_revoke="end") for one in config.tenants))
    url, base = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    headers = {"authorization": f"Bearer {admin_key}"}
    async with (
        gateway_of(config, ApiServer(f"{url}/v1"), f"{url}/readyz"),
        httpx.AsyncClient(base_url=base, headers=headers, trust_env=False, timeout=PATIENCE_S) as operator,
    ):
        yield Gateway(f"{url}/v1", operator)


async def _key_of(one: Gateway, other: Gateway) -> Took:
    """Create a key through one gateway, use it at the other one, and revoke it."""
    created_at = time.perf_counter()
    made = await one.change("POST", _KEYS, {"tenant": ID})
    accepted_at = await other.until(made["key"], HTTPStatus.OK)
    stream = asyncio.create_task(_stream(other, made["key"]))
    await asyncio.sleep(POLL_S / 2 + random.uniform(0, POLL_S))  # the stream has begun
    revoked_at = time.perf_counter()
    await one.change("PATCH", f"{_KEYS}/{made['id']}", {"disabled": True})
    refused_at, streamed = await asyncio.gather(other.until(made["key"], HTTPStatus.UNAUTHORIZED), stream)
    if streamed.status != HTTPStatus.OK or streamed.ended_at < revoked_at:
        raise BenchFailed(f"a stream did not run until its key was revoked: {streamed.status}")
    return Took(
        accepted_at - created_at,
        refused_at - revoked_at,
        streamed.ended_at - revoked_at,
        _REVOKED in streamed.last_event and not streamed.saw_done,
    )


async def _stream(gateway: Gateway, key: str) -> TimedRequest:
    subject = ServerUnderTest(ApiServer(gateway.url, key))
    connection = await subject.endpoint.connect()
    try:
        return await connection.exchange(subject.chat(), PATIENCE_S)
    finally:
        connection.close()


def figures_of(took: list[Took]) -> list[Figure]:
    """The longest of all times, and how many streams said why they ended."""
    named = sum(one.is_named for one in took)
    accepted_s, refused_s, ended_s = (
        max(times) for times in zip(*((t.accepted_s, t.refused_s, t.ended_s) for t in took), strict=True)
    )
    return [
        figure("revoking: a new key is accepted elsewhere after", accepted_s, "s", EVERYWHERE_TARGET),
        figure("revoking: a revoked key gets 401 elsewhere after", refused_s, "s", EVERYWHERE_TARGET),
        figure("revoking: its stream elsewhere has ended after", ended_s, "s", EVERYWHERE_TARGET),
        figure("revoking: streams that ended with key_revoked", named / len(took), "share", at_least(1)),
    ]
