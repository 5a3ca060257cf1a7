"""One request through all stages, against an engine that plays a script."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import unittest.mock
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.admission.tokens import estimate
from gateway.identity.keys import hash_key
from shared.errors import EngineFailed
from shared.openai import ChatMessage, ChatRequest
from shared.sse import Closing, closing_comment, error_event
from tests.gateway.conftest import CHAT, KEY, OTHER_KEY, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import (
    CUT,
    HEADERS,
    FakeEngine,
    Script,
    byte_bundle,
    chunk,
    closing,
    refusal,
    stream,
    unary,
)

DONE = b"data: [DONE]\n\n"
FOREIGN_REFUSAL = Script([b'{"error": {"message": "m", "code": 400}}'], 400, "application/json")
"""Other engines put the status where OpenAI puts a code."""
PROMPT = "user:hi\nassistant:"
"""What the fake engine's template makes of the tests' chat; one token per byte."""


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    assert answer.headers["x-request-id"]
    body = await answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


# -- what passes ----------------------------------------------------------------------------------


async def test_a_stream_comes_through_byte_for_byte(house: House) -> None:
    house.engine.script = stream(chunk("a"), chunk("b"))
    async with house.chat(stream=True) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert await answer.read() == chunk("a") + chunk("b") + DONE
    line = await house.line()
    assert line["end_reason"] == "ok"
    assert line["status"] == 200
    assert line["prompt_tokens"] == 10
    assert line["completion_tokens"] == 3
    assert line["cached_tokens"] == 4
    assert line["settled_tokens"] == 13
    assert line["events"] == 3
    assert line["engine_queue_ms"] == 1.5
    await house.at_rest()


async def test_a_unary_answer_comes_through(house: House) -> None:
    house.engine.script = unary("hello")
    async with house.chat() as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert "x-penstock-closing" not in answer.headers
        assert (await answer.json())["choices"][0]["message"]["content"] == "hello"
    assert (await house.line())["settled_tokens"] == 13
    await house.at_rest()


async def test_a_unary_answer_larger_than_the_head_is_not_held_back(house: House) -> None:
    text = "x" * 1_000_000
    house.engine.script = unary(text)
    async with house.chat() as answer:
        assert (await answer.json())["choices"][0]["message"]["content"] == text
    line = await house.line()
    assert line["body_len"] > len(text)
    await house.at_rest()


async def test_the_engine_gets_the_body_the_ids_and_the_ids_of_the_request(house: House) -> None:
    traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {"x-request-id": "mine-1", "traceparent": traceparent}
    async with house.chat(
        stream=True, temperature=0.5, colour="red", model="small", headers=headers
    ) as answer:
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-penstock-ignored-fields"] == "colour"
        await answer.read()
    seen = house.engine.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["x-request-id"] == "mine-1"
    assert seen.headers["x-penstock-tenant"] == "acme"
    assert seen.headers["x-penstock-service-tier"] == "priority", "no cap is set for it"
    assert seen.headers["traceparent"].startswith("00-" + "a" * 32)
    assert seen.headers["traceparent"] != traceparent
    assert "authorization" not in seen.headers
    extension = seen.body.pop("penstock")
    assert extension["tokenizer"] == byte_bundle().hash
    assert [len(ids) for ids in extension["prompt_ids"]] == [len(PROMPT)]
    assert seen.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "temperature": 0.5,
        "colour": "red",
    }
    assert (await house.line())["request_id"] == "mine-1"


async def test_a_request_id_that_is_not_well_formed_is_replaced(house: House) -> None:
    async with house.chat(headers={"x-request-id": "no spaces please"}) as answer:
        assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_every_stage_is_timed_in_header_and_log(house: House) -> None:
    house.engine.script = Script(stream(chunk("a")).steps, headers={"server-timing": "tokenize;dur=0.1"})
    async with house.chat(stream=True) as answer:
        await answer.read()
        timing = answer.headers["server-timing"]
    names = [entry.partition(";")[0] for entry in timing.split(", ")]
    assert names == [
        *(
            "edge",
            "auth",
            "seat",
            "body",
            "validate",
            "tenant",
            "tokenize",
            "quota",
            "route",
            "connect",
            "wait",
        ),
        "engine-tokenize",
    ]
    line = await house.line()
    stages = [line[f"{name}_ms"] for name in [*names[:-1], "relay", "settle"]]
    assert sum(stages) == pytest.approx(line["total_ms"], abs=0.02)
    assert line["first_byte_ms"] <= line["total_ms"]


async def test_completions_and_tokenizing_take_the_same_way(house: House) -> None:
    house.engine.script = unary()
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": ["ab", "cde"], "max_tokens": 5}),
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"model": "small", "tokens": [1, 2]}),
    ):
        async with house.client.post(f"{house.url}{path}", json=body, headers=house.headers) as answer:
            assert answer.status == 200
        assert house.engine.seen[-1].path == path
        assert house.engine.seen[-1].body["model"] == "tiny"
    completion, tokenize, _ = await house.lines(3)
    assert completion["reserved_tokens"] == 5 + 2 * 5
    assert tokenize["reserved_tokens"] == 0
    await house.at_rest()


async def test_models_are_those_that_the_tenant_may_use(open_house: Open) -> None:
    sections = {
        "tenants": [{"id": "acme"}, {"id": "other", "models": []}],
    }
    house = await open_house(**sections)
    async with house.get("/v1/models") as answer:
        listed = (await answer.json())["data"]
    assert [(m["id"], m["created"], m["max_model_len"]) for m in listed] == [
        ("tiny", 7, 4096),
        ("small", 7, 4096),
    ]
    async with house.get("/v1/models/small") as answer:
        assert (await answer.json())["id"] == "small"
    async with house.get("/v1/models/big") as answer:
        assert answer.status == 404
        assert (await error_of(answer))["code"] == "model_not_found"
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    async with house.get("/v1/models", **other) as answer:
        assert (await answer.json())["data"] == []
    async with house.chat(headers=other) as answer:
        assert answer.status == 404


async def test_any_name_reaches_a_model_with_a_star(open_house: Open) -> None:
    house = await open_house()
    url = house.engine.url
    starred = await open_house(models=[{"name": "tiny", "replicas": [url], "aliases": ["*"]}])
    starred.engine.script = unary()
    async with starred.chat(model="gpt-5.4") as answer:
        assert answer.status == 200
    async with starred.get("/v1/models") as answer:
        assert [m["id"] for m in (await answer.json())["data"]] == ["tiny"]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "says"),
    [
        (None, "did not provide"),
        ("Basic abc", "malformed"),
        ("Bearer", "malformed"),
        ("Bearer two words", "Incorrect"),
        ("Bearer wrong-key", "Incorrect"),
        ("Bearer sk_dev_abcdefghijkl_" + "x" * 32, "Incorrect"),
        ("Bearer " + "x" * 5000, "malformed"),
    ],
)
async def test_without_a_valid_key_nothing_is_answered(
    house: House, authorization: str | None, says: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/requests/x"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
    ):
        async with house.client.request(method, house.url + path, headers=headers) as answer:
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = await error_of(answer)
            assert error["code"] == "invalid_api_key"
            assert says in error["message"]
    assert not house.engine.seen
    sent = authorization.split()[-1] if authorization else ""
    assert len(sent) < 8 or sent not in house.log.getvalue() + error["message"]


async def test_a_path_that_is_nearly_right_is_answered_with_the_one_that_is(house: House) -> None:
    async with house.client.post(f"{house.url}/chat/completions", headers=house.headers) as answer:
        assert answer.status == 404
        error = await error_of(answer)
        assert error["code"] == "unknown_url"
        assert "Did you mean '/v1/chat/completions'? The base URL ends with /v1." in error["message"]
    async with house.get("/nowhere") as answer:
        assert (await error_of(answer))["message"] == "There is nothing at '/nowhere'."


async def test_head_is_answered_as_get_is_without_the_body(house: House) -> None:
    for path, status in (("/v1/models", 200), ("/v1/models/tiny", 200), ("/v1/models/big", 404)):
        async with house.client.head(house.url + path, headers=house.headers) as answer:
            assert (answer.status, await answer.read()) == (status, b"")
            assert int(answer.headers["content-length"]) > 0
    async with house.client.head(f"{house.url}/v1/requests/x", headers=house.headers) as answer:
        assert answer.status == 405


async def test_expired_and_disabled_keys(open_house: Open) -> None:
    keys = [
        {"id": "old", "hash": hash_key("old-key"), "tenant": "acme", "expires": "2020-01-01T00:00:00Z"},
        {"id": "off", "hash": hash_key("off-key"), "tenant": "acme", "disabled": True},
    ]
    house = await open_house(keys=keys)
    for key, says in (("old-key", "expired"), ("off-key", "revoked")):
        async with house.chat(headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 401
            assert says in (await error_of(answer))["message"]


HOSTILE = [
    b"",
    b"   ",
    b"null",
    b"[]",
    b"7",
    b'{"model": "tiny"',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "messages": "hi"}',
    b'{"model": "tiny", "messages": []}',
    b'{"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}',
    b'{"model": 3, "messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": '
    + b"9" * 10_000
    + b"}",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 100_000,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "penstock": '
    b'{"tokenizer": "", "prompt_ids": [[1]]}}',
    b'{"model": "tiny", "model": "tiny", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_bodies_are_400(house: House, body: bytes) -> None:
    async with house.client.post(
        f"{house.url}/v1/chat/completions", data=body, headers=house.headers
    ) as answer:
        assert answer.status == 400
        error = await error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert not house.engine.seen
    line = await house.line()
    assert line["end_reason"] == "refused"
    assert line["stage"] == ("tenant" if b"tools" in body else "validate"), "who knows the engine knows tools"


async def test_unknown_fields_are_refused_when_the_policy_says_so(open_house: Open) -> None:
    house = await open_house(admission={"unknown_fields": "refuse"})
    async with house.chat(colour="red") as answer:
        assert answer.status == 400
        assert (await error_of(answer))["param"] == "colour"


async def test_a_prompt_beyond_the_context_is_refused_before_it_is_dispatched(house: House) -> None:
    for fields, param in (
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"max_tokens": 4096}, "max_tokens"),
        ({"max_completion_tokens": 4096}, "max_completion_tokens"),
    ):
        async with house.chat(fields) as answer:
            assert answer.status == 400
            error = await error_of(answer)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
    assert not house.engine.seen
    async with house.chat(max_tokens=4096 - len(PROMPT)) as answer:
        assert answer.status == 200


async def test_bodies_are_bounded(open_house: Open) -> None:
    house = await open_house(limits={"body_len_max": 2000})
    long = "x" * 3000
    async with house.chat(user=long) as answer:
        assert answer.status == 413
        assert (await error_of(answer))["code"] == "request_too_large"

    async def pieces() -> Any:
        for _ in range(30):
            yield b"x" * 100

    url = f"{house.url}/v1/chat/completions"
    async with house.client.post(url, data=pieces(), headers=house.headers) as answer:
        assert answer.status == 413
    async with house.client.post(
        url, data=b"{}", headers=house.headers | {"content-encoding": "gzip"}
    ) as answer:
        assert answer.status == 400


async def test_a_body_that_drips_ends_in_408(open_house: Open) -> None:
    house = await open_house(timeouts={"body_s": 0.05})
    never = asyncio.Event()

    async def drip() -> Any:
        yield b"{"
        await never.wait()

    request = house.client.post(f"{house.url}/v1/chat/completions", data=drip(), headers=house.headers)
    async with asyncio.timeout(PATIENCE_S), request as answer:
        assert answer.status == 408
        assert (await error_of(answer))["code"] == "request_body_timeout"
    assert (await house.line())["stage"] == "body"


async def test_unknown_routes_and_methods(house: House) -> None:
    async with house.get("/nowhere") as answer:
        assert answer.status == 404
        assert (await error_of(answer))["code"] == "unknown_url"
    async with house.get("/v1/chat/completions") as answer:
        assert answer.status == 405
        assert (await error_of(answer))["code"] == "method_not_allowed"
    async with house.client.delete(f"{house.url}/v1/models", headers=house.headers) as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost : b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 10_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 10_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(200)) + b"\r\n",
    ],
    ids=range(6),
)
async def test_what_is_not_http_is_refused_in_the_same_envelope(house: House, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    writer.write(head)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert b"x-request-id: req_" in answer.lower()
    assert b'{"error":{"message":"' in answer
    line = await house.line()
    assert line["endpoint"] == "unparsed"


# -- the engine's troubles ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "status", "code", "end_reason"),
    [
        (refusal(400, "context_length_exceeded"), 400, "context_length_exceeded", "refused"),
        (refusal(404, "model_not_found"), 404, "model_not_found", "refused"),
        (refusal(503, "queue_full", retry_after="7"), 503, "queue_full", "refused"),
        (refusal(500, "engine_failed"), 500, "engine_failed", "engine_failed"),
        (refusal(401, "invalid_api_key"), 502, "upstream_failed", "upstream_failed"),
        (refusal(418, "teapot"), 502, "upstream_failed", "upstream_failed"),
        (refusal(400, "their_own_code"), 400, "invalid_value", "refused"),
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


async def test_a_stream_that_ends_early_is_not_taken_for_whole(house: House) -> None:
    house.engine.script = Script([chunk("a")])
    async with house.chat(stream=True) as answer:
        body = await answer.read()
    assert b"upstream_failed" in body
    assert DONE not in body


async def test_a_stream_that_breaks_within_an_event_is_cut(house: House) -> None:
    house.engine.script = Script([chunk("a"), b"data: half", CUT])
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


async def test_an_engine_that_is_not_there_is_502(open_house: Open) -> None:
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


async def test_a_replica_that_is_not_there_is_passed_over(open_house: Open) -> None:
    house = await open_house("http://127.0.0.1:1", "http://127.0.0.1:2")
    house.engine.script = unary()
    for _ in range(6):
        async with house.chat() as answer:
            assert answer.status == 200
    lines = await house.lines(6)
    assert {line["replica"] for line in lines} == {house.engine.url.removeprefix("http://")}
    assert max(line["attempts"] for line in lines) > 1
    assert len(house.engine.seen) == 6
    await house.at_rest()


# -- counting -------------------------------------------------------------------------------------


async def test_without_a_tokenizer_prompts_are_estimated(open_house: Open) -> None:
    house = await open_house(bundle=None)
    house.engine.script = Script([chunk("a"), chunk("b"), DONE])
    async with house.chat(stream=True, max_tokens=100) as answer:
        assert await answer.read() == chunk("a") + chunk("b") + DONE
    assert "penstock" not in house.engine.seen[0].body
    expected = estimate(ChatRequest(model="tiny", messages=[ChatMessage("user", "hi")])).prompt_tokens
    line = await house.line()
    assert line["reserved_tokens"] == expected + 100
    assert line["settled_tokens"] == expected + 100, "it told no usage"
    assert line["end_reason"] == "ok"
    assert line["prompt_exact"] is False
    await house.at_rest()


async def test_a_new_tokenizer_is_fetched_when_an_answer_names_it(open_house: Open) -> None:
    house = await open_house(bundle=None)
    house.engine.script = unary()
    async with house.chat():
        pass
    house.engine.bundle = byte_bundle()
    async with house.chat():
        pass
    known = house.gateway.engines.of(house.gateway.config.models[0])
    await until(lambda: known.tokenizer is not None and known.tokenizer.hash == byte_bundle().hash)
    async with house.chat():
        pass
    assert house.engine.seen[-1].body["penstock"]["tokenizer"] == byte_bundle().hash


@pytest.mark.parametrize(("words", "with_ids"), [(20_000, True), (150_000, True), (160_000, False)])
async def test_a_long_prompt_goes_through_with_its_ids_while_there_is_room(
    open_house: Open, words: int, with_ids: bool
) -> None:
    house = await open_house(max_model_len=10_000_000)
    house.engine.script = unary()
    text = "water " * words  # a token for each byte
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    data, url = io.BytesIO(msgspec.json.encode(body)), f"{house.url}/v1/chat/completions"
    room = 5_000_000 if with_ids else 4_000_000
    with unittest.mock.patch("gateway.outbound.BODY_LEN_MAX", room):
        async with house.client.post(url, data=data, headers=house.headers) as answer:
            assert answer.status == 200
    sent = house.engine.seen[0].body
    assert sent["messages"][0]["content"] == text
    assert ("penstock" in sent) is with_ids
    assert (await house.line())["reserved_tokens"] > len(text)


async def test_what_is_reserved(house: House) -> None:
    house.engine.script = unary()
    for fields in (
        {"max_tokens": 7},
        {"max_tokens": 7, "n": 3},
        {},
        {"max_completion_tokens": 9, "max_tokens": 7},
    ):
        async with house.chat(fields):
            pass
    reserved = [line["reserved_tokens"] - len(PROMPT) for line in await house.lines(4)]
    assert reserved == [7, 21, 1024, 9]


@pytest.mark.parametrize("code", ["queue_full", "not_ready"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_replica_that_refuses_at_its_door_is_passed_over(
    open_house: Open, code: str, streaming: bool
) -> None:
    async with FakeEngine(bundle=byte_bundle()) as full:
        full.script = refusal(503, code)
        house = await open_house(full.url)
        house.engine.script = stream(chunk("a")) if streaming else unary()
        for _ in range(2):  # equals take turns: one of the two comes to the full one first
            async with house.chat(stream=streaming) as answer:
                assert answer.status == 200
                await answer.read()
        assert full.seen
        assert len(house.engine.seen) == 2
        lines = await house.lines(2)
        assert sum(line["attempts"] for line in lines) == len(full.seen) + 2
        assert all(line["end_reason"] == "ok" and line["settled_tokens"] == 13 for line in lines)
        await house.at_rest()


@pytest.mark.parametrize(("code", "asked"), [("queue_full", 2), ("not_ready", 3)])
async def test_a_crowd_is_not_sent_from_door_to_door(open_house: Open, code: str, asked: int) -> None:
    async with FakeEngine(bundle=byte_bundle()) as second, FakeEngine(bundle=byte_bundle()) as third:
        house = await open_house(second.url, third.url)
        for engine in (house.engine, second, third):
            engine.script = refusal(503, code, retry_after="7")
        async with house.chat() as answer:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "7"
        line = await house.line()
        assert (line["attempts"], line["error_code"], line["settled_tokens"]) == (asked, code, 0)
        await house.at_rest()


async def test_all_that_the_engine_says_of_its_time_is_in_the_line(house: House) -> None:
    times = {"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0, "preempted_ms": 4.0, "stalled_ms": 5.0}
    end = msgspec.structs.replace(
        Closing(end_reason="length", prompt_tokens=10, completion_tokens=3, preemptions=6), **times
    )
    house.engine.script = unary(end=end)
    async with house.chat() as answer:
        assert answer.status == 200
    line = await house.line()
    told = {name.removeprefix("engine_"): line[name] for name in line if name.startswith("engine_")}
    assert told == times | {"end_reason": "length", "preemptions": 6}


# -- probes, metrics, drain -----------------------------------------------------------------------


async def test_a_name_that_chat_answers_is_a_model_by_itself(open_house: Open) -> None:
    """`*` takes any name, in either place."""
    house = await open_house(model={"aliases": ["*"]})
    async with house.chat(model="made-up") as answer:
        assert answer.status == 200
    async with house.get("/v1/models/made-up") as answer:
        assert (await answer.json())["id"] == "made-up"
    async with house.get("/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["tiny"]


@pytest.mark.parametrize(("chunk_len", "status"), [(1, 400), (64, 400), (2048, 200)])
async def test_a_body_in_chunks_of_a_few_bytes_is_refused(house: House, chunk_len: int, status: int) -> None:
    """Each costs as much as a large one. The long prompt of the second is what is refused there."""
    text = "x" * (20_000 if chunk_len < 2048 else 2_000)
    body = msgspec.json.encode({**CHAT, "messages": [{"role": "user", "content": text}]})
    pieces = [body[i : i + chunk_len] for i in range(0, len(body), chunk_len)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    await writer.drain()
    writer.write(framed)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert answer.split(b" ", 2)[1] == b"%d" % status
    writer.close()
    line = await house.line()
    assert (line.get("error_code") == "context_length_exceeded") == (chunk_len == 64)


async def test_probes_are_open(house: House) -> None:
    for path in ("/livez", "/readyz", "/startupz"):
        async with house.client.get(house.url + path) as answer:
            assert answer.status == 200
            assert answer.headers["x-request-id"]


async def test_metrics_are_on_the_admin_port_alone(open_house: Open) -> None:
    house = await open_house(admin={"port": 0})
    house.engine.script = unary()
    async with house.chat():
        pass
    await house.line()
    async with house.client.get(f"http://127.0.0.1:{house.gateway.admin_port}/metrics") as answer:
        text = await answer.text()
    assert 'penstock_gateway_requests_total{end_reason="ok",endpoint="/v1/chat/completions"' in text
    assert "penstock_gateway_requests_in_flight 0.0" in text
    async with house.get("/metrics") as answer:
        assert answer.status == 404


async def test_open_streams_finish_while_the_gateway_drains(house: House) -> None:
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on, chunk("b"))
    async with house.chat(stream=True) as answer:
        drain = asyncio.create_task(house.gateway.drain())
        await until(lambda: not house.gateway.lifecycle.is_ready)
        async with house.client.get(house.url + "/readyz") as probe:
            assert probe.status == 503
        async with house.client.get(house.url + "/livez") as probe:
            assert probe.status == 200
        async with house.chat() as refused:
            assert refused.status == 503
            assert refused.headers["x-should-retry"] == "true"
        assert not drain.done()
        go_on.set()
        assert await answer.read() == chunk("a") + chunk("b") + DONE
    await drain


async def test_what_outlasts_the_drain_is_told_so(open_house: Open) -> None:
    house = await open_house(timeouts={"drain_s": 0.05})
    house.engine.script = stream(chunk("a"), asyncio.Event())
    async with house.chat(stream=True) as answer:
        await house.gateway.drain()
        body = await answer.read()
    assert b"gateway_stopped" in body
    assert DONE not in body
    assert (await house.line())["end_reason"] == "drain"
    await house.at_rest()


async def test_more_requests_than_allowed_are_refused_at_once(open_house: Open) -> None:
    house = await open_house(limits={"live_max": 1})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    async with house.chat(stream=True) as answer:
        async with house.chat() as refused:
            assert refused.status == 503
            assert (await error_of(refused))["code"] == "queue_full"
        go_on.set()
        await answer.read()


async def test_idle_connections_keep_nobody_out(open_house: Open) -> None:
    house = await open_house(limits={"connections_max": 2})
    held = [await asyncio.open_connection("127.0.0.1", house.gateway.port) for _ in range(20)]
    async with house.get("/v1/models") as answer:
        assert answer.status == 200
    async with asyncio.timeout(PATIENCE_S):
        for reader, _ in held[:-1]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    await until(lambda: "gateway.connections_full" in house.log.getvalue())
    assert house.log.getvalue().count("gateway.connections_full") == 1
    for _, writer in held:
        writer.transport.abort()


async def test_where_every_connection_has_a_request_a_new_one_is_closed(open_house: Open) -> None:
    house = await open_house(limits={"connections_max": 1})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    async with house.chat(stream=True) as answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()
        go_on.set()
        assert (await answer.read()).endswith(DONE)


async def test_nothing_that_was_said_is_logged(house: House) -> None:
    house.engine.script = stream(chunk("canary-answer"))
    async with house.chat(stream=True, messages=[{"role": "user", "content": "canary-prompt"}]) as answer:
        await answer.read()
    async with house.chat(messages=[{"role": "user", "content": ["canary-prompt"]}]) as answer:
        assert answer.status == 400
        assert "canary" not in await answer.text()
    await house.lines(2)
    assert "canary" not in house.log.getvalue()
    assert KEY not in house.log.getvalue()
