"""Tools, structures, reasoning and what else chats ask of their prompts and answers: what our engines take of
it, and what is refused by its name."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any, Final

import msgspec
import pytest

from shared.apis.chat import EFFORTS, AssistantMessage, ChatDelta, ChatRequest, FunctionDelta, ToolCallDelta
from shared.apis.chat_form import argument_slices, long_arguments
from shared.apis.chat_messages import ChatMessage, FunctionCall, FunctionToolCall, TextPart
from shared.apis.completions import CompletionRequest
from shared.apis.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from shared.apis.holding import DEPTH_MAX, FIELDS_MAX, TOKEN_BYTES, VALUES_MAX
from shared.apis.prompt import ChatPrompt, TextPrompt
from shared.apis.request import Request
from shared.apis.structure import CHOICE_LEN_MAX, CHOICES_MAX, GRAMMAR_LEN_MAX, Structure, StructureKind
from shared.apis.tokenize import TokenizeRequest
from shared.apis.tools import ToolChoice, ToolMode
from shared.apis.validation import Parsed, parse
from shared.fairness.fair_threads import at_once
from shared.wire.errors import InvalidRequest, UnsupportedParameter
from shared.wire.shapes import TOOLS_MAX
from tests.shared.wire.request_bodies import CHAT, MESSAGE, chat, completion

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL: Final = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS: Final = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "content": "7"}
LONG: Final = "x" * 65


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema_format(**fields: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **fields}}
    }


def taken(body: bytes, type_: type[Request] = ChatRequest) -> Any:
    """The request, of which our engines take all."""
    parsed: Parsed[Any] = parse(body, type_)
    parsed.require_supported()
    assert not parsed.ignored
    return parsed.request


def refused(body: bytes, type_: type[Request] = ChatRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, type_).require_supported()
    assert caught.value.status == 400
    return caught.value


# -- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "mode", "name"),
    [
        ({}, ToolMode.NONE, None),
        ({"tools": []}, ToolMode.NONE, None),
        ({"tool_choice": "auto"}, ToolMode.NONE, None),
        ({"tools": [tool()]}, ToolMode.AUTO, None),
        ({"tools": [tool()], "tool_choice": "auto"}, ToolMode.AUTO, None),
        ({"tools": [tool()], "tool_choice": "none"}, ToolMode.NONE, None),
        ({"tools": [tool()], "tool_choice": "required"}, ToolMode.REQUIRED, None),
        ({"tools": [tool(), tool("g")], "tool_choice": named("g")}, ToolMode.REQUIRED, "g"),
    ],
)
def test_a_choice_of_tools(fields: dict[str, Any], mode: ToolMode, name: str | None) -> None:
    assert taken(chat(**fields)).tool_choice_asked == ToolChoice(mode, name)


def test_tools_are_told_to_the_template_whatever_is_chosen() -> None:
    """So a conversation's prompt stays the same, and its cached prefix with it."""
    tools = [tool(description="d", parameters=SCHEMA, strict=True), tool("-_" * 32)]
    for choice in ("none", "auto", "required"):
        prompt = taken(chat(tools=tools, tool_choice=choice)).prompt_form
        assert msgspec.json.decode(msgspec.json.encode(prompt.tools)) == tools
    assert not taken(chat(parallel_tool_calls=False, tools=tools)).calls_in_parallel
    assert taken(chat(parallel_tool_calls=None, tools=tools)).calls_in_parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(TOOLS_MAX + 1)]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [tool(""), tool()]}, "tools[0].function.name"),
        ({"tools": [tool(LONG)]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f\n")]}, "tools[0].function.name"),
        ({"tools": [tool("é")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[1])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(description=7)]}, "tools[0].function.description"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        ({"tool_choice": "any", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": 7, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {}, "tools": [tool()]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function"),
        (
            {"tool_choice": {"type": "function", "function": {}}, "tools": [tool()]},
            "tool_choice.function.name",
        ),
        ({"tool_choice": named("g"), "tools": [tool()]}, "tool_choice.function.name"),
    ],
)
def test_tools_that_are_none_are_refused_by_their_names(fields: dict[str, Any], param: str) -> None:
    error = refused(chat(**fields))
    assert (error.param, type(error)) == (param, InvalidRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(), {"type": "custom", "custom": {"name": "g"}}]}, "tools[1].type"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "custom"}, "tools": [tool()]}, "tool_choice.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_what_no_engine_of_ours_does_is_unsupported(fields: dict[str, Any], param: str) -> None:
    error = refused(chat(**fields))
    assert (error.param, type(error)) == (param, UnsupportedParameter)


