"""Requests of Anthropic's Messages: the chat that they are, and what is refused of them by its name."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.apis.chat_messages import ChatMessage
from shared.apis.message_chat import BILLING, SIGNATURE, sealed, unsealed
from shared.apis.messages import CountTokensRequest, MessagesRequest
from shared.apis.prompt import ChatPrompt
from shared.apis.structure import StructureKind
from shared.apis.tools import NO_CALLS, ToolChoice, ToolMode
from shared.apis.validation import Parsed, parse
from shared.fairness.fair_threads import at_once
from shared.text.chat_template import ChatTemplate
from shared.wire.errors import InvalidJson, InvalidRequest, UnsupportedParameter

HELLO: Final = {"role": "user", "content": "hello"}
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL: Final = {"name": "f", "input_schema": SCHEMA}
LATER: Final = {"name": "g", "description": "Found.", "input_schema": {}, "defer_loading": True}
USE: Final = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b"}}
FOUND: Final = {"type": "tool_reference", "tool_name": "g"}
EPHEMERAL: Final = {"cache_control": {"type": "ephemeral"}}
IMAGE: Final = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any = "7", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def turns(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [*blocks]}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 4096, "messages": [HELLO], **fields}).encode()


def taken(**fields: Any) -> MessagesRequest:
    """The request, of which our engines take all."""
    parsed: Parsed[MessagesRequest] = parse(body(**fields), MessagesRequest)
    parsed.require_supported()
    assert not parsed.ignored
    return parsed.request


def chat(**fields: Any) -> list[Any]:
    """The messages of the chat that it is, without what they leave out."""
    found: list[Any] = msgspec.to_builtins(taken(**fields).prompt_form.messages)
    return found


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        taken(**fields)
    return caught.value


# -- the chat -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"messages": turns(text("hello"))}, {}),
        ({"messages": turns(text("hello", **EPHEMERAL))}, {}),
        ({"system": [text("Be.")]}, {"system": "Be."}),
        ({"system": [text(f"{BILLING} 1; c=9"), text("Be.", **EPHEMERAL)]}, {"system": "Be."}),
        ({"system": [text(f"{BILLING} 1")]}, {}),
        ({"system": ""}, {}),
        ({"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "u"}}, {}),
        ({"messages": [HELLO, *turns(text("So."), role="system")]},
         {"messages": [HELLO, {"role": "system", "content": "So."}]}),
        ({"messages": turns(result([text("7", **EPHEMERAL)], is_error=False, **EPHEMERAL))},
         {"messages": turns(result())}),
        ({"messages": [*turns({**USE, **EPHEMERAL, "caller": {"type": "direct"}}, role="assistant"), HELLO]},
         {"messages": [*turns(USE, role="assistant"), HELLO]}),
        ({"tools": [{**TOOL, **EPHEMERAL, "type": "custom", "eager_input_streaming": True}]},
         {"tools": [TOOL]}),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, {}),
    ],
)  # fmt: skip
def test_what_says_the_same_is_the_same_prompt(fields: dict[str, Any], same: dict[str, Any]) -> None:
    one, other = taken(**fields).prompt_form, taken(**same).prompt_form
    assert msgspec.json.encode(one) == msgspec.json.encode(other)


def test_turns_stay_apart_and_in_their_order() -> None:
    messages = [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "system", "content": "Late."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "AAAA"},
                text("Let me see."),
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                result("no such file", is_error=True),
                text("Go on."),
                {"type": "mid_conv_system", "content": [text("Now.")]},
                text("Well?"),
            ],
        },
        HELLO,
    ]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    assert chat(system="Be.", messages=messages, tools=[TOOL]) == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "system", "content": "Late."},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "Error: no such file", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "Well?"},
        {"role": "user", "content": "hello"},
    ]


def test_the_prompt_is_made_once() -> None:
    request = taken()
    assert request.prompt_form is request.prompt_form


@given(st.text(max_size=200))
def test_thoughts_that_are_not_told_come_back(thoughts: str) -> None:
    told = {"type": "thinking", "thinking": "", "signature": sealed(thoughts)}
    [_, message] = taken(
        messages=[HELLO, *turns(told, text("Yes."), role="assistant"), HELLO]
    ).prompt_form.messages[:2]
    assert (message.reasoning_content or "") == thoughts


@pytest.mark.parametrize("signature", ["", SIGNATURE, "EqQBCgIYAhIM", f"{SIGNATURE}.%%", f"{SIGNATURE}.gA=="])
def test_a_signature_of_anothers_holds_nothing(signature: str) -> None:
    assert unsealed(signature) == ""


def test_the_last_turn_of_the_assistants_is_continued() -> None:
    prompt = taken(messages=[HELLO, {"role": "assistant", "content": "It is"}]).prompt_form
    assert (prompt.continues_final, prompt.opens_answer) == (True, False)
    prompt = taken().prompt_form
    assert (prompt.continues_final, prompt.opens_answer) == (False, True)


@pytest.mark.parametrize("written", ["{{ message.content | upper }}", ""])
def test_a_turn_that_cannot_be_continued_is_told_by_its_name(written: str) -> None:
    prompt = taken(messages=[HELLO, {"role": "assistant", "content": "It is"}]).prompt_form
    template = ChatTemplate("{% for message in messages %}" + written + "{% endfor %}", {})
    with pytest.raises(InvalidRequest) as caught:
        at_once(template.slices(prompt))
    assert caught.value.param == "messages[1].content"


# -- tools ----------------------------------------------------------------------------------------


def test_a_tool_that_is_loaded_later() -> None:
    """It is no part of the prompt's head; the result that found it holds its definition."""
    before = taken(tools=[LATER, TOOL])
    assert [tool.function.name for tool in before.tools_asked] == ["f"]
    found = [HELLO, *turns(USE, role="assistant"), *turns(result([FOUND]))]
    request = taken(tools=[LATER, TOOL], messages=found, tool_choice={"type": "tool", "name": "g"})
    assert [tool.function.name for tool in request.tools_asked] == ["g", "f"]
    assert request.tool_places == ["tools[0].input_schema", "tools[1].input_schema"]
    assert request.prompt_form.tools == before.prompt_form.tools
    definition = json.loads(request.prompt_form.messages[-1].text)
    assert definition == {
        "type": "function",
        "function": {"name": "g", "description": "Found.", "parameters": {}},
    }
    assert refused(tools=[LATER, TOOL], tool_choice={"type": "tool", "name": "g"}).param == "tool_choice.name"


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, NO_CALLS),
        ({"tool_choice": {"type": "auto"}}, NO_CALLS),
        ({"tools": [TOOL]}, ToolChoice(ToolMode.AUTO)),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, NO_CALLS),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, ToolChoice(ToolMode.REQUIRED)),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, ToolChoice(ToolMode.REQUIRED, "f")),
    ],
)
def test_which_tools_are_called(fields: dict[str, Any], choice: ToolChoice) -> None:
    assert taken(**fields).tool_choice_asked == choice


