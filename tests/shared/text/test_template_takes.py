"""What templates take is found out by rendering, and chats are put into that form: no message is lost or
moved, and a turn's prompt is the beginning of the next one's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.demo import MODEL_DIR
from shared.apis.prompt import ChatPrompt
from shared.fairness.fair_threads import at_once
from shared.text import chat_template
from shared.text.bounded_template import SOURCE_LEN_MAX
from shared.text.call_arguments import arguments_of, written_json
from shared.text.chat_template import ChatTemplate, variables_read
from shared.text.prompts import prompt_slices
from shared.text.rendering import APART_LEN, Renderer
from shared.text.template_probes import common
from shared.text.template_takes import Takes, short_id
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire.errors import InvalidRequest
from tests.sessions import AGENTS, Message, Session
from tests.shared.text.chat_templates import DEMANDING, HERMES_TOOLS, STRICT, TEMPLATES, WITH_TOOLS
from tests.shared.text.toy_tokenizers import bundle_of, byte_level
from tests.suites.chats import PARIS, ROME, WEATHER, call
from tests.suites.templates import InProcess, prompt_of

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SOURCES = WITH_TOOLS | DEMANDING
REMINDER = "<system-reminder>\nlate\n</system-reminder>"
USER = {"role": "user", "content": "Hi"}
AGAIN = {"role": "user", "content": "again"}
ANSWER = {"role": "assistant", "content": "Hello!"}
SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "late"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [PARIS]}
RESULT = {"role": "tool", "tool_call_id": PARIS["id"], "content": "15"}


def template_of(source: str, **given: Any) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, arguments=variables_read(source, SPECIAL), **given)


def rendered(template: ChatTemplate, *messages: Message, opens: bool = False, **more: Any) -> str:
    return at_once(template.slices(prompt_of({"messages": messages, **more}, opens=opens)))


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    return {name: template_of(source) for name, source in SOURCES.items()}


# -- one meaning, one form ------------------------------------------------------------------------


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SAME: dict[str, tuple[list[Message], list[Message]]] = {
    "a part": ([USER], [{"role": "user", "content": parts("Hi")}]),
    "several parts": ([USER], [{"role": "user", "content": parts("H", "", "i")}]),
    "an answer in parts": ([USER, ANSWER, AGAIN], [USER, ANSWER | {"content": parts("Hello!")}, AGAIN]),
    "a result in parts": ([USER, CALLS, RESULT], [USER, CALLS, RESULT | {"content": parts("1", "5")}]),
    "an empty text beside a call": ([USER, CALLS, RESULT], [USER, CALLS | {"content": ""}, RESULT]),
    "no part beside a call": ([USER, CALLS, RESULT], [USER, CALLS | {"content": []}, RESULT]),
    "no content beside a call": (
        [USER, CALLS, RESULT],
        [USER, {name: value for name, value in CALLS.items() if name != "content"}, RESULT],
    ),
    "no answer": ([USER, ANSWER | {"content": ""}, AGAIN], [USER, ANSWER | {"content": None}, AGAIN]),
    "no calls": ([USER, ANSWER, AGAIN], [USER, ANSWER | {"tool_calls": []}, AGAIN]),
    "reasoning": ([USER, ANSWER | {"reasoning": "Hm."}], [USER, ANSWER | {"reasoning_content": "Hm."}]),
    "no reasoning": ([USER, ANSWER], [USER, ANSWER | {"reasoning_content": ""}]),
    "arguments that were spelled anew": (
        [USER, CALLS | {"tool_calls": [call("f", '{"a": 1.5, "b": ["é", null]}')]}, RESULT],
        [USER, CALLS | {"tool_calls": [call("f", '{"a":1.5,"b":["é",null]}')]}, RESULT],
    ),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name, source in SOURCES.items()
        for case, (messages, _) in SAME.items()
        if "tool_calls" in source or not any("tool_calls" in message for message in messages)
    ],
)
def test_what_means_the_same_has_the_same_text(
    name: str, case: str, templates: dict[str, ChatTemplate]
) -> None:
    one, other = (rendered(templates[name], *messages) for messages in SAME[case])
    assert one == other


# -- what templates take --------------------------------------------------------------------------


def test_what_a_template_takes_is_found_out(templates: dict[str, ChatTemplate]) -> None:
    assert templates["Hermes"].takes == Takes()
    assert templates["Llama"].takes == Takes(calls_at_once=False)
    assert templates["Mistral"].takes == Takes(system=False, any_id=False)
    assert templates["parts"].takes == Takes(text=False)
    assert templates["strict"].takes == Takes(
        systems=False,
        late_system=False,
        any_first=False,
        past_reasoning=False,
        reasoning_kept_by={"keep_thinking": True},
    )
    assert templates["alternating"].takes == Takes(
        system=False, any_first=False, users_in_row=False, assistants_in_row=False, user_behind_tool=False
    )
    assert templates["hoisting"].takes == Takes(
        systems=False,
        late_system=False,
        calls_at_once=False,
        objects=False,
        nameless_result=False,
        no_text="null",
    )


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", False),
        ("{% for m in messages %}{{ m.role | capitalize }}:{{ m.content }};{% endfor %}", False),
        ("{# developer #}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ 'D' if m.role == 'developer' }}{{ m.content }};{% endfor %}", True),
    ],
)
def test_a_developer_is_the_system_unless_the_template_makes_more_of_it(source: str, knows: bool) -> None:
    assert template_of(source).takes.developer is knows


def test_a_template_that_needs_too_much_for_a_probe_is_not_probed_further() -> None:
    """Nor is anything changed where the template refuses all."""
    loops = "{% for i in range(4000) %}{% for j in range(4000) %}x{% endfor %}{% endfor %}"
    assert template_of(loops).takes == Takes()
    assert template_of("{{ raise_exception('no') }}").takes == Takes()


def test_what_is_taken_travels_with_the_tokenizer() -> None:
    bundle = msgspec.structs.replace(bundle_of(byte_level(), STRICT), takes=template_of(STRICT).takes)
    assert bundle.takes is not None
    there = msgspec.json.decode(msgspec.json.encode(bundle), type=TokenizerBundle)
    assert there == bundle
    assert there.hash != msgspec.structs.replace(bundle, takes=None).hash
    assert Tokenizer(there).template_of(ChatPrompt([])).takes == bundle.takes
    demo = Tokenizer(TokenizerBundle.from_dir(MODEL_DIR))
    assert demo.bundle.takes is not None
    assert demo.hash == demo.bundle.hash


# -- chats in that form ---------------------------------------------------------------------------


def test_a_late_instruction_that_is_refused_is_the_users_at_its_place(
    templates: dict[str, ChatTemplate],
) -> None:
    text = rendered(templates["strict"], SYSTEM, USER, LATE, ANSWER, AGAIN)
    assert text.index("Hi<|im_end|>") < text.index(f"<|im_start|>user\n{REMINDER}") < text.index("Hello!")
    developer = LATE | {"role": "developer"}
    assert rendered(templates["strict"], SYSTEM, USER, developer, ANSWER, AGAIN) == text
    text = rendered(templates["alternating"], USER, LATE, ANSWER, LATE, AGAIN)
    assert f"<start_of_turn>user\nHi\n\n{REMINDER}<end_of_turn>" in text, "two in a row are one"
    assert f"<start_of_turn>user\n{REMINDER}\n\nagain<end_of_turn>" in text
    text = rendered(templates["hoisting"], SYSTEM, USER, LATE, ANSWER, AGAIN)
    assert text.startswith(f"<s>Be brief.<User>Hi<User>{REMINDER}<Assistant>")
    text = rendered(templates["Hermes"], SYSTEM, USER, LATE, ANSWER, AGAIN)
    assert "<|im_start|>system\nlate<|im_end|>" in text, "what is taken stays as it is"


def test_a_reminder_behind_a_result_leaves_the_reasoning_before_it_alone() -> None:
    """The template leaves out the reasoning before the user's last message."""
    thinking = CALLS | {"reasoning_content": "Hm."}
    template = template_of(STRICT)
    text = rendered(template, USER, thinking, RESULT, LATE)
    assert "<think>\nHm.\n</think>" in text
    assert f"<|im_start|>tool\n15\n\n{REMINDER}<|im_end|>" in text
    keeping = template_of(STRICT, defaults={"keep_thinking": True})
    assert f"<|im_start|>user\n{REMINDER}<|im_end|>" in rendered(keeping, USER, thinking, RESULT, LATE)


