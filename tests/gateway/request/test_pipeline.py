"""One request through all stages, against an engine that plays a script."""

from __future__ import annotations

import asyncio
import io
import re
import unittest.mock

import msgspec
import pytest

from gateway.admission.tokens import estimate_slices
from gateway.request import pipeline
from gateway.request.exchange import ENGINE_TIMING_LEN_MAX, IGNORED_LEN_MAX
from gateway.request.record import CALLS, TOKENS
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.validation import INLINE_LEN_MAX
from shared.fairness.fair_threads import at_once
from shared.wire.causes import Cause, CauseCode
from shared.wire.ids import IGNORED_FIELDS_HEADER
from shared.wire.sse import Closing
from tests.gateway.conftest import CONVERSATIONS, OTHER_KEY, PROMPT, House, Open, error_of, until
from tests.gateway.fake_engine import FakeEngine, Script, byte_bundle, chunk, refusal, stream, unary

pytestmark = pytest.mark.both_protocols

DONE = b"data: [DONE]\n\n"
# -- what passes ----------------------------------------------------------------------------------


async def test_a_stream_is_relayed_byte_for_byte(house: House) -> None:
    house.engine.script = stream(chunk("a"), chunk("b"))
    async with house.chat(stream=True) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
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


@pytest.mark.parametrize("is_ours", [True, False])
async def test_the_line_says_how_long_the_body_was(open_house: Open, is_ours: bool) -> None:
    house = await open_house(bundle=byte_bundle() if is_ours else None)
    turns = [asyncio.Event() for _ in range(3)]
    house.engine.script = stream(chunk("a"), turns[0], chunk("b"), turns[1], chunk("c"), turns[2])
    body = b""
    async with house.chat(stream=True) as answer:
        for turn in turns:  # an event that comes alone is passed on as it came
            body += await answer.content.readuntil(b"\n\n")
            turn.set()
        body += await answer.read()
    assert (await house.line())["body_len"] == len(body)


async def test_a_request_that_waits_for_its_engine_holds_what_was_sent_alone(open_house: Open) -> None:
    """Not its body, nor what was made of it, which is dozens of times as much."""
    house = await open_house()
    begin = asyncio.Event()
    house.engine.script = stream(begin, chunk("a"))
    messages = [{"role": "user", "content": "x" * 3_000}]
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(house.chat(stream=True, messages=messages, max_tokens=1).__aenter__())
        await until(lambda: bool(house.engine.seen))
        held = house.gateway._edge._pipeline._memory.held
        begin.set()
    asked.result().release()
    assert 0 < held <= 3_000 + 8 * 3_000, "the text, and the ids that are sent along"


async def test_a_unary_answer_is_relayed(house: House) -> None:
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


async def test_what_no_message_has_is_named_and_goes_to_no_engine(house: House) -> None:
    part = {"type": "text", "text": "hi"}
    messages = [
        {"role": "user", "content": [{**part, "uuid": "1", "image_url": "http://x"}], "colour": "red"}
    ]
    async with house.chat(messages=messages, stream=True) as answer:
        named = "messages.colour, messages.content.uuid, messages.content.image_url"
        assert answer.headers["x-penstock-ignored-fields"] == named
        await answer.read()
    assert house.engine.seen[0].body["messages"] == [{"role": "user", "content": [part]}]


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
    assert seen.headers["x-penstock-service-tier"] == "default", "nobody is above others unasked"
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


async def test_what_an_engine_tells_of_itself_is_bounded(house: House) -> None:
    times = ", ".join(f"part{number};dur=1.5" for number in range(ENGINE_TIMING_LEN_MAX))
    names = f"field, {'?, ' * (IGNORED_LEN_MAX // 3)}late"
    told = {"server-timing": times[: 2 * ENGINE_TIMING_LEN_MAX], IGNORED_FIELDS_HEADER: names}
    house.engine.script = Script(stream(chunk("a")).steps, headers=told)
    async with house.chat(stream=True, response_format={"type": "json_object"}) as answer:
        timing, ignored = answer.headers["server-timing"], answer.headers[IGNORED_FIELDS_HEADER]
    assert 0 < timing.count("engine-part") <= times[:ENGINE_TIMING_LEN_MAX].count("part")
    assert ignored == "field"


