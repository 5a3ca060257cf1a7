"""Keys as their callers meet them: what they open, how their secrets are replaced, and what becomes of
streams when they are revoked."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.whole import KeyConfig, load
from gateway.endpoints.table import ENDPOINTS
from gateway.identity.keys import (
    ENV_LEN_MAX,
    KEY_LEN_MAX,
    KeyTable,
    digest_of,
    hash_key,
    key_problem,
    mint_key,
)
from shared.process.setting_values import to_toml
from shared.wire.errors import IdentityUnavailable, Unauthenticated
from shared.wire.ids import KeyId
from tests.gateway.conftest import KEY, House, Open, error_of, settings, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream, unary

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOW_S = NOW.timestamp()
VICTIM = "the victim's"
pytestmark = pytest.mark.hop("http2")


def key(text: str, id_: str = "k", **more: Any) -> KeyConfig:
    return KeyConfig(id_, hash_key(text), "acme", **more)


# -- the table ------------------------------------------------------------------------------------


def opens(table: KeyTable, text: str, now_s: float = NOW_S) -> bool:
    try:
        return table.authenticate(f"Bearer {text}", now_s).key == "k"
    except Unauthenticated:
        return False


def test_the_secret_before_works_until_its_overlap_is_over_and_no_longer() -> None:
    until_ = NOW + timedelta(seconds=60)
    table = KeyTable([key("new", previous_hash=hash_key("old"), previous_expires=until_)])
    assert opens(table, "old", NOW_S + 59.9)
    assert opens(table, "new", NOW_S + 59.9)
    assert opens(table, "new", NOW_S + 60)
    with pytest.raises(Unauthenticated, match="replaced by a newer one"):
        table.authenticate("Bearer old", NOW_S + 60)
    assert not opens(table, "ancient")
    table.of_digest(digest_of(hash_key("old")), NOW_S + 59.9)
    with pytest.raises(Unauthenticated, match="replaced by a newer one"):
        table.of_digest(digest_of(hash_key("old")), NOW_S + 60)


def test_a_key_that_is_replaced_or_removed_leaves_nothing_that_opens() -> None:
    old = key("new", previous_hash=hash_key("old"), previous_expires=NOW + timedelta(seconds=60))
    table = KeyTable([old])
    assert not table.put(key("other")), "that is no revocation"
    assert [opens(table, text) for text in ("new", "old", "other")] == [False, False, True]
    assert table.put(key("other", disabled=True)), "and that is one"
    assert not table.put(key("other", disabled=True)), "it did not work before"
    assert not table.remove(KeyId("k"))
    table.put(key("other"))
    assert table.remove(KeyId("k"))
    assert len(table._by_digest) == len(table) == 0


def test_a_key_that_takes_over_anothers_hash_keeps_it_when_that_one_goes() -> None:
    table = KeyTable([key("same", "a")])
    table.put(key("same", "k"))
    table.remove(KeyId("a"))
    assert opens(table, "same")


def test_of_two_entries_with_one_hash_the_declared_one_is_meant_and_else_none() -> None:
    table = KeyTable([key("same", "k")])
    table.declared = {"k"}
    stranger = replace(key("same", "a"), previous_hash=hash_key("same"), previous_expires=NOW)
    for _ in range(2):
        table.put(stranger)
        table.put(key("same", "b"))
        assert opens(table, "same")
        assert [table.is_contested(KeyId(id_)) for id_ in "kab"] == [False, True, True]
        table.remove(KeyId("a"))
        assert opens(table, "same"), "it goes on"
        table.put(replace(stranger, hash=hash_key("other"), previous_hash=None, previous_expires=None))
        assert opens(table, "same")
    table.declared = set()
    assert not opens(table, "same"), "nobody knows whose it is"
    table.remove(KeyId("b"))
    assert opens(table, "same")
    for id_ in "ka":
        table.remove(KeyId(id_))
    assert len(table._by_digest) == len(table._claims) == len(table) == 0


def test_a_declared_key_is_not_taken_over_by_an_entry_that_has_the_id_in_it() -> None:
    minted = mint_key("live")
    for hash_ in (minted.hash, hash_key("x")):
        table = KeyTable([KeyConfig("k", minted.hash, "acme")])
        table.declared = {"k"}
        table.put(KeyConfig(minted.id, hash_, "other"))
        assert opens(table, minted.text)


def test_a_minted_key_is_that_of_its_own_id() -> None:
    minted = mint_key("live")
    table = KeyTable([KeyConfig("twin", minted.hash, "other"), KeyConfig(minted.id, minted.hash, "acme")])
    assert table.authenticate(f"Bearer {minted.text}", NOW_S).key == minted.id
    with pytest.raises(Unauthenticated, match="Incorrect API key"):
        table.authenticate(f"Bearer {mint_key('live', minted.id).text}", NOW_S)


def test_a_key_is_bounded_and_so_is_the_name_of_what_it_was_minted_for() -> None:
    assert key_problem("x" * KEY_LEN_MAX) is None
    assert key_problem("x" * (KEY_LEN_MAX + 1)) is not None
    mint_key("e" * ENV_LEN_MAX)
    with pytest.raises(AssertionError):
        mint_key("e" * (ENV_LEN_MAX + 1))


def test_an_unknown_key_is_no_mistake_of_its_caller_while_the_keys_are_not_known() -> None:
    table = KeyTable([key("here")])
    table.is_complete = False
    with pytest.raises(IdentityUnavailable):
        table.authenticate("Bearer here", NOW_S)
    table.declared = {"k"}
    assert opens(table, "here")
    with pytest.raises(IdentityUnavailable):
        table.authenticate("Bearer elsewhere", NOW_S)


# -- what a key may use ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "allowed", "refused"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions", "/v1/completions"),
        ("POST", "/v1/completions", "/v1/completions", "/v1/chat/completions"),
        ("POST", "/tokenize", "/tokenize", "/detokenize"),
        ("GET", "/v1/models", "/v1/models", "/tokenize"),
        ("GET", "/v1/models/tiny", "/v1/models", "/tokenize"),
        ("DELETE", "/v1/requests/r1", "/v1/requests", "/v1/models"),
    ],
)
async def test_a_key_opens_the_endpoints_that_it_is_restricted_to_and_no_other(
    open_house: Open, method: str, path: str, allowed: str, refused: str
) -> None:
    keys = [
        {"id": name, "hash": hash_key(name), "tenant": "acme", "endpoints": [scope]}
        for name, scope in (("allowed", allowed), ("refused", refused))
    ]
    house: House = await open_house(keys=keys)
    house.engine.script = unary()
    for name in ("allowed", "refused"):
        headers = {"authorization": f"Bearer {name}"}
        async with house.client.request(method, f"{house.url}{path}", headers=headers, data=b"{") as answer:
            assert (answer.status == 403) == (name == "refused")
            if name == "refused":
                error = await error_of(answer)
                assert error["code"] == "permission_denied"
                assert f"may not use {allowed}" in error["message"]
                assert refused in error["message"]
    assert not house.engine.seen, "nothing was dispatched"


async def test_a_restricted_key_is_told_what_does_not_exist(open_house: Open) -> None:
    only = {"id": "k", "hash": hash_key(KEY), "tenant": "acme", "endpoints": ["/v1/models"]}
    house: House = await open_house(keys=[only])
    async with house.get("/v2/none") as answer:
        assert answer.status == 404
    async with house.get("/v1/modelsx") as answer:
        assert answer.status == 404


def test_every_endpoint_can_be_a_scope_and_nothing_else_can() -> None:
    told = load(settings("http://a", keys=[as_table("k", endpoints=[*ENDPOINTS, "*"])]), {})
    assert told.keys[0].endpoints == (*ENDPOINTS, "*")
    with pytest.raises(Exception, match="must be \\* or one of /v1/chat/completions"):
        load(settings("http://a", keys=[as_table("k", endpoints=["/v1/chat"])]), {})


def as_table(id_: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "hash": hash_key(id_), "tenant": "acme", **more}


# -- revocation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["disabled", "removed"])
@pytest.mark.parametrize("on_revoke", ["end", "finish"])
async def test_a_revoked_keys_streams_end_where_the_tenant_asks_for_it_and_no_others_do(
    tmp_path: Path, log: io.StringIO, way: str, on_revoke: str
) -> None:
    """The victim is another key of the same tenant: its stream gets its whole answer."""
    go_on = asyncio.Event()
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = stream(chunk("a"), go_on, chunk("b"))
        keys = [as_table("revoked"), as_table(VICTIM.replace(" ", "-").replace("'", ""))]
        keys[1]["hash"] = hash_key(VICTIM)
        told = settings(engine.url, keys=keys, tenant={"on_revoke": on_revoke})
        config, path = load(told, {}), tmp_path / "gateway.toml"
        path.write_text(to_toml(config))
        async with Gateway(config, path=path) as gateway, aiohttp.ClientSession() as client:
            house = House(gateway, engine, client, log)
            await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
            bearer = [{"authorization": f"Bearer {text}"} for text in ("revoked", VICTIM)]
            async with (
                house.chat(stream=True, headers=bearer[0]) as one,
                house.chat(stream=True, headers=bearer[1]) as other,
            ):
                for answer in (one, other):
                    await answer.content.readuntil(b"\n\n")
                kept = [config.keys[1]]
                if way == "disabled":
                    kept.insert(0, replace(config.keys[0], disabled=True))
                path.write_text(to_toml(replace(config, keys=tuple(kept))))
                assert await gateway.reload() == []
                if on_revoke == "end":
                    rest = await one.read()
                    assert b'"code":"key_revoked"' in rest
                    assert b"[DONE]" not in rest
                go_on.set()
                assert (await other.read()).endswith(b"data: [DONE]\n\n")
                if on_revoke == "finish":
                    assert (await one.read()).endswith(b"data: [DONE]\n\n")
            async with house.chat(headers=bearer[0]) as answer:
                assert answer.status == 401
            lines = await house.lines(3)
            ended = next(line for line in lines if line["key_id"] == "revoked")
            assert ended["end_reason"] == ("key_revoked" if on_revoke == "end" else "ok")
            await house.at_rest()


async def test_a_revoked_keys_request_that_has_no_answer_yet_gets_401(
    tmp_path: Path, log: io.StringIO
) -> None:
    go_on = asyncio.Event()
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = stream(go_on, chunk("b"))
        config = load(settings(engine.url, tenant={"on_revoke": "end"}), {})
        path = tmp_path / "gateway.toml"
        path.write_text(to_toml(config))
        async with Gateway(config, path=path) as gateway, aiohttp.ClientSession() as client:
            house = House(gateway, engine, client, log)
            asking = asyncio.create_task(house.chat(stream=True).__aenter__())
            await until(lambda: bool(engine.active))
            path.write_text(to_toml(replace(config, keys=config.keys[1:])))
            await gateway.reload()
            answer = await asking
            assert (answer.status, (await error_of(answer))["code"]) == (401, "key_revoked")
            await house.at_rest()
