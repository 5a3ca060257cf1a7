"""Responses that a gateway keeps: answered, retrieved, gone on with, deleted, and each tenant's own."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from gateway.identity.keys import hash_key
from gateway.request import stored_responses
from gateway.stored.memory import MemoryResponses
from gateway.stored.redis import RedisResponses
from gateway.stored.responses import KeptResponse, NoRoom
from shared.apis.responses.answer import OutputMessage, OutputReasoning, OutputText, ReasoningText
from shared.apis.responses.stored import replay
from shared.wire import sse
from shared.wire.ids import TenantId
from tests.described_responses import check_event, events_of
from tests.gateway.conftest import KEY, OTHER_KEY, House, Open, error_of, until
from tests.gateway.endpoints import responses_scripts as scripts
from tests.gateway.endpoints.responses_scripts import THEIR_USAGE, theirs
from tests.gateway.fake_engine import CUT, HEADERS, Script, Seen, Step, closing
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.redis_server import RedisServer

ACME = TenantId("acme")
UNKNOWN = "resp_0123456789"
pytestmark = pytest.mark.hop("http2")


class Engine:
    """What an engine of ours answers: the last text of the input once more, by ids of its own."""

    def __init__(self) -> None:
        self.ids = (f"resp_{number:024x}" for number in itertools.count(1))
        self.before: tuple[Step, ...] = ()
        self.after: tuple[Step, ...] = ()
        self.text = ""
        self.output: list[Any] | None = None

    def __call__(self, seen: Seen) -> Script:
        id_ = next(self.ids)
        text = self.text or f"said {id_[-2:]}"
        message = OutputMessage(id=f"msg_{id_[5:]}00", status="completed", content=[OutputText(text)])
        whole = msgspec.structs.replace(
            scripts.response("x"), id=id_, output=self.output or [message], metadata={"a": '"store":true'}
        )
        if not seen.body.get("stream"):
            headers = {sse.CLOSING_HEADER: sse.encode_closing(closing()).decode()}
            steps = [HEADERS, *self.before, msgspec.json.encode(whole)]
            return Script(steps, 200, "application/json", headers)
        first, second, *rest = scripts.told(text, whole=whole)
        return Script(
            [first + second, *self.before, *rest, *self.after, sse.DONE, sse.closing_comment(closing())]
        )


@pytest.fixture(params=["memory", "redis"])
async def house(request: pytest.FixtureRequest, open_house: Open, redis: RedisServer) -> House:
    return await kept_house(open_house, redis, store=request.param)


@pytest.fixture
async def quick(open_house: Open, redis: RedisServer) -> House:
    """One with memory alone, where the store makes no difference."""
    return await kept_house(open_house, redis)


async def kept_house(
    open_house: Open, redis: RedisServer, *, store: str = "memory", **sections: Any
) -> House:
    responses = {"store": store, **sections.pop("responses", {})}
    if store == "redis":
        sections["redis"] = {"url": redis.url, "key_prefix": f"test-{uuid.uuid4().hex}"}
    house: House = await open_house(responses=responses, **sections)
    house.engine.script = Engine()
    return house


@pytest.fixture
async def sdk(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def script_of(house: House) -> Engine:
    assert isinstance(house.engine.script, Engine)
    return house.engine.script


async def ask(house: House, key: str = KEY, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "hi", **fields}
    async with house.client.post(
        f"{house.url}/v1/responses", json=body, headers={"authorization": f"Bearer {key}"}
    ) as answer:
        assert answer.status == 200, await answer.text()
        if body.get("stream"):
            events = events_of(await answer.read())
            for event in events:
                check_event(event)
            told: dict[str, Any] = events[-1]["response"]
            return told
        whole: dict[str, Any] = await answer.json()
        return whole


def call(
    house: House, path: str, method: str = "GET", key: str = KEY
) -> aiohttp.client._RequestContextManager:
    headers = {"authorization": f"Bearer {key}"}
    return house.client.request(method, f"{house.url}/v1/responses/{path}", headers=headers)


async def told(house: House, path: str, method: str = "GET") -> dict[str, Any]:
    async with call(house, path, method) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def is_kept(house: House, id_: str) -> bool:
    async with call(house, id_) as answer:
        assert answer.status in (200, 404)
        return answer.status == 200


def sent(house: House) -> dict[str, Any]:
    """What the engine was sent last."""
    return house.engine.seen[-1].body


def text_of(body: dict[str, Any]) -> str:
    """The prompt in the ids that the engine was sent: each is a byte."""
    [ids] = body["penstock"]["prompt_ids"]
    return bytes(IDS.index(one) for one in ids).decode()


def _ids() -> list[int]:
    """The id of each byte in the fake engine's tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    order = {char: at for at, char in enumerate(sorted(ByteLevel.alphabet()))}
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (at for at in range(256, 512))
    chars = [chr(one) if one in plain else chr(next(others)) for one in range(256)]
    return [order[char] for char in chars]


