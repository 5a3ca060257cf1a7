"""Responses through the gateway: counted, charged, relayed, and refused in their own words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from gateway.config.edge import AdmissionConfig
from shared.wire import sse
from tests.described_responses import check_event, events_of
from tests.gateway.conftest import KEY, House, Open, error_of, until
from tests.gateway.endpoints import responses_scripts as scripts
from tests.gateway.endpoints.responses_scripts import THEIR_USAGE, opening, streamed, theirs, told
from tests.gateway.fake_engine import CUT, HEADERS, Script, closing

PROMPT = "user:hi\nassistant:"
pytestmark = pytest.mark.hop("http2")


@pytest.fixture
async def sdk(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(house: House, path: str = "/v1/responses", **fields: Any) -> aiohttp.client._RequestContextManager:
    body = {"model": "tiny", "input": "hi", **fields}
    return house.client.post(house.url + path, json=body, headers=house.headers)


async def data_of(house: House, **fields: Any) -> bytes:
    async with ask(house, stream=True, **fields) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


# -- our engines ----------------------------------------------------------------------------------


async def test_a_response_is_counted_and_charged(open_house: Open) -> None:
    house = await open_house(tenant={"limits": {"tokens_per_min": 1000}})
    house.engine.script = scripts.unary("a", "b")
    async with ask(house) as answer:
        assert (answer.status, (await answer.json())["id"]) == (200, scripts.ID)
        assert "x-ratelimit-limit-tokens" in answer.headers
    line = await house.line()
    assert (line["endpoint"], line["settled_tokens"]) == ("/v1/responses", 13)
    [seen] = house.engine.seen
    assert seen.path == "/v1/responses"
    assert [*map(len, seen.body["penstock"]["prompt_ids"])] == [len(PROMPT)]
    assert 0 < seen.body["max_output_tokens"] < 1000, "what may be generated is what was reserved"
    await house.at_rest()


async def test_a_stream_is_passed_on_as_it_is(house: House) -> None:
    house.engine.script = streamed("a", "b")
    assert await data_of(house) == b"".join(told("a", "b")) + sse.DONE
    line = await house.line()
    assert (line["settled_tokens"], line["end_reason"]) == (13, "ok")
    await house.at_rest()


async def test_it_opens_before_there_is_a_token(house: House) -> None:
    go = asyncio.Event()
    house.engine.script = streamed("a", before=[go])
    async with ask(house, stream=True) as answer:
        assert events_of(await answer.content.readany())[0]["type"] == "response.created"
        go.set()
        assert b"response.completed" in await answer.read()


async def test_a_stream_that_breaks_says_so_to_sdks_and_to_codex(house: House) -> None:
    sent = told("a", "b")[:6]
    house.engine.script = Script([*sent, CUT])
    data = await data_of(house)
    assert data.startswith(b"".join(sent))
    assert b"[DONE]" not in data
    seen = [json.loads(event.partition(b"\ndata: ")[2]) for event in data.split(b"\n\n") if event]
    *_, error, failed = seen
    for event in (error, failed):
        check_event(event)
    assert (error["type"], error["error"]["code"]) == ("error", "upstream_failed")
    assert error["error"]["request_id"] == (await house.line())["request_id"]
    assert failed["response"]["error"]["code"] == "server_error"
    numbers = [event["sequence_number"] for event in seen]
    assert numbers == sorted(set(numbers)), "the numbers go on"
    await house.at_rest()


async def test_an_error_that_ends_an_opening_is_passed_on(house: House) -> None:
    """It has begun, so that no status is left to say it."""
    error = {"message": "no", "type": "server_error", "code": "engine_failed", "param": None}
    event = sse.named_event(b"error", msgspec.json.encode({"type": "error", "error": error}))
    go, end = asyncio.Event(), sse.closing_comment(closing(reason="engine_failed"))
    house.engine.script = Script([b"".join(opening()), go, event, end])
    async with ask(house, stream=True) as answer:
        assert len(events_of(await answer.content.readany())) == 2
        go.set()
        data = await answer.read()
    assert b'"engine_failed"' in data
    assert b"[DONE]" not in data


async def test_the_sdk(house: House, sdk: openai.AsyncOpenAI) -> None:
    house.engine.script = scripts.unary("a", "b")
    assert (await sdk.responses.create(model="tiny", input="hi")).output_text == "ab"
    house.engine.script = streamed("a", "b")
    async with sdk.responses.stream(model="tiny", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == "ab"
    house.engine.script = Script([*told("a")[:5], CUT])
    broken = await sdk.responses.create(model="tiny", input="hi", stream=True)
    with pytest.raises(openai.APIError, match="broke off") as cut:
        [event async for event in broken]
    assert isinstance(cut.value.body, dict)
    assert cut.value.body["request_id"] == (await house.lines(3))[-1]["request_id"]
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="tiny", input="hi", store=True)
    assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve("resp_1")


async def test_tokens_are_counted_without_an_answer(house: House, sdk: openai.AsyncOpenAI) -> None:
    body = msgspec.json.encode({"object": "response.input_tokens", "input_tokens": 7})
    house.engine.script = Script([HEADERS, body], 200, "application/json")
    assert (await sdk.responses.input_tokens.count(model="tiny", input="hi")).input_tokens == 7
    line = await house.line()
    assert (line["endpoint"], line["settled_tokens"]) == ("/v1/responses/input_tokens", 0)
    async with ask(house, "/v1/responses/input_tokens", input=[{"type": "item_reference"}]) as answer:
        assert (await error_of(answer))["param"] == "input[0].type"


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/responses/resp_1", "not_found"),
        ("DELETE", "/v1/responses/resp_1", "not_found"),
        ("POST", "/v1/responses/resp_1/cancel", "not_found"),
        ("GET", "/v1/responses/resp_1/input_items", "not_found"),
        ("GET", "/v1/responses", "method_not_allowed"),
        ("GET", "/v1/response", "unknown_url"),
    ],
)
async def test_nothing_is_stored(house: House, method: str, path: str, code: str) -> None:
    async with house.client.request(method, house.url + path, headers=house.headers) as answer:
        assert (await error_of(answer))["code"] == code
        assert answer.status == (405 if code == "method_not_allowed" else 404)
    async with house.client.request(method, house.url + path) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (401, "invalid_api_key")


async def test_unknown_fields_are_named_or_refused(open_house: Open) -> None:
    house = await open_house()
    house.engine.script = scripts.unary("a")
    item = {"role": "user", "content": "hi", "mood": 1}
    async with ask(house, input=[item], made_up=1) as answer:
        assert answer.headers["x-penstock-ignored-fields"] == "made_up, input.mood"
    strict = await open_house(admission=msgspec.to_builtins(AdmissionConfig(unknown_fields="refuse")))
    async with ask(strict, input=[item]) as answer:
        assert (await error_of(answer))["param"] == "input.mood"


# -- engines of other makes -----------------------------------------------------------------------


async def foreign(open_house: Open, *events: bytes) -> House:
    house: House = await open_house(bundle=None)
    house.engine.script = Script([*events])
    return house


@pytest.mark.parametrize("type_first", [True, False])
@pytest.mark.parametrize("done", [b"", sse.DONE])
@pytest.mark.parametrize("length", [3, 5_000, 100_000])
async def test_another_makes_stream_is_charged_by_its_last_event(
    open_house: Open, type_first: bool, done: bytes, length: int
) -> None:
    events = theirs("x" * length, type_first=type_first, done=done)
    house = await foreign(open_house, *events)
    data = await data_of(house, max_output_tokens=50)
    line = await house.line()
    assert (line["prompt_tokens"], line["completion_tokens"], line["settled_tokens"]) == (21, 4, 25)
    assert line["end_reason"] == "ok"
    blanked = b"".join(events).replace(b'"cached_tokens":16', b'"cached_tokens":0 ')
    assert data == blanked, "what was cached may be another tenant's"


async def test_another_makes_answer_is_charged_by_its_usage(open_house: Open) -> None:
    house = await open_house(bundle=None)
    body = msgspec.json.encode({"id": "resp_x", "output": [], "usage": THEIR_USAGE})
    house.engine.script = Script([body], 200, "application/json")
    async with ask(house, max_output_tokens=50) as answer:
        assert answer.status == 200
    assert (await house.line())["settled_tokens"] == 25


async def test_another_makes_stream_that_ends_early_is_charged_by_the_estimate(open_house: Open) -> None:
    house = await foreign(open_house, *theirs()[:2])
    data = await data_of(house, max_output_tokens=50)
    assert b"event: error\n" in data
    line = await house.line()
    assert line["settled_tokens"] == line["reserved_tokens"]


async def test_another_make_is_sent_its_own_fields_and_stores_nothing(open_house: Open) -> None:
    house = await foreign(open_house, *theirs())
    image = {"type": "input_image", "image_url": "data:image/png;base64,QUFB", "detail": "low"}
    item = {"role": "user", "content": [{"type": "input_text", "text": "hi"}, image], "mood": 1}
    tools = [{"type": "function", "name": "f", "strict": False, "server_url": "x"}, {"type": "web_search"}]
    fields: dict[str, Any] = {
        "instructions": "s",
        "text": {"verbosity": "high", "other": 1},
        "reasoning": {"effort": "low"},
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "client_metadata": {"a": "b"},
        "cache_salt": "s",
        "made_up": 1,
    }
    thought = {"type": "reasoning", "summary": []}
    sealed = thought | {"encrypted_content": "penstock:reasoning:Hm."}
    async with ask(house, stream=True, input=[item, sealed], tools=tools, **fields) as answer:
        left_out = set(answer.headers["x-penstock-ignored-fields"].split(", "))
    assert left_out == {
        *("input.mood", "tools.server_url", "text.other", "client_metadata", "cache_salt", "made_up")
    }
    [seen] = house.engine.seen
    del item["mood"]
    assert seen.body == {
        "model": "tiny",
        "stream": True,
        "store": False,
        "input": [item, thought | {"content": [{"type": "reasoning_text", "text": "Hm."}]}],
        "tools": [{"type": "function", "name": "f", "strict": False}],
        **{name: fields[name] for name in ("instructions", "reasoning", "tool_choice", "metadata")},
        "text": {"verbosity": "high"},
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0].type"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.1.1/"}]}
                ]
            },
            "input[0].content[0].image_url.url",
        ),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"usage": THEIR_USAGE}}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"\\u0075sage": THEIR_USAGE}}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "schema": {"usage": {"input_tokens": 1}}}}}, "text"),
    ],
)
async def test_another_make_is_not_sent_what_would_reach_further(
    open_house: Open, fields: dict[str, Any], param: str
) -> None:
    """What it has stored may be another tenant's. It fetches what it is told to, and repeats what it was
    sent."""
    house = await foreign(open_house, *theirs())
    body = json.dumps({"model": "tiny", "input": "hi", **fields}).replace("\\\\u", "\\u")
    async with house.client.post(f"{house.url}/v1/responses", data=body, headers=house.headers) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, param)
    assert not house.engine.seen


async def test_another_make_that_lacks_the_path_is_named_in_the_error(open_house: Open) -> None:
    house = await open_house(bundle=None)
    house.engine.script = Script([b'{"detail":"Not Found"}'], 404, "application/json")
    async with ask(house) as answer:
        told = await error_of(answer)
    assert (answer.status, told["code"]) == (404, "path_not_served")
    assert "/v1/responses" in told["message"]


async def test_a_caller_that_leaves_ends_the_request_at_the_engine(house: House) -> None:
    house.engine.script = streamed("a", before=[asyncio.Event()])
    async with ask(house, stream=True) as answer:
        await answer.content.readany()
        answer.close()
    await until(lambda: bool(house.engine.seen) and house.engine.seen[0].cancelled.is_set())
    assert (await house.line())["end_reason"] == "client_cancel"
    await house.at_rest()
