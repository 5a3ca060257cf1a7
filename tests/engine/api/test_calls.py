"""Answers with reasoning and calls, seen by the official SDK: whole and streamed they are the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam

from engine.api.ask import forms, grammar
from engine.contract.messages import FinishReason
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire import sse
from shared.wire.ids import SESSION_HEADER, TENANT_HEADER
from tests.engine.api import tiny
from tests.engine.api.conftest import MODEL, Serve, Served, until
from tests.engine.api.tiny import EOS, write_model_dir

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = [("weather", {"city": "Oslo", "days": 2}), ("time", {})]
SCRIPTS = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    ),
    "qwen3-coder": (
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time>\n</function>\n</tool_call>"
    ),
    "mistral": 'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]time[ARGS]{}',
    "granite": (
        'Let me see.<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, '
        '{"name": "time", "arguments": {}}]'
    ),
    "lfm2": 'Let me see.<|tool_call_start|>[weather(city="Oslo", days=2), time()]<|tool_call_end|>',
}
THINKING = f"<think>\nHm, Oslo.\n</think>\n\n{SCRIPTS['hermes']}"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokens of Qwen's marks."""
    directory = write_model_dir(tmp_path_factory.mktemp("calls"))
    tokenizer = tiny.byte_level()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": EOS})
    )
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(TokenizerBundle.from_dir(model_dir))


ROOM = {"max_model_len": 8192, "pages": 1024}


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A model of Qwen3's family."""
    async with serve(answer_format="qwen3", core=ROOM) as served:
        yield served
        served.assert_nothing_leaks()


async def both(served: Served, **asked: Any) -> tuple[list[ChatCompletionMessage], list[str], int]:
    """The messages of an answer, their finish reasons and its tokens, which must be the same streamed as
    whole but for the ids of calls."""
    create: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **asked}
    whole = await served.sdk.chat.completions.create(**create)
    async with served.sdk.chat.completions.stream(**create, stream_options={"include_usage": True}) as stream:
        streamed = await stream.get_final_completion()
    assert whole.usage is not None
    assert streamed.usage is not None
    assert streamed.usage == whole.usage
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert shape(one.message) == shape(other.message)
    messages = [choice.message for choice in whole.choices]
    return messages, [choice.finish_reason for choice in whole.choices], whole.usage.completion_tokens


