"""Engines that fail, break off, refuse or are not there."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from gateway.relay import stream as relay_stream
from gateway.relay.engine_errors import ERROR_LEN_MAX
from shared.wire.errors import EngineFailed
from shared.wire.sse import EVENT_LEN_MAX, closing_comment, error_event
from tests.gateway.conftest import CONVERSATIONS, PATIENCE_S, House, Open, error_of
from tests.gateway.fake_engine import CUT, HEADERS, FakeEngine, Script, chunk, closing, refusal, unary

pytestmark = pytest.mark.both_protocols

DONE = b"data: [DONE]\n\n"
FOREIGN_REFUSAL = Script([b'{"error": {"message": "m", "code": 400}}'], 400, "application/json")
"""Other engines put the status where OpenAI puts a code."""


@pytest.mark.parametrize("said", ["9" * 400, "100000", "soon", "-1", ""])
async def test_a_time_that_nobody_waits_is_not_passed_on(house: House, said: str) -> None:
    house.engine.script = refusal(503, "queue_full", retry_after=said)
    async with house.chat() as answer:
        assert answer.status == 503
        assert answer.headers.get("retry-after") != said


@pytest.mark.parametrize(
    ("script", "status", "code", "end_reason"),
    [
        (refusal(400, "context_length_exceeded"), 400, "context_length_exceeded", "refused"),
        (refusal(404, "model_not_found"), 404, "model_not_found", "refused"),
        (refusal(503, "queue_full", retry_after="7"), 503, "queue_full", "refused"),
        (refusal(500, "engine_failed"), 500, "engine_failed", "engine_failed"),
        (refusal(401, "invalid_api_key"), 502, "upstream_failed", "upstream_failed"),
        (refusal(418, "teapot"), 502, "upstream_failed", "upstream_failed"),
        (refusal(400, "their_own_code"), 400, "their_own_code", "refused"),
        (Script([b"<html>"], 500, "text/html"), 502, "upstream_failed", "upstream_failed"),
        (Script([b"<html>"], 404, "text/html"), 502, "upstream_failed", "upstream_failed"),
        (FOREIGN_REFUSAL, 400, "invalid_value", "refused"),
        (Script([b'data: {"error":{"message":"m","code":"queue_full"}}\n\n']), 503, "queue_full", "refused"),
        (Script([b'data: {"error":{"message":"m"}}\n\n']), 502, "upstream_failed", "upstream_failed"),
        (Script([]), 502, "upstream_failed", "upstream_failed"),
        (Script([b"data: half an ev", CUT]), 502, "upstream_failed", "upstream_failed"),
        (Script([CUT]), 502, "upstream_failed", "upstream_failed"),
    ],
    ids=range(15),
)
async def test_errors_before_the_first_token_have_a_status(
    house: House, script: Script, status: int, code: str, end_reason: str
) -> None:
    house.engine.script = script
    async with house.chat(stream=True) as answer:
        assert answer.status == status
        assert answer.headers["x-should-retry"] in ("true", "false")
        error = await error_of(answer)
        assert error["code"] == code
        if "retry-after" in script.headers:
            assert answer.headers["retry-after"] == script.headers["retry-after"]
    line = await house.line()
    assert line["end_reason"] == end_reason
    assert line["status"] == status
    await house.at_rest()


@pytest.mark.parametrize(
    ("begins", "code"),
    [
        (b"data: ", "upstream_failed"),
        (error_event(EngineFailed("The engine failed.")) + b"data: ", "engine_failed"),
    ],
    ids=["the first event", "what follows an error"],
)
async def test_what_an_engine_says_without_end_before_the_first_event_is_read_no_further_than_its_bound(
    house: House, monkeypatch: pytest.MonkeyPatch, begins: bytes, code: str
) -> None:
    monkeypatch.setattr(relay_stream, "HEAD_LEN_MAX", 100_000)
    house.engine.script = Script([HEADERS, begins, b"x" * 500_000, asyncio.Event()])
    async with asyncio.timeout(PATIENCE_S), house.chat(stream=True) as answer:
        assert (await error_of(answer))["code"] == code
    await house.at_rest()


async def test_an_error_that_is_too_long_is_read_by_its_status_alone(house: House) -> None:
    error = b'{"error":{"message":"too long for this model","code":"context_length_exceeded"}}'
    for length, code in ((ERROR_LEN_MAX, "context_length_exceeded"), (ERROR_LEN_MAX + 1, "invalid_value")):
        house.engine.script = Script([error.ljust(length)], 400, "application/json")
        async with house.chat() as answer:
            assert answer.status == 400
            assert (await error_of(answer))["code"] == code


THEIR_QUOTA = [
    refusal(429, "rate_limit_exceeded", "Rate limit reached for organization org-1", retry_after="7"),
    refusal(429, "insufficient_quota", "org-1 has to pay"),
    refusal(429, "their_own_code", "org-1"),
    refusal(400, "insufficient_quota", "org-1"),
    Script([b'{"error": {"message": "org-1", "code": 429}}'], 400, "application/json"),
    Script([b"<html>org-1"], 429, "text/html"),
    Script([b'data: {"error":{"message":"org-1","code":"rate_limit_exceeded"}}\n\n']),
]


@pytest.mark.parametrize("script", THEIR_QUOTA, ids=range(len(THEIR_QUOTA)))
async def test_a_quota_of_the_gateways_at_an_engine_is_none_of_the_callers(
    open_house: Open, script: Script
) -> None:
    async with FakeEngine() as other:
        house = await open_house(other.url, bundle=None)
        house.engine.script = other.script = script
        async with house.chat(stream=True) as answer:
            assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
            assert answer.headers.get("retry-after") == script.headers.get("retry-after")
            error = await error_of(answer)
        assert error["code"] == "queue_full"
        assert "org-1" not in error["message"]
        assert len(house.engine.seen) == len(other.seen) == 1, "the other may have room"
        line = await house.line()
        assert (line["end_reason"], line["settled_tokens"], line["attempts"]) == ("refused", 0, 2)


async def test_a_unary_answer_that_is_cut_is_502(house: House) -> None:
    script = unary()
    house.engine.script = Script([HEADERS, b"{", CUT], 200, "application/json", script.headers)
    async with house.chat() as answer:
        assert answer.status == 502
        assert (await error_of(answer))["code"] == "upstream_failed"
    await house.at_rest()


async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(house: House) -> None:
    house.engine.script = Script([chunk("a"), chunk("b"), CUT])
    async with house.chat(stream=True) as answer:
        body = await answer.read()
    assert body.startswith(chunk("a") + chunk("b") + b'data: {"error":')
    assert b"upstream_failed" in body
    assert DONE not in body
    line = await house.line()
    assert line["status"] == 200
    assert line["end_reason"] == "upstream_failed"
    assert line["stage"] == "relay"
    assert line["settled_tokens"] == line["reserved_tokens"], "nobody told what was computed"
    await house.at_rest()


async def test_a_stream_that_ends_without_done_is_a_failure(house: House) -> None:
    house.engine.script = Script([chunk("a")])
    async with house.chat(stream=True) as answer:
        body = await answer.read()
    assert b"upstream_failed" in body
    assert DONE not in body


async def test_a_stream_that_breaks_within_an_event_ends_with_an_error_event(house: House) -> None:
    house.engine.script = Script([chunk("a"), b"data: half", CUT])
    async with house.chat(stream=True) as answer:
        body = await answer.read()
    assert body.startswith(chunk("a") + b"data: {")
    assert b"upstream_failed" in body
    assert b"half" not in body
    await house.at_rest()


async def test_a_stream_that_breaks_within_a_long_event_is_ended_by_closing_the_connection(
    house: House,
) -> None:
    house.engine.script = Script([chunk("a"), b"data: " + b"x" * 2 * EVENT_LEN_MAX, CUT])
    async with house.chat(stream=True) as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await house.at_rest()


async def test_an_error_event_of_the_engines_passes_and_is_logged(house: House) -> None:
    event = error_event(EngineFailed("The engine failed."))
    house.engine.script = Script([chunk("a"), event, closing_comment(closing(reason="failed"))])
    async with house.chat(stream=True) as answer:
        assert await answer.read() == chunk("a") + event
    line = await house.line()
    assert line["end_reason"] == "upstream_failed"
    assert line["engine_end_reason"] == "failed"
    assert line["settled_tokens"] == 13


async def test_an_unreachable_engine_is_502(open_house: Open) -> None:
    lost = await open_house()
    await lost.engine.stop()
    async with lost.chat() as answer:
        assert answer.status == 502
        assert answer.headers["x-should-retry"] == "true"
        assert (await error_of(answer))["code"] == "upstream_unreachable"
    line = (await lost.lines(1))[0]
    assert line["end_reason"] == "upstream_unreachable"
    assert line["settled_tokens"] == 0
    await lost.at_rest()


async def test_a_request_is_retried_elsewhere_when_a_replica_is_unreachable(open_house: Open) -> None:
    house = await open_house("http://127.0.0.1:1", "http://127.0.0.1:2")
    house.engine.script = unary()
    for i in range(CONVERSATIONS):
        async with house.chat(prompt_cache_key=f"{i}") as answer:
            assert answer.status == 200
    lines = await house.lines(CONVERSATIONS)
    assert {line["replica"] for line in lines} == {house.engine.url.removeprefix("http://")}
    assert max(line["attempts"] for line in lines) > 1
    assert len(house.engine.seen) == CONVERSATIONS
    await house.at_rest()
