"""Gateways whose keys and tenants operators change: in the file, or in Redis."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import redis

from gateway.app import Gateway
from gateway.config.whole import load
from gateway.directory.follower import Follower
from gateway.identity.keys import hash_key
from shared.process.setting_values import to_toml
from tests.gateway.conftest import House, settings, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, unary
from tests.gateway.redis_server import RedisServer

OPERATOR = "the operator's"
BOSS = {"authorization": f"Bearer {OPERATOR}"}
OPERATORS = [
    {"id": "ops", "hash": hash_key(OPERATOR)},
    {"id": "ops-2", "hash": hash_key("another operator's")},
]


@dataclass
class Answer:
    """What the admin listener answered."""

    status: int
    body: Any
    etag: str | None = None

    @property
    def code(self) -> str:
        code: str = self.body["error"]["code"]
        return code

    @property
    def fields(self) -> list[str]:
        """The fields that are named as wrong."""
        return [problem["field"] for problem in self.body["problems"]]


@dataclass
class World:
    """One gateway or several that share a directory, an engine behind them, and a client."""

    store: str
    path: Path
    engine: FakeEngine
    client: aiohttp.ClientSession
    log: io.StringIO
    stack: AsyncExitStack
    redis_url: str | None = None
    prefix: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex}")
    gateways: list[Gateway] = field(default_factory=list)

    def write(self, **sections: Any) -> None:
        """Write the file that the gateways have."""
        directory: dict[str, Any] = {"store": self.store}
        told: dict[str, Any] = {
            "admin": {"port": 0, "keys": OPERATORS},
            "directory": directory | sections.pop("directory", {}),
            "redis": {"url": self.redis_url, "key_prefix": self.prefix} if self.redis_url else {},
            **sections,
        }
        self.path.write_text(to_toml(load(settings(self.engine.url, **told), {})))

    async def open(self, **more: Any) -> House:
        """Start another gateway. `more`: of `Gateway`."""
        config = load(self.path, {})
        gateway = await self.stack.enter_async_context(Gateway(config, path=self.path, **more))
        self.gateways.append(gateway)
        await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
        return House(gateway, self.engine, self.client, self.log)

    async def ask(
        self, method: str, path: str, body: Any = None, *, at: int = 0, headers: Any = None
    ) -> Answer:
        """Ask the admin listener of gateway number `at`, as an operator."""
        url = f"http://127.0.0.1:{self.gateways[at].admin_port}/admin/v1/{path}"
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.client.request(method, url, headers={**BOSS, **(headers or {})}, data=data) as got:
            return Answer(got.status, await got.json(), got.headers.get("etag"))

    async def key(self, **fields: Any) -> dict[str, Any]:
        """Create a key."""
        answer = await self.ask("POST", "keys", {"tenant": "acme", **fields})
        assert answer.status == 200, answer
        made: dict[str, Any] = answer.body
        return made

    async def status(self, key: str, *, at: int = 0) -> int:
        """The status that a caller with this key gets."""
        url = f"http://127.0.0.1:{self.gateways[at].port}/v1/models"
        async with self.client.get(url, headers={"authorization": f"Bearer {key}"}) as answer:
            return answer.status

    async def until_status(self, key: str, status: int, *, at: int = 0) -> None:
        """Wait until a caller with this key gets this status."""
        while await self.status(key, at=at) != status:  # each request is a turn of the loop
            pass

    async def line(self, event: str, text: str = "") -> dict[str, Any]:
        """The last line of this event that holds the text, once there is one."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [line for line in self.logged(event) if text in str(line)]
            return bool(found)

        await until(is_there)
        return found[-1]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of this event."""
        lines = map(msgspec.json.decode, self.log.getvalue().splitlines())
        return [line for line in lines if line["event"] == event]


@asynccontextmanager
async def directory_world(
    tmp_path: Path, log: io.StringIO, redis_url: str | None, **sections: Any
) -> AsyncIterator[World]:
    """A world without gateways yet. Without `redis_url` its directory is the file."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(bundle=byte_bundle()))
        engine.script = unary()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        store = "file" if redis_url is None else "redis"
        path = tmp_path / f"{os.urandom(4).hex()}.toml"
        world = World(store, path, engine, client, log, stack, redis_url)
        world.write(**sections)
        yield world


def follower(world: World, at: int = 0) -> Follower:
    found = world.gateways[at]._follower
    assert found is not None
    return found


def at(world: World, name: str) -> str:
    """A key in Redis."""
    return f"{world.prefix}:{{~directory}}:{name}"


def raw(own: RedisServer) -> Any:
    """A client that does not decode."""
    return redis.Redis(port=own.port)


async def problems(world: World, at: int = 0) -> list[str]:
    """What `/readyz` says on the admin listener."""
    url = f"http://127.0.0.1:{world.gateways[at].admin_port}/readyz"
    async with world.client.get(url) as answer:
        body = await answer.json()
        assert (answer.status == 200) == body["ok"]
        told: list[str] = body.get("problems", [])
        return told
