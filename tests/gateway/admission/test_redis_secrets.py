"""No prompt, answer, key or token is sent to Redis, or kept there.

Each is a *canary*: a text that nothing else contains. MONITOR tells all that is sent.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.config.edge import IssuerConfig
from shared.process.clock import SYSTEM_CLOCK
from tests.gateway.conftest import PATIENCE_S, House, until
from tests.gateway.directory.directory_world import OPERATOR, World, directory_world, raw
from tests.gateway.fake_engine import Script, Seen, chunk, refusal, stream, unary
from tests.gateway.identity.issuers import EC, GRANT, as_toml, issuer
from tests.gateway.redis_server import PATIENT_S, RedisServer

PROMPT: Final = "canary-of-a-prompt"
ANSWER: Final = "canary-of-an-answer"
SUBJECT: Final = "canary-of-a-subject"
CLAIM: Final = "canary-of-a-claim"
LIMITS: Final = {"requests_per_min": 900, "tokens_per_min": 900_000, "concurrent": 50, "token_budget": 10**7}
SAYS: Final = [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}]
ASKED: Final[tuple[dict[str, Any], ...]] = (
    {"messages": SAYS},
    {"messages": SAYS, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": SAYS, "user": PROMPT, "metadata": {"a": PROMPT}, "stop": PROMPT, "cache_salt": PROMPT},
    {"messages": SAYS, "max_tokens": 10**6},
    {"messages": PROMPT},
    {"messages": SAYS, "model": PROMPT},
)
"""Bodies, some of which are refused."""


@pytest.fixture
async def world(tmp_path: Path, log: io.StringIO, own: RedisServer) -> AsyncIterator[World]:
    told = issuer(tmp_path / "jwks.json", EC)
    async with directory_world(tmp_path, log, own.url, **sections(own, told)) as world:
        yield world


def sections(own: RedisServer, issuer: IssuerConfig) -> dict[str, Any]:
    """All that a gateway keeps in Redis is kept there."""
    return {
        "redis": {"url": own.url, "key_prefix": "canaries", "timeout_s": PATIENT_S},
        "quotas": {"store": "redis"},
        "tenant": {"limits": LIMITS},
        "issuers": [as_toml(issuer)],
        "grants": [{**GRANT, "limits": LIMITS}],
    }


@asynccontextmanager
async def monitored(own: RedisServer) -> AsyncIterator[list[bytes]]:
    """What is sent to the server, in the end in one piece: all of it once this is left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", own.port, limit=1 << 26)
    writer.write(b"MONITOR\r\n")
    assert await reader.readline() == b"+OK\r\n"
    sent: list[bytes] = []
    try:
        yield sent
        raw(own).echo("the-last-word")
        sent.append(await reader.readuntil(b"the-last-word"))
    finally:
        writer.close()


def kept(own: RedisServer) -> dict[bytes, list[Any]]:
    """All keys of the server, each with its values."""
    server = raw(own)
    found: dict[bytes, list[Any]] = {}
    for name in server.scan_iter():
        match server.type(name):
            case b"string":
                found[name] = [server.get(name)]
            case b"hash":
                found[name] = [word for pair in server.hgetall(name).items() for word in pair]
            case b"list":
                found[name] = server.lrange(name, 0, -1)
            case b"zset":
                found[name] = server.zrange(name, 0, -1)
            case other:
                raise AssertionError(f"{name!r} is a {other!r}")
    return found


async def ask(house: House, token: str, body: dict[str, Any]) -> int:
    async with asyncio.timeout(PATIENCE_S), house.chat(body, headers=bearer(token)) as answer:
        await answer.read()
        return answer.status


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def answered(seen: Seen) -> Script:
    return stream(chunk(ANSWER)) if seen.body.get("stream") else unary(ANSWER)


async def asked_in_every_way(world: World, house: House, tokens: list[str]) -> dict[bytes, list[Any]]:
    """What is kept while a stream of each caller runs. In the end they have run."""
    go_on = asyncio.Event()
    for token in tokens:
        world.engine.script = answered
        assert {await ask(house, token, body) for body in ASKED} >= {200, 400, 404}
        world.engine.script = refusal(500, "engine_failed", ANSWER)
        assert await ask(house, token, {"messages": SAYS}) == 500
        assert await ask(house, f"{token}x", {"messages": SAYS}) == 401
    world.engine.script = stream(chunk(ANSWER), go_on)
    async with asyncio.TaskGroup() as group:
        for token in tokens:
            group.create_task(ask(house, token, {"messages": SAYS, "stream": True, "user": PROMPT}))
        await until(lambda: world.engine.active == len(tokens))
        during = kept(raw_of(world))
        go_on.set()
    return during


def raw_of(world: World) -> RedisServer:
    assert world.redis_url is not None
    return RedisServer.at(int(world.redis_url.rpartition(":")[2]))


async def test_no_prompt_and_no_secret_comes_to_redis_or_a_log_beside_it(
    world: World, own: RedisServer
) -> None:
    async with monitored(own) as sent:
        house = await world.open()
        made = await world.key(labels=["of a test"])
        rotated = await world.ask("POST", f"keys/{made['id']}/rotate", {"overlap_s": 3600})
        text, token = rotated.body["key"], EC.token(SYSTEM_CLOCK.wall(), sub=SUBJECT, email=CLAIM)
        during = await asked_in_every_way(world, house, [made["key"], text, token])
        await until(lambda: not len(house.gateway.live))
        assert (await world.ask("PATCH", f"keys/{made['id']}", {"disabled": True})).status == 200
        await world.stack.aclose()
        after = kept(own)
    secrets = [key.rpartition("_")[2] for key in (made["key"], text)]
    canaries = ["canary-of", *secrets, OPERATOR, *token.split(".")[1:]]
    assert all(len(canary) > 8 for canary in canaries)
    told = {"sent": sent[0], "kept in a stream": shown(during), "kept": shown(after)}
    told["logged"] = world.log.getvalue().encode()
    for place, bytes_ in told.items():
        for canary in canaries:
            assert canary.encode() not in bytes_, f"{canary} was {place}"
    for there in (made["id"], "of a test", "reserve", "settle"):
        assert there.encode() in told["sent"], "all of it is looked at"
    assert b"canaries:leases" in during
    assert any(b":usage:" in name for name in after)


def shown(found: dict[bytes, list[Any]]) -> bytes:
    return b"\n".join(word for name, values in found.items() for word in (name, *values))
