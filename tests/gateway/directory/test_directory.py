"""Keys and tenants as operators change them through the admin listener, in the file and in Redis alike."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.directory import registry
from gateway.directory.accounts import POLL_S
from gateway.directory.registry import Registry
from gateway.directory.rotation import OVERLAP_S_MAX
from gateway.identity.keys import mint_key
from shared.process import logs
from shared.process.setting_values import ConfigError
from shared.wire.errors import Conflict, Unauthenticated
from tests.fakes import VirtualClock
from tests.gateway.conftest import CHAT, KEY, OTHER_KEY, until
from tests.gateway.directory.directory_world import World, directory_world
from tests.gateway.fake_engine import chunk, stream
from tests.gateway.redis_server import RedisServer

HASH = re.compile(r"sha256:|\b[0-9a-f]{64}\b")


@pytest.fixture(params=["file", "redis"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, log: io.StringIO, redis: RedisServer
) -> AsyncIterator[World]:
    url = redis.url if request.param == "redis" else None
    async with directory_world(tmp_path, log, url) as world:
        await world.open()
        yield world


async def put_tenant(world: World, id_: str = "made", **fields: Any) -> None:
    answer = await world.ask("PUT", f"tenants/{id_}", fields)
    assert answer.status == 200, answer


# -- keys -----------------------------------------------------------------------------------------


async def test_a_key_is_created_listed_changed_and_deleted(world: World) -> None:
    await put_tenant(world, limits={"concurrent": 9})
    fields = {
        "tenant": "made",
        "env": "test",
        "models": ["tiny"],
        "endpoints": ["/v1/models"],
        "limits": {"requests_per_min": 60},
        "labels": ["of the tests"],
        "expires": "2099-01-31T00:00:00Z",
    }
    made = await world.key(**fields)
    text = made.pop("key")
    assert re.fullmatch(rf"sk_test_{made['id']}_[A-Za-z0-9]{{32}}", text)
    assert await world.status(text) == 200
    shown = await world.ask("GET", f"keys/{made['id']}")
    assert shown.body == made
    assert {name: made[name] for name in fields if name != "limits"} == {
        name: value for name, value in fields.items() if name != "limits"
    }
    assert made["limits"]["requests_per_min"] == 60
    created = datetime.fromisoformat(made["created"])
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=5)
    listed = await world.ask("GET", "keys?tenant=made")
    assert listed.body["data"] == [made]
    patch = {"labels": None, "limits": {"requests_per_min": None, "concurrent": 2}}
    changed = await world.ask("PATCH", f"keys/{made['id']}", patch)
    assert changed.status == 200, changed
    assert changed.body["labels"] == []
    assert changed.body["limits"]["requests_per_min"] is None
    assert changed.body["limits"]["concurrent"] == 2
    assert changed.body["expires"] == made["expires"], "what the patch does not name stays"
    gone = await world.ask("DELETE", f"keys/{made['id']}")
    assert gone.status == 200
    assert await world.status(text) == 401
    assert (await world.ask("GET", f"keys/{made['id']}")).code == "not_found"
    assert (await world.ask("DELETE", f"keys/{made['id']}")).code == "not_found"


async def test_a_keys_limits_for_single_models_are_set_changed_and_hold(world: World) -> None:
    """A list takes the place of the one before; the key's other requests are not limited."""
    made = await world.key(model_limits=[{"model": "tiny", "limits": {"requests_per_min": 1}}])
    [entry] = made["model_limits"]
    assert (entry["model"], entry["limits"]["requests_per_min"]) == ("tiny", 1)
    assert entry["limits"]["concurrent"] is None
    path = f"keys/{made['id']}"
    chats = [await chat_status(world, made["key"], model) for model in ("tiny", "small")]
    assert chats == [200, 429], "the second name is an alias"
    assert await world.status(made["key"]) == 200
    given_back = await world.ask("PATCH", path, {"model_limits": made["model_limits"]})
    assert given_back.body["model_limits"] == made["model_limits"], "what is shown can be sent"
    wider = [{"model": "tiny", "limits": {"requests_per_min": 1_000}}]
    changed = await world.ask("PATCH", path, {"model_limits": wider})
    assert changed.body["model_limits"][0]["limits"]["requests_per_min"] == 1_000
    assert await chat_status(world, made["key"], "tiny") == 200
    line = await world.line("admin.change", "key.change")
    assert line["from"] == {"model_limits": made["model_limits"]}
    assert line["to"] == {"model_limits": changed.body["model_limits"]}
    assert (await world.ask("PATCH", path, {"model_limits": None})).body["model_limits"] == []


