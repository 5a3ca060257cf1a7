"""The console's chats: requests with a caller's key, through the whole pipeline."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from gateway.identity.keys import KEY_LEN_MAX, hash_key
from gateway.operators import chats
from gateway.operators.chat_reading import TEXT_LEN_MAX
from gateway.operators.chats import CHATS, MESSAGES_MAX
from tests.gateway.conftest import KEY, PATIENCE_S, House, Open, until
from tests.gateway.console.test_gate import KEY as OPERATORS_KEY
from tests.gateway.console.test_gate import Page, page_of
from tests.gateway.fake_engine import CUT, HEADERS, Script, chunk, refusal, stream
from tests.gateway.operators.test_admin import operator_keys
from tests.gateway.workers.test_worker_front import opened

pytestmark = pytest.mark.parametrize("protocol", ["http2"], indirect=True)
BODY = {"key": KEY, "model": "tiny", "messages": [{"role": "user", "content": "a canary"}]}


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house(admin=operator_keys())
    assert isinstance(house, House)
    return house


@pytest.fixture
async def page(house: House) -> Page:
    page = page_of(house)
    await page.log_in()
    return page


async def begin(page: Page, **fields: Any) -> str:
    told, _ = await page.ask("POST", CHATS, json=BODY | fields)
    id_: str = told["id"]
    return id_


async def over(page: Page, id_: str) -> dict[str, Any]:
    """The chat, once it is over."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told, _ = await page.ask("GET", f"{CHATS}/{id_}")
            if told["is_over"]:
                found: dict[str, Any] = told
                return found
            await asyncio.sleep(0.01)


async def test_a_chat_is_a_request_like_any_other(house: House, page: Page) -> None:
    told = await over(page, id_ := await begin(page, max_tokens=7, temperature=0.5))
    assert (told["status"], told["text"], told["problem"]) == (200, "abc", None)
    assert len(told["ticks_ms"]) == told["text_len"] == 3
    line = await house.line()
    assert (line["request_id"], line["tenant"], line["key_id"]) == (id_, "acme", "k1")
    assert (line["status"], line["end_reason"], line["settled_tokens"]) == (200, "ok", 13)
    [seen] = [one for one in house.engine.seen if one.path == "/v1/chat/completions"]
    assert seen.body["max_tokens"] == 7
    [record] = (await page.ask("GET", f"/admin/v1/requests/{id_}"))[0]["data"]
    assert record["line"]["total_ms"] == line["total_ms"]
    later, _ = await page.ask("GET", f"{CHATS}/{id_}?text=2&ticks=2")
    assert (later["text"], later["text_len"], len(later["ticks_ms"])) == ("c", 3, 1)
    assert "canary" not in house.log.getvalue()
    assert KEY not in house.log.getvalue()
    await page.ask("DELETE", f"{CHATS}/{id_}")
    await page.ask("GET", f"{CHATS}/{id_}", status=404)
    await house.at_rest()