def test_what_no_shape_of_a_tool_has_is_named() -> None:
    tools = [{**tool(), "cache_control": {}}, tool("g", defer=True, parameters=SCHEMA)]
    parsed = parse(chat(tools=tools), ChatRequest)
    assert parsed.ignored == ("tools.cache_control", "tools.function.defer")


def test_as_many_tools_as_may_be_are_taken() -> None:
    request = taken(chat(tools=[tool(f"f{i}") for i in range(TOOLS_MAX)]))
    assert len(request.tools_asked) == TOOLS_MAX


# -- structures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": None, "disable_any_whitespace": False}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Structure(StructureKind.JSON_OBJECT, param="response_format"),
        ),
        (
            schema_format(strict=True, description="d"),
            Structure(
                StructureKind.JSON_SCHEMA,
                json.dumps(SCHEMA),
                strict=True,
                param="response_format.json_schema.schema",
            ),
        ),
        (
            {"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "text"}},
            Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA), param="structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": '{"type": "object"}'}},
            Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}', param="structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"regex": "[0-9]+"}},
            Structure(StructureKind.REGEX, "[0-9]+", param="structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            Structure(StructureKind.CHOICE, choices=("yes", "no"), param="structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Structure(StructureKind.GRAMMAR, 'start: "a"', param="structured_outputs.grammar"),
        ),
    ],
)
def test_a_structure(make: Any, fields: dict[str, Any], structure: Structure | None) -> None:
    request = taken(make(**fields), ChatRequest if make is chat else CompletionRequest)
    assert request.structure == structure
    assert "start" not in repr(request.structure), "it is the caller's text"


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (schema_format(name=LONG), "response_format.json_schema.name"),
        (schema_format(name="a b"), "response_format.json_schema.name"),
        (schema_format(schema=None), "response_format.json_schema.schema"),
        (schema_format(schema=True), "response_format.json_schema.schema"),
        (schema_format(schema={"const": "x" * 300_000}), "response_format.json_schema.schema"),
        (schema_format(strict=1), "response_format.json_schema.strict"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [SCHEMA]}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"const": "x" * 300_000}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "a" * (GRAMMAR_LEN_MAX + 1)}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * (CHOICES_MAX + 1)}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a" * (CHOICE_LEN_MAX + 1)]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ],
)
def test_a_structure_that_is_none_is_refused_by_its_name(
    make: Any, fields: dict[str, Any], param: str
) -> None:
    error = refused(make(**fields), ChatRequest if make is chat else CompletionRequest)
    assert (error.param, type(error)) == (param, InvalidRequest)


