"""Embeddings through the gateway: counted and charged, at engines of ours that embed and of other makes."""

from __future__ import annotations

import base64
import struct
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from shared.wire import sse
from tests.gateway.conftest import KEY, House, Open, error_of
from tests.gateway.fake_engine import Script, Seen, closing

VECTOR = [0.5, -1.0, 0.25]
pytestmark = pytest.mark.hop("http2")


def embedded(seen: Seen) -> Script:
    """What another make answers: for each input the same vector, in the form that was asked for."""
    given = seen.body["input"]
    count = 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
    packed: Any = VECTOR
    if seen.body.get("encoding_format") == "base64":
        packed = base64.b64encode(struct.pack("<3f", *VECTOR)).decode()
    data = [{"object": "embedding", "index": at, "embedding": packed} for at in range(count)]
    usage = {"prompt_tokens": 5 * count, "total_tokens": 5 * count}
    body = {"object": "list", "data": data, "model": "tiny", "usage": usage}
    return Script([msgspec.json.encode(body)], 200, "application/json")


ABLE = {"tools": False, "reasoning": False, "structured_output": False, "embeddings": True}


async def ours(open_house: Open, **sections: Any) -> House:
    """An engine of ours, whose tokenizer has a token for each byte."""

    def answer(seen: Seen) -> Script:
        script = embedded(seen)
        tokens = sum(map(len, seen.body["penstock"]["prompt_ids"]))
        told = sse.encode_closing(closing(prompt=tokens, completion=0)).decode()
        return Script(script.steps, 200, script.content_type, {sse.CLOSING_HEADER: told})

    house: House = await open_house(capabilities=ABLE, **sections)
    house.engine.script = answer
    return house


async def theirs(open_house: Open, **sections: Any) -> House:
    house: House = await open_house(bundle=None, **sections)
    house.engine.script = embedded
    return house


def ask(house: House, **fields: Any) -> aiohttp.client._RequestContextManager:
    body = {"model": "tiny", "input": "hi", **fields}
    return house.client.post(f"{house.url}/v1/embeddings", json=body, headers=house.headers)


@pytest.mark.parametrize(
    ("given", "count"), [("hi", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["x"] * 2048, 2048)]
)
async def test_every_form_of_input_is_passed_on_and_charged(open_house: Open, given: Any, count: int) -> None:
    house = await theirs(open_house, tenant={"limits": {"tokens_per_min": 100_000}})
    async with ask(house, input=given) as answer:
        assert answer.status == 200
        assert len((await answer.json())["data"]) == count
        assert "x-ratelimit-limit-tokens" in answer.headers
    [seen] = house.engine.seen
    assert (seen.path, seen.body) == ("/v1/embeddings", {"model": "tiny", "input": given})
    line = await house.line()
    assert (line["settled_tokens"], line["prompt_tokens"], line["completion_tokens"]) == (
        5 * count,
        5 * count,
        0,
    )
    assert line["reserved_tokens"] >= count
    await house.at_rest()


async def test_the_sdk(open_house: Open) -> None:
    house = await theirs(open_house)
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=0) as client:
        for form in ({}, {"encoding_format": "float"}):
            answer = await client.embeddings.create(model="tiny", input=["a", "b"], **form)
            assert [one.embedding for one in answer.data] == [VECTOR] * 2
            assert answer.usage.total_tokens == 10


async def test_an_engine_is_sent_its_own_fields_alone(open_house: Open) -> None:
    house = await theirs(open_house)
    fields = {"dimensions": 2, "truncate_prompt_tokens": -1, "user": "u", "encoding_format": "float"}
    async with ask(house, **fields, temperature=0.5, max_tokens=5, priority=-5, made_up=1) as answer:
        left_out = set(answer.headers["x-penstock-ignored-fields"].split(", "))
    assert left_out == {"temperature", "max_tokens", "priority", "made_up"}
    assert house.engine.seen[0].body == {"model": "tiny", "input": "hi", **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"stream": True}, "stream"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 100_000}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    open_house: Open, fields: dict[str, Any], param: str
) -> None:
    house = await theirs(open_house)
    async with ask(house, **fields) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, param)
    assert not house.engine.seen


