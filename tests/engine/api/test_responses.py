"""Responses, seen by the official SDK with its strict validation on, and held to what describes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import openai
import pydantic
import pytest

from engine.contract.messages import FinishReason, ServiceClass
from shared.wire import sse
from shared.wire.load_report import LOAD_HEADER
from tests.described_responses import check_event, check_response, events_of, put_together, text_of
from tests.engine.api.conftest import MODEL, Serve, Served, until
from tests.engine.api.test_calls import ROOM, SCRIPTS, THINKING, model_dir, tokenizer
from tests.engine.api.tiny import EOS

__all__ = ["model_dir", "tokenizer"]

SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "additionalProperties": False,
}
WRONG: Final = {"type": "wrong"}
TOOLS: Final[Any] = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False},
    {
        "type": "namespace",
        "name": "clock",
        "description": "Time.",
        "tools": [{"type": "function", "name": "now"}],
    },
    {"type": "custom", "name": "patch", "description": "Edit."},
]
CALLING: Final = SCRIPTS["hermes"].replace('"time"', '"clock__now"')
PATCHING: Final = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\n\\u00e9"}}\n</tool_call>'
)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A model of Qwen3's family."""
    async with serve(answer_format="qwen3", core=ROOM) as served:
        yield served
        served.assert_nothing_leaks()


async def both(served: Served, **asked: Any) -> dict[str, Any]:
    """The response, which must be the same streamed as whole, but for its ids, and as it is described."""
    body = {"model": MODEL, "input": "hello", **asked}
    answer = await served.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    check_response(whole)
    streamed = await served.http.post("/v1/responses", json={**body, "stream": True})
    *_, done, comment, rest = streamed.content.split(b"\n\n")
    assert (done, comment.partition(b" {")[0], rest) == (b"data: [DONE]", b": penstock", b"")
    events = events_of(streamed.content)
    for event in events:
        check_event(event)
    last: dict[str, Any] = events[-1]["response"]
    assert put_together(events) == last["output"]
    assert _without_ids(last) == _without_ids(whole)
    closing = sse.parse_closing(comment.removeprefix(b": penstock "))
    assert closing is not None
    usage = last["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        closing.prompt_tokens,
        closing.completion_tokens,
    )
    return whole


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


# -- through the SDK ------------------------------------------------------------------------------


async def test_the_sdk_creates_streams_and_counts(served: Served) -> None:
    served.says("the lazy dog")
    whole = await served.sdk.responses.create(model=MODEL, input="hello", instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.instructions) == ("the lazy dog", "completed", "Be brief.")
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(served.ids("the lazy dog")) + 1
    counted = await served.sdk.responses.input_tokens.count(
        model=MODEL, input="hello", instructions="Be brief."
    )
    assert counted.input_tokens == whole.usage.input_tokens == len(served.core.added[0].prompt_ids)
    stream = await served.sdk.responses.create(model=MODEL, input="hello", stream=True)
    deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "the lazy dog"
    assert len(served.core.added) == 2, "to count is to generate nothing"


async def test_the_sdk_puts_a_stream_together(served: Served) -> None:
    served.says(THINKING.replace('"time"', '"clock__now"'))
    async with served.sdk.responses.stream(model=MODEL, input="hello", tools=TOOLS) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert snapshots[-1] == response.output_text == "Let me see."
    reasoning, message, weather, now = response.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert weather.type == now.type == "function_call"
    assert json.loads(weather.arguments) == {"city": "Oslo", "days": 2}
    assert (now.name, now.namespace, now.arguments) == ("now", "clock", "{}")


CITY: Final[Any] = pydantic.create_model("City", name=(str, ...))


async def test_the_sdk_parses_a_structure(served: Served) -> None:
    served.says('{"name":"Oslo"}')
    parsed = await served.sdk.responses.parse(model=MODEL, input="hello", text_format=CITY)
    assert parsed.output_parsed == CITY(name="Oslo")
    [added] = served.core.added
    assert added.grammar


async def test_the_sdk_raises_what_ends_a_stream(served: Served) -> None:
    served.says("the lazy", ends=False)
    stream = await served.sdk.responses.create(model=MODEL, input="hello", stream=True)
    seen = []

    async def read() -> None:
        async for event in stream:
            seen.append(event.type)
            if seen.count("response.output_text.delta") == 1:
                served.core.finish(1, FinishReason.NUMERIC)

    with pytest.raises(openai.APIError, match="not finite"):
        await read()
    assert "response.output_text.delta" in seen


# -- what an answer is ----------------------------------------------------------------------------