REQUIRED: Final = {"tools": [tool()], "tool_choice": "required"}
JSON: Final = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**JSON, "min_tokens": 1}, "min_tokens"),
        ({**JSON, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool()], "min_tokens": 1}, "min_tokens"),
        ({**JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({**REQUIRED, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({**REQUIRED, "messages": [MESSAGE], "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_cannot_hold_together_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(chat(**fields)).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {**REQUIRED, **JSON},  # OpenAI's, and its Agents SDK sends it: the format is for an answer in text
        {"tools": [tool()], **JSON},
        {"tools": [tool()], "structured_outputs": {"regex": "a"}},
        {"tools": [tool()], "tool_choice": "none", "min_tokens": 1},
        {**JSON, "min_tokens": 0, "ignore_eos": False},
    ],
)
def test_what_can_hold_together_is_taken(fields: dict[str, Any]) -> None:
    taken(chat(**fields))


# -- reasoning, and the template's variables ------------------------------------------------------


def test_variables_of_the_template() -> None:
    assert taken(chat()).prompt_form.arguments == {}
    for effort in EFFORTS:
        assert taken(chat(reasoning_effort=effort)).prompt_form.arguments == {"reasoning_effort": effort}
    own = {"enable_thinking": False, "a": [1, {"b": None}]}
    prompt = taken(chat(reasoning_effort="low", chat_template_kwargs=own)).prompt_form
    assert prompt.arguments == {"reasoning_effort": "low", **own}


def test_a_budget_of_thinking_and_whether_it_is_told() -> None:
    assert [taken(chat(thinking_token_budget=n)).thinking_tokens_max for n in (None, -1, 0, 7)] == [
        None,
        None,
        0,
        7,
    ]
    shown = [taken(chat(include_reasoning=told)).shows_reasoning for told in (None, True, False)]
    assert shown == [True, True, False]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 7}, "reasoning_effort"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": nested(16)}}, "chat_template_kwargs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": "7"}, "thinking_token_budget"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(chat(**fields)).param == param


def test_nesting_up_to_the_bound_is_taken() -> None:
    taken(chat(chat_template_kwargs={"a": nested(15)}))


# -- how the prompt ends --------------------------------------------------------------------------

ENDS: Final = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]


@pytest.mark.parametrize(
    ("fields", "continues", "opens"),
    [
        ({}, False, True),
        ({"add_generation_prompt": True}, False, True),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": False}, False, True),
        ({"continue_final_message": True}, True, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, True, False),
    ],
)
def test_how_a_prompt_ends(fields: dict[str, Any], continues: bool, opens: bool) -> None:
    for body, type_ in (
        (chat(messages=ENDS, **fields), ChatRequest),
        (json.dumps({"messages": ENDS, **fields}).encode(), TokenizeRequest),
    ):
        prompt = taken(body, type_).prompt_form
        assert (prompt.continues_final, prompt.opens_answer) == (continues, opens)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (ENDS, {"add_generation_prompt": True}),
        (ENDS[:1], {}),
        ([*ENDS, CALLS], {}),
        ([CALLS, RESULT], {}),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: list[Any], fields: dict[str, Any]) -> None:
    error = refused(chat(messages=messages, continue_final_message=True, **fields))
    assert error.param == "continue_final_message"


def test_tokenize_takes_what_makes_a_chats_prompt() -> None:
    fields = {"tools": [tool()], "chat_template_kwargs": {"a": 1}, "continue_final_message": True}
    prompt = taken(json.dumps({"messages": ENDS, **fields}).encode(), TokenizeRequest).prompt_form
    assert (len(prompt.tools), prompt.arguments, prompt.continues_final) == (1, {"a": 1}, True)
    for name, value in fields.items():
        error = refused(json.dumps({"prompt": "a", name: value}).encode(), TokenizeRequest)
        assert error.param == name


def test_a_suffix_is_for_one_text() -> None:
    assert taken(completion(suffix="x"), CompletionRequest).prompt_form == TextPrompt("hi", suffix="x")
    assert taken(completion(suffix=""), CompletionRequest).prompt_form == TextPrompt("hi")
    for fields in ({"prompt": ["a"]}, {"prompt": [1]}, {"echo": True}, {"suffix": 7}):
        assert refused(completion(**{"suffix": "x", **fields}), CompletionRequest).param == "suffix"


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [CALLS, RESULT],
        [
            {"role": "assistant", "tool_calls": [CALL, CALL]},
            RESULT,
            {**RESULT, "content": [{"type": "text", "text": "a"}]},
        ],
        [{**CALLS, "content": ""}, {**CALLS, "content": "Let me see."}],
        [{**CALLS, "content": [{"type": "text", "text": "Let me see."}]}],
        [{**MESSAGE, "reasoning": "hm"}, {**MESSAGE, "reasoning_content": "hm", "reasoning": "hm"}],
        [{"role": "assistant", "content": None, "reasoning": "hm"}],
        [
            {"role": "assistant", "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
        [{**MESSAGE, "role": "user"}, {**MESSAGE, "role": "user"}, MESSAGE, MESSAGE],
        [{**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]}],
    ],
)
def test_histories_with_calls_and_reasoning_are_taken(messages: list[Any]) -> None:
    taken(chat(messages=messages))
    taken(json.dumps({"messages": messages}).encode(), TokenizeRequest)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([CALLS, {**RESULT, "tool_call_id": ""}], "messages[1].tool_call_id"),
        ([CALLS, {**RESULT, "content": None}], "messages[1].content"),
        ([{**CALLS, "tool_calls": []}], "messages[0].content"),
        ([{**CALLS, "tool_calls": [{**CALL, "id": 7}]}], "messages[0].tool_calls[0].id"),
        ([{**CALLS, "tool_calls": [{**CALL, "type": "x"}]}], "messages[0].tool_calls[0].type"),
        (
            [{**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{**CALLS, "tool_calls": [CALL] * 2049}], "messages[0].tool_calls"),
    ],
)
def test_calls_and_results_that_are_none_are_refused_by_their_names(messages: list[Any], param: str) -> None:
    assert refused(chat(messages=messages)).param == param


