"""The caller's own deadlines hold whether or not the core steps. A core that hangs takes no more work, and
what it holds ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from engine.api.answer.outputs import ChoiceOutput
from engine.api.core import client
from engine.api.core.queue import CoreQueue
from engine.contract.messages import AddRequest, FinishReason, Ping
from shared.wire import sse
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve, Served, until
from tests.fakes import VirtualClock

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
SOON = "0.05"


def is_free(queue: CoreQueue) -> bool:
    """True if no tenant holds any of it."""
    return not (queue._sequences.held or queue._tokens.held)


async def chat(served: Served, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await served.http.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers)


def told(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("header", ["x-queue-timeout", "x-request-timeout"])
async def test_a_core_that_does_not_step_ends_no_deadline(served: Served, header: str) -> None:
    served.core.admits = False
    response = await chat(served, {header: SOON})
    assert told(response) == (504, header[2:].replace("-", "_"))
    assert served.core.aborted == [1]
    closing = sse.parse_closing(response.headers[sse.CLOSING_HEADER])
    assert closing is not None
    assert (closing.prompt_tokens, closing.completion_tokens) == (0, 0), "it never began"


@pytest.mark.parametrize("header", ["x-queue-timeout", "x-request-timeout"])
@pytest.mark.parametrize("is_read", [False, True])
async def test_deadlines_are_on_the_clock_that_times_all_else(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, header: str, is_read: bool
) -> None:
    clock = VirtualClock()
    async with serve(clock=clock) as served:
        served.core.admits = False
        reached = asyncio.Event()

        async def never(*_: object) -> Any:
            reached.set()
            await asyncio.Event().wait()

        if not is_read:
            monkeypatch.setattr(served.engine.state.threads, "run", never)
        asked = asyncio.create_task(chat(served, {header: "5", FIRST_TOKEN: "60000"}))
        await until(lambda: bool(served.core.added) if is_read else reached.is_set())
        if is_read:
            assert served.core.added[0].first_token_s == 60.0, "no time has passed"
        clock.advance(4.9)
        await served.http.get("/livez")
        assert not asked.done()
        clock.advance(0.2)
        assert told(await asked) == (504, header[2:].replace("-", "_"))
        served.assert_nothing_leaks()


async def queue_times(served: Served) -> int:
    """How many sequences the metric of queue times has seen."""
    text = (await served.http.get("/metrics")).text
    [count] = [line for line in text.splitlines() if line.startswith("penstock_engine_queue_seconds_count")]
    return int(float(count.split()[1]))


async def test_the_queue_metric_sees_who_never_began(served: Served) -> None:
    """Under overload these are those that waited longest."""
    served.core.admits = False
    one = asyncio.create_task(chat(served, {}))
    await until(lambda: len(served.core.waiting) == 1)
    [request_id] = served.engine.state._generations
    assert served.engine.state.abort(request_id) == 1
    assert told(await one)[1] == "request_aborted"
    assert await queue_times(served) == 1


async def test_the_queue_metric_has_each_sequence_once(served: Served) -> None:
    """The one that lived longest began first, and need not have waited."""
    served.says("the", ends=False)
    served.core.withheld.update(range(2, 4))
    one = asyncio.create_task(chat(served, {}, n=3))
    await until(lambda: bool(served.core.running))
    [request_id] = served.engine.state._generations
    assert served.engine.state.abort(request_id) == 1
    assert told(await one)[1] == "request_aborted"
    assert await queue_times(served) == 3


async def test_the_queue_is_over_once_a_choice_has_begun(served: Served) -> None:
    """The others come when there is room: the answer has begun."""
    served.says("the", ends=False)
    served.core.withheld.update(range(2, 21))
    response = await chat(served, {"x-queue-timeout": SOON, "x-request-timeout": "0.2"}, n=20)
    assert told(response) == (504, "request_timeout")


async def test_what_choices_have_computed_is_told_at_a_deadline(served: Served) -> None:
    served.says("the", ends=False)
    response = await chat(served, {"x-queue-timeout": SOON, "x-request-timeout": "0.2"}, n=2)
    assert told(response) == (504, "request_timeout")
    closing = sse.parse_closing(response.headers[sse.CLOSING_HEADER])
    assert closing is not None
    assert closing.completion_tokens == 2 * len(served.ids("the")), "what was computed is told"
    assert closing.prompt_tokens > 0
    assert sorted(served.core.aborted) == [1, 2]


async def test_a_stream_ends_with_an_error_event(served: Served, lines: list[dict[str, Any]]) -> None:
    served.says("the", ends=False)
    response = await chat(served, {"x-request-timeout": "0.1"}, stream=True)
    assert response.status_code == 200
    assert '"code":"request_timeout"' in response.text
    assert "[DONE]" not in response.text
    await until(lambda: bool(lines))
    assert lines[0]["end_reason"] == "request_timeout"


@pytest.mark.parametrize("header", ["x-queue-timeout", "x-request-timeout"])
async def test_reading_and_tokenizing_count(
    served: Served, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(served.engine.state.threads, "run", never)
    assert told(await chat(served, {header: SOON})) == (504, header[2:].replace("-", "_"))
    assert served.core.added == []


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1" * 200])
async def test_a_deadline_that_is_none_is_refused_by_name(served: Served, value: str) -> None:
    response = await chat(served, {"x-queue-timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-queue-timeout"


# -- first-token deadlines ------------------------------------------------------------------------

FIRST_TOKEN = "x-penstock-first-token-timeout-ms"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("expected_s", "says", "after"),
    [(75.04, "in 75.0 s", "19"), (600.0, "in 600.0 s", "30"), (0.0, "did not come", "1")],
)
async def test_a_first_token_that_comes_too_late_is_told_with_the_estimate(
    served: Served, expected_s: float, says: str, after: str, stream: bool
) -> None:
    served.core.admits = False
    asked = asyncio.create_task(chat(served, {FIRST_TOKEN: "60000"}, stream=stream))
    await until(lambda: bool(served.core.added))
    assert 30.0 < served.core.added[0].first_token_s <= 60.0
    served.core.finish(1, FinishReason.TOO_LATE, expected_s)
    response = await asked
    assert '"code":"first_token_deadline"' in response.text
    assert says in response.text
    if not stream:
        assert response.status_code == 503
        assert response.headers["retry-after"] == after


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_one_first_token(served: Served, stream: bool) -> None:
    """Of many choices, or prompts, those come late that find no slot at first."""
    served.says("the")
    prompts = ["hello hello", "the", "hello hello hello", "the"]
    body = {"model": MODEL, "prompt": prompts, "stream": stream, "n": 2}
    asked = served.http.post("/v1/completions", json=body, headers={FIRST_TOKEN: "60000"})
    assert (await asked).status_code == 200
    bounded = [at for at, added in enumerate(served.core.added) if added.first_token_s < math.inf]
    assert bounded == [2], "the first choice of the first of the shortest prompts"
    assert served.core.lifted == []


async def test_a_stream_that_has_begun_is_not_ended_for_want_of_a_first_token(served: Served) -> None:
    served.says("the", ends=False)
    served.core.withheld.add(1)
    headers = {FIRST_TOKEN: "60000", "x-request-timeout": "0.3"}
    response = await chat(served, headers, n=3, stream=True)
    assert '"code":"request_timeout"' in response.text
    assert served.core.lifted == [1]


async def test_without_a_gateway_a_first_token_is_of_use_for_ever(served: Served) -> None:
    served.says("the")
    assert (await chat(served, {})).status_code == 200
    assert served.core.added[0].first_token_s == math.inf


@pytest.mark.parametrize("value", ["soon", "0", "-1", "1.5", "nan", "٣", "9" * 9, "86400001"])
async def test_a_first_token_timeout_that_is_none_is_refused_by_name(served: Served, value: str) -> None:
    headers = {FIRST_TOKEN.encode(): value.encode()}
    response = await served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == FIRST_TOKEN


# -- a core that hangs ----------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings without pauses between them."""
    monkeypatch.setattr(client, "PING_EVERY_S", 0.0)


