"""Responses' requests: items as the one chat form, tools as functions, and what is refused by its place."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.responses.request import _INCLUDED_MAX, InputTokensRequest, ResponsesRequest
from shared.apis.responses.tools import CUSTOM_SCHEMA, Called, CalledAs
from shared.apis.tools import AskedFunction, FunctionTool, ToolMode
from shared.apis.validation import Parsed, parse
from shared.wire.errors import InvalidRequest, UnsupportedParameter
from shared.wire.shapes import ITEMS_MAX

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Final = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
AGENTS: Final = {
    "type": "namespace",
    "name": "agents",
    "description": "Others.",
    "tools": [{"type": "function", "name": "spawn"}, {"type": "custom", "name": "say"}],
}


def read(given: Any = "hi", **fields: Any) -> Parsed[ResponsesRequest]:
    body = msgspec.json.encode({"model": "m", "input": given, **fields})
    parsed = parse(body, ResponsesRequest)
    parsed.require_supported()
    return parsed


def messages(given: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.to_builtins(read(given, **fields).request.prompt_form.messages)
    return found


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


def called(call_id: str, name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **more}


def brought(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(*texts: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": [], "content": content, **more}


def call_of(call_id: str, name: str = "weather", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


# -- items ----------------------------------------------------------------------------------------


def test_a_text_is_what_the_user_says_behind_the_instructions() -> None:
    assert messages("hi") == [{"role": "user", "content": "hi"}]
    assert messages("hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_messages_keep_their_places_and_roles() -> None:
    given = [
        {"role": "developer", "content": "a"},  # without a type, as a short form has it
        said("user", [{"type": "input_text", "text": "b"}], id="msg_1", status="completed"),
        said("system", [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]),
        said("user", "e"),
        said("user", "f"),
    ]
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    assert messages(given) == [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": parts},
        {"role": "user", "content": "e"},
        {"role": "user", "content": "f"},
    ]


def test_what_the_model_wrote_as_one_answer_is_one_message() -> None:
    given = [
        said("user", "q"),
        thought("Hm", "m."),
        said("assistant", [{"type": "output_text", "text": "Let me", "annotations": [], "logprobs": []}]),
        called("a", id="fc_1", status="completed"),
        called("b"),
        brought("a", "1"),
        brought("b", [{"type": "input_text", "text": "2"}]),
        called("c"),
        brought("c", "3"),
        said("assistant", [{"type": "refusal", "refusal": "No."}]),
    ]
    assert messages(given)[1:] == [
        {
            "role": "assistant",
            "content": "Let me",
            "reasoning_content": "Hmm.",
            "tool_calls": [call_of("a"), call_of("b")],
        },
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "assistant", "content": None, "tool_calls": [call_of("c")]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "assistant", "content": "No."},
    ]


def test_what_it_did_not_write_as_one_stays_apart() -> None:
    given = [said("assistant", "a"), said("assistant", "b")]
    assert messages([*given, thought("c"), called("d"), said("assistant", "e")]) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "e", "reasoning_content": "c", "tool_calls": [call_of("d")]},
    ]
    behind_a_call = messages([called("a"), thought("b"), said("assistant", "c")])
    assert [one["content"] for one in behind_a_call] == [None, "c"]


def test_reasoning_comes_back_however_a_client_keeps_it() -> None:
    sealed = {"encrypted_content": "penstock:reasoning:Hm: {}"}
    summary = {"summary": [{"type": "summary_text", "text": "Hm: {}"}]}
    for kept in (
        thought("Hm: {}"),
        thought("Hm: {}", **sealed),
        {"type": "reasoning", "summary": [], **sealed},  # as Codex sends it
        {"type": "reasoning", **summary, **sealed},
        {"type": "reasoning", **summary, "encrypted_content": None},
        {"type": "reasoning", "content": "Hm: {}"},
    ):
        [answer] = messages([kept, said("assistant", "a")])
        assert answer["reasoning_content"] == "Hm: {}"
    for others in (
        {"type": "reasoning", **summary, "encrypted_content": "gAAAAABx"},
        {"type": "reasoning", "summary": []},
    ):
        assert messages([others, said("assistant", "a")]) == [{"role": "assistant", "content": "a"}]
        with pytest.raises(InvalidRequest, match="input"):
            messages([others])


def test_a_custom_tools_call_is_one_of_its_function() -> None:
    given = [
        said("user", "q"),
        {"type": "custom_tool_call", "call_id": "a", "name": "say", "namespace": "agents", "input": 'x "\n'},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "y"},
    ]
    _, call, output = messages(given, tools=[AGENTS])
    assert call["tool_calls"] == [call_of("a", "agents__say", r'{"input":"x \"\n"}')]
    assert output == {"role": "tool", "content": "y", "tool_call_id": "a"}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
        ({"type": "computer_call", "id": "c"}, "input[1].type"),
        ({"type": "shell_call", "action": {}}, "input[1].type"),
        (said("user", [{"type": "input_file", "file_id": "f"}]), "input[1].content[0].type"),
        (said("user", [{"type": "input_image", "image_url": "data:"}]), "input[1].content[0]"),
        (brought("a", [{"type": "input_image", "image_url": "data:"}]), "input[1].output[0]"),
        (said("assistant", [{"type": "audio"}]), "input[1].content[0].type"),
        ({"type": "reasoning", "summary": [{"type": "image"}]}, "input[1].summary[0].type"),
    ],
)
def test_what_is_not_read_is_refused_by_its_place(item: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        read([said("user", "hi"), item])
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user"}, "input[0].content"),
        ({"content": "x"}, "input[0].role"),
        (said("user", [{"type": "input_text"}]), "input[0].content[0].text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "a", "arguments": "{}"}, "input[0].name"),
        (called("a", arguments=None), "input[0].arguments"),
        (called("a", arguments="{"), "input[0].arguments"),
        (called("a", arguments="[]"), "input[0].arguments"),
        ({"type": "function_call_output", "call_id": "a"}, "input[0].output"),
        ({"type": "custom_tool_call", "call_id": "a", "name": "f"}, "input[0].input"),
        ({"role": "judge", "content": "x"}, "input[0].role"),
        ([], "input"),
    ],
)
def test_what_an_item_lacks_is_named_by_its_place(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read([item] if isinstance(item, dict) else item)
    assert refused.value.param == param


def test_unknown_fields_are_named_and_repeated_ones_refused() -> None:
    given = [said("user", [{"type": "input_text", "text": "a", "colour": 1}], mood="x")]
    parsed = read(given, reasoning={"context": "auto"}, text={"x": 1}, tools=[{**WEATHER, "y": 1}], z=1)
    named = {"z", "input.mood", "input.content.colour", "reasoning.context", "text.x", "tools.y"}
    assert set(parsed.ignored) == named
    twice = b'{"model": "m", "input": [{"role": "user", "content": "a", "content": "b"}]}'
    with pytest.raises(InvalidRequest) as refused:
        parse(twice, ResponsesRequest)
    assert refused.value.param == "input[0].content"


# -- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.type"),
        ({"include": ["message.output_text.logprobs", "everything"]}, "include[1]"),
        ({"tools": [{"type": "mcp", "server_url": "https://x"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
        ({"tools": [{**AGENTS, "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        read(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("store", "background", "previous_response_id", "conversation", "prompt", "tools")),
        {"store": False, "background": False, "truncation": "auto", "metadata": {"a": "b"}, "user": "u"},
        {"client_metadata": {"a": "b"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"max_tool_calls": 3, "include": ["web_search_call.action.sources"], "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_obfuscation": True}, "text": {"verbosity": "medium"}},
        {"tools": [{"type": "web_search"}], "tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    parsed = read(**fields)
    assert (parsed.ignored, parsed.request.tools_asked) == ((), ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"given": [said("user", "hi")] * (ITEMS_MAX + 1)}, "input"),
        ({"include": ["reasoning.encrypted_content"] * (_INCLUDED_MAX + 1)}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"stream_options": {}}, "stream_options"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**AGENTS, "tools": [{"type": "custom", "name": "a"}] * 600}] * 2}, "tools"),
        ({"tools": [{**WEATHER, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**AGENTS, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**AGENTS, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(**fields)
    assert (refused.value.param, refused.value.code) == (param, "invalid_value")


def test_what_is_asked_of_the_answer() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    request = read(
        text={"format": schema},
        max_output_tokens=9,
        top_logprobs=3,
        presence_penalty=0.5,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "generate_summary": "auto"},
        include=["reasoning.encrypted_content"],
    ).request
    assert request.structure is not None
    assert (request.structure.param, request.structure.strict) == ("text.format.schema", True)
    assert (request.output_tokens_max, request.max_tokens_param) == (9, "max_output_tokens")
    assert (request.logprobs_asked, request.presence_penalty, request.calls_in_parallel) == (3, 0.5, False)
    assert request.prompt_form.arguments == {"reasoning_effort": "low"}
    assert (request.tells_summary, request.tells_encrypted) == (True, True)
    assert read(include=["message.output_text.logprobs"]).request.logprobs_asked == 0
    assert read().request.logprobs_asked is None


# -- tools ----------------------------------------------------------------------------------------


def test_the_model_is_told_of_functions_alone() -> None:
    custom = {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "text"}}
    request = read(tools=[WEATHER, AGENTS, {"type": "web_search"}, custom]).request
    told = [tool for tool in request.prompt_form.tools if isinstance(tool, FunctionTool)]
    assert [tool.function.name for tool in told] == ["weather", "agents__spawn", "agents__say", "patch"]
    assert all(tool.function.strict is None for tool in told), "it changes no prompt"
    assert [tool.function.schema for tool in told][1:] == [b"", bytes(CUSTOM_SCHEMA), bytes(CUSTOM_SCHEMA)]
    asked = [tool.function for tool in request.tools_asked if isinstance(tool, FunctionTool)]
    assert all(isinstance(one, AskedFunction) for one in asked)
    assert request.tool_places == ("tools[0].parameters", "tools[1].tools[0].parameters", "", "")
    assert [one.strict for one in asked] == [False, None, None, None]
    assert request.offers.called["agents__say"] == Called(CalledAs.CUSTOM, "say", "agents")
    assert request.offers.called["weather"] == Called(CalledAs.FUNCTION, "weather")


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ("none", ToolMode.NONE, None),
        (None, ToolMode.AUTO, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "weather"}, ToolMode.REQUIRED, "weather"),
        ({"type": "function", "name": "spawn"}, ToolMode.REQUIRED, "agents__spawn"),
        ({"type": "custom", "name": "say", "namespace": "agents"}, ToolMode.REQUIRED, "agents__say"),
        ({"type": "function", "name": "agents__spawn"}, ToolMode.REQUIRED, "agents__spawn"),
    ],
)
def test_a_choice_is_one_of_the_functions(choice: Any, mode: ToolMode, name: str | None) -> None:
    request = read(tools=[WEATHER, AGENTS], tool_choice=choice).request
    assert (request.tool_choice_asked.mode, request.tool_choice_asked.name) == (mode, name)
    assert len(request.tools_asked) == 3


def test_allowed_tools_leave_the_prompt_as_it_is() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "spawn"}]}
    request = read(tools=[WEATHER, AGENTS], tool_choice=choice).request
    assert request.tool_choice_asked.mode is ToolMode.REQUIRED
    assert len(request.prompt_form.tools) == 3
    [tool] = request.tools_asked
    assert isinstance(tool, FunctionTool)
    assert tool.function.name == "agents__spawn"
    assert request.tool_places == ["tools[1].tools[0].parameters"]


# -- the prompt -----------------------------------------------------------------------------------


def test_a_conversation_is_the_same_chat_in_either_api() -> None:
    """What templates are given of it, and so its tokens, are the same."""
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call_of("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "o"},
    ]
    items = [said("user", "q"), thought("r"), said("assistant", "a"), called("c"), brought("c", "o")]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body = msgspec.json.encode({"model": "m", "messages": chat, "tools": tools})
    theirs = parse(body, ChatRequest).request.prompt_form
    ours = read(items, instructions="s", tools=[WEATHER]).request.prompt_form
    assert ours.messages == theirs.messages == [msgspec.convert(one, ChatMessage) for one in chat]
    assert ours.tools == theirs.tools
    assert ours.place(0) == "instructions"
    assert ours.place(2) == "input[1]"


def test_what_is_counted_is_what_a_response_would_be_asked() -> None:
    given = [said("user", "q")]
    fields: dict[str, Any] = {"instructions": "s", "tools": [AGENTS], "reasoning": {"effort": "low"}}
    counted = parse(msgspec.json.encode({"input": given, **fields}), InputTokensRequest)
    counted.require_supported()
    assert counted.request.prompt_form == read(given, **fields).request.prompt_form
    with pytest.raises(UnsupportedParameter, match="previous_response_id"):
        parse(b'{"input": "q", "previous_response_id": "resp_1"}', InputTokensRequest).require_supported()