def test_several_instructions_at_the_head_are_one_where_no_more_are_taken(
    templates: dict[str, ChatTemplate],
) -> None:
    head = SYSTEM, {"role": "developer", "content": "In French."}, USER
    assert "system\nBe brief.\n\nIn French.<|im_end|>" in rendered(templates["strict"], *head)
    assert rendered(templates["hoisting"], *head).startswith("<s>Be brief.\n\nIn French.<User>Hi")
    assert "Be brief.<|im_end|>\n<|im_start|>system\nIn French." in rendered(templates["Hermes"], *head)


def test_a_chat_begins_with_the_user_where_it_must(templates: dict[str, ChatTemplate]) -> None:
    for name in ("strict", "alternating"):
        assert "user\n<" in rendered(templates[name], ANSWER, USER)
        assert rendered(templates[name], SYSTEM)
    assert "user" not in rendered(templates["Hermes"], SYSTEM, ANSWER)


def test_messages_of_one_role_in_a_row_are_one_where_roles_alternate(
    templates: dict[str, ChatTemplate],
) -> None:
    more = {"role": "assistant", "content": "More.", "reasoning_content": "Hm."}
    text = rendered(templates["alternating"], USER, AGAIN, ANSWER, more, AGAIN)
    assert re.findall(r"<start_of_turn>(\w+)", text) == ["user", "model", "user"]
    assert "user\nHi\n\nagain<" in text
    assert "model\nHello!\n\nMore.<" in text
    text = rendered(templates["alternating"], USER, CALLS, RESULT, AGAIN)
    assert text.endswith("tool\n15\n\nagain<end_of_turn>\n"), "behind a result the user's text joins that"


