"""Live and recent requests, as operators see them: the ring, the admin API, and `penstock trace`."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.operators.operations import Merge, query_of
from gateway.operators.requests import (
    AT_ONCE,
    LIMIT_MAX,
    SAME_ID_MAX,
    RequestsApi,
    RequestsQuery,
)
from gateway.operators.together import OperatorAnswer, together
from gateway.relay.stream import TICK_LEN, Ticks
from gateway.request.recorder import BYTES_MAX, SUMMARY_LEN, TICKS_LEN, Recorder, summary_of
from gateway.routing.sessions import session_id
from shared import cli
from shared.telemetry.stages import Stamps
from shared.trace.request_records import RequestSummary, Tick
from shared.wire.causes import Cause
from shared.wire.completed_line import EVENT, GatewayLine
from shared.wire.end_reason import EndReason
from shared.wire.errors import InvalidRequest
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import Script, chunk, closing, refusal, stream
from tests.gateway.operators.test_admin import OPERATOR, operator_keys

BEGUN = datetime(2026, 11, 23, 12, 0, 0, tzinfo=UTC)


def line(request_id: str = "r", /, **changes: Any) -> GatewayLine:
    fields: dict[str, Any] = {
        "ts": BEGUN,
        "level": "info",
        "event": EVENT,
        "logger": "gateway.request.record",
        "service": "gateway",
        "request_id": request_id,
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "method": "POST",
        "endpoint": "/v1/chat/completions",
        "status": 200,
        "end_reason": EndReason.OK,
        "stage": "relay",
        "stream": True,
        "total_ms": 12.0,
        "attempts": 1,
        "prompt_exact": True,
        "reserved_tokens": 5,
        "settled_tokens": 3,
        "events": 2,
        "body_len": 100,
    }
    return GatewayLine(**{**fields, **changes})


def recorder_of(*lines: GatewayLine, records_max: int = 100, bytes_max: int = 1 << 20) -> Recorder:
    recorder = Recorder(records_max, bytes_max)
    for one in lines:
        recorder.add(one, Stamps(("edge", "wait"), (7.0, 7.002, 7.012)))
    return recorder


# -- the ring -------------------------------------------------------------------------------------


def test_records_are_bounded_however_many_there_may_be() -> None:
    recorder = Recorder(1_000_000)
    for number in range(2 * BYTES_MAX // 2**18):
        tenant = None if number % 3 == 0 else "acme"
        refused = {"end_reason": EndReason.REFUSED, "status": 400} if number % 2 else {}
        one = line(f"r{number}", tenant=tenant, total_ms=float(number % 7), **refused)
        recorder.add(one, Stamps(("edge",), (7.0, 7.1)), b"x" * 2**18)
    assert 0 < recorder.bytes_len <= BYTES_MAX


def test_the_oldest_records_go_first_by_number_and_by_bytes() -> None:
    few = recorder_of(*(line(f"r{i}") for i in range(9)), records_max=4)
    assert [one.request_id for one in few.newest_first()] == ["r8", "r7", "r6", "r5"]
    newest = next(few.newest_first()).number
    assert [one.request_id for one in few.newest_first(before=newest - 1)] == ["r6", "r5"]
    small = recorder_of(
        *(line(f"r{i}", error_detail="x" * 3000) for i in range(9)), bytes_max=16 * 4 * (SUMMARY_LEN + 3900)
    )
    assert len(small) == 4
    assert small.bytes_len <= 4 * (SUMMARY_LEN + 3900)
    one_too_large = recorder_of(line(error_detail="x" * 3000), bytes_max=1000)
    assert (len(one_too_large), one_too_large.bytes_len) == (0, 0)


def test_nothing_is_kept_where_nothing_is_asked_for() -> None:
    assert not Recorder(0).is_on


def test_a_record_has_its_visits_its_axis_and_its_causes_in_words() -> None:
    causes = (Cause(code="stalled", ms=12_000.0),)
    recorder = recorder_of(line("a"), line("b", causes=causes, first_byte_ms=9.0), line("a"))
    began = int(BEGUN.timestamp() * 1e6)
    assert [record.summary.number for record in recorder.find("a", 9)] == [began + 2, began]
    assert [record.summary.number for record in recorder.find("a", 1)] == [began + 2]
    assert recorder.find("c", 9) == []
    [record] = recorder.find("b", 9)
    assert record.causes == ("stalled 12 s: this client did not read",)
    assert [tuple(bar.stage for bar in record.axis.bars)] == [("edge", "wait")]
    assert record.line is not None
    assert record.line.first_byte_ms == 9.0


def test_a_record_has_its_ticks_from_its_headers_on_and_their_bytes_count() -> None:
    ticks = Ticks()
    ticks.note(2, 7.0025)
    ticks.note(3, 7.0115)
    stamps = Stamps(("edge", "relay"), (7.0, 7.002, 7.012))
    recorder = Recorder(9)
    recorder.add(line("a"), stamps)
    without_len = recorder.bytes_len
    recorder.add(line("b"), stamps, None, ticks)
    assert recorder.bytes_len == 2 * without_len + TICKS_LEN + 2 * TICK_LEN
    assert [record.ticks for record in recorder.find("a", 9)] == [()]
    assert [record.ticks for record in recorder.find("b", 9)] == [((Tick(2.5, 2), Tick(11.5, 3)))]


# -- the question ---------------------------------------------------------------------------------


def parsed(parameters: dict[str, str]) -> RequestsQuery:
    query: RequestsQuery = query_of(RequestsQuery, parameters)
    return query


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"state": "dead"}, "state must be one of live, done"),
        ({"status": "429x"}, "status must be"),
        ({"status": "6xx"}, "status must be"),
        ({"end_reason": "exploded"}, "end_reason must be one of ok,"),
        ({"limit": "0"}, f"limit must be a whole number from 1 to {LIMIT_MAX}"),
        ({"limit": str(LIMIT_MAX + 1)}, "limit must be"),
        ({"limit": "many"}, "limit must be"),
        ({"before": "-1"}, "before must be"),
        ({"min_ms": "1.5"}, "min_ms must be"),
        ({"tenant": ""}, "tenant must be"),
        ({"model": "m" * 513}, "model must be"),
        ({"session": "m" * 513}, "session must be"),
        ({"since": "2026-11-23T12:00:00"}, "since must be a moment with its zone, like"),
        ({"until": "noon"}, "until must be a moment"),
        ({"color": "red"}, "There are the parameters state, id,"),
    ],
)
def test_a_wrong_question_names_its_parameter(parameters: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        parsed(parameters)
    assert refused.value.param == next(iter(parameters))


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({}, "abc"),
        ({"tenant": "acme"}, "ac"),
        ({"model": "large"}, "b"),
        ({"status": "503"}, "b"),
        ({"status": "2xx"}, "ac"),
        ({"end_reason": "refused"}, "b"),
        ({"min_ms": "100"}, "c"),
        ({"endpoint": "/v1/completions"}, "a"),
        ({"tenant": "acme", "min_ms": "100"}, "c"),
        ({"session": session_id("acme", "mine")}, "c"),
        ({"session": "mine"}, "bc"),
        ({"session": "mine", "tenant": "other"}, "b"),
        ({"session": "no such session"}, ""),
        ({"id": "b"}, "b"),
        ({"id": "d"}, ""),
        ({"trace_id": "c" * 32}, "c"),
        ({"since": "2026-11-23T12:00:00Z"}, "abc"),
        ({"since": "2026-11-23T13:00:00.001+01:00"}, ""),
        ({"until": "2026-11-23T11:59:59.9Z"}, "c"),
        ({"since": "2026-11-23T11:59:59.95Z", "until": "2026-11-23T11:59:59.98Z"}, "c"),
        ({"since": "0001-01-01T00:00:00+14:00", "until": "9999-12-31T23:59:59-14:00"}, "abc"),
    ],
)
def test_a_question_covers_what_it_asks_for(parameters: dict[str, str], found: str) -> None:
    own, theirs = session_id("acme", "mine"), session_id("other", "mine")
    recorder = recorder_of(
        line("a", tenant="acme", model="tiny", endpoint="/v1/completions"),
        line("b", tenant="other", model="large", status=503, end_reason=EndReason.REFUSED, session=theirs),
        line("c", tenant="acme", model="tiny", total_ms=100.0, session=own, trace_id="c" * 32),
    )
    query = parsed(parameters)
    assert "".join(sorted(o.request_id for o in recorder.newest_first() if query.covers(o))) == found


def test_live_and_done_are_both_asked_for_unless_one_is_named() -> None:
    assert parsed({}) == RequestsQuery()
    assert parsed({"state": "live"}) == RequestsQuery(state="live")
    assert parsed({"state": "done", "limit": "7", "before": "9"}) == RequestsQuery(
        state="done", limit=7, before=9
    )


# -- a running gateway ----------------------------------------------------------------------------


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house(admin=operator_keys())
    assert isinstance(house, House)
    return house


async def ask(house: House, path: str, status: int = 200) -> Any:
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/requests{path}"
    async with house.client.get(url, headers=OPERATOR) as answer:
        assert answer.status == status
        return await answer.json()


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_a_request_is_seen_while_it_lives_and_when_it_is_done(house: House) -> None:
    gate = asyncio.Event()
    end = closing()
    house.engine.script = stream(chunk("a"), gate, chunk("b"), end=end)
    async with house.chat(stream=True, headers={"x-request-id": "mine"}) as answer:
        await answer.content.readline()
        page = await ask(house, "?state=live")
        [one] = page["data"]
        assert (one["request_id"], one["is_live"], one["stage"], one["tenant"]) == (
            "mine",
            True,
            "relay",
            "acme",
        )
        [live] = (await ask(house, "/mine"))["data"]
        assert live["summary"]["events"] >= 1
        assert live["text"].startswith("request mine, in progress")
        assert "meaning" not in live
        assert live["axis"]["bars"][-1]["stage"] == "relay"
        assert [tick[1] for tick in live["ticks"]] == [live["summary"]["events"]]
        assert (await ask(house, "?state=done"))["data"] == []
        gate.set()
        await answer.read()
    await until(lambda: len(house.gateway._recorder) == 1)
    assert (await ask(house, "?state=live"))["data"] == []
    [done] = (await ask(house, ""))["data"]
    assert (done["status"], done["end_reason"], done["completion_tokens"]) == (200, "ok", 3)
    [record] = (await ask(house, "/mine"))["data"]
    assert record["line"] == {**(await house.line()), "ts": record["line"]["ts"]}
    assert "ticks" not in record["line"]
    times, events = zip(*record["ticks"], strict=True)
    assert sorted(set(events)) == list(events)
    assert (events[0], events[-1]) == (live["ticks"][0][1], record["line"]["events"])
    relay = next(visit for visit in record["visits"] if visit[0] == "relay")
    assert relay[1] - 0.01 <= times[0] <= times[-1] <= relay[1] + relay[2] + 0.01
    assert sorted(times) == list(times)
    stages = [visit[0] for visit in record["visits"]]
    assert stages[0] == "edge"
    assert stages[-2:] == ["relay", "settle"]
    assert sum(visit[2] for visit in record["visits"]) == pytest.approx(record["line"]["total_ms"], abs=0.1)
    assert {"service": "engine", "stage": "queue"}.items() <= record["axis"]["bars"][-1].items()
    assert record["axis"]["error_ms"] >= 0.0
    assert "hello" not in json.dumps(record)


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_pages_follow_each_other_and_an_unknown_id_is_not_found(house: House) -> None:
    def refuse(_: object) -> Script:
        return refusal(400, "invalid_value")

    house.engine.script = refuse
    for number in range(5):
        async with house.chat(headers={"x-request-id": f"r{number}"}) as answer:
            assert answer.status == 400
    await until(lambda: len(house.gateway._recorder) == 5)
    seen, path = [], "?limit=2"
    while True:
        page = await ask(house, path)
        seen += [one["request_id"] for one in page["data"]]
        if page["before"] is None:
            break
        path = f"?limit=2&before={page['before']}"
    assert seen == ["r4", "r3", "r2", "r1", "r0"]
    for _ in range(SAME_ID_MAX + 1):
        async with house.chat(headers={"x-request-id": "often"}) as answer:
            assert answer.status == 400
    await until(lambda: len(house.gateway._recorder) == 5 + SAME_ID_MAX + 1)
    assert len((await ask(house, "/often"))["data"]) == SAME_ID_MAX
    assert (await ask(house, "/nobodys", 404))["error"]["code"] == "not_found"
    assert (await ask(house, "?limit=x", 400))["error"]["param"] == "limit"


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_strangers_take_no_tenants_record(open_house: Open) -> None:
    house = await open_house(admin={**operator_keys(), "records": 4})
    for number in range(4):
        async with house.chat(headers={"x-request-id": f"mine{number}"}) as answer:
            assert answer.status == 200
    await until(lambda: len(house.gateway._recorder) == 4)
    before = (await ask(house, "?tenant=acme"))["data"]
    assert [one["request_id"] for one in before] == ["mine3", "mine2", "mine1", "mine0"]
    for _ in range(20):
        async with house.chat(headers={"authorization": "Bearer nobodys"}) as answer:
            assert answer.status == 401
    await until(lambda: len(house.gateway._recorder) == 8)
    assert (await ask(house, "?tenant=acme"))["data"] == before
    assert [one["status"] for one in (await ask(house, "?status=4xx"))["data"]] == [401] * 4


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_a_page_that_has_not_changed_is_not_made_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/requests"

    async def poll(query: str = "", known: str = "") -> tuple[int, str, bytes]:
        headers = {**OPERATOR, **({"if-none-match": known} if known else {})}
        async with house.client.get(url + query, headers=headers) as answer:
            return answer.status, answer.headers.get("etag", ""), await answer.read()

    gate = asyncio.Event()
    house.engine.script = stream(chunk("a"), gate, end=closing())
    status, empty, _ = await poll("?state=done")
    assert (status, empty != "") == (200, True)
    async with house.chat(stream=True) as answer:
        await answer.content.readline()
        assert (await poll())[:2] == (200, ""), "what lives changes by itself"
        with monkeypatch.context() as patched:
            patched.setattr(RequestsApi, "page", lambda *_: pytest.fail("it was made"))
            assert await poll("?state=done", empty) == (304, empty, b"")
        gate.set()
        await answer.read()
    await until(lambda: len(house.gateway._recorder) == 1)
    status, newest, body = await poll("?state=done", empty)
    assert (status, len(json.loads(body)["data"]), newest != empty) == (200, 1, True)
    assert await poll("?state=done", newest) == (304, newest, b"")
    assert (await poll("?state=done&limit=9", newest))[0] == 200, "another question"


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_the_command_asks_a_running_gateway(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.chat(stream=True, headers={"x-request-id": "mine"}) as answer:
        await answer.read()
    await until(lambda: len(house.gateway._recorder) == 1)
    url = f"http://127.0.0.1:{house.gateway.admin_port}"

    async def trace(*argv: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(cli.main, ["trace", *argv, "--admin-url", url])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, _, told = await trace("mine")
    assert (code, "PENSTOCK_ADMIN_KEY" in told) == (1, True)
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the operator's")
    code, text, told = await trace("mine")
    assert (code, told) == (0, "")
    assert "request mine" in text
    assert "gateway  200 ok in relay" in text
    assert "           events " in text
    assert "the engine's times are placed within" in text
    [record] = (await ask(house, "/mine"))["data"]
    assert (record["text"], record["meaning"]) == (text.rstrip("\n"), "the client has its whole answer")
    code, text, _ = await trace("mine", "--json")
    assert json.loads(text) == {name: value for name, value in record.items() if name != "text"}
    code, text, _ = await trace("--slowest", "3")
    assert (code, text.count("\n")) == (0, 1)
    assert "200 ok" in text
    code, text, told = await trace("nobodys")
    assert (code, text) == (1, "")
    assert "There is no such request" in told
    began = f"{house.gateway._recorder.since.troubled:%Y-%m-%d %H:%M:%S}"
    assert f"failed and slow ones since {began}" in told
    assert "penstock trace nobodys --logs FILE" in told


# -- several workers ------------------------------------------------------------------------------


JOINED = {"data": Merge.PAGE, "before": Merge.MOST}


def answer_of(status: int, body: object) -> OperatorAnswer:
    return OperatorAnswer(status, {}, json.dumps(body).encode())


def test_the_pages_of_several_workers_are_one_and_what_one_has_is_found() -> None:
    pages = {
        1: answer_of(200, {"data": [{"number": 9}], "before": None}),
        2: answer_of(200, {"data": [{"number": 7}, {"number": 5}], "before": 5}),
    }
    page = json.loads(together(pages, (), JOINED).body)
    assert page == {
        "data": [{"number": 9, "worker": 1}, {"number": 7, "worker": 2}, {"number": 5, "worker": 2}],
        "before": 5,
    }
    many = {
        worker: answer_of(200, {"data": [{"number": 2 * n + worker} for n in range(600)], "before": None})
        for worker in range(2)
    }
    page = json.loads(together(many, (), JOINED).body)
    assert [one["number"] for one in page["data"]] == list(range(1199, 199, -1))
    assert page["before"] == 200
    one = {1: answer_of(404, {"error": {}}), 2: answer_of(200, {"data": [{"line": {}}]})}
    assert json.loads(together(one, (), JOINED).body) == {"data": [{"line": {}}]}
    nothing = {None: answer_of(404, {"error": {"message": "There is none."}})}
    missing = together(nothing, ["b"], JOINED)
    told = json.loads(together({1: missing, 2: one[2]}, (), JOINED).body)
    assert (told["silent_gateways"], told["partial"]) == (["b"], True), "it may have more"
    none = {1: answer_of(404, {"error": {}}), 2: answer_of(404, {"error": {}})}
    assert together(none, (), JOINED).status == 404


async def test_others_have_their_turn_while_a_thousand_live_requests_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live: Any = list(range(LIMIT_MAX))
    api = RequestsApi(live, recorder_of())
    turns: list[int] = []
    monkeypatch.setattr(api, "_live_summary", lambda _: api_summary())
    listing = asyncio.create_task(api._lives(RequestsQuery()))
    while not listing.done():
        turns.append(len(turns))
        await asyncio.sleep(0)
    assert len(listing.result()) == LIMIT_MAX
    assert len(turns) >= LIMIT_MAX // AT_ONCE
    page = api.page(RequestsQuery(limit=7), listing.result())
    assert (len(page.data), page.before) == (7, None)


def api_summary() -> RequestSummary:
    """A live request in short."""
    return summary_of(line("a"), 0)