def test_one_call_at_most() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert not taken(tools=[TOOL], tool_choice=choice).calls_in_parallel
    assert taken(tools=[TOOL]).calls_in_parallel


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "wishes", "budget", "shows", "hides"),
    [
        ({}, {}, None, True, False),
        ({"thinking": {"type": "adaptive"}}, {}, None, True, False),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}, None, False, True),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}, None, True, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"enable_thinking": True, "thinking": True}, 1024, True, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
         {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}, None, False, False),
    ],
)  # fmt: skip
def test_thinking(
    fields: dict[str, Any], wishes: dict[str, Any], budget: int | None, shows: bool, hides: bool
) -> None:
    request = taken(**fields)
    assert request.prompt_form.wishes == wishes
    assert request.thinking_tokens_max == budget
    assert (request.shows_reasoning, request.hides_reasoning) == (shows, hides)
    assert (request.reasoning_kept_tokens > 0) == hides


@pytest.mark.parametrize("where", ["output_config.format", "output_format"])
def test_a_schema_of_the_answer(where: str) -> None:
    format_ = {"type": "json_schema", "schema": SCHEMA}
    fields = (
        {"output_format": format_} if where == "output_format" else {"output_config": {"format": format_}}
    )
    structure = taken(**fields).structure
    assert structure is not None
    assert (structure.kind, structure.param) == (StructureKind.JSON_SCHEMA, f"{where}.schema")
    assert json.loads(structure.source) == SCHEMA