async def test_an_input_that_is_too_long_is_the_engines_to_refuse(open_house: Open) -> None:
    house = await theirs(open_house)
    error = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    house.engine.script = Script([msgspec.json.encode({"error": error})], 400, "application/json")
    async with ask(house) as answer:
        assert (answer.status, (await error_of(answer))["message"]) == (400, "too long")
    assert (await house.line())["settled_tokens"] == 0


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", [[71, 72]]),
        (["a", "ab"], [[64], [64, 65]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1]] * 2048, [[1]] * 2048),
    ],
)
async def test_an_engine_of_ours_is_sent_the_ids_that_were_counted(
    open_house: Open, given: Any, ids: list[list[int]]
) -> None:
    house = await ours(open_house, tenant={"limits": {"tokens_per_min": 100_000}})
    async with ask(house, input=given, dimensions=2, encoding_format="base64") as answer:
        assert answer.status == 200
        assert len((await answer.json())["data"]) == len(ids)
    [seen] = house.engine.seen
    assert (seen.body["input"], seen.body["dimensions"]) == (given, 2)
    assert [len(one) for one in seen.body["penstock"]["prompt_ids"]] == [len(one) for one in ids]
    if not isinstance(given, str) and not isinstance(given[0], str):
        assert seen.body["penstock"]["prompt_ids"] == ids
    tokens = sum(map(len, ids))
    line = await house.line()
    told = [line[name] for name in ("reserved_tokens", "settled_tokens", "prompt_tokens")]
    assert (told, line["completion_tokens"]) == ([tokens] * 3, 0)
    assert line["endpoint"] == "/v1/embeddings"
    await house.at_rest()


async def test_what_an_input_costs_is_counted_before_an_engine_is_asked(open_house: Open) -> None:
    house = await ours(open_house, tenant={"limits": {"tokens_per_min": 100}})
    async with ask(house, input=["x" * 60, "y" * 60]) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (429, "request_exceeds_quota")
    async with ask(house, input=["x" * 60, "y" * 40]) as answer:
        assert answer.status == 200
    async with ask(house, input="x") as answer:
        assert answer.status == 429
    assert len(house.engine.seen) == 1
    await house.at_rest()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("x" * 65, "input"),
        ([7] * 65, "input"),
        (["x", "x" * 65], "input[1]"),
        ([[7] * 65, [7]], "input[0]"),
        (["x" * 2000, "x"], "input[0]"),
    ],
)
async def test_an_input_that_is_too_long_for_ours_is_named(open_house: Open, given: Any, param: str) -> None:
    house = await ours(open_house, max_model_len=64)
    async with ask(house, input=given) as answer:
        error = await error_of(answer)
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert not house.engine.seen
    async with ask(house, input=["x" * 64]) as answer:
        assert answer.status == 200


async def test_what_is_cut_is_counted_as_it_is_cut(open_house: Open) -> None:
    house = await ours(open_house, max_model_len=64)
    for number, (cut, tokens) in enumerate(((10, 10), (-1, 64)), 1):
        async with ask(house, input=["x" * 3000, "ab"], truncate_prompt_tokens=cut) as answer:
            assert answer.status == 200
        assert [len(one) for one in house.engine.seen[-1].body["penstock"]["prompt_ids"]] == [tokens, 2]
        assert (await house.lines(number))[-1]["settled_tokens"] == tokens + 2
    async with ask(house, input="x", truncate_prompt_tokens=65) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, "truncate_prompt_tokens")


async def test_a_model_that_only_embeds_is_asked_for_nothing_else(open_house: Open) -> None:
    house: House = await open_house(capabilities={**ABLE, "generation": False})
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"prompt": "hi"}),
        ("responses", {"input": "hi"}),
    ):
        url = f"{house.url}/v1/{path}"
        async with house.client.post(url, json={"model": "tiny", **body}, headers=house.headers) as answer:
            assert (answer.status, (await error_of(answer))["code"]) == (404, "path_not_served")
    assert not house.engine.seen
