"""Changes of the directory in Redis whose answers get lost: each is made once, answered truly and audited."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.directory import redis_directory
from gateway.directory.redis_directory import SCRIPT
from tests.gateway.conftest import until
from tests.gateway.directory.directory_world import Answer, World, at, directory_world, follower, raw
from tests.gateway.lossy_redis import Loss, LossyRedis, lossy_redis
from tests.gateway.redis_server import RedisServer

Losses = Sequence[Loss]
ALL: Losses = ("close",) * 4
"""Those of a call, of its copy, which the link sends by itself, and of the change that is sent once more."""


@pytest.fixture
async def way(own: RedisServer) -> AsyncIterator[LossyRedis]:
    async with lossy_redis(own.port) as way:
        yield way


@pytest.fixture
async def world(tmp_path: Path, log: io.StringIO, way: LossyRedis) -> AsyncIterator[World]:
    """One gateway, with the tenant `made`."""
    async with directory_world(tmp_path, log, way.url) as world:
        await world.open()
        assert (await world.ask("PUT", "tenants/made", {})).status == 200
        yield world


async def asked(
    world: World, way: LossyRedis, losses: Losses, method: str, path: str, body: Any = None, **headers: str
) -> Answer:
    """The answer to a change whose answers from Redis are lost at first."""
    way.losses[:] = losses
    answer = await world.ask(method, path, body, headers=headers)
    assert not way.losses, "it was sent often enough"
    return answer


async def audited(world: World, action: str) -> list[dict[str, Any]]:
    """The audit lines of an action. None is still to be written."""

    def reloads() -> int:
        return sum(line["action"] == "reload" for line in world.logged("admin.change"))

    before = reloads()
    await world.ask("POST", "reload")
    await until(lambda: reloads() > before)
    return [line for line in world.logged("admin.change") if line["action"] == action]


@pytest.mark.parametrize("losses", [("close",), ("close", "close"), ("stall",), ("close", "stall")])
async def test_a_key_whose_creation_was_made_is_answered_with_its_secret(
    world: World, way: LossyRedis, losses: Losses
) -> None:
    answer = await asked(world, way, losses, "POST", "keys", {"tenant": "made"})
    assert answer.status == 200, answer
    assert await world.status(answer.body["key"]) == 200
    assert [key["id"] for key in (await world.ask("GET", "keys?tenant=made")).body["data"]] == [
        answer.body["id"]
    ]
    [line] = await audited(world, "key.create")
    assert (line["target"], "outcome" in line) == (answer.body["id"], False)


async def test_a_change_of_a_key_is_made_once_and_audited(world: World, way: LossyRedis) -> None:
    made = await world.key(tenant="made")
    path = f"keys/{made['id']}"
    rotated = await asked(world, way, ["close"], "POST", f"{path}/rotate", {"overlap_s": 3600})
    assert rotated.status == 200, rotated
    assert [await world.status(one["key"]) for one in (made, rotated.body)] == [200, 200]
    revoked = await asked(world, way, ["close"], "PATCH", path, {"disabled": True})
    assert (revoked.status, revoked.body["disabled"]) == (200, True)
    assert await world.status(made["key"]) == 401
    gone = await asked(world, way, ["close"], "DELETE", path)
    assert (gone.status, gone.body["id"]) == (200, made["id"])
    for action in ("key.rotate", "key.revoke", "key.delete"):
        [line] = await audited(world, action)
        assert line["target"] == made["id"]


async def test_a_tenant_is_replaced_by_its_own_etag_and_by_any(world: World, way: LossyRedis) -> None:
    for concurrent in (1, 2):
        etag = "*" if concurrent == 1 else str((await world.ask("GET", "tenants/made")).etag)
        limits = {"limits": {"concurrent": concurrent}}
        answer = await asked(world, way, ["close"], "PUT", "tenants/made", limits, **{"if-match": etag})
        assert answer.status == 200, answer
        assert answer.body["limits"]["concurrent"] == concurrent
    lines = await audited(world, "tenant.put")
    assert [line["to"]["limits"]["concurrent"] for line in lines] == [None, 1, 2]


async def test_what_another_has_changed_since_is_not_changed_back(
    world: World, way: LossyRedis, own: RedisServer
) -> None:
    """Another operator deletes the new key between the first call and its copy, and does more."""

    def put(kind: str, id_: str, expected: bytes, json: bytes, place: str) -> None:
        names = ("state", "log", "keys", "tenants", "keys-in-order", "tenants-in-order")
        words = kind, id_, expected, json, place, "", "", "an epoch", "another's", 9, 1 << 60
        reply = raw(own).eval(SCRIPT, len(names), *(at(world, name) for name in names), "put", *words)
        assert reply[1] == b"ok"

    def others() -> None:
        [(id_, json)] = raw(own).hgetall(at(world, "keys")).items()
        put("keys", id_.decode(), json, b"", f"made/{id_.decode()}")
        put("tenants", "other", b"", b"{}", "other")

    way.at_loss = others
    answer = await asked(world, way, ["close"], "POST", "keys", {"tenant": "made"})
    assert answer.status == 200, "it was made"
    assert not raw(own).hgetall(at(world, "keys"))
    await follower(world).refresh()
    assert await world.status(answer.body["key"]) == 401
    assert len(await audited(world, "key.create")) == 1


async def test_where_nobody_knows_the_operator_is_told_so_and_the_line_says_so(
    world: World, way: LossyRedis
) -> None:
    answer = await asked(world, way, ALL, "POST", "keys", {"tenant": "made"})
    assert (answer.status, answer.code) == (503, "change_unknown")
    assert "Read it again" in answer.body["error"]["message"]
    [line] = await audited(world, "key.create")
    assert (line["outcome"], line["from"], line["to"]["tenant"]) == ("unknown", None, "made")
    [key] = (await world.ask("GET", "keys?tenant=made")).body["data"]
    assert key["id"] == line["target"]


async def test_a_copy_that_is_refused_leaves_it_unknown(
    world: World, way: LossyRedis, own: RedisServer
) -> None:
    """The answer to a copy is not about the call before it."""
    way.at_loss = lambda: own.admin.acl_setuser("default", enabled=True, commands=["-evalsha", "-eval"])
    answer = await asked(world, way, ["close"], "PUT", "tenants/new", {})
    own.admin.acl_setuser("default", enabled=True, commands=["+evalsha", "+eval"])
    assert (answer.status, answer.code) == (503, "change_unknown")
    [_, line] = await audited(world, "tenant.put")
    assert (line["target"], line["outcome"]) == ("new", "unknown")


async def test_a_change_that_was_refused_was_not_made_and_has_no_line(world: World, own: RedisServer) -> None:
    own.admin.config_set("maxmemory", "1")
    answer = await world.ask("POST", "keys", {"tenant": "made"})
    own.admin.config_set("maxmemory", "0")
    assert (answer.status, answer.code) == (503, "directory_unavailable")
    assert not raw(own).hgetall(at(world, "keys"))
    assert not await audited(world, "key.create")


async def test_a_change_that_comes_too_late_is_not_made(
    world: World, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a server that stood still has in its sockets, long after the operator was answered."""
    monkeypatch.setattr(redis_directory, "MADE_WITHIN_S", -1.0)
    answer = await world.ask("POST", "keys", {"tenant": "made"})
    assert (answer.status, answer.code) == (503, "directory_unavailable")
    assert not raw(own).hgetall(at(world, "keys"))
    assert not await audited(world, "key.create")