def test_calls_come_one_at_a_time_with_their_results_where_no_more_are_taken(
    templates: dict[str, ChatTemplate],
) -> None:
    calls = CALLS | {"tool_calls": [PARIS, ROME]}
    results = RESULT | {"content": "21", "tool_call_id": ROME["id"]}, RESULT
    text = rendered(templates["Llama"], USER, calls, *results, AGAIN, tools=[WEATHER])
    found = re.findall(r'"place": "(\w+)|ipython<\|end_header_id\|>\n\n"(\d+)', text)
    assert [place or result for place, result in found] == ["Paris", "15", "Rome", "21"]
    text = rendered(templates["hoisting"], USER, calls, *results)
    assert re.findall(r"<sep>.*?(\w+)\"}|:(\d+)</output>", text) == [
        ("celsius", ""),
        ("", "15"),
        ("Rome", ""),
        ("", "21"),
    ]


def test_ids_of_calls_have_the_form_that_a_template_asks_for(templates: dict[str, ChatTemplate]) -> None:
    id_ = "toolu_01AbCdEfGh"
    text = rendered(
        templates["Mistral"],
        USER,
        CALLS | {"tool_calls": [PARIS | {"id": id_}]},
        RESULT | {"tool_call_id": id_},
    )
    assert text.count(f'"{short_id(id_)}"') == 2
    assert re.fullmatch("[A-Za-z0-9]{9}", short_id(id_))
    assert short_id(PARIS["id"]) == PARIS["id"], "those of our engines are of that form"
    assert len({short_id(f"call_{number}") for number in range(1000)}) == 1000