def test_the_maximum_need_not_fit() -> None:
    request = taken(max_tokens=10**6, stop_sequences=["a", "b"])
    assert (request.output_tokens_max, request.stated_tokens_max) == (10**6, None)
    assert request.stop_strings == ["a", "b"]


def test_a_wish_is_granted_where_a_template_reads_it() -> None:
    prompt = ChatPrompt([ChatMessage("user", "hi")], wishes={"effort": "low", "other": 1})
    source = "{{ effort }}{{ other }}{% for message in messages %}{{ message.content }}{% endfor %}"
    for arguments, told in (("effort",), "low"), ((), ""):
        assert at_once(ChatTemplate(source, {}, arguments=arguments).slices(prompt)) == f"{told}hi"


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": turns({"type": "document", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": turns(USE)}, "messages[0].content[0].type"),
        ({"messages": turns(text("a"), result(), role="assistant")}, "messages[0].content[1].type"),
        ({"messages": turns(result(), role="system")}, "messages[0].content[0].type"),
        ({"messages": turns({**USE, "input": "x"}, role="assistant")}, "messages[0].content[0].input"),
        ({"messages": turns(result([{"type": "document"}]))}, "messages[0].content[0].content[0].type"),
        ({"messages": [HELLO, *turns(USE, role="assistant")]}, "messages[1].content"),
        ({"messages": [HELLO, *turns(USE, text("a"), role="assistant")]}, "messages[1].content"),
        ({"messages": [HELLO, {"role": "assistant", "content": ""}]}, "messages[1].content"),
        ({"messages": [HELLO, {"role": "assistant", "content": "a"}], "tools": [TOOL],
          "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA},
          "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_format"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"temperature": 3}, "temperature"),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_the_callers_own_names(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": turns(IMAGE)}, "messages[0].content[0].source"),
        ({"messages": turns(result([text("a"), IMAGE]))}, "messages[0].content[0].content[1].source"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
         "context_management.edits[0].keep"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_no_engine_of_ours_does_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (type(error), error.param) == (UnsupportedParameter, param)
    parse(body(**fields), MessagesRequest)  # another make's may do it


def test_a_field_of_chats_is_refused_with_the_one_to_use() -> None:
    assert str(refused(stop=["a"])) == "stop is not supported; use stop_sequences."
    assert str(refused(json_schema={})) == "json_schema is not supported; use output_config.format."


def test_the_places_of_messages_are_those_of_the_request() -> None:
    asked = taken(
        system="Be brief.", messages=[HELLO, *turns(USE, role="assistant"), *turns(result(), text("a"))]
    )
    assert asked.prompt_form.places == ("system", "messages[0]", "messages[1]", *["messages[2]"] * 2)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"made_up": 1}, ("made_up",)),
        ({"tools": [{**TOOL, "input_examples": []}]}, ("tools.input_examples",)),
        ({"messages": turns(text("a", made_up=1))}, ("messages.content.made_up",)),
        ({"thinking": {"type": "adaptive", "depth": 1}}, ("thinking.depth",)),
    ],
)
def test_what_nobody_knows_is_named(fields: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert parse(body(**fields), MessagesRequest).ignored == ignored


@pytest.mark.parametrize(
    "twice",
    [
        '"messages": [{"role": "user", "content": "a", "content": "b"}]',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "text": "b"}]}]',
        '"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "a", "name": "b"}]',
        '"messages": [{"role": "user", "content": ""}], "system": [{"type": "text", "text": "", "text": ""}]',
    ],
)
def test_a_field_that_is_given_twice_is_refused(twice: str) -> None:
    with pytest.raises(InvalidJson):
        parse(f'{{"model": "m", "max_tokens": 1, {twice}}}'.encode(), MessagesRequest)


def test_a_count_is_asked_for_with_the_same_conversation() -> None:
    fields = {"system": "Be.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    raw = json.dumps({"model": "m", "messages": [HELLO], **fields}).encode()
    counted: Parsed[CountTokensRequest] = parse(raw, CountTokensRequest)
    counted.require_supported()
    assert msgspec.json.encode(counted.request.prompt_form) == msgspec.json.encode(
        taken(**fields).prompt_form
    )