async def test_a_core_that_hangs_is_not_ready_until_it_answers_again(serve: Serve, hurried: None) -> None:
    async with serve(core_timeout_s=0.02) as served:
        state = served.engine.state
        await until(lambda: state.core._pinged > 2)
        assert state.is_ready
        served.core.hang()
        await until(lambda: not state.core.answers)
        ready = await served.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            503,
            {"phase": "ready", "ok": False, "problems": ["The core has not answered for 0.02 s."]},
        )
        assert (await served.http.get("/livez")).status_code == 200
        assert told(await chat(served, {})) == (503, "not_ready")
        assert "penstock_engine_ready 0.0" in (await served.http.get("/metrics")).text
        assert [type(message) for message in served.core.unread or ()] == [Ping], "one question at a time"
        served.core.go_on()
        await until(lambda: state.core.answers)
        assert (await served.http.get("/readyz")).status_code == 200
        served.says("fine")
        assert (await asyncio.wait_for(chat(served, {}), PATIENCE_S)).status_code == 200


def cost(response: httpx.Response) -> tuple[int, int]:
    """The tokens of prompt and answer that an answer reports."""
    header = response.headers.get(sse.CLOSING_HEADER)
    closing = sse.parse_closing(header or response.text.rpartition(": penstock ")[2])
    assert closing is not None
    return closing.prompt_tokens, closing.completion_tokens