async def chat_status(world: World, key: str, model: str) -> int:
    url = f"http://127.0.0.1:{world.gateways[0].port}/v1/chat/completions"
    bearer = {"authorization": f"Bearer {key}"}
    async with world.client.post(url, json={**CHAT, "model": model}, headers=bearer) as answer:
        return answer.status


async def test_a_replaced_secret_works_beside_the_new_one_until_the_overlap_is_over(world: World) -> None:
    old = await world.key()
    rotated = await world.ask("POST", f"keys/{old['id']}/rotate", {"overlap_s": 3600})
    assert rotated.status == 200, rotated
    assert rotated.body["id"] == old["id"]
    overlap = datetime.fromisoformat(rotated.body["previous_expires"]) - datetime.now(UTC)
    assert timedelta(seconds=3000) < overlap <= timedelta(seconds=3601)
    assert [await world.status(one["key"]) for one in (old, rotated.body)] == [200, 200]
    again = await world.ask("POST", f"keys/{old['id']}/rotate")
    assert again.code == "conflict"
    assert "Wait, or end both" in again.body["error"]["message"]
    assert [await world.status(one["key"]) for one in (old, rotated.body)] == [200, 200]
    at_once = await world.ask("POST", f"keys/{old['id']}/rotate", {"overlap_s": 0})
    keys = [old["key"], rotated.body["key"], at_once.body["key"]]
    assert [await world.status(key) for key in keys] == [401, 401, 200]


def registry_at(world: World, wall_s: float) -> Registry:
    """The operations on the gateway's keys at another time."""
    gateway = world.gateways[0]
    return Registry(gateway._registry._directory, gateway.accounts, VirtualClock(wall=wall_s))


async def test_an_overlap_is_no_shorter_than_was_asked_for(world: World) -> None:
    made = await world.key()
    now_s = 1_700_000_000.9
    rotated = await registry_at(world, now_s).rotate_key(made["id"], {"overlap_s": 1}, "ops", None)
    assert rotated.previous_expires is not None
    assert rotated.previous_expires.timestamp() == 1_700_000_002


async def test_a_key_that_has_expired_gets_no_new_secret(world: World) -> None:
    made = await world.key(expires="2999-01-01T00:00:00Z")
    expires_s = datetime(2999, 1, 1, tzinfo=UTC).timestamp()
    with pytest.raises(Conflict, match="has expired"):
        await registry_at(world, expires_s).rotate_key(made["id"], {}, "ops", None)
    await registry_at(world, expires_s - 1).rotate_key(made["id"], {}, "ops", None)


async def test_a_revoked_key_is_told_so_and_can_be_given_back(world: World) -> None:
    made = await world.key()
    assert (await world.ask("PATCH", f"keys/{made['id']}", {"disabled": True})).body["disabled"]
    assert await world.status(made["key"]) == 401
    assert (await world.ask("POST", f"keys/{made['id']}/rotate")).code == "conflict"
    await world.ask("PATCH", f"keys/{made['id']}", {"disabled": False})
    assert await world.status(made["key"]) == 200


