"""What templates are given: tools, calls, variables and parts of content, as transformers gives them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.generation import GenerationRequest
from shared.apis.messages import MessagesRequest
from shared.apis.prompt import ChatPrompt
from shared.apis.responses.request import ResponsesRequest
from shared.apis.validation import parse
from shared.fairness.fair_threads import at_once
from shared.process.clock import SYSTEM_CLOCK
from shared.text import bounded_template
from shared.text.bounded_template import Unbounded
from shared.text.chat_template import BoundedEnvironment, ChatTemplate, CompiledTemplate, variables_read
from shared.text.rendering import APART_LEN, Renderer
from shared.text.tokenizer import ARGUMENTS_LEN_MAX, Tokenizer, TokenizerBundle, UnusableTokenizer
from shared.wire.errors import InvalidRequest, NotInPlace
from tests.shared.text.chat_templates import HERMES_TOOLS, LLAMA_TOOLS, TEMPLATES, WITH_TOOLS
from tests.shared.text.toy_tokenizers import bundle_of, byte_level
from tests.suites.chats import CHATS, PARIS, WEATHER, call


def rendered(source: str, prompt: ChatPrompt, **given: Any) -> str:
    return at_once(ChatTemplate(source, {"bos_token": "<s>"}, **given).slices(prompt))


def refused(source: str, prompt: ChatPrompt, **given: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        rendered(source, prompt, **given)
    return caught.value


def prompt_of(*messages: dict[str, Any], **more: Any) -> ChatPrompt:
    from tests.suites import templates

    return templates.prompt_of({"messages": [*messages], **more})


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_chats_of_all_kinds_are_rendered_as_transformers_renders_them(name: str) -> None:
    from tests.suites.templates import EQUAL, KINDS, Judge

    judge = Judge(WITH_TOOLS[name])
    assert judge.is_in_place
    kinds = [
        judge.kind(chat, opens=opens)
        for chat in CHATS.values()
        for opens in ((False,) if chat.get("continues") else (True, False))
    ]
    assert set(kinds) <= set(KINDS)
    assert sum(kind in EQUAL for kind in kinds) > len(kinds) / 3


def test_arguments_that_are_no_object_are_named() -> None:
    calls = [PARIS, call("get_weather", '["Rome"]')]
    chat = prompt_of(USER, {"role": "assistant", "content": None, "tool_calls": calls}, tools=[WEATHER])
    assert refused(HERMES_TOOLS, chat).param == "messages[1].tool_calls[1].function.arguments"
    chat.messages[1].tool_calls = (
        prompt_of({"role": "assistant", "tool_calls": [call("now", "")]}).messages[0].tool_calls
    )
    assert '{"name": "now", "arguments": {}}' in rendered(HERMES_TOOLS, chat)


def test_variables_are_those_that_the_template_reads_unless_the_operator_says_which() -> None:
    assert variables_read(HERMES_TOOLS, ()) == ("enable_thinking",)
    assert variables_read(LLAMA_TOOLS, ("bos_token",)) == ("custom_tools", "date_string")
    chat = prompt_of(USER, arguments={"enable_thinking": False})
    assert rendered(HERMES_TOOLS, chat, arguments=("enable_thinking",)).endswith("</think>\n\n")
    assert refused(HERMES_TOOLS, chat).param == "chat_template_kwargs.enable_thinking"
    effort = prompt_of(USER, arguments={"reasoning_effort": "low"})
    assert refused(HERMES_TOOLS, effort).param == "reasoning_effort"


def test_an_effort_of_none_asks_for_no_thinking() -> None:
    none, low = (prompt_of(USER, arguments={"reasoning_effort": effort}) for effort in ("none", "low"))
    assert rendered(HERMES_TOOLS, none) == rendered(HERMES_TOOLS, prompt_of(USER))
    assert rendered(HERMES_TOOLS, none, arguments=("enable_thinking",)).endswith("</think>\n\n")
    assert rendered(HERMES_TOOLS, low, arguments=("enable_thinking",)).endswith("assistant\n")
    stated = prompt_of(USER, arguments={"reasoning_effort": "low", "enable_thinking": False})
    assert rendered(HERMES_TOOLS, stated, arguments=("enable_thinking",)).endswith("</think>\n\n")


def test_defaults_hold_where_a_request_sets_nothing() -> None:
    given = {"arguments": ("enable_thinking",), "defaults": {"enable_thinking": False}}
    assert rendered(HERMES_TOOLS, prompt_of(USER), **given).endswith("</think>\n\n")
    thinking = prompt_of(USER, arguments={"enable_thinking": True})
    assert rendered(HERMES_TOOLS, thinking, **given).endswith("assistant\n")


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "range", "loop", "_x", "a b"])
def test_what_is_no_variable_can_be_set_by_nobody(name: str) -> None:
    for given in ({"arguments": (name,)}, {"defaults": {name: 1}}):
        with pytest.raises(ValueError, match="no variable"):
            ChatTemplate("x", {"bos_token": "<s>"}, **given)


def test_variables_travel_with_the_tokenizer_and_are_part_of_its_hash() -> None:
    def bundle(**more: Any) -> TokenizerBundle:
        plain = bundle_of(byte_level(), HERMES_TOOLS)
        return TokenizerBundle(tokenizer_json=plain.tokenizer_json, chat_template=HERMES_TOOLS, **more)

    given = {"template_arguments": ("enable_thinking",), "template_defaults": {"enable_thinking": False}}
    assert len({bundle().hash, *(bundle(**{name: given[name]}).hash for name in given)}) == 3
    text = at_once(Tokenizer(bundle(**given)).template_of(prompt_of(USER)).slices(prompt_of(USER)))
    assert text.endswith("</think>\n\n")
    with pytest.raises(UnusableTokenizer, match="messages is no variable"):
        Tokenizer(bundle(template_arguments=("messages",)))
    with pytest.raises(UnusableTokenizer, match="the variables of its template take more than"):
        Tokenizer(bundle(template_defaults={"enable_thinking": "x" * ARGUMENTS_LEN_MAX}))


def test_a_template_of_its_own_for_tools_is_used_for_chats_with_tools(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools|length }}{{ x }}"},
    ]

    def texts() -> list[str]:
        tokenizer = Tokenizer(TokenizerBundle.from_dir(tmp_path))
        chats = prompt_of(USER), prompt_of(USER, tools=[WEATHER])
        return [at_once(tokenizer.template_of(chat).slices(chat)) for chat in chats]

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert texts() == ["plain", "1"]
    assert TokenizerBundle.from_dir(tmp_path).template_arguments == ("x",)
    (tmp_path / "chat_template.jinja").write_text("file, {{ tools is none }}")
    assert texts() == ["file, True", "file, False"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("for tools")
    assert texts() == ["file, True", "for tools"]


def test_tools_and_calls_that_a_template_does_not_read_are_refused() -> None:
    chatml = TEMPLATES["ChatML"]
    assert refused(chatml, prompt_of(USER, tools=[WEATHER])).param == "tools"
    calls = prompt_of(USER, {"role": "assistant", "content": "a", "tool_calls": [PARIS]})
    assert refused(chatml, calls).param == "messages[1].tool_calls"


def test_a_template_that_fails_on_tools_says_so() -> None:
    chat = prompt_of(USER, tools=[WEATHER])
    assert "with these tools" in refused("{{ tools.nope.nope }}", chat).message
    assert "no thanks" in refused("{% if tools %}{{ raise_exception('no thanks') }}{% endif %}", chat).message


def test_a_chat_with_tools_is_never_rendered_on_an_event_loop() -> None:
    """A short one may take a template long, and is no reason to render others elsewhere."""
    template = ChatTemplate(HERMES_TOOLS, {}, arguments=("enable_thinking",))
    for more in ({"tools": [WEATHER]}, {"arguments": {"enable_thinking": True}}, {"continues": True}):
        with pytest.raises(NotInPlace):
            template.render(prompt_of(USER, **more))
    with pytest.raises(NotInPlace):
        template.render(prompt_of({"role": "assistant", "content": "", "tool_calls": [PARIS]}))
    assert template.render(prompt_of(USER))


def test_tools_of_a_long_chat_reach_the_process_that_renders_it() -> None:
    template = ChatTemplate(
        HERMES_TOOLS, {}, arguments=("enable_thinking",), defaults={"enable_thinking": False}
    )
    renderer = Renderer()
    long: dict[str, Any] = {"role": "assistant", "content": "a" * APART_LEN, "tool_calls": [PARIS]}
    chat = prompt_of(long, tools=[WEATHER])
    try:
        text = at_once(template.slices(chat, renderer))
        assert renderer.pid is not None
        assert json.dumps(WEATHER, ensure_ascii=False) in text
        assert text.endswith("</think>\n\n")
        wide = json.dumps({"n": [2**64, -(2**63) - 1, 2**63]})
        long["tool_calls"] = [call("now", wide)]
        assert f'"arguments": {wide}' in at_once(template.slices(prompt_of(long), renderer))
        first = renderer.pid
        for depth in range(980, 1000):
            long["tool_calls"] = [call("now", '{"n": ' + "[" * depth + "]" * depth + "}")]
            with contextlib.suppress(InvalidRequest):
                at_once(template.slices(prompt_of(long), renderer))
        assert renderer.pid == first, "it outlives what is nested too deeply"
    finally:
        renderer.close()


def test_tools_count_among_what_makes_a_chat_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(bounded_template.Spending, "start", lambda _, length: lengths.append(length))
    schema = {"type": "object", "description": "x" * 5000}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    calls = [call("f", json.dumps({"a": "y" * 3000}))]
    chat = prompt_of(
        {"role": "assistant", "tool_calls": calls}, tools=[tool], arguments={"enable_thinking": "z" * 700}
    )
    rendered(HERMES_TOOLS, chat, arguments=("enable_thinking",))
    assert lengths[-1] >= 8700


# -- bounds ---------------------------------------------------------------------------------------


def test_json_that_is_written_with_indents_is_weighed_by_its_depth() -> None:
    """At a depth of 400 each of the numbers takes 1,600 spaces."""
    deep: Any = [1] * 2000
    for _ in range(400):
        deep = [deep]
    source = "{{ x | tojson(indent=4) }}"
    template = CompiledTemplate(source, {}, BoundedEnvironment(SYSTEM_CLOCK, ["x"]))
    with pytest.raises(Unbounded, match="keeps too much"):
        template.render([], 5000, {"x": deep})
    assert template.render([], 5000, {"x": {"a": [1]}}) == json.dumps({"a": [1]}, indent=4)


def test_json_may_have_separators_of_its_own() -> None:
    source = "{{ x | tojson(separators=(',', ':')) }}"
    template = CompiledTemplate(source, {}, BoundedEnvironment(SYSTEM_CLOCK, ["x"]))
    assert template.render([], 9, {"x": {"a": [1, 2]}}) == '{"a":[1,2]}'
    with pytest.raises(Unbounded):
        CompiledTemplate(source.replace(":", ":" * 9), {}, BoundedEnvironment(SYSTEM_CLOCK, ["x"]))


def test_a_variable_from_outside_is_no_number_whatever_the_template_sets() -> None:
    source = "{% if x is not defined %}{% set x = 1 %}{% endif %}{{ (x % 2) | length }}"
    with pytest.raises(Unbounded, match="format a text"):
        CompiledTemplate(source, {}, BoundedEnvironment(SYSTEM_CLOCK, ["x"]))


def test_a_range_in_a_loop_with_variables_of_its_own_is_counted() -> None:
    source = "{% for m in messages %}{% set n = 3 %}{% for i in range(n) %}{{ i }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source, {}).render(ChatPrompt([ChatMessage("user", "a")])) == "012"


PICKY = (
    "{%- set effort = reasoning_effort|default('xhigh') -%}"
    "{%- if effort not in ('low', 'medium', 'xhigh') -%}{{ raise_exception('Unknown') }}{%- endif -%}"
    "{%- for message in messages -%}{{ message.content }}{%- endfor -%}/{{ effort }}"
)


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("high", "xhigh"), ("max", "xhigh")],
)
def test_an_effort_that_is_refused_is_the_nearest_that_is_taken(asked: str, taken: str) -> None:
    chat = prompt_of(USER, arguments={"reasoning_effort": asked})
    assert rendered(PICKY, chat, arguments=("reasoning_effort",)).endswith(f"/{taken}")
    any_effort = PICKY.replace("effort not in", "false and effort not in")
    assert rendered(any_effort, chat, arguments=("reasoning_effort",)).endswith(f"/{asked}")


def test_no_effort_is_no_thinking_where_none_is_refused() -> None:
    chat = prompt_of(USER, arguments={"reasoning_effort": "none"})
    source = PICKY + "{{ '/thinks' if enable_thinking|default(true) else '/not' }}"
    assert rendered(source, chat, arguments=("reasoning_effort", "enable_thinking")).endswith("/xhigh/not")
    odd = prompt_of(USER, arguments={"reasoning_effort": "vast"})
    assert refused(source, odd, arguments=("reasoning_effort",)).param == "messages"


HIGH = {"reasoning_effort": "high"}
OF_CHAT = {"model": "m", "messages": [USER]}
OF_MESSAGES = {**OF_CHAT, "max_tokens": 2048}
HIGH_OF_MESSAGES = {**OF_MESSAGES, "output_config": {"effort": "high"}}


@pytest.mark.parametrize(
    ("shape", "body", "given"),
    [
        (MessagesRequest, HIGH_OF_MESSAGES, "xhigh"),
        (
            MessagesRequest,
            {**HIGH_OF_MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "xhigh",
        ),
        (MessagesRequest, {**HIGH_OF_MESSAGES, "thinking": {"type": "disabled"}}, "low"),
        (ResponsesRequest, {"model": "m", "input": "Hi", "reasoning": {"effort": "high"}}, "xhigh"),
        (ChatRequest, {**OF_CHAT, **HIGH}, "xhigh"),
        (ChatRequest, {**OF_CHAT, "chat_template_kwargs": HIGH}, "xhigh"),
        (ChatRequest, {**OF_CHAT, **HIGH, "chat_template_kwargs": {"reasoning_effort": "medium"}}, "medium"),
    ],
)
def test_every_api_asks_for_an_effort_that_the_template_takes(
    shape: type[GenerationRequest], body: dict[str, Any], given: str
) -> None:
    request = parse(json.dumps(body).encode(), shape).request
    assert isinstance(request.prompt_form, ChatPrompt)
    assert rendered(PICKY, request.prompt_form, arguments=("reasoning_effort",)).endswith(f"/{given}")


def test_what_a_chat_sets_of_the_template_goes_before_what_its_fields_wish() -> None:
    source = PICKY + "{{ '/thinks' if enable_thinking|default(true) else '/not' }}"
    variables = ("reasoning_effort", "enable_thinking")
    none = prompt_of(USER, arguments={"reasoning_effort": "none", "enable_thinking": True})
    assert rendered(source, none, arguments=variables).endswith("/xhigh/thinks")
    wish = ChatPrompt(none.messages, wishes={**HIGH, "enable_thinking": False})
    assert rendered(source, wish, arguments=variables).endswith("/xhigh/not")
    stated = ChatPrompt(
        none.messages, wishes=wish.wishes, arguments={"reasoning_effort": "low", "enable_thinking": True}
    )
    assert rendered(source, stated, arguments=variables).endswith("/low/thinks")
