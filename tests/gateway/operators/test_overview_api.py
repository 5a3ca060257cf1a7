"""The last hours by the minute: what is counted, in which bounds, and how several gateways' are one;
when keys were used last."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from gateway.operators.engines import EngineView
from gateway.operators.figures import EngineFigures
from gateway.operators.key_uses import KeyUsesApi
from gateway.operators.operations import operation_of
from gateway.operators.overview import EVERY_S, LOADS_MAX, OverviewApi
from gateway.operators.together import OperatorAnswer, together
from gateway.request import minutes as module
from gateway.request.key_uses import USES_MAX, KeyUses
from gateway.request.minutes import BUCKETS, CODES_MAX, KINDS_MAX, MINUTES_MAX, OTHER, Minutes, edges_ms
from shared.wire.end_reason import EndReason
from tests.fakes import VirtualClock
from tests.gateway.conftest import Open, until
from tests.gateway.fake_engine import chunk, closing, stream, unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.operators.test_requests_api import BEGUN, line

STREAM: dict[str, Any] = {
    "model": "m",
    "replica": "r",
    "first_byte_ms": 20.0,
    "total_ms": 120.0,
    "completion_tokens": 11,
    "prompt_tokens": 8,
    "cached_tokens": 6,
}


def noted(*changes: dict[str, Any]) -> Minutes:
    minutes = Minutes()
    for one in changes:
        minutes.note(line(**{**STREAM, **one}))
    return minutes


def within(bucket: int, ms: float) -> bool:
    edges = [0.0, *edges_ms()]
    return edges[bucket] <= ms <= edges[bucket + 1]


def test_a_stream_is_counted_with_its_times_and_tokens_and_a_failure_with_its_code() -> None:
    minutes = noted(
        {},
        {"stream": False},
        {"end_reason": EndReason.REFUSED, "error_code": "rate_limit_exceeded", "replica": None},
        {"end_reason": EndReason.CLIENT_CANCEL},
    )
    [minute] = minutes.since(None)
    ended, refused = minute.cells["m", "r"], minute.cells["m", None]
    assert (ended.requests, ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens) == (
        3,
        24,
        18,
        22,
    )
    assert (ended.errors, refused.errors) == ({"client_cancel": 1}, {"rate_limit_exceeded": 1})
    [first], [gap] = ([at for at, count in enumerate(part) if count] for part in (ended.first, ended.gaps))
    assert within(first, 20.0)
    assert within(gap, 10.0)


def test_every_time_has_its_bucket() -> None:
    for first_ms in (0.0, 0.01, 1e3, 1e9):
        [minute] = noted({"first_byte_ms": first_ms, "total_ms": first_ms}).since(None)
        [at] = [at for at, count in enumerate(minute.cells["m", "r"].first) if count]
        assert within(at, first_ms) or at == BUCKETS - 1


def test_minutes_follow_each_other_and_a_clock_that_is_set_back_begins_none() -> None:
    at = (BEGUN, BEGUN + timedelta(seconds=59.9), BEGUN + timedelta(minutes=3), BEGUN)
    minutes = noted(*({"ts": one} for one in at))
    told = [(one.at, one.cells["m", "r"].requests) for one in minutes.since(None)]
    assert told == [(BEGUN, 2), (BEGUN + timedelta(minutes=3), 2)]
    assert [one.at for one in minutes.since(BEGUN + timedelta(minutes=1))] == [BEGUN + timedelta(minutes=3)]
    version = minutes.version
    minutes.note(line(ts=BEGUN))
    assert minutes.version != version


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = noted(*({"ts": BEGUN + timedelta(minutes=at)} for at in range(MINUTES_MAX + 9)))
    assert len(list(hours.since(None))) == MINUTES_MAX
    [minute] = noted(*({"replica": f"r{at}"} for at in range(KINDS_MAX + 9))).since(None)
    assert len(minute.cells) == KINDS_MAX + 1
    assert minute.cells[OTHER, OTHER].requests == 9
    failed = {"end_reason": EndReason.UPSTREAM_FAILED}
    [minute] = noted(*({**failed, "error_code": f"e{at}"} for at in range(CODES_MAX + 9))).since(None)
    assert (len(minute.cells["m", "r"].errors), minute.cells["m", "r"].errors[OTHER]) == (CODES_MAX + 1, 9)
    monkeypatch.setattr(module, "CELLS_MAX", 3)
    few = noted(*({"ts": BEGUN + timedelta(minutes=at // 2), "replica": f"r{at}"} for at in range(8)))
    assert [len(one.cells) for one in few.since(None)] == [2]


async def nobody() -> list[EngineView]:
    return []


def test_the_rows_of_several_are_added_up_and_loads_say_whose_they_are() -> None:
    clock = VirtualClock()
    ts = datetime.fromtimestamp(clock.wall(), UTC)
    apis = [
        OverviewApi(noted({"ts": ts}, {"ts": ts, **more}), nobody, clock) for more in ({}, {"replica": "s"})
    ]
    answers = [OperatorAnswer(200, {}, json.dumps(_told(api)).encode()) for api in apis]
    merges = operation_of(apis[0]._answer).merges
    whole = json.loads(together({None: answers[0], "b": answers[1]}, (), merges).body)
    assert [(row["replica"], row["requests"]) for row in whole["rows"]] == [("r", 3), ("s", 1)]
    assert [sum(row["first_token"].values()) for row in whole["rows"]] == [3, 1]
    assert whole["edges_ms"] == edges_ms()


def _told(api: OverviewApi) -> Any:
    return msgspec.to_builtins(api.overview())


async def test_engines_are_read_by_the_minute_within_bounds() -> None:
    clock = VirtualClock()
    figures = EngineFigures(running=3, waiting={"default": 2}, pages={"owned": 1, "cached": 1, "free": 2})
    view: dict[str, Any] = {"models": ["m"], "phase": "active", "health": "healthy", "requests": 0}
    views = [EngineView(id=f"r{at}", figures=figures, **view) for at in range(LOADS_MAX + 9)]
    views[1] = EngineView(id="r1", problem="It did not answer.", **view)

    async def engines() -> list[EngineView]:
        return views

    api = OverviewApi(Minutes(), engines, clock)
    task = asyncio.create_task(api.watch())
    await until(lambda: clock.sleeping == 1)
    clock.advance(EVERY_S)
    await until(lambda: api._read == 1)
    loads = api.overview().loads
    assert len(loads) == LOADS_MAX - 1
    assert (loads[0].waiting, loads[0].running, loads[0].pages_used_percent) == (2, 3, 25.0)
    task.cancel()


async def test_a_running_gateway_tells_of_its_requests(open_house: Open) -> None:
    house = await open_house(admin=operator_keys())
    house.engine.script = stream(chunk("a"), chunk("b"), end=closing())
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/overview"
    async with house.chat(stream=True) as answer:
        await answer.read()
    await until(lambda: len(house.gateway._recorder) == 1)
    async with house.client.get(url, headers=OPERATOR) as answer:
        told, etag = await answer.json(), answer.headers["etag"]
    [row] = told["rows"]
    assert (row["requests"], row["completion_tokens"], sum(row["first_token"].values())) == (1, 3, 1)
    async with house.client.get(url, headers={**OPERATOR, "if-none-match": etag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")
    for query, param in (("since=noon", "since"), ("until=noon", "until")):
        async with house.client.get(f"{url}?{query}", headers=OPERATOR) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
    async with house.client.get(f"{url}?since=9999-01-01T00:00:00Z", headers=OPERATOR) as answer:
        assert (await answer.json())["rows"] == []


def test_the_keys_that_were_used_last_are_known() -> None:
    uses = KeyUses()
    for at in range(USES_MAX):
        uses.note(f"k{at}", "acme", BEGUN)
    uses.note("k0", "acme", BEGUN + timedelta(seconds=1))
    uses.note("new", "other", BEGUN)
    known = dict(uses.of(None))
    assert (len(known), known["k0"]) == (USES_MAX, BEGUN + timedelta(seconds=1))
    assert "k1" not in known
    assert list(uses.of("other")) == [("new", BEGUN)]


def test_of_several_the_latest_counts() -> None:
    first, later = "2026-11-02T00:00:00Z", "2026-11-03T00:00:00Z"
    answers = {
        None: {"since": "2026-11-01T00:00:00Z", "data": {"a": first, "b": later}},
        "x": {"since": "2026-11-01T00:00:05Z", "data": {"a": later, "b": first}},
    }
    told = {name: OperatorAnswer(200, {}, json.dumps(one).encode()) for name, one in answers.items()}
    merges = operation_of(KeyUsesApi(KeyUses())._answer).merges
    assert json.loads(together(told, (), merges).body) == {
        "since": "2026-11-01T00:00:05Z",
        "data": {"a": later, "b": later},
    }


async def test_a_running_gateway_tells_of_its_keys(open_house: Open) -> None:
    house = await open_house(admin=operator_keys())
    house.engine.script = unary()
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/key_uses"
    async with house.chat() as answer:
        assert answer.status == 200
    await until(lambda: len(house.gateway._recorder) == 1)
    for query, count in (("", 1), ("?tenant=acme", 1), ("?tenant=other", 0)):
        async with house.client.get(url + query, headers=OPERATOR) as answer:
            told = await answer.json()
        assert len(told["data"]) == count
    async with house.client.get(url, headers=OPERATOR) as answer:
        told = await answer.json()
    [at] = told["data"].values()
    assert datetime.fromisoformat(told["since"]) <= datetime.fromisoformat(at)
    async with house.client.get(f"{url}?key=k", headers=OPERATOR) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "key")