def test_text_beside_reasoning_and_calls_joins_the_reasoning_where_a_template_refuses_both() -> None:
    source = HERMES_TOOLS.replace(
        "{%- for call in message.tool_calls or [] %}",
        "{%- if content and message.thinking and message.tool_calls %}{{ raise_exception(1) }}{% endif %}"
        "{%- for call in message.tool_calls or [] %}",
    )
    template = template_of(source)
    assert template.takes == Takes(text_of_reasoned_call=False)
    text = rendered(template, USER, CALLS | {"reasoning": "Hm.", "content": "I look."}, RESULT)
    assert "<think>\nHm.\n\nI look.\n</think>" in text


def test_an_error_names_the_message_that_the_template_was_at(templates: dict[str, ChatTemplate]) -> None:
    """Its number is the caller's, whatever was put before it or joined, and in another process too."""
    orphan = {"role": "function", "name": "f", "content": "1"}
    for length in (1, APART_LEN):
        user = USER | {"content": "x" * length}
        job = templates["strict"].slices(
            prompt_of({"messages": [ANSWER, user, LATE, LATE, orphan]}), InProcess()
        )
        with pytest.raises(InvalidRequest, match="Unexpected message role") as caught:
            at_once(job)
        assert caught.value.param == "messages[4]"
    prompt = prompt_of({"messages": [USER, orphan]})
    named = msgspec.structs.replace(prompt, param="input", places=("input[3]", "input[7]"))
    with pytest.raises(InvalidRequest) as caught:
        at_once(templates["strict"].slices(named))
    assert caught.value.param == "input[7]"


# -- arguments as they were written ---------------------------------------------------------------

ODD = '{ "a":1.50, "b" : [1,2], "é": "\\u00e9", "c": {"d":  true}, "e": 1E3, "f": "x" }'


def test_arguments_print_as_they_were_written(templates: dict[str, ChatTemplate]) -> None:
    chat = USER, CALLS | {"tool_calls": [call("f", ODD)]}, RESULT
    for name in ("Hermes", "Llama", "Mistral", "alternating", "hoisting"):
        assert ODD in rendered(templates[name], *chat)
    text = rendered(templates["strict"], *chat)
    for name, value in {
        "a": "1.50",
        "b": "[1,2]",
        "é": "é",
        "c": '{"d":  true}',
        "e": "1E3",
        "f": "x",
    }.items():
        assert f"<parameter={name}>\n{value}\n</parameter>" in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ a | tojson(indent=1) }}", json.dumps(json.loads(ODD), indent=1, ensure_ascii=False)),
        ("{{ a | tojson(ensure_ascii=true) }}", json.dumps(json.loads(ODD))),
        ("{{ a | string }}", str(json.loads(ODD))),
        ("{{ a | length }}{{ a is mapping }}{{ a.b is sequence }}{{ a.b | first }}", "6TrueTrue1"),
        ("{{ a._text }}{{ a.text }}", ""),
    ],
)
def test_for_all_else_they_are_what_they_are(source: str, text: str) -> None:
    within = source.replace("a ", "m.tool_calls[0].function.arguments ").replace(
        "a.", "m.tool_calls[0].function.arguments."
    )
    template = template_of(
        "{% for m in messages %}{% if m.tool_calls %}" + within + "{% endif %}{% endfor %}"
    )
    assert rendered(template, USER, CALLS | {"tool_calls": [call("f", ODD)]}) == text


def test_arguments_stay_what_was_written_in_the_process_for_long_chats() -> None:
    source = HERMES_TOOLS + "{# " + "-" * SOURCE_LEN_MAX + " #}"
    template, renderer = template_of(source, takes=Takes()), Renderer()
    chat = prompt_of({"messages": [USER, CALLS | {"tool_calls": [call("f", ODD), PARIS]}, RESULT]})
    try:
        text = at_once(template.slices(chat, renderer))
    finally:
        renderer.close()
    assert ODD in text
    assert json.dumps(json.loads(PARIS["function"]["arguments"])) in text


def test_arguments_are_kept_only_where_a_template_prints_them_alike() -> None:
    dense = HERMES_TOOLS.replace(
        "call.arguments | tojson", "call.arguments | tojson | replace('\"a\":', '\"A\":')"
    )
    assert template_of(dense).takes.written
    unlike = HERMES_TOOLS.replace(
        "call.arguments | tojson", "(call.arguments | tojson).split(': ') | join('=')"
    )
    assert not template_of(unlike).takes.written
    text = rendered(template_of(unlike), USER, CALLS | {"tool_calls": [call("f", '{"a":  1}')]}, RESULT)
    assert '{"a"=1}' in text


