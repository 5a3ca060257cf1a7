"""The directory in Redis through outages, losses and failovers: what was known holds."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gateway.config.whole import KeyConfig, TenantConfig
from gateway.directory import follower as following
from gateway.directory import redis_directory
from gateway.directory.accounts import POLL_S, AccountsReader
from gateway.directory.entries import KEYS_MAX, TENANTS_MAX, Change, encode, etag_of, place_of
from gateway.directory.follower import SLICE, Follower
from gateway.directory.redis_directory import RawEntry, RedisDirectory
from gateway.identity.keys import hash_key
from gateway.redis.link import RedisLink, RedisUnavailable
from gateway.redis.links import Links
from shared.process.clock import SYSTEM_CLOCK
from tests.fakes import VirtualClock
from tests.gateway.conftest import KEY, PATIENCE_S, until
from tests.gateway.directory.directory_world import World, at, directory_world, follower, problems, raw
from tests.gateway.fake_engine import chunk, stream
from tests.gateway.identity.issuers import EC, as_toml, issuer
from tests.gateway.redis_server import RedisServer


@pytest.fixture
async def world(tmp_path: Path, log: io.StringIO, own: RedisServer) -> AsyncIterator[World]:
    async with directory_world(tmp_path, log, own.url) as world:
        yield world


def saved(own: RedisServer) -> dict[bytes, bytes]:
    """All that the server has, as a backup would."""
    return {name: raw(own).dump(name) for name in raw(own).keys("*")}


def restore(own: RedisServer, backup: dict[bytes, bytes]) -> None:
    raw(own).flushall()
    for name, dumped in backup.items():
        raw(own).restore(name, 0, dumped)


async def test_a_revoked_key_is_refused_within_five_seconds_by_gateways_that_nobody_told(
    world: World,
) -> None:
    """They look by themselves: each has a clock of its own here, which stands still until it is told to."""
    assert POLL_S <= 5
    clocks = [VirtualClock() for _ in range(2)]
    await world.open()
    for clock in clocks:
        await world.open(clock=clock)

    async def learn(key: str, before: int, after: int) -> None:
        for number, clock in enumerate(clocks, 1):
            assert await world.status(key, at=number) == before, "it has not looked since"
            clock.advance(POLL_S)
            await world.until_status(key, after, at=number)

    async with asyncio.timeout(PATIENCE_S):
        made = await world.key()
        await learn(made["key"], 401, 200)
        await world.ask("DELETE", f"keys/{made['id']}")
        assert await world.status(made["key"]) == 401
        await learn(made["key"], 200, 401)


# -- outages --------------------------------------------------------------------------------------


async def test_a_gateway_that_starts_without_redis_serves_the_files_keys_and_turns_no_other_away_for_good(
    world: World, own: RedisServer
) -> None:
    await world.open()
    made = await world.key()
    backup = saved(own)
    own.kill()
    await world.open()
    assert await problems(world, at=1) == ["directory"]
    assert await world.status(KEY, at=1) == 200
    assert await world.status(made["key"], at=1) == 503
    refused = await world.ask("POST", "keys", {"tenant": "acme"}, at=1)
    assert (refused.status, refused.code) == (503, "directory_unavailable")
    own.start()
    restore(own, backup)
    await follower(world, 1).refresh()
    assert await problems(world, at=1) == []
    assert await world.status(made["key"], at=1) == 200
    assert await world.status("sk_live_" + "a" * 12 + "_" + "A" * 32, at=1) == 401


async def test_keys_go_on_working_while_redis_is_down_and_no_request_waits_for_it(
    world: World, own: RedisServer
) -> None:
    """The victims are all callers: the server is there, and does not answer."""
    await world.open()
    made = await world.key()
    own.stop_still()
    refreshing = asyncio.create_task(follower(world).refresh())
    for _ in range(20):
        assert await world.status(made["key"]) == 200
        assert await world.status("wrong") == 401
    await refreshing
    await world.line("directory.down", "no answer within 1 s")
    assert await problems(world) == [], "what was read last holds"
    async with world.client.get(f"http://127.0.0.1:{world.gateways[0].admin_port}/metrics") as answer:
        assert "penstock_gateway_directory_up 0.0" in await answer.text()
    own.go_on()
    await follower(world).refresh()
    await world.line("directory.up")
    assert (await world.ask("GET", f"keys/{made['id']}")).status == 200


@pytest.mark.parametrize("is_revoked", [False, True])
async def test_what_was_read_too_long_ago_holds_no_longer_and_ends_no_stream_by_itself(
    world: World, own: RedisServer, is_revoked: bool
) -> None:
    world.write(directory={"stale_s": 60.0})
    clock = VirtualClock()
    house = await world.open()
    answer = await world.ask("PUT", "tenants/made", {"on_revoke": "end"})
    assert answer.status == 200
    made = await world.key(tenant="made")
    mine = following.Follower(follower(world).directory, world.gateways[0].accounts, 60.0, clock)
    await mine.refresh()
    go_on = asyncio.Event()
    world.engine.script = stream(chunk("a"), go_on, chunk("b"))
    bearer = {"authorization": f"Bearer {made['key']}"}
    backup = saved(own)
    async with house.chat(stream=True, headers=bearer) as running:
        await running.content.readuntil(b"\n\n")
        own.kill()
        await mine.refresh()
        assert await world.status(made["key"]) == 200
        clock.advance(59)
        await mine.refresh()
        assert await world.status(made["key"]) == 200
        clock.advance(1)
        await mine.refresh()
        assert not mine.is_current
        assert await world.status(made["key"]) == 503
        assert await world.status(KEY) == 200, "the file's"
        own.start()
        restore(own, backup)
        await mine.refresh()
        assert await world.status(made["key"]) == 200
        if is_revoked:
            await world.ask("DELETE", f"keys/{made['id']}")
            await mine.refresh()
            assert b'"code":"key_revoked"' in await running.read()
        else:
            go_on.set()
            assert (await running.read()).endswith(b"data: [DONE]\n\n"), "nobody has revoked it"


# -- losses ---------------------------------------------------------------------------------------


async def test_an_empty_redis_where_there_was_a_directory_takes_no_key_away(
    world: World, own: RedisServer
) -> None:
    await world.open()
    made = await world.key()
    backup = saved(own)
    own.kill()
    own.start()
    await follower(world).refresh()
    await world.line("directory.down", "lost")
    assert await world.status(made["key"]) == 200
    refused = await world.ask("POST", "keys", {"tenant": "acme"})
    assert (refused.status, refused.code) == (503, "directory_unavailable"), "it would begin another one"
    await world.open()
    assert await problems(world, at=1) == ["directory"], "one that starts now is not misled"
    assert (await world.ask("POST", "keys", {"tenant": "acme"}, at=1)).status == 503
    assert await world.status(made["key"], at=1) == 503
    restore(own, backup)
    for number in (0, 1):
        await follower(world, number).refresh()
        assert await world.status(made["key"], at=number) == 200
        assert await problems(world, at=number) == []


async def test_a_new_directory_is_begun_when_the_operator_says_so(world: World, own: RedisServer) -> None:
    await world.open()
    made = await world.key()
    raw(own).flushall()
    await follower(world).refresh()
    raw(own).delete(at(world, "state"))
    await world.open()
    assert await problems(world, at=1) == []
    other = await world.ask("POST", "keys", {"tenant": "acme"}, at=1)
    assert await world.status(other.body["key"], at=1) == 200
    await follower(world).refresh()
    assert [await world.status(key) for key in (made["key"], other.body["key"])] == [200, 401], (
        "a gateway that knew the one before goes by that until it is restarted"
    )
    assert (await world.ask("POST", "keys", {"tenant": "acme"})).status == 503


@pytest.mark.parametrize("name", ["keys", "tenants", "state"])
async def test_what_a_server_evicts_takes_no_key_away(world: World, own: RedisServer, name: str) -> None:
    await world.open()
    await world.ask("PUT", "tenants/made", {})
    made = await world.key(tenant="made")
    raw(own).delete(at(world, name))
    await follower(world).refresh()
    await world.line("directory.down", "lost")
    assert await world.status(made["key"]) == 200


async def test_changes_that_a_failover_has_lost_are_lost_for_every_gateway(
    world: World, own: RedisServer
) -> None:
    """Another change has the number of the lost one by then."""
    await world.open(clock=VirtualClock())
    first = await world.key()
    backup = saved(own)
    lost = await world.key()
    await world.ask("DELETE", f"keys/{first['id']}")
    restore(own, backup)
    await world.open()
    kept = [(await world.ask("POST", "keys", {"tenant": "acme"}, at=1)).body for _ in range(2)]
    await follower(world).refresh()
    statuses = [await world.status(one["key"]) for one in (first, lost, *kept)]
    assert statuses == [200, 401, 200, 200]


async def test_a_gateway_that_has_missed_more_changes_than_are_kept_reads_all(
    world: World, own: RedisServer
) -> None:
    await world.open()
    gone = await world.key()
    await world.open()
    await follower(world, 1).refresh()
    full = raw(own).rpushx(at(world, "log"), *["another:change/of it"] * 9_999)
    raw(own).hincrby(at(world, "state"), "version", 9_999)
    made = await world.key()
    await world.ask("DELETE", f"keys/{gone['id']}")
    assert raw(own).llen(at(world, "log")) == full
    await follower(world, 1).refresh()
    assert [await world.status(one["key"], at=1) for one in (gone, made)] == [401, 200]


async def test_an_acl_user_that_may_use_its_own_keys_alone_is_enough(
    world: World, own: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("correct-horse\n")
    user = {"username": "penstock", "password": f"file:{tmp_path / 'password'}"}
    world.write(redis={"url": own.url, "key_prefix": world.prefix, **user})
    own.admin.acl_setuser(
        "penstock",
        enabled=True,
        passwords=["+correct-horse"],
        keys=[f"{world.prefix}:*"],
        categories=["+@read", "+@write", "+@scripting", "-@dangerous"],
        commands=["+time", "+client|setname"],
    )
    own.admin.acl_setuser("default", enabled=False)
    await world.open()
    made = await world.key()
    await world.ask("POST", f"keys/{made['id']}/rotate")
    assert (await world.ask("GET", "keys")).status == 200
    assert (await world.ask("DELETE", f"keys/{made['id']}")).status == 200
    assert await problems(world) == []


async def test_a_token_may_name_a_tenant_of_the_directory(world: World, tmp_path: Path) -> None:
    now_s = int(SYSTEM_CLOCK.wall())
    issuers = [as_toml(issuer(tmp_path / "issuer", EC))]
    world.write(issuers=issuers, grants=[{"issuer": issuers[0]["id"], "tenant_claim": ["team"]}])
    await world.open()
    token = EC.token(now_s, team="made")
    assert await world.status(token) == 401
    await world.ask("PUT", "tenants/made", {})
    assert await world.status(token) == 200
    await world.ask("DELETE", "tenants/made")
    assert await world.status(token) == 401


# -- size -----------------------------------------------------------------------------------------


def fill(world: World, own: RedisServer, count: int) -> list[KeyConfig]:
    """A directory of so many keys, written past the gateways."""
    keys = [KeyConfig(f"{n:012d}", hash_key(f"sk_live_{n:012d}_{'A' * 32}"), "made") for n in range(count)]
    pipe = raw(own).pipeline(transaction=False)
    pipe.hset(at(world, "tenants"), "made", encode(TenantConfig("made")))
    pipe.zadd(at(world, "tenants-in-order"), {"made": 0})
    for key in keys:
        pipe.hset(at(world, "keys"), key.id, encode(key))
        pipe.zadd(at(world, "keys-in-order"), {place_of(key): 0})
    pipe.hset(at(world, "state"), mapping={"epoch": "e", "version": 0, "floor": 0})
    pipe.execute()
    return keys


async def test_a_large_directory_is_read_in_slices_between_which_requests_are_served(
    world: World, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(world, own, 3000)
    sizes: list[int] = []
    turns = 0
    take = Follower._take

    def counted(self: Follower, entries: Sequence[RawEntry]) -> None:
        sizes.append(len(entries))
        take(self, entries)

    monkeypatch.setattr(Follower, "_take", counted)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await world.open()
    counting.cancel()
    assert sum(sizes) >= 3001
    assert max(sizes) <= 2 * SLICE
    assert turns > len(sizes)
    for number in (0, 1234, 2999):
        assert await world.status(f"sk_live_{number:012d}_{'A' * 32}") == 200
    page = (await world.ask("GET", "keys?tenant=made&limit=200")).body
    assert [key["id"] for key in page["data"]] == [key.id for key in keys[:200]]
    assert page["next"] == place_of(keys[199])


async def test_the_number_of_keys_is_bounded(
    world: World, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"keys": KEYS_MAX, "tenants": TENANTS_MAX}
    assert most == following.ENTRIES_MAX == redis_directory.FULL
    fill(world, own, 10)
    monkeypatch.setitem(following.ENTRIES_MAX, "keys", 9)
    await world.open()
    assert await problems(world) == ["directory"]
    await world.line("directory.down", "more than 9 keys")
    monkeypatch.setitem(following.ENTRIES_MAX, "keys", 10)
    monkeypatch.setitem(redis_directory.FULL, "keys", 10)
    await follower(world).refresh()
    refused = await world.ask("POST", "keys", {"tenant": "acme"})
    assert (refused.status, refused.code) == (409, "conflict")


async def test_no_key_is_made_of_a_tenant_that_another_operator_deletes_meanwhile(
    world: World, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.open()
    await world.ask("PUT", "tenants/made", {})
    change = redis_directory.RedisDirectory.change

    async def later(directory: redis_directory.RedisDirectory, *asked: Any) -> Change:
        raw(own).hdel(at(world, "tenants"), "made")
        return await change(directory, *asked)

    monkeypatch.setattr(redis_directory.RedisDirectory, "change", later)
    refused = await world.ask("POST", "keys", {"tenant": "made"})
    assert (refused.status, refused.fields) == (400, ["tenant"])


async def test_a_change_that_others_are_always_before_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.open()
    made, tried = await world.key(), list[object]()

    async def too_late(_: object, *change: object) -> bool:
        tried.append(change)
        return False

    monkeypatch.setattr(redis_directory.RedisDirectory, "_put", too_late)
    refused = await world.ask("PATCH", f"keys/{made['id']}", {"labels": ["a"]})
    assert (refused.status, refused.code) == (409, "conflict")
    assert len(tried) == redis_directory.ATTEMPTS_MAX


class _Nodes:
    """Nodes of a Cluster, of which none answers."""

    looked_for = 0

    def of(self, tenant: str) -> RedisLink:
        raise RedisUnavailable(f"the node of {tenant} is gone")

    async def refresh(self) -> None:
        self.looked_for += 1


async def test_a_node_that_is_gone_is_looked_for_at_the_next_call() -> None:
    """Another one may have its keys by then."""
    nodes = _Nodes()
    directory = RedisDirectory(cast(Links, nodes), "p", cast(AccountsReader, None))
    for call in range(1, 4):
        with pytest.raises(RedisUnavailable):
            await directory.scan("keys", b"0", 1)
        assert nodes.looked_for == call


async def test_no_secret_is_in_redis(world: World, own: RedisServer) -> None:
    await world.open()
    made = await world.key()
    rotated = await world.ask("POST", f"keys/{made['id']}/rotate")
    held = b"".join(raw(own).hgetall(at(world, "keys")).values())
    for text in (made["key"], rotated.body["key"]):
        assert text.rpartition("_")[2].encode() not in held
        assert hash_key(text).encode() in held
    assert re.fullmatch(r"[0-9a-f]{32}", etag_of(TenantConfig("made")))
    assert msgspec.json.decode(held, type=KeyConfig).id == made["id"]
    await until(lambda: bool(world.logged("admin.change")))