async def test_a_change_counts_at_another_gateway_within_seconds_and_for_its_streams(world: World) -> None:
    """The victim is another key of the same tenant: its stream gets its whole answer."""
    assert POLL_S <= 5
    await put_tenant(world, on_revoke="end")
    house = await world.open()
    revoked, kept = await world.key(tenant="made"), await world.key(tenant="made")
    go_on = asyncio.Event()
    world.engine.script = stream(chunk("a"), go_on, chunk("b"))
    for made in (revoked, kept):
        await world.until_status(made["key"], 200, at=1)
    bearer = [{"authorization": f"Bearer {made['key']}"} for made in (revoked, kept)]
    async with (
        house.chat(stream=True, headers=bearer[0]) as one,
        house.chat(stream=True, headers=bearer[1]) as other,
    ):
        for answer in (one, other):
            await answer.content.readuntil(b"\n\n")
        await world.ask("DELETE", f"keys/{revoked['id']}")
        assert b'"code":"key_revoked"' in await one.read()
        assert await world.status(revoked["key"], at=1) == 401
        go_on.set()
        assert (await other.read()).endswith(b"data: [DONE]\n\n")


async def test_a_new_key_that_draws_anothers_id_takes_nothing_from_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await world.key(tenant="acme")
    monkeypatch.setattr(registry, "mint_key", lambda env: mint_key(env, made["id"]))
    assert (await world.ask("POST", "keys", {"tenant": "other"})).status == 409
    assert await world.status(made["key"]) == 200


