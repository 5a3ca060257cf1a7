"""Entries of the directory in Redis that cannot be read, or that the file has too: all others are as they
were."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.config.whole import KeyConfig, TenantConfig
from gateway.directory.accounts import Kind
from gateway.directory.entries import PATH_LEN_MAX, decode_object, encode
from gateway.directory.follower import MODELS_SHOWN_MAX, REFUSED_SHOWN_MAX
from gateway.identity.keys import hash_key
from shared.process.setting_values import ConfigError
from tests.gateway.conftest import KEY, House
from tests.gateway.directory.directory_world import World, at, directory_world, follower, problems, raw
from tests.gateway.redis_server import RedisServer


@pytest.fixture
async def world(tmp_path: Path, log: io.StringIO, own: RedisServer) -> AsyncIterator[World]:
    async with directory_world(tmp_path, log, own.url) as world:
        yield world


GOOD = KeyConfig("a" * 12, hash_key("good"), "acme", created=datetime(2026, 1, 1, tzinfo=UTC))
GARBAGE: dict[str, bytes] = {
    "no JSON": b"\xff\x00garbage",
    "an array": b"[]",
    "an empty object": b"{}",
    "a field that a later version may have": encode(GOOD)[:-1] + b',"networks":["10.0.0.0/8"]}',
    "another id": encode(GOOD).replace(b"a" * 12, b"b" * 12),
    "a tenant that is not there": encode(GOOD).replace(b'"acme"', b'"nobody"'),
    "a hash that is none": encode(GOOD).replace(b"sha256:", b"md5:"),
    "half of a pair": encode(GOOD).replace(b'ious_expires":null', b'ious_expires":"2030-01-01T00:00:00Z"'),
    "a bound that is passed": encode(GOOD).replace(b'"concurrent":null', b'"concurrent":-1'),
    "two megabytes": b'{"id":"' + b"x" * (2 << 20) + b'"}',
}  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_an_entry_that_cannot_be_read_changes_nothing_for_any_other(
    world: World, own: RedisServer, garbage: bytes
) -> None:
    """It may be one that revokes, so its key is refused; the victims are all other keys."""
    await world.open()
    first = await world.key()
    raw(own).hset(at(world, "keys"), GOOD.id, encode(GOOD))
    touch(world, own, GOOD.id)
    await follower(world).refresh()
    assert await world.status("good") == 200
    raw(own).hset(at(world, "keys"), GOOD.id, garbage)
    raw(own).hset(at(world, "keys"), b"\xff\x00\x1b[2J", garbage)
    touch(world, own, GOOD.id)
    second = await world.key()
    await follower(world).refresh()
    keys = (first["key"], second["key"], "good")
    assert [await world.status(key) for key in keys] == [200, 200, 401]
    refused = await world.line("directory.entry_refused", GOOD.id)
    assert refused["problems"]
    await world.open()
    assert [await world.status(key, at=1) for key in keys] == [200, 200, 401]
    assert await problems(world, at=1) == []
    raw(own).zadd(at(world, "keys-in-order"), {f"acme/{GOOD.id}": 0})
    listed: list[str] = []
    after: str | None = ""
    while after is not None:
        page = (await world.ask("GET", f"keys?limit=1&after={after}")).body
        listed += [one["id"] for one in page["data"]]
        after = page["next"]
    assert set(listed) == {"k1", "k2", first["id"], second["id"]} | {GOOD.id} & set(listed)
    assert len(listed) == len(set(listed)) >= 4
    raw(own).hset(at(world, "keys"), GOOD.id, encode(GOOD))
    touch(world, own, GOOD.id)
    for number in (0, 1):
        await follower(world, number).refresh()
        assert await world.status("good", at=number) == 200, "it can be read again"


LATER: dict[str, bytes] = {
    "a further field": encode(GOOD)[:-1] + b',"networks":["10.0.0.0/8"]}',
    "a further field in one": encode(GOOD).replace(b'"limits":{', b'"limits":{"images_per_min":1,'),
    "another kind of value": encode(GOOD).replace(b'"labels":[]', b'"labels":{"team":"a"}'),
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
async def test_an_entry_of_a_later_version_can_be_revoked_where_it_cannot_be_read(
    world: World, own: RedisServer, later: bytes
) -> None:
    """While gateways of two versions run, whoever revokes a key reaches either. The victim is another key."""
    assert later != encode(GOOD)
    await world.open()
    other, path = await world.key(), f"keys/{GOOD.id}"
    raw(own).hset(at(world, "keys"), GOOD.id, later)
    raw(own).zadd(at(world, "keys-in-order"), {f"acme/{GOOD.id}": 0})
    raw(own).hincrby(at(world, "state"), "keys", 1)
    touch(world, own, GOOD.id)
    for method, asked, body in (
        ("GET", path, None),
        ("PATCH", path, {"disabled": True}),
        ("POST", f"{path}/rotate", {}),
    ):
        refused = await world.ask(method, asked, body)
        assert (refused.status, refused.code) == (409, "conflict")
        assert "later version" in refused.body["error"]["message"]
    assert raw(own).hget(at(world, "keys"), GOOD.id) == later
    deleted = await world.ask("DELETE", path)
    assert (deleted.status, deleted.body["tenant"]) == (200, "acme")
    assert raw(own).hget(at(world, "keys"), GOOD.id) is None
    assert raw(own).zrange(at(world, "keys-in-order"), 0, -1) == [f"acme/{other['id']}".encode()]
    assert (await world.ask("DELETE", path)).status == 404
    assert await world.status(other["key"]) == 200


@pytest.mark.parametrize("garbage", ["no JSON", "an empty object", "another id"])
async def test_what_is_no_entry_is_not_taken_for_one_that_can_be_deleted(
    world: World, own: RedisServer, garbage: str
) -> None:
    await world.open()
    await world.key()
    raw(own).hset(at(world, "keys"), GOOD.id, GARBAGE[garbage])
    assert (await world.ask("DELETE", f"keys/{GOOD.id}")).status == 409
    assert raw(own).hget(at(world, "keys"), GOOD.id) == GARBAGE[garbage]


def touch(world: World, own: RedisServer, id_: str, kind: Kind = "keys") -> None:
    """Note a change of an entry that was written past the gateways."""
    raw(own).rpush(at(world, "log"), f"{id_[:4]}:{kind}/{id_}")
    raw(own).hincrby(at(world, "state"), "version", 1)


@pytest.mark.parametrize("entry", [b"", b"garbage", b"\xff:keys/\xff", b"h:ghosts/a", b"h:keys/"])
async def test_garbage_among_the_changes_hides_none_of_the_others(
    world: World, own: RedisServer, entry: bytes
) -> None:
    await world.open()
    raw(own).hset(at(world, "state"), mapping={"epoch": "e", "version": 1, "floor": 0})
    raw(own).rpush(at(world, "log"), entry)
    await follower(world).refresh()
    made = await world.key()
    assert await world.status(made["key"]) == 200


async def test_a_state_that_is_garbage_is_an_outage(world: World, own: RedisServer) -> None:
    await world.open()
    made = await world.key()
    raw(own).hset(at(world, "state"), mapping={"version": "x"})
    await follower(world).refresh()
    raw(own).hset(at(world, "state"), mapping={"epoch": b"\xff", "version": 1})
    await follower(world).refresh()
    raw(own).delete(at(world, "state"))
    raw(own).set(at(world, "state"), b"garbage")
    await follower(world).refresh()
    assert (await world.ask("POST", "keys", {"tenant": "acme"})).code == "directory_unavailable"
    assert await world.status(made["key"]) == 200


async def test_a_tenant_that_can_be_read_again_brings_its_keys_back(world: World, own: RedisServer) -> None:
    await world.open()
    await world.ask("PUT", "tenants/made", {})
    made, other = await world.key(tenant="made"), await world.key()
    raw(own).hset(at(world, "tenants"), "made", b"garbage")
    await world.open()
    assert [await world.status(one["key"], at=1) for one in (made, other)] == [401, 200]
    mended = await world.ask("PUT", "tenants/made", {}, at=1)
    assert mended.status == 200
    assert await world.status(made["key"], at=1) == 200


async def test_a_tenant_that_cannot_be_read_any_more_lets_none_of_its_keys_in(
    world: World, own: RedisServer
) -> None:
    """It may have fewer rights by now; the victim is another tenant."""
    await world.open()
    await world.ask("PUT", "tenants/made", {})
    made, other = await world.key(tenant="made"), await world.key()
    raw(own).hset(at(world, "tenants"), "made", encode(TenantConfig("made"))[:-1] + b',"paused":true}')
    touch(world, own, "made", "tenants")
    await follower(world).refresh()
    assert [await world.status(one["key"]) for one in (made, other)] == [401, 200]
    raw(own).hset(at(world, "tenants"), "made", encode(TenantConfig("made")))
    touch(world, own, "made", "tenants")
    await follower(world).refresh()
    assert [await world.status(one["key"]) for one in (made, other)] == [200, 200]


async def test_what_names_a_model_that_a_gateway_lacks_reaches_it_all_the_same(world: World) -> None:
    """The first gateway has a further model. The victim is whoever revokes or restricts there."""
    one = {"name": "tiny", "replicas": [world.engine.url]}
    world.write(models=[one, {"name": "new", "replicas": [world.engine.url]}])
    await world.open()
    world.write(models=[one])
    await world.open()
    await world.ask("PUT", "tenants/made", {})
    made = await world.key(tenant="made", models=["tiny"])
    both = {"models": ["tiny", "new"]}
    assert (await world.ask("PATCH", f"keys/{made['id']}", both)).status == 200
    limits = {"requests_per_min": 0}
    model_limits = [{"model": "new", "limits": {"concurrent": 1}}]
    restricted = {**both, "limits": limits, "model_limits": model_limits}
    assert (await world.ask("PUT", "tenants/made", restricted, headers={"if-match": "*"})).status == 200
    await follower(world, 1).refresh()
    for number, served in enumerate(["new tiny", "tiny"]):
        url = f"http://127.0.0.1:{world.gateways[number].port}/v1/models"
        async with world.client.get(url, headers={"authorization": f"Bearer {made['key']}"}) as answer:
            assert answer.headers["x-ratelimit-limit-requests"] == "0"
            listed = (await answer.json())["data"]
        assert " ".join(sorted(model["id"] for model in listed)) == served
    assert (await world.ask("PATCH", f"keys/{made['id']}", {"disabled": True})).status == 200
    await follower(world, 1).refresh()
    assert await world.status(made["key"], at=1) == 401
    assert (await world.line("directory.models_unknown"))["models"] == ["new"]
    assert len(world.logged("directory.models_unknown")) == 1


async def test_what_is_told_of_entries_is_bounded(world: World, own: RedisServer) -> None:
    many = REFUSED_SHOWN_MAX + 5
    raw(own).hset(at(world, "keys"), mapping={f"bad{number}": b"[]" for number in range(many)})
    names = tuple(f"ghost-{number}" for number in range(MODELS_SHOWN_MAX + 5))
    for id_ in ("one", "other"):
        raw(own).hset(at(world, "tenants"), id_, encode(TenantConfig(id_, models=(*names, f"of-{id_}"))))
    raw(own).hset(at(world, "state"), mapping={"epoch": "e", "version": 0, "floor": 0})
    await world.open()
    assert (await world.line("directory.entries_refused"))["count"] == many
    assert len(world.logged("directory.entry_refused")) == REFUSED_SHOWN_MAX
    [told] = world.logged("directory.models_unknown")
    assert len(told["models"]) == MODELS_SHOWN_MAX


def test_the_path_of_a_name_that_is_given_twice_is_bounded() -> None:
    deep = b"".join(b'{"' + b"x" * 60 + b'": ' for _ in range(20))
    with pytest.raises(ConfigError) as refused:
        decode_object(deep + b'{"a": 1, "a": 2}' + b"}" * 20)
    [problem] = refused.value.problems
    assert problem.endswith(".a: is given 2 times")
    assert len(problem) < PATH_LEN_MAX + 100


async def test_a_change_that_names_no_further_model_is_taken_where_one_is_lacking(
    world: World, own: RedisServer
) -> None:
    await world.open()
    await world.key()
    raw(own).hset(at(world, "keys"), GOOD.id, encode(replace(GOOD, models=("tiny", "new"))))
    touch(world, own, GOOD.id)
    raw(own).hset(at(world, "tenants"), "made", encode(TenantConfig("made", models=("new",))))
    path = f"keys/{GOOD.id}"
    assert (await world.ask("PATCH", path, {"labels": ["a"]})).status == 200
    assert (await world.ask("PATCH", path, {"models": ["new"]})).status == 200
    refused = await world.ask("PATCH", path, {"models": ["new", "newer"]})
    assert (refused.status, refused.fields) == (400, ["models"])
    assert (await world.ask("PATCH", path, {"disabled": True})).status == 200
    assert await world.status("good") == 401
    any_ = {"if-match": "*"}
    assert (await world.ask("PUT", "tenants/made", {"models": ["new"]}, headers=any_)).status == 200
    refused = await world.ask("PUT", "tenants/made", {"models": ["newer"]}, headers=any_)
    assert (refused.status, refused.fields) == (400, ["models"])


async def test_the_file_wins_over_an_entry_of_the_same_id(world: World, own: RedisServer) -> None:
    await world.open()
    await world.ask("PUT", "tenants/made", {"limits": {"requests_per_min": 5}})
    made = await world.key(tenant="made")
    refused = await world.ask("PUT", "tenants/acme", {}, headers={"if-match": "*"})
    assert (refused.status, refused.code) == (409, "conflict")
    assert (await world.ask("DELETE", "keys/k1")).code == "conflict"
    world.write(tenants=[{"id": "acme"}, {"id": "other"}, {"id": "made", "limits": {"requests_per_min": 0}}])
    assert await world.gateways[0].reload() == []
    await follower(world).refresh()
    house = House(world.gateways[0], world.engine, world.client, world.log)
    bearer = {"authorization": f"Bearer {made['key']}"}
    async with house.client.get(f"{house.url}/v1/models", headers=bearer) as answer:
        assert answer.headers["x-ratelimit-limit-requests"] == "0"
    listed = (await world.ask("GET", "tenants")).body
    assert [tenant["id"] for tenant in listed["data"]] == ["acme", "made", "other"]
    assert listed["fixed"] == ["acme", "made", "other"]
    world.write()
    assert await world.gateways[0].reload() == []
    async with house.client.get(f"{house.url}/v1/models", headers=bearer) as answer:
        assert answer.headers["x-ratelimit-limit-requests"] == "5"


async def test_a_key_of_the_file_stands_before_that_of_the_directory_as_long_as_it_is_there(
    world: World, own: RedisServer
) -> None:
    await world.open()
    await world.open()
    made = await world.key()
    await follower(world, 1).refresh()
    declared = {"id": made["id"], "hash": hash_key("the file's"), "tenant": "acme"}
    world.write(keys=[declared])
    assert await world.gateways[0].reload() == []
    assert [await world.status(key) for key in (made["key"], "the file's")] == [401, 200]
    changed = await world.ask("PATCH", f"keys/{made['id']}", {"labels": ["a"]}, at=1)
    assert changed.status == 200, "the other gateway has not read its file again"
    await follower(world).refresh()
    assert [await world.status(key) for key in (made["key"], "the file's")] == [401, 200]
    world.write()
    assert await world.gateways[0].reload() == []
    await follower(world).refresh()
    assert [await world.status(key) for key in (made["key"], "the file's")] == [200, 401]
    world.write(keys=[declared])
    assert await world.gateways[0].reload() == []
    assert (await world.ask("DELETE", f"keys/{made['id']}", at=1)).status == 200
    await follower(world).refresh()
    assert await world.status("the file's") == 200


@pytest.mark.parametrize("id_", ["a" * 12, "zz"])
async def test_a_key_of_the_file_is_not_taken_over_by_an_entry_with_its_hash(
    world: World, own: RedisServer, id_: str
) -> None:
    """The victim is the holder of the file's key: "dev-key" is nothing that the gateway minted."""
    await world.open()
    await world.key()
    stranger = replace(GOOD, id=id_, hash=hash_key(KEY), tenant="other", disabled=True)
    for entry in (encode(stranger), encode(replace(stranger, hash=hash_key("new"))), encode(stranger)):
        raw(own).hset(at(world, "keys"), id_, entry)
        touch(world, own, id_)
        await follower(world).refresh()
        assert await world.status(KEY) == 200
        await world.open()
        assert await world.status(KEY, at=-1) == 200
    assert (await world.line("directory.same_secret"))["ids"] == [id_]
    raw(own).hdel(at(world, "keys"), id_)
    touch(world, own, id_)
    await follower(world).refresh()
    assert await world.status(KEY) == 200


async def test_a_key_in_redis_of_a_tenant_that_the_file_has_no_longer_is_refused(
    world: World, own: RedisServer
) -> None:
    await world.open()
    gone, kept = await world.key(tenant="other"), await world.key()
    world.write(tenants=[{"id": "acme"}], keys=[])
    assert await world.gateways[0].reload() == []
    for _ in range(2):
        assert [await world.status(one["key"]) for one in (gone, kept)] == [401, 200]
        await follower(world).refresh()