def shape(message: ChatCompletionMessage) -> dict[str, Any]:
    apart = {"tool_calls", "parsed", "role", "content", "annotations"}
    told: dict[str, Any] = message.model_dump(exclude_none=True, exclude=apart)
    return told | {"calls": calls_of(message), "content": message.content or ""}


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    ids = [call.id for call in message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert all(call.type == "function" for call in message.tool_calls or ())
    return [
        (call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
        if call.type == "function"
    ]


@pytest.mark.parametrize("family", SCRIPTS)
async def test_calls_of_a_family(serve: Serve, family: str) -> None:
    async with serve(answer_format=family, core=ROOM) as served:
        served.says(SCRIPTS[family])
        [message], reasons, tokens = await both(served)
        assert [(name, json.loads(arguments)) for name, arguments in calls_of(message)] == CALLS
        assert message.content == "Let me see."
        assert reasons == ["tool_calls"]
        assert tokens == len(served.ids(SCRIPTS[family])) + 1
        served.assert_nothing_leaks()


async def test_qwen3_5_calls_out_of_its_thoughts(serve: Serve) -> None:
    """Its template opens them; they end where a call begins, closed or not."""
    calls = SCRIPTS["qwen3-coder"].removeprefix("Let me see.\n")
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "<think>\n"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    for ended in ("", "</think>\n\n"):
        async with serve(answer_format="qwen3.5", core=ROOM) as served:
            served.says(f"Hm, Oslo.\n{ended}{calls}")
            [message], reasons, _ = await both(served, messages=messages, extra_body=body)
            assert [(name, json.loads(arguments)) for name, arguments in calls_of(message)] == CALLS
            assert message.model_dump()["reasoning_content"] == "Hm, Oslo."
            assert not message.content
            assert reasons == ["tool_calls"]


async def test_reasoning_has_both_of_its_names_and_is_counted(served: Served) -> None:
    served.says(THINKING)
    [message], reasons, tokens = await both(served)
    told = message.model_dump()
    assert told["reasoning_content"] == told["reasoning"] == "Hm, Oslo."
    assert message.content == "Let me see."
    assert len(calls_of(message)) == 2
    assert reasons == ["tool_calls"]
    assert tokens == len(served.ids(THINKING)) + 1
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert reasoning_tokens is not None
    thought = len(served.ids("\nHm, Oslo.\n"))
    assert thought <= reasoning_tokens <= thought + 2, "with its marks or without"


async def test_reasoning_that_is_not_to_be_told_is_left_out_and_counted(served: Served) -> None:
    served.says(THINKING)
    whole, _, tokens = await both(served, extra_body={"include_reasoning": False})
    assert whole[0].model_extra == {}
    assert whole[0].content == "Let me see."
    assert tokens == len(served.ids(THINKING)) + 1


async def test_a_prompt_that_opens_reasoning(served: Served) -> None:
    """Where the template, or a prefill, leaves it open, the answer begins within it."""
    served.says("so it is</think>\n\nYes.")
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nWell, "}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    [choice] = answer.choices
    assert choice.message.content == "Yes."
    assert choice.message.model_dump()["reasoning"] == "so it is"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "tool_calls"),
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "stop"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls"),
    ],
)
async def test_the_reason_of_an_end_by_calls(served: Served, asked: dict[str, Any], reason: str) -> None:
    served.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    [message], reasons, _ = await both(served, **asked)
    assert calls_of(message) == [("weather", '{"city": "Oslo"}')]
    assert message.content is None
    assert reasons == [reason]
    assert all(request.grammar for request in served.core.asked)


async def test_an_answer_cut_off_within_a_call(served: Served) -> None:
    script = '<tool_call>\n{"name": "weather", "arguments": {"city": "Os'
    served.says(script, ends=False)
    create: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    answer = await served.sdk.chat.completions.create(**create, max_tokens=len(served.ids(script)))
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    [(name, arguments)] = calls_of(choice.message)
    assert name == "weather"
    assert '{"city": "Oslo"}'.startswith(arguments)


@pytest.mark.parametrize("asked", [{}, {"tool_choice": "none"}])
async def test_an_answer_without_a_call(served: Served, asked: dict[str, Any]) -> None:
    served.says("Let me see.")
    [message], reasons, _ = await both(served, **asked)
    assert (message.content, message.tool_calls, reasons) == ("Let me see.", None, ["stop"])


async def test_no_calls_are_looked_for_that_were_not_asked_for(served: Served) -> None:
    served.says(SCRIPTS["hermes"])
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    [choice] = answer.choices
    assert choice.message.content == SCRIPTS["hermes"]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


async def test_several_choices_with_calls(served: Served) -> None:
    scripts = [THINKING, "<think>\nNo.\n</think>\n\nNo."]
    served.core.script = lambda add: served.ids(scripts[(add.handle - 1) % 2]) + served.ids(EOS)
    messages, reasons, _ = await both(served, n=2)
    assert [message.content for message in messages] == ["Let me see.", "No."]
    assert reasons == ["tool_calls", "stop"]


async def test_choices_begin_in_their_order(served: Served) -> None:
    """SDKs put them into a list."""
    served.says("hello")
    served.core.withheld = {1}
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "n": 2}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        await until(lambda: 2 not in served.core.running and not served.core.left - 1)
        served.core.withheld = set()
        served.core.release()
        lines = [line async for line in response.aiter_lines()]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert roles == [0, 1]
    assert chunks[0]["choices"][0]["index"] == 0


async def test_a_stop_string_counts_behind_reasoning_alone(served: Served) -> None:
    served.says("<think>\nthe END of it\n</think>\n\nSo be it. END of all")
    [message], reasons, _ = await both(served, stop=["END"])
    assert message.content == "So be it. "
    assert message.model_dump()["reasoning"] == "the END of it"
    assert reasons == ["stop"]