def test_only_what_a_client_did_not_spell_anew_is_remembered() -> None:
    for text in ('{"a":1,"b":[{"c":null}],"d":"é\\n\\u0001"}', "{}", '{"a":1.5,"b":-7,"c":true}'):
        assert type(arguments_of(text)) is dict
        assert written_json({"function": {"arguments": arguments_of(text)}}) == json.dumps(
            {"function": {"arguments": json.loads(text)}}, ensure_ascii=False
        )


# -- the law --------------------------------------------------------------------------------------


def turns(session: Session, *, knows_calls: bool) -> Iterator[list[Message]]:
    """A session's turns, for a template that knows no calls with results as the user's messages."""
    for turn in session.turns:
        if knows_calls:
            yield turn
        else:
            yield [
                {"role": "user" if one["role"] == "tool" else one["role"], "content": one["content"] or "x"}
                for one in turn
            ]


def lost(template: ChatTemplate, source: str, session: Session) -> list[int]:
    """The characters of each turn's prompt, without what begins an answer, that the next one does not begin
    with."""
    found, before = [], ""
    for turn in turns(session, knows_calls="tool_calls" in source):
        tools = session.tools if "tools" in source else []
        text = rendered(template, *turn, tools=tools)
        found.append(len(before) - len(common(before, text)))
        before = common(text, rendered(template, *turn, tools=tools, opens=True))
    return found


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", ["Hermes", "Llama", "strict", "alternating", "parts", "ChatML", "Llama 3"])
def test_a_turns_prompt_begins_with_the_last_ones(
    name: str, agent: str, templates: dict[str, ChatTemplate]
) -> None:
    source = (SOURCES | TEMPLATES)[name]
    session = AGENTS[agent](0.002)
    template = templates.get(name) or template_of(source)
    if template.takes.past_reasoning and name != "Hermes":
        assert not any(lost(template, source, session))
        return
    assert not any(lost(template, source, session.without_reasoning))
    told = lost(template, source, session)
    assert any(told), "reasoning that the template leaves out is lost"
    if template.takes.reasoning_kept_by:
        keeping = template_of(source, defaults=template.takes.reasoning_kept_by)
        assert not any(lost(keeping, source, session))


@pytest.mark.parametrize("agent", AGENTS)
def test_a_turns_ids_begin_with_the_last_ones(agent: str) -> None:
    """With the demo's tokenizer and template."""
    tokenizer = Tokenizer(TokenizerBundle.from_dir(MODEL_DIR))
    before: list[int] = []
    session = AGENTS[agent](0.005)
    for turn in session.turns:
        chat = prompt_of({"messages": turn, "tools": session.tools}, opens=False)
        [ids] = at_once(prompt_slices(tokenizer, chat, None))
        assert ids[: len(before)] == before
        before = ids


# -- long histories -------------------------------------------------------------------------------


def test_a_long_history_is_converted_in_slices() -> None:
    """As many as its arguments have pieces."""
    long = call("f", json.dumps({"text": "x" * chat_template.SLICE_LEN}))
    template = template_of(HERMES_TOOLS, takes=Takes())
    for count in (1, 5):
        messages = [USER, *[CALLS | {"tool_calls": [long]}, RESULT] * count]
        chat = prompt_of({"messages": messages})
        assert len([*template._input.message_slices(chat)]) == count


def test_texts_that_are_joined_are_copied_once() -> None:
    """However many of them are one in the end."""
    template = template_of(DEMANDING["alternating"])
    users = [{"role": "user", "content": f"{number:04}"} for number in range(2000)]
    late = [LATE for _ in range(2000)]
    text = rendered(template, *users, *late, tools=[])
    assert text.count("<start_of_turn>") == 1
    assert text.count("\n\n") == 3999
