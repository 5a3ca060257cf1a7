"""An agent of another make, pydantic-ai's, through the gateway to an engine of another make: its tool loop,
as a stream and not, and an image."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import openai
import pytest
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from shared.wire import sse
from shared.wire.ids import IGNORED_FIELDS_HEADER
from tests.gateway.conftest import KEY, PATIENCE_S, House, Open
from tests.gateway.fake_engine import HEADERS, Script, Seen

USAGE: Final = {"prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49}
ARGUMENTS: Final = '{"city": "Riga"}'


def said(seen: Seen) -> dict[str, Any]:
    """What the model says: it calls a tool, and then says what that told."""
    last = seen.body["messages"][-1]
    if last["role"] == "tool":
        return {"content": f"It is {last['content']}."}
    if "tools" not in seen.body:
        return {"content": "A picture."}
    call = {"name": seen.body["tools"][0]["function"]["name"], "arguments": ARGUMENTS}
    return {"content": None, "tool_calls": [{"id": "call00001", "type": "function", "function": call}]}


def pieces(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The deltas of a message, as vLLM streams them."""
    if not (calls := message.get("tool_calls")):
        return [{"role": "assistant", "content": ""}, *({"content": char} for char in message["content"])]
    [call] = calls
    first = {"index": 0, **call, "function": {**call["function"], "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": part}} for part in (ARGUMENTS[:5], ARGUMENTS[5:])]
    return [{"role": "assistant", "content": None}, *({"tool_calls": [one]} for one in (first, *rest))]


def script(seen: Seen) -> Script:
    message = said(seen)
    reason = "tool_calls" if "tool_calls" in message else "stop"
    facts = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
    if not seen.body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
        body = {**facts, "object": "chat.completion", "choices": [choice], "usage": USAGE}
        return Script([HEADERS, msgspec.json.encode(body)], 200, "application/json")
    facts["object"] = "chat.completion.chunk"
    ends = [*((delta, None) for delta in pieces(message)), ({}, reason)]
    choices = [[{"index": 0, "delta": delta, "finish_reason": end}] for delta, end in ends]
    events = [{**facts, "choices": choice} for choice in choices] + [{**facts, "choices": [], "usage": USAGE}]
    return Script([*(sse.event(msgspec.json.encode(event)) for event in events), sse.DONE])


pytestmark = pytest.mark.hop("http1")  # what engines of other makes speak


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house(bundle=None, owned_by="vllm", tenant={"limits": {"token_budget": 100_000}})
    house.engine.script = script
    assert isinstance(house, House)
    return house


@pytest.fixture
async def model(house: House) -> AsyncIterator[OpenAIChatModel]:
    client = openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S)
    async with client:
        yield OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client))


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"cold in {city}"


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agents_tool_loop_ends_with_what_the_tool_told(
    house: House, model: OpenAIChatModel, streaming: bool
) -> None:
    agent = Agent(model, instructions="Use your tools.", tools=[weather])
    if streaming:
        async with agent.run_stream("What is the weather?") as run:
            output = await run.get_output()
    else:
        output = (await agent.run("What is the weather?")).output
    assert output == "It is cold in Riga."
    first, second = (seen.body for seen in house.engine.seen)
    assert first["tools"] == second["tools"]
    [tool] = first["tools"]
    assert tool["function"]["description"] == "Tell the weather of a city."
    roles = [message["role"] for message in second["messages"]]
    assert roles == [*(message["role"] for message in first["messages"]), "assistant", "tool"]
    call, answer = second["messages"][-2:]
    [made] = call["tool_calls"]
    assert msgspec.json.decode(made["function"]["arguments"]) == msgspec.json.decode(ARGUMENTS)
    assert (answer["content"], answer["tool_call_id"]) == ("cold in Riga", made["id"])
    lines = await house.lines(2)
    assert [(line["end_reason"], line["settled_tokens"]) for line in lines] == [("ok", 49), ("ok", 49)]
    assert all(line["reserved_tokens"] > line["settled_tokens"] for line in lines)


async def test_an_agents_image_reaches_the_engine(house: House, model: OpenAIChatModel) -> None:
    image = BinaryContent(data=b"\x89PNG\r\n\x1a\n" + bytes(3000), media_type="image/png")
    assert (await Agent(model).run(["What is it?", image])).output == "A picture."
    [seen] = house.engine.seen
    _, part = seen.body["messages"][-1]["content"]
    assert part["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(image.data).decode()}"
    assert (await house.line())["settled_tokens"] == 49


async def test_openais_sdk_sends_back_what_it_was_sent(house: House, model: OpenAIChatModel) -> None:
    """With the fields that its own types add."""
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    asked: Any = {"role": "user", "content": "What is the weather?"}
    chats = model.client.chat.completions
    first = (await chats.create(model="tiny", messages=[asked], tools=[tool])).choices[0].message
    [call] = first.tool_calls or []
    told: Any = {"role": "tool", "content": "cold", "tool_call_id": call.id}
    again: Any = first.model_dump()
    answer = await chats.with_raw_response.create(model="tiny", messages=[asked, again, told], tools=[tool])
    assert answer.parse().choices[0].message.content == "It is cold."
    sent = house.engine.seen[-1].body["messages"][1]
    assert sent["tool_calls"] == [msgspec.json.decode(call.model_dump_json())]
    assert "tool_calls" not in answer.headers.get(IGNORED_FIELDS_HEADER, "")