async def test_log_probabilities_of_an_answer_in_parts(served: Served) -> None:
    served.says(THINKING)
    create: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "logprobs": True}
    answer = await served.sdk.chat.completions.create(**create)
    assert answer.choices[0].logprobs is not None
    whole = [entry.token for entry in answer.choices[0].logprobs.content or ()]
    assert "".join(whole) == THINKING
    streamed = []
    async for chunk in await served.sdk.chat.completions.create(**create, stream=True):
        for choice in chunk.choices:
            streamed += (
                [] if choice.logprobs is None else [one.token for one in choice.logprobs.content or ()]
            )
    assert streamed == whole


async def test_what_is_told_of_calls_and_reasoning(served: Served, lines: list[dict[str, Any]]) -> None:
    served.says(THINKING)
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stream": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        data = await response.aread()
    closing = sse.parse_closing(data.rpartition(b": penstock ")[2].strip())
    assert closing is not None
    [line] = [line for line in lines if line["endpoint"] == "/v1/chat/completions"]
    assert (closing.calls, line["calls"]) == (2, 2)
    assert closing.reasoning_tokens == line["reasoning_tokens"] > 0
    assert line["grammar_ms"] >= 0.0
    assert "masks_ms" in line
    metrics = (await served.http.get("/metrics")).text
    assert "penstock_engine_calls_total 2.0" in metrics
    assert f"penstock_engine_reasoning_tokens_total {float(closing.reasoning_tokens)}" in metrics
    assert 'penstock_engine_grammar_requests_total{kind="tools"} 1.0' in metrics


async def test_a_client_that_leaves_within_a_call(served: Served, lines: list[dict[str, Any]]) -> None:
    served.says('<tool_call>\n{"name": "weather", "arguments": {"city": "', ends=False)
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stream": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if "weather" in line:
                break
    await until(lambda: bool(lines))
    assert lines[-1]["end_reason"] == "client_cancel"
    assert lines[-1]["calls"] == 1
    assert served.core.aborted == [1]


# -- grammars -------------------------------------------------------------------------------------


async def test_the_same_tools_are_compiled_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counting(*args: Any, **named: Any) -> Any:
        made.append(args)
        return grammar.checked(*args, **named)

    monkeypatch.setattr(forms, "checked", counting)
    served.says("hello")
    create: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "tool_choice": "required"}
    for turns in range(3):
        await served.sdk.chat.completions.create(**create, messages=MESSAGES * (turns + 1))
    assert len(made) == 1
    assert len({request.grammar for request in served.core.asked}) == 1
    await served.sdk.chat.completions.create(**create, messages=MESSAGES, parallel_tool_calls=False)
    assert len(made) == 2
    assert served.core.asked[-1].grammar not in ("", served.core.asked[0].grammar)


async def test_what_was_compiled_is_kept_within_bounds(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def counting(*args: Any, **named: Any) -> Any:
        made.append(args)
        return grammar.checked(*args, **named)

    async def ask(*tools: Any) -> int:
        made.clear()
        for tool in tools:
            await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[tool])
        return len(made)

    monkeypatch.setattr(forms, "checked", counting)
    served.says("hello")
    one, other = TOOLS
    assert await ask(one, other, one) == 2
    monkeypatch.setattr(forms, "KEPT_MAX", 1)
    assert (
        await ask({**one, "function": {**one["function"], "description": "a"}}, one, one, other, other, one)
        == 4
    )
    monkeypatch.setattr(forms, "KEPT_LEN_MAX", 100)
    assert await ask(other, other) == 2, "it would not be kept alone"
    monkeypatch.setattr(forms, "KEYED_LEN_MAX", 1)
    assert await ask(one) == 1, "it has no key by which it would be found"


async def test_the_types_of_a_schema_that_is_too_long_are_not_looked_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "SCHEMA_LEN_MAX", 50)
    async with serve(answer_format="qwen3-coder", core=ROOM) as served:
        served.says(SCRIPTS["qwen3-coder"])
        [message], *_ = await both(served)
        assert [json.loads(arguments) for _, arguments in calls_of(message)] == [
            {"city": "Oslo", "days": "2"},
            {},
        ]