async def test_a_long_body_is_validated_on_a_thread(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("on the event loop")

    monkeypatch.setattr(pipeline, "validate", refuse)
    long = [{"role": "user", "content": "x" * INLINE_LEN_MAX}]
    async with house.chat(messages=long) as answer:
        assert answer.status != 500
    async with house.chat() as answer:
        assert answer.status == 500


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


async def test_a_model_with_the_alias_star_serves_any_name(open_house: Open) -> None:
    house = await open_house()
    url = house.engine.url
    starred = await open_house(models=[{"name": "tiny", "replicas": [url], "aliases": ["*"]}])
    starred.engine.script = unary()
    async with starred.chat(model="gpt-5.4") as answer:
        assert answer.status == 200
    async with starred.get("/v1/models") as answer:
        assert [m["id"] for m in (await answer.json())["data"]] == ["tiny"]


# -- counting -------------------------------------------------------------------------------------


async def test_without_a_tokenizer_prompts_are_estimated(open_house: Open) -> None:
    house = await open_house(bundle=None)
    house.engine.script = Script([chunk("a"), chunk("b"), DONE])
    async with house.chat(stream=True, max_tokens=100) as answer:
        assert await answer.read() == chunk("a") + chunk("b") + DONE
    assert "penstock" not in house.engine.seen[0].body
    chat = ChatRequest(model="tiny", messages=[ChatMessage("user", "hi")])
    expected = at_once(estimate_slices(chat, {}, 0)).prompt_tokens
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


@pytest.mark.parametrize(
    ("words", "room", "with_ids"),
    [
        pytest.param(20_000, 5_000_000, True, id="a long one"),
        pytest.param(43_000, 5_000_000, True, id="nearly as many ids as a body may have values"),
        pytest.param(44_000, 5_000_000, False, id="more ids than a body may have values"),
        pytest.param(43_000, 1_000_000, False, id="more bytes than a body may have"),
    ],
)
async def test_a_long_prompt_is_sent_with_its_token_ids_while_the_body_has_room(
    open_house: Open, words: int, room: int, with_ids: bool
) -> None:
    house = await open_house(max_model_len=10_000_000)
    house.engine.script = unary()
    text = "water " * words  # a token for each byte
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    data, url = io.BytesIO(msgspec.json.encode(body)), f"{house.url}/v1/chat/completions"
    with unittest.mock.patch("gateway.request.outbound.BODY_LEN_MAX", room):
        async with house.client.post(url, data=data, headers=house.headers) as answer:
            assert answer.status == 200
    sent = house.engine.seen[0].body
    assert sent["messages"][0]["content"] == text
    assert ("penstock" in sent) is with_ids
    assert (await house.line())["reserved_tokens"] > len(text)


async def test_the_reservation_is_the_prompt_and_the_maximum_of_every_choice(house: House) -> None:
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
async def test_a_request_is_retried_elsewhere_when_a_replica_refuses_it(
    open_house: Open, code: str, streaming: bool
) -> None:
    async with FakeEngine(bundle=byte_bundle()) as full:
        full.script = refusal(503, code)
        house = await open_house(full.url)
        house.engine.script = stream(chunk("a")) if streaming else unary()
        for i in range(CONVERSATIONS):
            async with house.chat(stream=streaming, prompt_cache_key=f"{i}") as answer:
                assert answer.status == 200
                await answer.read()
        assert full.seen
        assert len(house.engine.seen) == CONVERSATIONS
        lines = await house.lines(CONVERSATIONS)
        assert sum(line["attempts"] for line in lines) == len(full.seen) + CONVERSATIONS
        assert {line["route"] for line in lines if line["attempts"] == 2} == {"retry"}
        assert all(line["end_reason"] == "ok" and line["settled_tokens"] == 13 for line in lines)
        await house.at_rest()


@pytest.mark.parametrize(("code", "asked"), [("queue_full", 2), ("not_ready", 3)])
async def test_retries_after_a_full_queue_are_bounded(open_house: Open, code: str, asked: int) -> None:
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


async def test_reasoning_calls_and_grammars_are_in_line_and_metrics(house: House) -> None:
    told = {"reasoning_tokens": 2, "calls": 1, "grammar_ms": 1.5, "masks_ms": 60.0}
    end = msgspec.structs.replace(
        Closing(end_reason="ok", prompt_tokens=10, completion_tokens=3),
        causes=(Cause(code=CauseCode.MASKS, ms=60.0),),
        **told,
    )
    house.engine.script = unary(end=end)
    before = [TOKENS.value("tiny", "acme", "reasoning"), CALLS.value("tiny", "acme")]
    async with house.chat() as answer:
        assert answer.status == 200
    line = await house.line()
    assert (line["reasoning_tokens"], line["calls"]) == (2, 1)
    assert (line["engine_grammar_ms"], line["engine_masks_ms"]) == (1.5, 60.0)
    assert [cause["code"] for cause in line["causes"]] == ["masks"]
    after = [TOKENS.value("tiny", "acme", "reasoning"), CALLS.value("tiny", "acme")]
    assert [late - early for late, early in zip(after, before, strict=True)] == [2, 1]


async def test_the_engines_times_are_in_the_completed_line(house: House) -> None:
    times = {"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0, "preempted_ms": 4.0, "stalled_ms": 5.0}
    end = msgspec.structs.replace(
        Closing(end_reason="length", prompt_tokens=10, completion_tokens=3, preemptions=6), **times
    )
    house.engine.script = unary(end=end)
    async with house.chat() as answer:
        assert answer.status == 200
    line = await house.line()
    told = {name.removeprefix("engine_"): line[name] for name in line if name.startswith("engine_")}
    before = dict.fromkeys(("edge_ms", "body_ms", "validate_ms", "tokenize_ms", "handover_ms"), 0.0)
    assert told == before | times | {"end_reason": "length", "preemptions": 6, "swaps": 0}