async def test_reasoning_text_and_calls(served: Served) -> None:
    served.says(f"<think>\nHm, Oslo.\n</think>\n\n{CALLING}")
    response = await both(served, tools=TOOLS)
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert text_of(response["output"][0]) == "Hm, Oslo."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    *_, now = response["output"]
    assert (now["name"], now["namespace"]) == ("now", "clock")
    asked = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    [reasoning, *_] = (await both(served, tools=TOOLS, **asked))["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm, Oslo."}]
    assert reasoning["content"] == []


async def test_a_custom_tool_is_called_with_text(served: Served) -> None:
    served.says(PATCHING)
    [call] = (await both(served, tools=TOOLS))["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", 'a "b"\né')


async def test_an_answer_of_nothing_is_an_empty_message(served: Served) -> None:
    served.says("")
    [message] = (await both(served))["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


async def test_an_answer_that_is_cut_off_is_incomplete(served: Served) -> None:
    served.says("the quick brown fox")
    response = await both(served, max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["max_output_tokens"] == 2


async def test_log_probabilities_are_those_of_the_text(served: Served) -> None:
    served.says("<think>\nHm.\n</think>\n\nthe 日")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [_, message] = (await both(served, **asked))["output"]
    logprobs = message["content"][0]["logprobs"]
    assert b"".join(bytes(one["bytes"]) for one in logprobs).decode() == "the 日"
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)


async def test_sampling_and_urgency_are_told(served: Served) -> None:
    served.says("hello")
    response = await both(served, temperature=0.5, top_p=0.25, presence_penalty=1.0, service_tier="flex")
    assert [response[name] for name in ("temperature", "top_p", "presence_penalty")] == [0.5, 0.25, 1.0]
    assert response["service_tier"] == "flex"
    assert served.core.added[0].service_class is ServiceClass.FLEX


# -- what Codex sends -----------------------------------------------------------------------------

CODEX_TEMPLATE: Final = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
async def codex(serve: Serve, model_dir: Path) -> AsyncIterator[Served]:
    """A model whose template writes reasoning and calls as it does itself."""
    config = model_dir / "tokenizer_config.json"
    kept = config.read_text()
    config.write_text(json.dumps({"chat_template": CODEX_TEMPLATE, "eos_token": EOS}))
    try:
        async with serve(answer_format="qwen3", core=ROOM) as served:
            yield served
            served.assert_nothing_leaks()
    finally:
        config.write_text(kept)


def from_codex(*more: dict[str, Any]) -> dict[str, Any]:
    """A turn in the shape that Codex 0.171 gives it."""

    def says(role: str, *texts: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}

    function = {"type": "function", "description": "Run.", "strict": False, "parameters": SCHEMA}
    return {
        "model": MODEL,
        "stream": True,
        "input": [
            *(says("developer", "Be brief."), says("developer", "Sandbox: none.", "Ask first.")),
            *(says("user", "cwd: /"), says("user", "say hi"), *more),
        ],
        "tools": [
            {**function, "name": "exec_command"},
            {
                "type": "namespace",
                "name": "agents",
                "description": "d",
                "tools": [{**function, "name": "spawn"}],
            },
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2245b",
        "client_metadata": {"turn_id": "01a2245b"},
    }


async def test_a_turn_of_codex_goes_on_where_the_last_one_ended(codex: Served) -> None:
    """It keeps reasoning as its summary and what is sealed, and sends back what it has called."""
    calling = '<tool_call>{"name": "agents__spawn", "arguments": {"city": "Oslo"}}</tool_call>'
    codex.says(f"<think>Hm.</think>{calling}")
    answer = await codex.http.post("/v1/responses", json=from_codex())
    assert answer.status_code == 200, answer.text
    response = events_of(answer.content)[-1]["response"]
    reasoning, call = response["output"]
    assert (call["namespace"], call["name"], call["status"]) == ("agents", "spawn", "completed")
    output = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "hi"}
    kept = {key: reasoning[key] for key in ("type", "summary", "encrypted_content")}
    codex.says("done")
    answer = await codex.http.post("/v1/responses", json=from_codex(kept, call, output))
    assert answer.status_code == 200, answer.text
    first_ids, second_ids = (add.prompt_ids for add in codex.core.added)
    decode = codex.tokenizer.decode
    first, second = (decode(ids, skip_special_tokens=False) for ids in (first_ids, second_ids))
    assert "web_search" not in first
    assert second == f"{first}<think>Hm.</think>{calling}<|end|><|tool|>hi<|end|><|assistant|>"
    assert second_ids[: len(first_ids)] == first_ids


# -- streams --------------------------------------------------------------------------------------


async def test_a_stream_opens_when_the_core_admits_it(served: Served) -> None:
    served.core.script = lambda _: []
    body = {"model": MODEL, "input": "hello", "stream": True}
    async with served.http.stream("POST", "/v1/responses", json=body) as answer:
        data = answer.aiter_raw()
        opened = events_of(await anext(data))
        assert [event["type"] for event in opened] == ["response.created", "response.in_progress"]
        served.core.running[1].script = served.ids("hi") + served.ids(EOS)
        served.core.release()
        rest = b"".join([piece async for piece in data])
    assert b"response.completed" in rest


@pytest.mark.parametrize("opens", [True, False])
async def test_a_stream_that_fails_ends_with_the_error_and_the_response(served: Served, opens: bool) -> None:
    served.core.admits = opens
    served.says("the lazy", ends=False)
    body = {"model": MODEL, "input": "hello", "stream": True}
    task = asyncio.create_task(served.http.post("/v1/responses", json=body))
    if opens:
        await until(lambda: bool(served.core.running) and served.core.running[1].sent > 1)
    else:
        await until(lambda: bool(served.core.added))
    assert (await served.http.delete("/v1/requests/none")).json()["aborted"] == 0
    [request_id] = served.engine.state._generations
    assert (await served.http.delete(f"/v1/requests/{request_id}")).json()["aborted"] == 1
    data = (await task).content
    assert b"[DONE]" not in data
    *before, told, failed = events_of(data)
    for event in (told, failed):
        check_event(event)
    assert bool(before) == opens
    assert (told["error"]["code"], failed["type"]) == ("request_aborted", "response.failed")
    assert failed["response"]["error"]["code"] == "invalid_prompt"
    assert (failed["response"]["id"] == before[0]["response"]["id"]) if before else True


async def test_what_a_stream_holds_is_reserved(serve: Serve) -> None:
    """Its end tells the answer again, and its beginning the request."""
    async with serve(core={"max_model_len": 10_000, "pages": 2000}) as served:
        served.core.admits = False
        body = {"model": MODEL, "input": "hello", "stream": True, "max_output_tokens": 5000}
        held = []
        for fields in ({}, {"metadata": {"a": "b" * 50_000}}):
            task = asyncio.create_task(served.http.post("/v1/responses", json={**body, **fields}))
            await until(lambda: bool(served.core.waiting))
            held.append(served.engine.state.memory.held)
            task.cancel()
            await until(lambda: not served.engine.state._working)
        assert held[0] >= 5000 * 16
        assert held[1] - held[0] >= 50_000 * 3
        assert served.engine.state.memory.held == 0


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items?limit=1"),
    ],
)
async def test_nothing_is_stored(served: Served, method: str, path: str) -> None:
    answer = await served.http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "not_found", "id")
    assert "resp_1" in error["message"]
    assert LOAD_HEADER in answer.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**TOOLS[0], "parameters": WRONG, "strict": True}]}, "tools[0].parameters.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": WRONG}}}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": "x" * 90_000}, "input"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
    ],
)
async def test_what_the_model_cannot_do_is_named_by_its_place(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await served.http.post("/v1/responses", json={"model": MODEL, "input": "hello", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


async def test_schemas_are_held_where_strict_mode_takes_them(served: Served) -> None:
    """Unless a function says otherwise."""
    served.says("hello")
    closed = {**SCHEMA, "required": ["city", "days"]}
    grammars = []
    for function in (
        {"parameters": closed},
        {"parameters": closed, "strict": True},
        {"parameters": closed, "strict": False},
        {"parameters": SCHEMA},  # a property may be absent, which strict mode does not take
    ):
        body = {"model": MODEL, "input": "hello", "tools": [{"type": "function", "name": "f", **function}]}
        assert (await served.http.post("/v1/responses", json=body)).status_code == 200
        grammars.append(served.core.added[-1].grammar)
    assert grammars[0] == grammars[1]
    assert grammars[2] == grammars[3] != grammars[0]


async def test_what_a_schema_loses_is_named_by_its_place(served: Served) -> None:
    served.says("hello")
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{**TOOLS[1], "tools": [{"type": "function", "name": "f", "parameters": loose}]}]
    body = {"model": MODEL, "input": "hello", "tools": tools, "tool_choice": "required", "stream": True}
    answer = await served.http.post("/v1/responses", json=body)
    place = "tools[0].tools[0].parameters.properties.a.uniqueItems"
    assert answer.headers["x-penstock-ignored-fields"] == place