async def test_a_schema_whose_references_branch_without_end_holds_up_nobody(serve: Serve) -> None:
    """Its arguments' types are asked for, each reference once; another tenant is served meanwhile."""
    branches = {union: [{"$ref": "#/$defs/d"}] * 32 for union in ("anyOf", "oneOf", "allOf")}
    schema = {
        "type": "object",
        "properties": {"days": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {**branches, "enum": [1, 2]}},
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    body = {"model": MODEL, "messages": MESSAGES}
    async with serve(answer_format="qwen3-coder", core=ROOM) as served:
        call = "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>"
        served.says(f"<tool_call>\n{call}\n</tool_call>")
        post = served.http.post
        own = asyncio.create_task(
            post("/v1/chat/completions", json={**body, "tools": tools}, headers={TENANT_HEADER: "a"})
        )
        victim = await post("/v1/chat/completions", json=body, headers={TENANT_HEADER: "b"})
        assert victim.status_code == 200
        [told] = (await own).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(told["function"]["arguments"]) == {"days": 2}


@pytest.mark.parametrize(
    ("headers", "fields", "is_likely"),
    [
        ({}, {}, False),
        ({SESSION_HEADER: "0123456789abcdef"}, {}, True),
        ({}, {"prompt_cache_key": "k"}, True),
        ({}, {"prompt_cache_key": ""}, False),
        ({}, {"tools": TOOLS}, True),
        ({}, {"tools": TOOLS, "tool_choice": "none"}, False),
    ],
)
async def test_the_core_is_told_when_a_next_turn_is_likely(
    serve: Serve, headers: dict[str, str], fields: dict[str, Any], is_likely: bool
) -> None:
    async with serve(answer_format="qwen3", core=ROOM) as served:
        served.says("x")
        body = {"model": MODEL, "messages": MESSAGES, **fields}
        response = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert served.core.added[-1].has_next_turn is is_likely


async def test_a_plain_request_has_no_grammar(served: Served) -> None:
    served.says("hello")
    await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert served.core.asked[-1].grammar == ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_structure_goes_to_the_core(served: Served, path: str) -> None:
    served.says('{"a": 1}')
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "hello"}
    structures: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"json": {"type": "object"}}},
    ]
    for structure in structures:
        answer = await served.http.post(path, json={"model": MODEL, **prompt, **structure})
        assert answer.status_code == 200, answer.text
    grammars = [request.grammar for request in served.core.asked]
    assert all(grammars)
    assert len(set(grammars)) >= 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ],
)
async def test_what_cannot_be_compiled_is_refused_by_its_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert served.core.asked == []


async def test_tools_of_a_model_without_a_format_are_refused(serve: Serve) -> None:
    async with serve(answer_format="none", core=ROOM) as served:
        served.says("hello")
        body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
        assert "--answer-format" in error["message"]
        answer = await served.http.post("/v1/chat/completions", json={**body, "tool_choice": "none"})
        assert answer.status_code == 200


async def test_a_grammar_that_fails_is_never_a_short_answer(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    served.says('{"a": ', ends=False)
    body = {"model": MODEL, "messages": MESSAGES, "response_format": {"type": "json_object"}, "stream": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        await until(lambda: bool(served.core.running) and not served.core.left)
        served.core.finish(1, FinishReason.GRAMMAR)
        data = await response.aread()
    events = [event for event in data.split(b"\n\n") if event.startswith(b"data: ")]
    assert json.loads(events[-1][6:])["error"]["code"] == "grammar_failed"
    served.core.is_held = True
    create = served.sdk.chat.completions.create
    answer = create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
    task = asyncio.create_task(answer)
    await until(lambda: len(served.core.asked) == 2)
    served.core.finish(2, FinishReason.GRAMMAR)
    with pytest.raises(openai.InternalServerError) as failure:
        await task
    assert failure.value.code == "grammar_failed"
    assert [line["end_reason"] for line in lines] == ["grammar_failed"] * 2
