"""Decisions through the gateway: counted and charged, at engines of ours that decide and of other makes."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from shared.text.tokenizer import Tokenizer
from shared.wire import sse
from tests.gateway.conftest import House, Open, error_of
from tests.gateway.fake_engine import Script, Seen, byte_bundle, closing

ABLE = {"tools": False, "reasoning": False, "structured_output": False, "decisions": True}
PREDICATE = {"type": "predicate", "instructions": "It is true."}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": False}]}
pytestmark = pytest.mark.hop("http2")


def decided(seen: Seen, tokens: int) -> Script:
    answers = [{"type": "predicate", "name": None, "probability": 0.5} for _ in seen.body["questions"]]
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(answers),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + len(answers),
    }
    body = {"model": "tiny", "answers": answers, "usage": usage}
    told = sse.encode_closing(closing(prompt=tokens, completion=0)).decode()
    headers = {sse.CLOSING_HEADER: told} if "penstock" in seen.body else {}
    return Script([msgspec.json.encode(body)], 200, "application/json", headers)


async def ours(open_house: Open, **sections: Any) -> House:
    house: House = await open_house(capabilities=ABLE, **sections)
    house.engine.script = lambda seen: decided(seen, sum(map(len, seen.body["penstock"]["prompt_ids"])))
    return house


async def theirs(open_house: Open, **sections: Any) -> House:
    house: House = await open_house(bundle=None, **sections)
    house.engine.script = lambda seen: decided(seen, 9 * len(seen.body["questions"]))
    return house


def ask(house: House, **fields: Any) -> aiohttp.client._RequestContextManager:
    body = {"model": "tiny", "input": "hi", "questions": [PREDICATE, CHOICE], **fields}
    return house.client.post(f"{house.url}/v1/decisions", json=body, headers=house.headers)


async def test_an_engine_of_ours_is_sent_what_was_counted(open_house: Open) -> None:
    house = await ours(open_house, tenant={"limits": {"tokens_per_min": 100_000}})
    async with ask(house) as answer:
        assert answer.status == 200
        assert len((await answer.json())["answers"]) == 2
    [seen] = house.engine.seen
    decode = Tokenizer(byte_bundle()).decode
    pieces = [decode(ids) for ids in seen.body["penstock"]["prompt_ids"]]
    assert pieces == [
        "user:hi\n\n",
        "Is the following true? It is true.\nAnswer with Y or N only.\nassistant:",
        'Question: Which?\nA: "a"\nB: false\nAnswer with the letter of one option only.\nassistant:',
    ]
    tokens = sum(map(len, pieces))
    line = await house.line()
    told = line["reserved_tokens"], line["settled_tokens"], line["prompt_tokens"], line["completion_tokens"]
    assert told == (tokens, tokens, tokens, 0), "what they share counts once, and nothing is generated"
    await house.at_rest()


async def test_another_make_is_sent_the_shapes_alone(open_house: Open) -> None:
    house = await theirs(open_house, tenant={"limits": {"tokens_per_min": 100_000}})
    part = {"type": "input_text", "text": "hi", "image_url": "http://10.0.0.1/", "made_up": 1}
    given = [{"role": "user", "content": [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}}]}]
    question = {**CHOICE, "instructions": [{**part}], "weight": 2}
    fields = {
        "safety_identifier": "u",
        "prompt_cache_options": {"ttl": "30m"},
        "temperature": 1,
        "max_tokens": 9,
    }
    async with ask(house, input=given, questions=[question], **fields) as answer:
        assert answer.status == 200
        left_out = set(answer.headers["x-penstock-ignored-fields"].split(", "))
    assert left_out == {
        *("temperature", "max_tokens", "prompt_cache_options"),
        *("input.content.made_up", "questions.instructions.made_up", "questions.weight"),
    }
    [seen] = house.engine.seen
    bare = {"type": "input_text", "text": "hi"}
    assert seen.body == {
        "model": "tiny",
        "input": [{"role": "user", "content": [bare]}],
        "questions": [{**CHOICE, "instructions": [bare]}],
        "safety_identifier": "u",
    }
    line = await house.line()
    assert (line["settled_tokens"], line["completion_tokens"]) == (10, 1), "as it tells"
    await house.at_rest()


async def test_what_another_make_may_compute_is_reserved(open_house: Open) -> None:
    house = await theirs(open_house, tenant={"limits": {"tokens_per_min": 1_000_000}})
    async with ask(house, input="x" * 3000, questions=[PREDICATE] * 10) as answer:
        assert answer.status == 200
    assert (await house.line())["reserved_tokens"] > 10 * 1000, "it may read the input for each question"
    await house.at_rest()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"questions": [PREDICATE, {**PREDICATE, "instructions": "x" * 500}]},
            "questions[1]",
            "context_length_exceeded",
        ),
        ({"input": "x" * 700}, "input", "context_length_exceeded"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(200)]}]},
            "questions[0].choices",
            "invalid_value",
        ),
    ],
)
async def test_what_cannot_be_decided_is_named_before_anything_is_sent(
    open_house: Open, fields: dict[str, Any], param: str, code: str
) -> None:
    house = await ours(open_house, max_model_len=400)
    async with ask(house, **fields) as answer:
        error = await error_of(answer)
    assert (answer.status, error["code"], error["param"]) == (400, code, param)
    assert not house.engine.seen
    await house.at_rest()
