"""The caller's own deadlines hold whether or not the core steps; a core that hangs takes no more work."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from engine.api import core_client
from engine.core.messages import AddRequest, CoreInput, FinishReason, Ping, Pong
from shared import sse
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve, Served, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
SOON = "0.05"


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
    ("expected_s", "says", "after"), [(75.04, "in 75.0 s", "19"), (0.0, "did not come", "1")]
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


async def test_a_core_that_hangs_is_not_ready_until_it_answers_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_client, "PING_EVERY_S", 0.0)
    async with serve(core_timeout_s=0.02) as served:
        state, numbers = served.engine.state, list[int]()
        await until(lambda: state.core._pinged > 2)
        assert state.is_ready
        send = served.core.send

        def deaf(message: CoreInput) -> None:
            if isinstance(message, Ping):
                numbers.append(message.number)
            else:
                send(message)

        monkeypatch.setattr(served.core, "send", deaf)
        await until(lambda: not state.core.answers)
        ready = await served.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            503,
            {"phase": "ready", "ok": False, "problems": ["The core has not answered for 0.02 s."]},
        )
        assert (await served.http.get("/livez")).status_code == 200
        assert told(await chat(served, {})) == (503, "not_ready")
        assert "penstock_engine_ready 0.0" in (await served.http.get("/metrics")).text
        assert len(numbers) == 1, "one question at a time"
        monkeypatch.undo()
        monkeypatch.setattr(core_client, "PING_EVERY_S", 0.0)
        served.core.say(Pong(numbers[0]))
        await until(lambda: state.core.answers)
        assert (await served.http.get("/readyz")).status_code == 200
        served.says("fine")
        assert (await asyncio.wait_for(chat(served, {}), PATIENCE_S)).status_code == 200


async def test_what_a_core_that_hangs_is_sent_keeps_its_place_in_the_queue_though_it_is_aborted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in this process until the core takes it."""
    async with serve(max_queue_len=4) as served:
        sent, send = list[CoreInput](), served.core.send
        monkeypatch.setattr(served.core, "send", sent.append)
        for _ in range(4):
            assert told(await chat(served, {"x-queue-timeout": SOON})) == (504, "queue_timeout")
        assert told(await chat(served, {})) == (503, "queue_full")
        assert sum(isinstance(message, AddRequest) for message in sent) == 4
        monkeypatch.undo()
        for message in sent:
            send(message)
        served.says("fine")
        await until(lambda: not served.engine.state.core._queue.held)
        assert (await chat(served, {})).status_code == 200


async def test_the_gauges_of_a_core_that_died_are_gone(served: Served) -> None:
    served.says("fine")
    await chat(served, {})
    assert "penstock_engine_running_sequences" in (await served.http.get("/metrics")).text
    served.core.die()
    await until(lambda: served.engine.state.core.failure is not None)
    assert "penstock_engine_running_sequences" not in (await served.http.get("/metrics")).text