IDS = _ids()


# -- kept, and told -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [None, True])
async def test_what_was_answered_is_kept(house: House, stream: bool, store: bool | None) -> None:
    answered = await ask(house, stream=stream, store=store)
    assert answered["store"] is True
    assert await told(house, answered["id"]) == answered
    assert "store" not in sent(house), "engines keep nothing"
    line = (await house.lines(2))[0]
    assert line["stored"] == "kept"
    await house.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_to_be_kept_is_not(house: House, stream: bool) -> None:
    answered = await ask(house, stream=stream, store=False)
    assert answered["store"] is False
    assert not await is_kept(house, answered["id"])
    assert "stored" not in (await house.lines(2))[0]


async def test_all_events_of_a_stream_say_that_it_is_kept(quick: House) -> None:
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        data = await answer.read()
    assert data.endswith(sse.DONE)
    events = events_of(data)
    held = [event["response"]["store"] for event in events if "response" in event]
    assert held == [True, True, True]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]


async def test_a_caller_that_has_its_answer_can_refer_to_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last event is sent when the response is kept, and not before."""
    go, store = asyncio.Event(), house.gateway._responses.store
    assert store is not None
    put = store.put

    async def late(*args: Any) -> None:
        await go.wait()
        await put(*args)

    monkeypatch.setattr(store, "put", late)
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with house.client.post(f"{house.url}/v1/responses", json=body, headers=house.headers) as answer:
        seen = b""
        while b"output_item.done" not in seen:
            seen += await answer.content.readany()
        assert b"response.completed" not in seen
        go.set()
        seen += await answer.read()
    assert await is_kept(house, events_of(seen)[-1]["response"]["id"])


async def test_the_sdk(house: House, sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.responses.create(model="tiny", input="hi", instructions="be brief")
    second = await sdk.responses.create(model="tiny", input="more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert (await sdk.responses.retrieve(second.id)).output_text == second.output_text
    items = [item async for item in sdk.responses.input_items.list(second.id, order="asc", limit=2)]
    said = [item.model_dump()["content"][0]["text"] for item in items]
    assert said == ["hi", first.output_text, "more"]
    newest = [item.id async for item in sdk.responses.input_items.list(second.id, limit=1)]
    assert newest == [item.id for item in reversed(items)]
    async with sdk.responses.stream(model="tiny", input="again", previous_response_id=second.id) as stream:
        third = await stream.get_final_response()
    assert third.previous_response_id == second.id
    replayed = [event async for event in await sdk.responses.retrieve(third.id, stream=True)]
    assert replayed[-1].type == "response.completed"
    async with sdk.responses.stream(response_id=third.id) as again:
        assert (await again.get_final_response()).output_text == third.output_text
    await sdk.responses.delete(first.id)
    for refused in (
        sdk.responses.retrieve(first.id),
        sdk.responses.delete(first.id),
        sdk.responses.input_items.list(first.id),
        sdk.responses.cancel(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await refused
    with pytest.raises(openai.BadRequestError, match="complete") as complete:
        await sdk.responses.cancel(third.id)
    assert complete.value.code == "invalid_value"


# -- gone on with ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_with_another(house: House, stream: bool) -> None:
    """It is sent, counted and charged as if its caller had sent the whole conversation."""
    prompts = []
    previous: dict[str, Any] = {}
    for turn in ("hi", [{"role": "user", "content": "more"}], "enough"):
        answered = await ask(house, input=turn, stream=stream, **previous)
        assert answered["previous_response_id"] == previous.get("previous_response_id")
        assert "previous_response_id" not in sent(house)
        prompts.append(text_of(sent(house)))
        previous = {"previous_response_id": answered["id"]}
    assert prompts[-1] == (
        "user:hi\nassistant:said 01\nuser:more\nassistant:said 02\nuser:enough\nassistant:"
    )
    for earlier, later in itertools.pairwise(prompts):
        assert later.startswith(earlier), "what was computed for one turn is found by the next"
    said = [item["content"] for item in sent(house)["input"]]
    assert [one if isinstance(one, str) else one[0]["text"] for one in said] == [
        *("hi", "said 01", "more", "said 02", "enough")
    ]


async def test_what_a_conversation_costs_is_reserved_and_bounded(
    open_house: Open, redis: RedisServer
) -> None:
    tenant = {"limits": {"tokens_per_min": 400}}
    house = await kept_house(open_house, redis, tenant=tenant)
    first = await ask(house, input="x" * 250, max_output_tokens=20)
    body = {"model": "tiny", "input": "y" * 100, "previous_response_id": first["id"], "max_output_tokens": 20}
    async with house.client.post(f"{house.url}/v1/responses", json=body, headers=house.headers) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (429, "request_exceeds_quota")
    del body["previous_response_id"]
    async with house.client.post(f"{house.url}/v1/responses", json=body, headers=house.headers) as answer:
        assert answer.status == 200
    await house.at_rest()


async def test_a_conversation_that_exceeds_the_context_is_refused(quick: House) -> None:
    first = await ask(quick, input="x" * 2500)
    body = {"model": "tiny", "input": "y" * 2500, "previous_response_id": first["id"]}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (400, "context_length_exceeded")


async def test_reasoning_and_calls_come_back_as_they_were(open_house: Open, redis: RedisServer) -> None:
    quick = await kept_house(open_house, redis, bundle=None)
    thought = OutputReasoning(
        id="rs_1", status="completed", summary=[], content=[ReasoningText("hm")], encrypted_content="x"
    )
    called = msgspec.json.decode(
        b'{"type":"function_call","id":"fc_1","status":"completed","call_id":"c","name":"f","arguments":"{}"}'
    )
    script_of(quick).output = [thought, called]
    first = await ask(quick, input=[{"role": "user", "content": "hi"}])
    brought = [{"type": "function_call_output", "call_id": "c", "output": "o"}]
    script_of(quick).output = None
    second = await ask(quick, input=brought, previous_response_id=first["id"])
    kinds = [item.get("type", "message") for item in sent(quick)["input"]]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    items = (await told(quick, f"{second['id']}/input_items?order=asc"))["data"]
    assert [item["type"] for item in items] == kinds
    assert len({item["id"] for item in items}) == 4


async def test_log_probabilities_do_not_come_back(quick: House) -> None:
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    text = {"type": "output_text", "text": "said", "annotations": [], "logprobs": [entry]}
    script_of(quick).output = [{"type": "message", "id": "msg_1", "role": "assistant", "content": [text]}]
    first = await ask(quick, top_logprobs=0, include=["message.output_text.logprobs"])
    assert (await told(quick, first["id"]))["output"][0]["content"][0]["logprobs"] == [entry]
    script_of(quick).output = None
    await ask(quick, previous_response_id=first["id"])
    assert b"logprob" not in msgspec.json.encode(sent(quick)["input"])


@pytest.mark.parametrize("store", [False, None])
async def test_one_that_is_not_kept_may_go_on_with_another(quick: House, store: bool | None) -> None:
    first = await ask(quick)
    second = await ask(quick, previous_response_id=first["id"], store=store, stream=True)
    assert second["previous_response_id"] == first["id"]
    assert second["store"] is (store is None)
    assert await is_kept(quick, second["id"]) is (store is None)


async def test_a_conversation_that_is_not_whole_cannot_be_gone_on_with(house: House) -> None:
    first = await ask(house)
    second = await ask(house, previous_response_id=first["id"])
    third = await ask(house, previous_response_id=second["id"])
    await told(house, first["id"], "DELETE")
    seen = len(house.engine.seen)
    for id_ in (UNKNOWN, first["id"], third["id"]):
        body = {"model": "tiny", "input": "more", "previous_response_id": id_}
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            async with house.client.post(house.url + path, json=body, headers=house.headers) as answer:
                error = await error_of(answer)
            assert (answer.status, error["code"]) == (400, "previous_response_not_found")
            assert error["param"] == "previous_response_id"
    assert len(house.engine.seen) == seen, "nothing was computed"
    assert (await told(house, third["id"])) == third, "it is there, without what was before it"
    await house.at_rest()


async def test_the_tokens_of_a_conversation_are_counted_without_an_answer(quick: House) -> None:
    first = await ask(quick)
    counted = {"object": "response.input_tokens", "input_tokens": 7}
    quick.engine.script = Script([HEADERS, msgspec.json.encode(counted)], 200, "application/json")
    body = {"model": "tiny", "input": "more", "previous_response_id": first["id"]}
    async with quick.client.post(
        f"{quick.url}/v1/responses/input_tokens", json=body, headers=quick.headers
    ) as answer:
        assert await answer.json() == counted
    assert len(sent(quick)["input"]) == 3


async def test_a_mistake_is_told_by_the_callers_own_places(quick: House) -> None:
    first = await ask(quick)
    called_ = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for given, param in (
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].type"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}], "input[0].arguments"),
        ([{"role": "user", "content": "q"}, called_], "input[1]"),
    ):
        body = {"model": "tiny", "input": given, "previous_response_id": first["id"]}
        async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
            assert (await error_of(answer))["param"] == param
    item = {"role": "user", "content": "hi", "mood": 1}
    body = {"model": "tiny", "input": [item], "previous_response_id": first["id"], "made_up": 1}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        assert answer.headers["x-penstock-ignored-fields"] == "made_up, input.mood"


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [100, 30_000, 70_000, 300_000])
async def test_long_answers_and_long_requests_are_kept(
    open_house: Open, redis: RedisServer, stream: bool, length: int
) -> None:
    """The events that repeat the request, and the one that has the answer, come in several pieces."""
    house = await kept_house(open_house, redis, store="redis", max_model_len=10**6)
    script_of(house).text = "x" * length
    answered = await ask(house, stream=stream, instructions="y" * length, input="z" * length)
    assert await told(house, answered["id"]) == answered
    await ask(house, previous_response_id=answered["id"], stream=stream)
    assert len(msgspec.json.encode(sent(house)["input"])) > 2 * length


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [9_000, 400_000])
@pytest.mark.parametrize("of", ["input", "answer"])
async def test_what_is_too_long_is_answered_and_not_kept(
    open_house: Open, redis: RedisServer, stream: bool, length: int, of: str
) -> None:
    bounds = {"response_len_max": 8 * 1024}
    house = await kept_house(open_house, redis, responses=bounds, max_model_len=10**6)
    script_of(house).text = "x" * length if of == "answer" else "a"
    answered = await ask(house, stream=stream, input="y" * length if of == "input" else "b")
    assert answered["store"] is False
    assert answered["output"][0]["content"][0]["text"] == script_of(house).text
    assert not await is_kept(house, answered["id"])
    assert (await house.lines(2))[0]["stored"] == "too_long"
    await house.at_rest()
    assert house.gateway._threads is not None
    assert not held(house)


def held(house: House) -> int:
    """Bytes that requests hold."""
    found: int = house.gateway._responses.memory.held
    return found


async def test_a_chain_of_answers_ends_where_a_request_would(open_house: Open, redis: RedisServer) -> None:
    house = await kept_house(open_house, redis, limits={"body_len_max": 64 * 1024}, max_model_len=10**6)
    body: dict[str, Any] = {"model": "tiny", "input": "x" * 20_000}
    kept = 0
    while True:
        async with house.client.post(f"{house.url}/v1/responses", json=body, headers=house.headers) as answer:
            if answer.status == 200:
                body["previous_response_id"] = (await answer.json())["id"]
                kept += 1
                continue
            error = await error_of(answer)
            break
    assert kept == 3
    assert (answer.status, error["param"]) == (400, "previous_response_id")
    assert not held(house)


async def test_no_room_is_no_error(quick: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise NoRoom

    monkeypatch.setattr(quick.gateway._responses.store, "put", full)
    assert (await ask(quick, stream=True))["store"] is False
    assert (await quick.line())["stored"] == "no_room"


async def test_what_answers_hold_is_a_part_of_the_tenants_memory(quick: House) -> None:
    share = quick.gateway._responses.memory
    share.acquire(ACME, share.most - 200_000)
    script_of(quick).text = "x" * 80_000
    assert (await ask(quick, stream=True))["store"] is False
    assert (await quick.line())["stored"] == "no_room"
    script_of(quick).text = ""
    assert (await ask(quick, stream=True))["store"] is True
    async with call(quick, UNKNOWN) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (503, "queue_full")
    share.release(ACME, share.most - 200_000)
    assert not held(quick)


async def test_calls_about_them_have_a_pace(
    open_house: Open, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "PER_S", 0.001)
    monkeypatch.setattr(stored_responses, "AT_ONCE", 2)
    quick = await kept_house(open_house, redis)
    for status in (404, 404, 429):
        async with call(quick, UNKNOWN, "DELETE") as answer:
            assert answer.status == status
    async with call(quick, UNKNOWN, key=OTHER_KEY) as answer:
        assert answer.status == 404


async def test_a_conversation_has_so_many_turns_at_most(open_house: Open, redis: RedisServer) -> None:
    quick = await kept_house(open_house, redis, max_model_len=10**6)
    store, previous = quick.gateway._responses.store, ""
    assert store is not None
    for number in range(600):
        items = b'[{"role":"user","content":"hi"}]'
        await store.put(ACME, KeptResponse(f"r{number}", previous, b"{}", b"[]", items))
        previous = f"r{number}"
    for last, status in (("r500", 200), ("r599", 400)):
        body = {"model": "tiny", "input": "more", "previous_response_id": last}
        async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
            assert answer.status == status, await answer.text()


async def test_ids_and_queries_are_bounded(quick: House) -> None:
    body = {"model": "tiny", "input": "more", "previous_response_id": "r" * 300}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        error = await error_of(answer)
    assert (error["code"], error["param"]) == ("invalid_value", "previous_response_id")
    id_ = (await ask(quick))["id"]
    async with call(quick, f"{id_}?{'&'.join(f'a{at}=b' for at in range(40))}") as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (400, "invalid_value")


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_redis_that_is_lost_costs_no_answer(open_house: Open, own: RedisServer, stream: bool) -> None:
    house = await kept_house(open_house, own, store="redis")
    first = await ask(house)
    own.kill()
    second = await ask(house, stream=stream)
    assert second["store"] is False
    assert second["output"]
    body = {"model": "tiny", "input": "more", "previous_response_id": first["id"]}
    async with house.client.post(f"{house.url}/v1/responses", json=body, headers=house.headers) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (503, "responses_unavailable")
        assert answer.headers["retry-after"]
    for path, method in (
        (first["id"], "GET"),
        (f"{first['id']}/input_items", "GET"),
        (first["id"], "DELETE"),
    ):
        async with call(house, path, method) as answer:
            assert (answer.status, (await error_of(answer))["code"]) == (503, "responses_unavailable")
    assert [line.get("stored") for line in await house.lines(6)][:2] == ["kept", "unavailable"]
    own.start()
    store = house.gateway._responses.store
    assert isinstance(store, RedisResponses)
    await until(lambda: store._links.of(ACME).is_up)
    third = await ask(house, stream=stream)
    assert await told(house, third["id"]) == third


async def test_a_stream_that_breaks_is_not_kept(quick: House) -> None:
    script_of(quick).after = (CUT,)
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        data = await answer.read()
    assert b"response.completed" not in data
    assert b"response.failed" in data
    store = quick.gateway._responses.store
    assert isinstance(store, MemoryResponses)
    assert not store._tenants
    assert not held(quick)


async def test_a_caller_that_leaves_holds_nothing(quick: House) -> None:
    script_of(quick).before = (asyncio.Event(),)
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        await answer.content.readany()
        answer.close()
    await quick.at_rest()
    assert not held(quick)
    store = quick.gateway._responses.store
    assert isinstance(store, MemoryResponses)
    assert not store._tenants


async def test_an_engines_error_is_told_as_ever(quick: House) -> None:
    error = {"message": "no", "type": "server_error", "code": "engine_failed", "param": None}
    quick.engine.script = Script([msgspec.json.encode({"error": error})], 500, "application/json")
    body = {"model": "tiny", "input": "hi"}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (500, "engine_failed")
    assert not held(quick)


# -- cancelled ------------------------------------------------------------------------------------


async def test_a_response_that_is_streamed_is_cancelled(quick: House) -> None:
    script_of(quick).before = (asyncio.Event(),)
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        id_ = events_of(await answer.content.readany())[0]["response"]["id"]
        async with call(quick, f"{id_}/cancel", "POST", OTHER_KEY) as theirs_:
            assert theirs_.status == 404
        cancelled = await told(quick, f"{id_}/cancel", "POST")
        assert (cancelled["id"], cancelled["status"]) == (id_, "cancelled")
        data = await answer.read()
    assert b"request_aborted" in data
    assert b"response.failed" in data
    async with call(quick, f"{id_}/cancel", "POST") as answer:
        assert answer.status == 404
    await quick.at_rest()


# -- whose it is ----------------------------------------------------------------------------------


async def test_another_tenants_is_one_that_there_is_not(house: House) -> None:
    answered = await ask(house)
    id_ = answered["id"]
    errors = []
    for one in (id_, UNKNOWN):
        for path, method in (
            (one, "GET"),
            (f"{one}?stream=true", "GET"),
            (f"{one}/input_items", "GET"),
            (one, "DELETE"),
            (f"{one}/cancel", "POST"),
        ):
            async with call(house, path, method, OTHER_KEY) as answer:
                assert answer.status == 404
                errors.append((await answer.text()).replace(one, "ID"))
        headers = {"authorization": f"Bearer {OTHER_KEY}"}
        body = {"model": "tiny", "input": "more", "previous_response_id": one}
        async with house.client.post(f"{house.url}/v1/responses", json=body, headers=headers) as answer:
            assert answer.status == 400
            errors.append((await answer.text()).replace(one, "ID"))
    half = len(errors) // 2
    assert errors[:half] == errors[half:], "an id that is another's is told from none by nothing"
    assert await is_kept(house, id_)


@pytest.mark.parametrize("path", ["{}", "{}/input_items", "{}/cancel"])
async def test_a_key_for_other_endpoints_opens_none(open_house: Open, redis: RedisServer, path: str) -> None:
    keys = [{"id": "k1", "hash": hash_key(KEY), "tenant": "acme", "endpoints": ["/v1/chat/completions"]}]
    house = await kept_house(open_house, redis, keys=keys)
    async with call(house, path.format(UNKNOWN), "POST" if "cancel" in path else "GET") as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (403, "permission_denied")


# -- told -----------------------------------------------------------------------------------------


async def test_items_come_in_pages(quick: House) -> None:
    given = [{"role": "user", "content": f"{number}", "id": f"i{number}"} for number in range(45)]
    first = await ask(quick, input=given)
    second = await ask(quick, input="last", previous_response_id=first["id"])
    page = await told(quick, f"{second['id']}/input_items")
    assert (page["object"], len(page["data"]), page["has_more"]) == ("list", 20, True)
    assert page["data"][0]["content"][0]["text"] == "last"
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    ids: list[str] = []
    after = ""
    while True:
        page = await told(quick, f"{second['id']}/input_items?order=asc&limit=10{after}")
        ids += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert ids[:45] == [f"i{number}" for number in range(45)]
    assert len(ids) == 47
    nothing = await told(quick, f"{second['id']}/input_items?after=none")
    assert (nothing["data"], nothing["first_id"], nothing["has_more"]) == ([], None, False)
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order")):
        async with call(quick, f"{second['id']}/input_items?{query}") as answer:
            assert (answer.status, (await error_of(answer))["param"]) == (400, param)


async def test_a_retrieved_stream_is_what_the_response_was(quick: House) -> None:
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with quick.client.post(f"{quick.url}/v1/responses", json=body, headers=quick.headers) as answer:
        was = events_of(await answer.read())
    id_ = was[-1]["response"]["id"]
    async with call(quick, f"{id_}?stream=true") as answer:
        assert answer.content_type == "text/event-stream"
        data = await answer.read()
    assert data.endswith(sse.DONE)
    assert events_of(data) == was, "its text was one piece"
    for last in (0, 4, len(was) - 2, len(was) - 1):
        async with call(quick, f"{id_}?stream=true&starting_after={last}") as answer:
            seen = [
                json.loads(one[6:])
                for one in (await answer.text()).splitlines()
                if one[:6] == "data: "[:6] and "[DONE]" not in one
            ]
        assert seen == was[last + 1 :]
    async with call(quick, f"{id_}?stream=maybe") as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, "stream")


def test_events_that_are_told_again_end_with_the_number_that_they_had() -> None:
    """A client that lost the end of a stream goes on behind the last event that it has."""
    whole = msgspec.json.encode(scripts.response("a" * 9))
    first = events_of_numbers(replay(whole, 0, -1))
    assert first == [*range(9)]
    assert events_of_numbers(replay(whole, 57, -1)) == [0, 1, 2, 3, 4, 54, 55, 56, 57]
    assert events_of_numbers(replay(whole, 57, 30)) == [54, 55, 56, 57]


def events_of_numbers(data: bytes) -> list[int]:
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line)["sequence_number"] for line in lines]


def test_every_kind_of_item_is_told_again() -> None:
    """By the events that OpenAI has for it."""
    thought, summed = ({"type": f"{one}_text", "text": "hm"} for one in ("reasoning", "summary"))
    done: dict[str, Any] = {"status": "completed"}
    call_, custom = (
        {"call_id": "c", "name": "f", "arguments": "{}"},
        {"call_id": "d", "name": "g", "input": "i"},
    )
    said = json.loads(msgspec.json.encode(scripts.response("a")))
    output = [
        {"type": "reasoning", "id": "rs_1", **done, "summary": [], "content": [thought]},
        {"type": "reasoning", "id": "rs_2", **done, "summary": [summed], "content": []},
        {"type": "function_call", "id": "fc_1", **done, **call_},
        {"type": "custom_tool_call", "id": "ctc_1", **done, **custom},
        *said["output"],
    ]
    whole = {**said, "output": output}
    events = events_of(replay(msgspec.json.encode(whole), 0, -1))
    for event in events:
        check_event(event)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    assert sum(".delta" in event["type"] for event in events) == len(output)


# -- engines of other makes -----------------------------------------------------------------------


async def test_what_another_make_answers_is_kept_too(open_house: Open, redis: RedisServer) -> None:
    house = await kept_house(open_house, redis, bundle=None)
    house.engine.script = Script([*theirs()])
    body = {"model": "tiny", "input": "hi", "stream": True, "max_output_tokens": 50}
    async with house.client.post(f"{house.url}/v1/responses", json=body, headers=house.headers) as answer:
        data = await answer.read()
    assert data.count(b'"store":true') == 2
    assert sent(house)["store"] is False
    assert (await told(house, "resp_x"))["output"][0]["content"][0]["text"] == "one two"
    whole = {"id": "resp_y", "output": [], "usage": THEIR_USAGE}
    house.engine.script = Script([msgspec.json.encode(whole)], 200, "application/json")
    second = await ask(house, previous_response_id="resp_x", max_output_tokens=50)
    assert second["previous_response_id"] == "resp_x"
    assert [item["role"] for item in sent(house)["input"]] == ["user", "assistant", "user"]
    assert "previous_response_id" not in sent(house)
    assert [line["settled_tokens"] for line in await house.lines(3)] == [25, 0, 25]


@pytest.mark.parametrize(
    "body", [b'{"output":[],"usage":null}', b'{"id":"a b","output":[]}', b'{"id":"resp_1","output":{}}']
)
async def test_an_answer_that_cannot_be_told_again_is_not_kept(
    open_house: Open, redis: RedisServer, body: bytes
) -> None:
    house = await kept_house(open_house, redis, bundle=None)
    house.engine.script = Script([body], 200, "application/json")
    answered = await ask(house, max_output_tokens=50)
    assert answered.get("store") is not True
    assert (await house.line())["stored"] == "unreadable"
    await house.at_rest()


# -- operators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["off", "memory", "redis"])
async def test_an_operator_deletes_all_of_a_tenants(open_house: Open, redis: RedisServer, store: str) -> None:
    house = await kept_house(open_house, redis, store=store, admin=operator_keys())
    ids = [(await ask(house))["id"] for _ in range(3)]
    theirs_ = (await ask(house, OTHER_KEY))["id"]
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/tenants/acme/responses"
    for headers, status in ((house.headers, 403), ({}, 401)):
        async with house.client.delete(url, headers=headers) as answer:
            assert answer.status == status
    async with house.client.delete(url, headers=OPERATOR) as answer:
        deleted = await answer.json()
        assert answer.status == (404 if store == "off" else 200)
    if store == "off":
        return
    assert deleted == {"tenant": "acme", "deleted": 3}
    assert [await is_kept(house, id_) for id_ in ids] == [False] * 3
    async with call(house, theirs_, key=OTHER_KEY) as answer:
        assert answer.status == 200
    await until(lambda: "admin.change" in house.log.getvalue())
    lines = map(json.loads, house.log.getvalue().splitlines())
    [line] = [one for one in lines if one["event"] == "admin.change"]
    assert (line["event"], line["operator"], line["tenant"]) == ("admin.change", "ops", "acme")