async def test_the_quotas_of_the_key_hold(open_house: Open) -> None:
    keys = [{"id": "k1", "hash": hash_key(KEY), "tenant": "acme", "limits": {"requests_per_min": 1}}]
    house = await open_house(admin=operator_keys(), keys=keys)
    page = page_of(house)
    await page.log_in()
    assert (await over(page, await begin(page)))["status"] == 200
    told = await over(page, await begin(page))
    assert told["status"] == 429
    assert "This key's limit" in told["problem"]
    [first, second] = await house.lines(2)
    assert (first["status"], second["status"], second["quota_scope"]) == (200, 429, "key")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"key": "a\nb"}, "key"),
        ({"key": "k" * (KEY_LEN_MAX + 1)}, "key"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * (MESSAGES_MAX + 1)}, "messages"),
        ({"max_tokens": 10**10}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"stream": False}, "no such field"),
        ({"model": 5}, "model"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_wrong_chat_is_refused(open_house: Open, fields: dict[str, Any], says: str) -> None:
    house = await open_house(admin=operator_keys())
    page = page_of(house)
    await page.log_in()
    told, _ = await page.ask("POST", CHATS, json=BODY | fields, status=400)
    assert says in told["error"]["message"]
    for query in ("text=-1", "ticks=x", f"text={'9' * 9}"):
        await page.ask("GET", f"{CHATS}/{await begin(page)}?{query}", status=400)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (refusal(400, "invalid_value", "Not like that."), "Not like that."),
        (Script([HEADERS, chunk("a"), CUT]), "broke off"),
        (stream(chunk("x" * (TEXT_LEN_MAX // 4)), *[chunk("y" * (TEXT_LEN_MAX // 4))] * 4), "was cut after"),
    ],
)
async def test_an_answer_that_is_not_whole_says_why(
    house: House, page: Page, script: Script, problem: str
) -> None:
    house.engine.script = script
    told = await over(page, await begin(page))
    assert told["problem"] is not None
    assert problem in told["problem"] or told["status"] == 200
    await house.at_rest()


async def test_a_line_that_is_too_long_ends_a_chat(
    house: House, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "LINE_LEN_MAX", 1000)
    house.engine.script = stream(chunk("a canary " * 2_000))
    assert "broke off" in (await over(page, await begin(page)))["problem"]
    assert "canary" not in house.log.getvalue()
    await house.at_rest()


async def test_a_chat_that_is_ended_stops_at_the_engine(house: House, page: Page) -> None:
    house.engine.script = stream(chunk("a"), asyncio.Event())
    id_ = await begin(page)
    await until(lambda: bool(house.engine.active))
    told, _ = await page.ask("DELETE", f"{CHATS}/{id_}")
    assert (told["is_over"], told["problem"]) == (True, "It was ended.")
    await house.at_rest()


async def test_a_chat_that_nobody_asks_for_is_ended(
    house: House, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "UNSEEN_S", -1.0)
    monkeypatch.setattr(chats, "WATCH_S", 0.01)
    house.engine.script = stream(chunk("a"), asyncio.Event())
    told = await over(page, await begin(page))
    assert told["problem"] == "Nobody asked for its answer any more."
    await house.at_rest()


async def test_chats_are_bounded_and_those_that_are_over_make_room(
    house: House, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "CHATS_MAX", 2)
    done = await begin(page)
    await over(page, done)
    house.engine.script = stream(chunk("a"), asyncio.Event())
    running = [await begin(page), await begin(page)]
    await page.ask("GET", f"{CHATS}/{done}", status=404)
    told, _ = await page.ask("POST", CHATS, json=BODY, status=503)
    assert "chats run already" in told["error"]["message"]
    await page.ask("DELETE", f"{CHATS}/{running[0]}")
    await begin(page)
    await house.gateway._chats.aclose()
    await house.at_rest()


async def test_a_chat_is_its_operators_alone(open_house: Open) -> None:
    admin = operator_keys()
    admin["keys"].append({"id": "other", "hash": hash_key("another operator's")})
    house = await open_house(admin=admin)
    mine, others = page_of(house), page_of(house)
    await mine.log_in()
    await others.log_in("another operator's")
    id_ = await begin(mine)
    await over(mine, id_)
    await others.ask("GET", f"{CHATS}/{id_}", status=404)
    await others.ask("DELETE", f"{CHATS}/{id_}", status=404)


@pytest.mark.parametrize(("key", "says"), [("nobody's", "Incorrect API key"), ("gone", "has been revoked")])
async def test_a_key_that_does_not_work_is_refused_as_ever(open_house: Open, key: str, says: str) -> None:
    """An operator's own opens no model either."""
    keys = [{"id": "revoked", "hash": hash_key("gone"), "tenant": "acme", "disabled": True}]
    house = await open_house(admin=operator_keys(), keys=keys)
    page = page_of(house)
    await page.log_in()
    told = await over(page, await begin(page, key=key))
    assert told["status"] == 401
    assert says in told["problem"]
    told = await over(page, await begin(page, key=OPERATORS_KEY))
    assert (told["status"], told["text"]) == (403, "")


async def test_the_console_works_through_several_workers(
    short_tmp: Path, log: io.StringIO, protocol: str
) -> None:
    async with asyncio.timeout(6 * PATIENCE_S), opened(short_tmp, log) as house:
        page = Page(house.admin_port, house.client)
        await page.ask("GET", "/console")
        await page.log_in("wrong", 401)
        await page.log_in()
        told, answer = await page.ask("GET", "/admin/v1/console/operator")
        assert told["operator"] == "ops"
        assert answer.headers["x-frame-options"] == "DENY"
        told = await over(page, await begin(page))
        assert (told["text"], told["problem"]) == ("abc", None)
        limits, _ = await page.ask("GET", "/admin/v1/limits")
        assert {row["worker"] for row in limits["data"]} == {0, 1}
        await page.ask("POST", "/admin/v1/reload", status=403, origin="http://evil.example")
        for worker in house.workers:
            accounts = worker.gateway.accounts
            accounts.now.operators.remove(accounts.config.admin.keys[0].id)  # type: ignore[arg-type]
        await page.ask("GET", "/admin/v1/requests", status=401)