async def test_lists_come_in_pages_in_one_order(world: World) -> None:
    ids = {(await world.key(tenant=tenant))["id"] for tenant in ("acme", "other", "acme", "other", "acme")}
    seen: list[str] = []
    after = ""
    while True:
        page = (await world.ask("GET", f"keys?limit=2&after={after}")).body
        assert len(page["data"]) <= 2
        seen += [f"{key['tenant']}/{key['id']}" for key in page["data"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == sorted(seen)
    assert {place.rpartition("/")[2] for place in seen} == ids | {"k1", "k2"}
    mine = (await world.ask("GET", "keys?tenant=acme&limit=200")).body
    assert len(mine["data"]) == 4
    assert {key["tenant"] for key in mine["data"]} == {"acme"}
    for limit in ("0", "201", "x", "-1", "1" * 5000):
        refused = await world.ask("GET", f"keys?limit={limit}")
        assert (refused.status, refused.body["error"]["param"]) == (400, "limit")


# -- tenants --------------------------------------------------------------------------------------


async def test_a_tenant_is_created_replaced_and_deleted(world: World) -> None:
    policy = {"models": ["tiny"], "service_tier": "flex", "quota_fail": "local", "timeouts": {"total_s": 9}}
    made = await world.ask("PUT", "tenants/made", policy)
    assert made.status == 200
    key = await world.key(tenant="made")
    assert await world.status(key["key"]) == 200
    shown = await world.ask("GET", "tenants/made")
    assert (shown.body, shown.etag) == (made.body, made.etag)
    blind = await world.ask("PUT", "tenants/made", {**policy, "service_tier": "default"})
    assert (blind.status, blind.code) == (428, "precondition_required")
    etag = {"if-match": str(shown.etag)}
    replaced = await world.ask("PUT", "tenants/made", {**shown.body, "service_tier": "default"}, headers=etag)
    assert (replaced.status, replaced.body["service_tier"]) == (200, "default")
    late = await world.ask("PUT", "tenants/made", {**shown.body, "service_tier": "flex"}, headers=etag)
    assert (late.status, late.code) == (412, "changed_meanwhile"), "another operator has come first"
    assert (await world.ask("GET", "tenants/made")).body["service_tier"] == "default"
    assert (await world.ask("DELETE", "tenants/made")).code == "conflict", "it has a key"
    await world.ask("DELETE", f"keys/{key['id']}")
    assert (await world.ask("DELETE", "tenants/made")).status == 200
    assert (await world.ask("GET", "tenants/made")).code == "not_found"
    assert (await world.ask("POST", "keys", {"tenant": "made"})).fields == ["tenant"]


async def test_etags_come_in_lists_and_a_tenant_can_be_created_only_where_there_is_none(world: World) -> None:
    absent, path = {"if-none-match": "*"}, "tenants/made"
    made = await world.ask("PUT", path, {}, headers=absent)
    assert made.status == 200
    refused = await world.ask("PUT", path, {}, headers=absent)
    assert (refused.status, refused.code) == (412, "changed_meanwhile")
    refused = await world.ask("PUT", path, {}, headers={"if-match": "*", "if-none-match": str(made.etag)})
    assert refused.status == 412
    for etags, status in (
        (f'"a", {made.etag},"b"', 200),
        ('"a", "b"', 412),
        ("", 428),
        (f"W/{made.etag}", 412),
    ):
        answer = await world.ask("PUT", path, {}, headers={"if-match": etags} if etags else {})
        assert answer.status == status, etags


@pytest.mark.parametrize("id_", [".", ".."])
async def test_an_id_that_a_url_cannot_name_is_refused(world: World, id_: str) -> None:
    """Most clients take it out of the path before they send that."""
    with pytest.raises(ConfigError, match="id: ") as caught:
        await registry_at(world, 0).put_tenant(id_, {"models": ["ghost"]}, "ops", None)
    assert len(caught.value.problems) == 2, "all that is wrong is named"


async def test_a_tenants_new_limits_count_for_its_next_request(world: World) -> None:
    await put_tenant(world)
    key = await world.key(tenant="made")
    assert await world.status(key["key"]) == 200
    shown = await world.ask("GET", "tenants/made")
    await world.ask(
        "PUT",
        "tenants/made",
        {"limits": {"requests_per_min": 0}, "quota_fail": "local"},
        headers={"if-match": str(shown.etag)},
    )
    url = f"http://127.0.0.1:{world.gateways[0].port}/v1/chat/completions"
    bearer = {"authorization": f"Bearer {key['key']}"}
    async with world.client.post(url, json={}, headers=bearer) as answer:
        assert answer.status == 429


# -- bad changes ----------------------------------------------------------------------------------


BAD = [
    (
        "POST keys",
        {"tenant": "acme", "limits": {"concurrent": -1, "token": 1}, "expires": "soon", "models": ["ghost"]},
        {"limits.concurrent", "limits.token", "expires", "models"},
    ),
    ("POST keys", {}, {"tenant"}),
    ("POST keys", {"tenant": "nobody", "models": ["ghost"]}, {"tenant", "models"}),
    ("POST keys", {"tenant": "acme", "id": "a", "hash": "x", "disabled": True}, {"id", "hash", "disabled"}),
    ("POST keys", {"tenant": "acme", "endpoints": ["/v1/chat"], "env": "A"}, {"endpoints[0]", "env"}),
    ("POST keys", {"tenant": "acme", "expires": "2001-01-01T00:00:00Z"}, {"expires"}),
    ("PATCH keys/k1", {"expires": "9999-12-31T23:59:59-01:00"}, {"expires"}),
    ("PATCH keys/k1", {"expires": "0001-01-01T00:00:00+01:00"}, {"expires"}),
    ("PATCH keys/k1", {"expires": "9999-12-31T23:59:59"}, {"expires"}),
    ("POST keys", {"tenant": "acme", "labels": ["\u001b[2J"]}, {"labels[0]"}),
    ("POST keys", {"tenant": "acme", "labels": ["x"] * 17}, {"labels"}),
    ("POST keys", {"tenant": ["acme"]}, {"tenant"}),
    ("POST keys", b"[1]", {""}),
    ("POST keys", b'{"tenant": "acme", "tenant": "acme"}', {"tenant"}),
    ("PATCH keys/k1", b'{"limits": {"concurrent": 1, "concurrent": 2}}', {"limits.concurrent"}),
    (
        "PATCH keys/k1",
        b'{"model_limits": [{"model": "tiny"}, {"limits": {"concurrent": 1, "concurrent": 2}}]}',
        {"model_limits[1].limits.concurrent"},
    ),
    ("PATCH keys/k1", b'{"limits": {"a": 1, "a": 2}, "labels": [], "labels": []}', {"labels"}),
    (
        "PATCH keys/k1",
        b'{"x":' * 200 + b'{"a": 1, "a": 2}' + b"}" * 200,
        {".".join("x" * 200)[-256:] + ".a"},
    ),
    ("PUT tenants/new", b'{"models": ["tiny"], "mod\\u0065ls": ["*"]}', {"models"}),
    ("POST keys", b"{", {""}),
    ("POST keys", b'{"tenant": }', {""}),
    ("POST keys", b'{"tenant": "\xff"}', {""}),
    ("POST keys", b'{"labels":' + b"[" * 20_000, {""}),
    ("PATCH keys/k1", {"tenant": "other", "hash": "x", "modles": []}, {"tenant", "hash", "modles"}),
    (
        "POST keys",
        {"tenant": "acme", "model_limits": [{"model": "ghost", "limits": {}}]},
        {"model_limits"},
    ),
    (
        "PATCH keys/k1",
        {"model_limits": [{"model": "tiny", "limits": {"concurrent": -1}}]},
        {"model_limits[0].limits.concurrent"},
    ),
    ("PATCH keys/k1", {"limits": 7, "expires": 7}, {"limits", "expires"}),
    (
        "PUT tenants/new",
        {"limits": {"tokens_per_min": 1.5}, "service_tier": "gold"},
        {"limits.tokens_per_min", "service_tier"},
    ),
    (
        "PUT tenants/new",
        {"models": ["ghost"], "timeouts": {"total_s": 0}},
        {"models", "timeouts.total_s"},
    ),
    ("PUT tenants/new", {"id": "other"}, {"id"}),
    ("POST keys/k1/rotate", {"overlap_s": OVERLAP_S_MAX + 1, "force": True}, {"overlap_s", "force"}),
]


@pytest.mark.parametrize(("asked", "body", "fields"), BAD)
async def test_a_bad_change_is_refused_whole_with_all_that_is_wrong_named(
    world: World, asked: str, body: Any, fields: set[str]
) -> None:
    before = [(await world.ask("GET", kind)).body for kind in ("keys", "tenants")]
    file = world.path.read_bytes()
    method, path = asked.split()
    answer = await world.ask(method, path, body)
    assert (answer.status, set(answer.fields)) == (400, fields), answer
    told = [f"{problem['field']}: {problem['problem']}" for problem in answer.body["problems"]]
    assert len(set(told)) == len(told), "each is named once"
    assert answer.body["error"]["param"] == (answer.fields[0] or None)
    assert not any("tenant: is required" in problem for problem in told) or "tenant" not in body
    assert [(await world.ask("GET", kind)).body for kind in ("keys", "tenants")] == before
    assert world.path.read_bytes() == file
    assert await world.status(KEY) == 200
    assert not world.logged("admin.change")


async def test_what_is_too_large_or_comes_from_nobody_changes_nothing(world: World) -> None:
    large = await world.ask("POST", "keys", b'{"tenant": "' + b"a" * 70_000 + b'"}')
    assert (large.status, large.code) == (413, "request_too_large")
    for bearer, status in ((KEY, 403), ("x", 401)):
        headers = {"authorization": f"Bearer {bearer}"}
        assert (await world.ask("POST", "keys", {"tenant": "acme"}, headers=headers)).status == status
    assert (await world.ask("PUT", "keys/k1", {})).status == 405
    assert (await world.ask("GET", "keys/" + "x" * 65)).status == 404
    assert (await world.ask("GET", "tenants/%2e%2e")).status == 404
    assert not world.logged("admin.change")


async def test_every_change_leaves_an_audit_line_and_no_secret_is_in_any_log_or_list(world: World) -> None:
    await put_tenant(world)
    made = await world.key(tenant="made", labels=["a"])
    path = f"keys/{made['id']}"
    await world.ask("PATCH", path, {"labels": ["b"]})
    await world.ask("PATCH", path, {"labels": ["b"]})
    rotated = await world.ask(
        "POST", f"{path}/rotate", headers={"authorization": "Bearer another operator's"}
    )
    await world.ask("PATCH", path, {"disabled": True})
    shown = await world.ask("GET", path)
    await world.ask("DELETE", path)
    await world.ask("DELETE", "tenants/made")
    await until(lambda: len(world.logged("admin.change")) == 7)
    lines = world.logged("admin.change")
    assert [(line["operator"], line["action"], line["target"]) for line in lines] == [
        ("ops", "tenant.put", "made"),
        ("ops", "key.create", made["id"]),
        ("ops", "key.change", made["id"]),
        ("ops-2", "key.rotate", made["id"]),
        ("ops", "key.revoke", made["id"]),
        ("ops", "key.delete", made["id"]),
        ("ops", "tenant.delete", "made"),
    ], "one that changes nothing leaves none"
    assert lines[1]["from"] is None
    assert lines[1]["to"]["labels"] == ["a"]
    assert (lines[2]["from"], lines[2]["to"]) == ({"labels": ["a"]}, {"labels": ["b"]})
    assert set(lines[3]["to"]) == {"previous_expires"}
    assert (lines[5]["from"]["tenant"], lines[5]["to"]) == ("made", None)
    assert not HASH.search(f"{lines} {shown.body}")
    told = world.log.getvalue() + str(shown.body)
    for key in (made["key"], rotated.body["key"]):
        assert key.rpartition("_")[2] not in told


async def test_audit_lines_are_written_at_whatever_level(world: World) -> None:
    logs.configure("gateway", level="error", stream=world.log)
    await world.key()
    await world.ask("POST", "reload")
    await until(lambda: len(world.logged("admin.change")) == 2)
    assert not world.logged("config.reloaded")


async def test_two_operators_at_once_lose_no_change(world: World) -> None:
    await put_tenant(world)
    made = await world.key(tenant="made")
    path = f"keys/{made['id']}"
    patches = [{"limits": {name: 7}} for name in ("requests_per_min", "tokens_per_min", "concurrent")]
    await asyncio.gather(*(world.ask("PATCH", path, patch) for patch in patches))
    limits = (await world.ask("GET", path)).body["limits"]
    assert [limits[name] for name in ("requests_per_min", "tokens_per_min", "concurrent")] == [7, 7, 7]
    etag = {"if-match": str((await world.ask("GET", path)).etag)}
    twice = [world.ask("PATCH", path, {"labels": [label]}, headers=etag) for label in ("a", "b")]
    assert sorted(answer.status for answer in await asyncio.gather(*twice)) == [200, 412]
    etag = {"if-match": str((await world.ask("GET", path)).etag)}
    alike = [world.ask("PATCH", path, {"labels": ["c"]}, headers=etag) for _ in range(2)]
    assert sorted(answer.status for answer in await asyncio.gather(*alike)) == [200, 412], "each is another's"
    made_at_once = await asyncio.gather(*(world.key(tenant="made") for _ in range(8)))
    for one in made_at_once:
        assert await world.status(one["key"]) == 200


async def test_ten_thousand_wrong_keys_and_one_of_a_megabyte_leave_another_caller_alone(world: World) -> None:
    """The victim is served in the midst of them, and nothing is kept of any."""
    made = await world.key()
    url = f"http://127.0.0.1:{world.gateways[0].port}/v1/models"
    table = world.gateways[0].accounts.keys
    held = len(table._by_id), len(table._by_digest)
    for text in ["x" * 4096, "sk_live_" + "a" * 900]:
        async with world.client.get(url, headers={"authorization": f"Bearer {text}"}) as answer:
            assert answer.status == 401

    async def wrong(count: int) -> None:
        for number in range(count):
            text = f"sk_live_{number:012d}_{'A' * 32}"
            async with world.client.get(url, headers={"authorization": f"Bearer {text}"}) as answer:
                assert answer.status == 401

    async def victim() -> None:
        for _ in range(10):
            assert await world.status(made["key"]) == 200

    await asyncio.gather(*(wrong(25) for _ in range(8)), victim())
    for number in range(10_000):
        with pytest.raises(Unauthenticated):
            table.authenticate(f"Bearer sk_live_{number:012d}_{'A' * 32}", 0.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateways[0].port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer " + b"x" * (1 << 20))
    assert b" 400 " in await reader.readline()
    writer.close()
    assert (len(table._by_id), len(table._by_digest)) == held
    assert [await world.status(key) for key in (made["key"], OTHER_KEY)] == [200, 200]