async def test_what_a_core_that_hangs_holds_ends_and_is_dropped_when_it_goes_on(
    serve: Serve, hurried: None, lines: list[dict[str, Any]]
) -> None:
    async with serve(core_timeout_s=0.02) as served:
        core, state = served.core, served.engine.state
        served.says("the quick brown fox", ends=False)
        core.is_held = True
        asked = [asyncio.create_task(chat(served, {}, stream=streams)) for streams in (True, False)]
        await until(lambda: len(core.added) == 2)
        core.step()
        await until(lambda: not core._messages.qsize() and all(one.first_token_at for one in live(served)))
        core.admits = False
        asked += [asyncio.create_task(chat(served, {}, stream=streams)) for streams in (True, False)]
        await until(lambda: len(core.added) == 4)
        core.hang()
        begun_stream, begun, unbegun_stream, unbegun = await asyncio.gather(*asked)

        prompt_len = len(core.added[0].prompt_ids)
        assert begun_stream.status_code == 200
        assert '"code":"engine_failed"' in begun_stream.text
        assert "[DONE]" not in begun_stream.text
        assert told(begun) == (500, "engine_failed")
        assert cost(begun_stream) == cost(begun) == (prompt_len, 1)
        assert '"code":"not_ready"' in unbegun_stream.text
        assert told(unbegun) == (503, "not_ready")
        assert unbegun.headers["x-should-retry"] == "true"
        assert cost(unbegun_stream) == cost(unbegun) == (0, 0)
        assert {line["end_reason"] for line in lines} == {"engine_failed"}
        assert (state.core.live, len(lines), core.aborted) == (0, 4, [])

        late = state.metrics.uncharged_tokens
        core.unread, unread = None, core.unread
        core.step()  # the one that hung
        core.unread = unread
        core.go_on()
        await until(lambda: state.core.answers and late.value("late") == 2)
        assert sorted(core.aborted) == [1, 2, 3, 4]
        assert (core.running, core.waiting) == ({}, {}), "what they held is free"
        assert (await served.http.get("/readyz")).status_code == 200
        await until(lambda: is_free(state.core._queue))
        assert len(lines) == 5, "of a probe and of each request one"
        served.assert_nothing_leaks()


def live(served: Served) -> list[ChoiceOutput]:
    return list(served.engine.state.core._live.values())


async def test_a_request_with_a_choice_that_has_ended_was_begun(serve: Serve, hurried: None) -> None:
    async with serve(core_timeout_s=0.02) as served:
        served.says("the")
        served.core.withheld.add(2)
        asked = asyncio.create_task(chat(served, {}, n=2))
        await until(lambda: len(live(served)) == 1 and not served.core.running)
        served.core.hang()
        assert told(await asked) == (500, "engine_failed")
        served.core.go_on()
        await until(lambda: is_free(served.engine.state.core._queue))


async def test_a_request_that_comes_to_a_core_that_hangs_meanwhile_is_not_sent(
    serve: Serve, hurried: None
) -> None:
    async with serve(core_timeout_s=0.02) as served:
        state, found = served.engine.state, asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            content = msgspec.json.encode(CHAT)
            yield content[:5]
            await found.wait()
            yield content[5:]

        asked = asyncio.create_task(served.http.post("/v1/chat/completions", content=body()))
        await until(lambda: state._working == 1)
        served.core.hang()
        await until(lambda: not state.core.answers)
        found.set()
        assert told(await asked) == (503, "not_ready")
        assert [type(message) for message in served.core.unread or ()] == [Ping]


async def test_a_process_that_was_stopped_with_its_core_does_not_take_that_for_a_core_that_hangs(
    serve: Serve, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(core_timeout_s=30.0) as served:
        core, loop = served.engine.state.core, asyncio.get_running_loop()
        served.core.hang()
        await until(lambda: bool(served.core.unread))
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + 3600.0)
        for _ in range(10):
            await asyncio.sleep(0)
            assert core.answers
        served.core.go_on()
        pinged = core._pinged
        await until(lambda: core._pinged > pinged + 1)
        assert core.answers


async def test_what_a_core_that_hangs_is_sent_keeps_its_place_in_the_queue_though_it_is_aborted(
    serve: Serve,
) -> None:
    """It lies in this process until the core takes it."""
    async with serve(max_queue_len=4) as served:
        served.core.hang()
        for _ in range(4):
            assert told(await chat(served, {"x-queue-timeout": SOON})) == (504, "queue_timeout")
        assert told(await chat(served, {})) == (503, "queue_full")
        assert sum(isinstance(message, AddRequest) for message in served.core.unread or ()) == 4
        served.core.go_on()
        served.says("fine")
        await until(lambda: is_free(served.engine.state.core._queue))
        assert (await chat(served, {})).status_code == 200


async def test_what_ends_since_its_core_hangs_keeps_its_place_until_the_core_has_seen_it(
    serve: Serve, hurried: None
) -> None:
    async with serve(core_timeout_s=0.02, max_queue_len=4) as served:
        core = served.engine.state.core
        served.core.hang()
        asked = [asyncio.create_task(chat(served, {})) for _ in range(3)]
        assert {told(answer) for answer in await asyncio.gather(*asked)} == {(503, "not_ready")}
        assert (core.live, core.waiting, len(served.core.unread or ())) == (0, 3, 1 + 3 + 1)
        served.core.go_on()
        await until(lambda: is_free(core._queue))


async def test_the_gauges_of_a_core_that_died_are_gone(served: Served) -> None:
    served.says("fine")
    await chat(served, {})
    assert "penstock_engine_running_sequences" in (await served.http.get("/metrics")).text
    served.core.die()
    await until(lambda: served.engine.state.core.failure is not None)
    assert "penstock_engine_running_sequences" not in (await served.http.get("/metrics")).text