def test_all_that_a_template_may_print_is_measured() -> None:
    call = FunctionToolCall("i" * 10, FunctionCall("f" * 20, "a" * 40))
    message = ChatMessage("assistant", [TextPart("x")], reasoning="r" * 80, tool_calls=[call])
    assert sum(map(len, message.printable)) == 1 + 80 + 10 + 20 + 40
    assert sum(map(len, ChatMessage("tool", "x", tool_call_id="t" * 10).printable)) == 11
    assert ChatMessage("user", "x").printable == ("x",)


def of_calls(arguments: str, calls: int = 1) -> ChatPrompt:
    call = FunctionToolCall("1", FunctionCall("f", arguments))
    return ChatPrompt([ChatMessage("assistant", tool_calls=[call]) for _ in range(calls)])


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ('{"a": [' + "[]," * VALUES_MAX + "1]}", 1),
        ('{"a": [' + "1," * (VALUES_MAX // 8) + "1]}", 9),
        ("{" + '"":0,' * FIELDS_MAX + '"":0}', 1),
        ('{"a": ' + "[" * 40_000 + "]" * 40_000 + "}", 1),
        ('{"a": ' + "[" * DEPTH_MAX + "]" * DEPTH_MAX + "}", 1),
    ],
    ids=["lists", "numbers, in several", "fields", "depth", "depth of a short one"],
)
def test_what_is_made_of_the_arguments_of_calls_is_bounded_before_it_is_made(
    arguments: str, calls: int
) -> None:
    """They are a string of the body, in which its census counts nothing."""
    with pytest.raises(InvalidRequest, match="more than") as error:
        at_once(argument_slices(long_arguments(of_calls(arguments, calls))))
    assert (error.value.param or "").endswith(".tool_calls[0].function.arguments")


def test_long_arguments_of_honest_calls_are_taken() -> None:
    code = json.dumps({"path": "a.py", "text": 'x = {"a": [1, 2]}\n' * 50_000})
    at_once(argument_slices(long_arguments(of_calls(code))))
    assert not long_arguments(of_calls('{"a": 1}')), "nothing is counted"


@pytest.mark.parametrize("unit", ["{},", "[],", '{"":0},', '{"a":{}},', "[[]],", '"",'])
def test_trees_of_arguments_take_no_more_than_the_ids_that_come_after_them(unit: str) -> None:
    """A body's reservation counts `TOKEN_BYTES` for each of its bytes, which are ids only when the rendered
    prompt is encoded: by then the trees that the template was given are gone."""
    text = "[" + unit * 10_000 + "0]"
    tracemalloc.start()
    try:
        tree = msgspec.json.decode(text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree
    assert size <= TOKEN_BYTES * len(text)


# -- answers --------------------------------------------------------------------------------------


def test_answers_have_what_was_called_and_nothing_else() -> None:
    delta = ChatDelta(
        tool_calls=[ToolCallDelta(0, "call00001", "function", FunctionDelta("f", ""))], content=None
    )
    call = {"index": 0, "id": "call00001", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert msgspec.json.decode(msgspec.json.encode(delta)) == {"content": None, "tool_calls": [call]}
    piece = ChatDelta(tool_calls=[ToolCallDelta(0, function=FunctionDelta(arguments="{}"))])
    told = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    assert msgspec.json.decode(msgspec.json.encode(piece)) == told
    message = AssistantMessage(None, tool_calls=[FunctionToolCall("1", FunctionCall("f", "{}"))])
    assert msgspec.json.decode(msgspec.json.encode(message)) == {
        "content": None,
        "role": "assistant",
        "refusal": None,
        "annotations": [],
        "tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }
    usage = Usage(1, 2, 3, PromptTokensDetails(), CompletionTokensDetails(1))
    assert b'"completion_tokens_details":{"reasoning_tokens":1}' in msgspec.json.encode(usage)
    assert b"completion_tokens_details" not in msgspec.json.encode(Usage(1, 2, 3, PromptTokensDetails()))
