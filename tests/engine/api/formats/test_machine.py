"""The machine that reads answers: calls and reasoning of every family, whatever the model writes, and however
it is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.answer.parts import Part, PartKind
from engine.api.formats import machine as machines
from engine.api.formats import notations
from engine.api.formats import source as sources
from engine.api.formats.machine import AnswerMachine, mint_call_id
from tests.answer_texts import FORMATS, Answer, answer_of, family, parts_of, read, written
from tests.effort import drawn
from tests.uncollected import uncollected

CALLING = sorted(name for name, own in FORMATS.items() if own.calls is not None)
THINKING = sorted(name for name, own in FORMATS.items() if own.reasoning is not None)
TOOLS: dict[str, Any] = {
    "search": {
        "$defs": {"page": {"type": "object"}},
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "deep": {"type": ["boolean", "null"]},
            "tags": {"type": "array"},
            "page": {"anyOf": [{"$ref": "#/$defs/page"}, {"type": "null"}]},
            "score": {"enum": [1, 2.5]},
        },
    }
}
QUERY: dict[str, Any] = {
    "query": 'say "hi",\nthen \\ } ] )',
    "limit": 3,
    "deep": None,
    "tags": ["a", {"b": [1, -2.5e3, True]}],
    "page": {"at": {}},
    "score": 2.5,
}


def whole(name: str, text: str, prompt_tail: str = "", tools: Any = TOOLS) -> Answer:
    """The answer's parts, which are the same for its characters one by one."""
    parts = read(FORMATS[name], [text], prompt_tail, tools)
    assert parts == read(FORMATS[name], text, prompt_tail, tools)
    return answer_of(parts)


@pytest.mark.parametrize("name", CALLING)
def test_calls_come_back_as_they_were_written(name: str) -> None:
    calls = [("search", QUERY), ("now", {})]
    text = written(FORMATS[name], calls)
    for cut in range(len(text) + 1):
        answer = answer_of(read(FORMATS[name], [text[:cut], text[cut:]], tools=TOOLS))
        assert [(called, json.loads(own)) for called, own in answer.calls] == calls, cut
        assert answer.text == answer.reasoning == ""
    assert whole(name, text).calls[1] == ("now", "{}")


@pytest.mark.parametrize("name", CALLING)
def test_text_stands_around_calls_without_the_white_space_between(name: str) -> None:
    own = FORMATS[name]
    assert own.calls is not None
    calls = written(own, [("now", {})])
    before = "" if own.calls.is_bare else "Let me look. "
    assert whole(name, f"{before}\n\n{calls}\n Done. ") == Answer(
        before.strip() + "Done. ", "", [("now", "{}")]
    )


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_told_apart_wherever_it_begins(name: str) -> None:
    own = FORMATS[name].reasoning
    assert own is not None
    opened, closed = own.opener, own.closer
    assert whole(name, f"{opened}hm {closed}Hello. ") == Answer("Hello. ", "hm", [])
    tail = f"<user>what is {opened}?{FORMATS[name].anchors[0]}"
    assert whole(name, "Hello.", tail).text == "Hello.", "what a user wrote opens nothing"
    assert whole(name, f"\nhm{closed}Hello.", tail + opened) == Answer("Hello.", "hm", [])
    assert whole(name, f"hm{closed}Hello.", tail + opened + "so,") == Answer("Hello.", "hm", [])
    assert whole(name, "Hello.", tail + opened + closed).text == "Hello."
    assert whole(name, "hm ", tail + opened) == Answer("", "hm ", []), "it need not end"


def test_a_call_within_reasoning_ends_it_where_the_family_says_so() -> None:
    for name, ends in (("qwen3.5", True), ("glm-4", True), ("qwen3", False)):
        call = written(FORMATS[name], [("now", {})])
        answer = whole(name, f"hm\n{call}", "<|im_start|>assistant\n<think>\n")
        assert answer == (Answer("", "hm", [("now", "{}")]) if ends else Answer("", f"hm\n{call}", []))
    broken = "hm <tool_call> is how"
    assert whole("qwen3.5", broken, "<think>").reasoning == broken


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'a <tool_call> is {"name": "f"} in tags'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", }</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f'),
        ("hermes", "</tool_call> alone  "),
        ("llama-3", ' {"name": "Bob", "age": 3}'),
        ("llama-3", 'So: {"name": "f", "parameters": {}}'),
        ("llama-3", "  "),
        ("pythonic", "[link(s)](http://example.com)"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[1, 2]"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]3"),
        ("mistral-list", "[TOOL_CALLS][]"),
        ("qwen3.5", "<tool_call>\n<function=f g>\n</function>\n</tool_call>"),
        ("gemma-4", "<|tool_call>call:f(a)<tool_call|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.f"),
    ],
)
def test_what_is_no_call_is_text_word_for_word(name: str, text: str) -> None:
    assert whole(name, text) == Answer(text, "", [])


@pytest.mark.parametrize(
    ("name", "text", "calls", "rest"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":[1', [("f", '{"a":[1')], ""),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a": <b', [("f", '{"a": ')], "<b"),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}}</tool_call>ok', [("f", "{}")], "}ok"),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')], ""),
        ("hermes", '<tool_call>{"id":[{}],"parameters":{"a":1},"name":"f"}', [("f", '{"a":1}')], ""),
        ("hermes", '<tool_call>{"name":"f","arguments":null}', [("f", "{}")], ""),
        ("hermes", '<tool_call>x<tool_call>{"name":"f"}</tool_call>', [("f", "{}")], "<tool_call>x"),
        ("mistral-list", '[TOOL_CALLS][{"name":"f"}, {"nam}', [("f", "{}")], ', {"nam}'),
        ("mistral-list", '[TOOL_CALLS] [{"name": "f"}]', [("f", "{}")], ""),
        ("llama-3", '<|python_tag|>{"name":"f","parameters":{}}; {"name":"g","parameters":{}}',
         [("f", "{}"), ("g", "{}")], ""),
        ("pythonic", "[f(a=1, b)]", [("f", '{"a": 1}')], "b)]"),
        ("pythonic", "[f(a=[1, foo])]", [("f", '{"a": [1, ')], "foo])]"),
        ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", [("f", '{"a": 1}')], ""),
        ("lfm2", "<|tool_call_start|>[f(a='it's', b=+.5, c=(1,), d=0x10)]<|tool_call_end|>",
         [("f", '{"a": "it\'s", "b": 0.5, "c": [1], "d": 16}')], ""),
        ("lfm2", "<|tool_call_start|>[f(a='x\\x41\\u00e9\\q", [("f", '{"a": "x\\u0041\\u00e9\\\\q')], ""),
        ("qwen3.5", "<function=f>\n<parameter=a>\n 1\n", [("f", '{"a": " 1\\n')], ""),
        ("qwen3.5", "<tool_call><function=f>?</function></tool_call>!", [("f", "{}")], "?!"),
        ("qwen3.5", "<tool_call><function=search>\n<parameter=limit>\nmany\n</parameter></function>",
         [("search", '{"limit": "many"}')], ""),
        ("gemma-4", '<|tool_call>call:f{a:{b:"c"},<|"|>k<|"|>:[1,x]}',
         [("f", '{"a": {"b": "c"}, "k": [1, x]}')], ""),
    ],
)  # fmt: skip
def test_what_a_call_is_made_of_decides_how_far_it_goes(
    name: str, text: str, calls: list[tuple[str, str]], rest: str
) -> None:
    assert whole(name, text) == Answer(rest, "", calls)


def test_arguments_come_as_they_are_written() -> None:
    for name in ("hermes", "qwen3.5", "pythonic", "gemma-4"):
        machine = AnswerMachine(FORMATS[name], "", tools=TOOLS)
        text = written(FORMATS[name], [("search", {"query": "a" * 40})])
        middle = text.index("a" * 40) + 20
        released = [part for char in text[:middle] for part in machine.feed(-1, char)]
        answer = answer_of(released)
        assert answer.calls[0][1].count("a") >= 18, name
        assert [part.call_id for part in released if part.kind is PartKind.CALL] != [""]
        assert all(part.call_id == "" for part in released if part.kind is not PartKind.CALL)


def test_ids_suit_every_template() -> None:
    assert re.fullmatch("[A-Za-z0-9]{9}", mint_call_id())
    assert mint_call_id() != mint_call_id()


def test_without_tools_calls_are_text_and_white_space_stays() -> None:
    text = "a \n" + written(FORMATS["qwen3"], [("now", {})]) + " \n"
    machine = AnswerMachine(FORMATS["qwen3"], "", tools=None)
    assert parts_of(machine, text) == [Part(text)]
    assert machine.calls == 0


# -- by token id --------------------------------------------------------------------------------------

IDS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4, '<|"|>': 5, "<|tool_call>": 6}


def test_a_marker_that_is_a_token_is_known_by_its_id_alone() -> None:
    format_ = family("qwen3", IDS)
    assert format_.pieces("<tool_call>\n{}") == (3, "\n{}")
    spelled = written(format_, [("now", {})])
    assert answer_of(read(format_, spelled)) == Answer(spelled, "", [])
    called: list[str | int] = [
        1,
        "hm",
        2,
        "so ",
        3,
        spelled.removeprefix("<tool_call>").removesuffix("</tool_call>"),
        4,
    ]
    for texts in ({}, {token_id: text for text, token_id in IDS.items()}):
        machine = AnswerMachine(format_, "", tools={})
        assert answer_of(parts_of(machine, called, texts)) == Answer("so", "hm", [("now", "{}")])
        assert machine.reasoning_tokens == 3


def test_a_token_that_marks_nothing_after_all_is_spelled_out() -> None:
    assert answer_of(
        read(family("qwen3", IDS), [3, "x", 4, 3, '{"name": "f", "arguments": {"a": "', 4, '"}}', 4])
    ) == (Answer("<tool_call>x</tool_call>", "", [("f", '{"a": "</tool_call>"}')]))
    gemma = family("gemma-4", IDS)
    assert answer_of(read(gemma, [6, "call:f{a:", 5, "x", 6, "y", 5, "}<tool_call|>"])).calls == [
        ("f", '{"a": "x<|tool_call>y"}')
    ]


def test_the_text_of_earlier_tokens_that_comes_with_a_marker_is_not_lost() -> None:
    machine = AnswerMachine(family("qwen3", IDS), "", tools={})
    assert answer_of([*machine.feed(9, ""), *machine.feed(1, "\ufffd<think>"), *machine.feed(9, "hm")]) == (
        Answer("\ufffd", "hm", [])
    )


def test_text_waits_for_nothing_where_no_marker_can_begin() -> None:
    machine = AnswerMachine(family("qwen3", IDS), "", tools={})
    assert machine.feed(9, "a < <tool_call>") == [Part("a < <tool_call>")]
    assert machine.feed(9, "a ") == [Part("a")], "white space may stand before a call"
    assert machine.feed(9, "b") == [Part(" b")]
    machine = AnswerMachine(FORMATS["qwen3"], "", tools={})
    assert machine.feed(9, "a <tool") == [Part("a")]
    assert machine.feed(9, "s>") == [Part(" <tools>")]


# -- bounds -------------------------------------------------------------------------------------------


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HELD_LEN_MAX", 100)
    monkeypatch.setattr(machines, "SPACE_HELD_MAX", 10)
    for name, begun in (
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("hermes", '<tool_call>{"'),
        ("llama-3", "{"),
        ("hermes", "a"),
        ("llama-3", ""),
        ("mistral", "[TOOL_CALLS]"),
    ):
        for filling in ("x" * 300, " " * 300):
            machine = AnswerMachine(FORMATS[name], "", tools={})
            text = begun + filling
            released = "".join(part.text for char in text for part in machine.feed(-1, char))
            assert len(text) - len(released) <= 101, (name, filling[0])
            assert released + "".join(part.text for part in machine.finish()) == text


def test_a_value_that_is_too_long_to_wait_for_is_a_string() -> None:
    text = written(FORMATS["qwen3.5"], [("search", {"tags": ["x" * sources.HELD_LEN_MAX]})])
    parts = read(FORMATS["qwen3.5"], [text[at : at + 1000] for at in range(0, len(text), 1000)], tools=TOOLS)
    [(_, arguments)] = answer_of(parts).calls
    assert json.loads(arguments)["tags"] == json.dumps(["x" * sources.HELD_LEN_MAX])


def test_a_name_or_a_value_that_is_too_long_is_none_of_a_call() -> None:
    name, key, word = "f" * machines.NAME_LEN_MAX, "k" * notations.KEY_LEN_MAX, "1" * notations.SCALAR_LEN_MAX
    for own, text in (
        ("mistral", "[TOOL_CALLS]{name}[ARGS]{{}}"),
        ("hermes", '<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'),
    ):
        assert whole(own, text.format(name=name)) == Answer("", "", [(name, "{}")])
        too_long = text.format(name=name + "f")
        assert whole(own, too_long) == Answer(too_long, "", [])
    glm = "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert whole("glm-4", glm.format(key=key)).calls == [("f", json.dumps({key: "1"}))]
    assert whole("glm-4", glm.format(key=key + "k")).calls == [("f", "{}")]
    for gap, called in ((sources.GAP_LEN_MAX, ["f"]), (sources.GAP_LEN_MAX + 1, [])):
        text = f'<function{" " * gap}name="f"></function>'
        assert [name for name, _ in whole("minicpm5", text).calls] == called
    assert whole("pythonic", f"[f({key}=1)]").calls == [("f", json.dumps({key: 1}))]
    assert whole("pythonic", f"[f({key}kk=1)]").calls == []
    assert whole("pythonic", f"[f(a=[{word}])]").calls == [("f", f'{{"a": [{word}]}}')]
    assert whole("pythonic", f"[f(a=[{word}1])]") == Answer("1])]", "", [("f", '{"a": [' + word)])


def test_lists_within_lists_are_read_to_a_depth() -> None:
    deep = notations.DEPTH_MAX
    assert whole("pythonic", f"[f(a={'[' * deep}1{']' * deep})]").calls[0][1].count("[") == deep
    text = f"[f(a={'[' * deep}[1]{']' * deep})]"
    assert whole("pythonic", text) == Answer(f"1]{']' * deep})]", "", [("f", '{"a": ' + "[" * (deep + 1))])


def test_the_types_of_an_argument_are_looked_for_in_few_steps() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(notations.REFERENCES_MAX):
        deep = {"anyOf": [deep]}
    assert notations.schema_types(deep) == ("integer",)
    assert notations.schema_types({"anyOf": [deep]}) == ()
    root: dict[str, Any] = {"type": "integer"}
    for _ in range(notations.REFERENCES_MAX):
        root = {"a": root}
    reference = "#" + "/a" * notations.REFERENCES_MAX
    assert notations.schema_types({"$ref": reference}, root) == ("integer",)
    assert notations.schema_types({"$ref": reference + "/a"}, {"a": {"type": "string", **root}}) == ()
    many: list[Any] = [{}] * notations.CHOICES_MAX
    assert notations.schema_types({"anyOf": [*many[1:], {"type": "integer"}]}) == ("integer",)
    assert notations.schema_types({"anyOf": [*many, {"type": "integer"}]}) == ()
    assert notations.schema_types({"enum": [""] * notations.CHOICES_MAX + [1]}) == ("string",)
    long = "1.".ljust(notations.SCALAR_LEN_MAX, "0")
    assert notations.coerced(long, ("integer",)) == long
    assert notations.coerced(long + "0", ("integer",)) == f'"{long}0"'


def test_an_answer_that_is_given_up_leaves_nothing_behind() -> None:
    with uncollected(AnswerMachine, sources.MarkedSource) as left:
        for text in ("a", '<tool_call>{"na', '<tool_call>{"name": "f", "arguments": {'):
            AnswerMachine(FORMATS["hermes"], "", tools={}).feed(-1, text)
        assert left() == []


# -- anything that a model may produce ----------------------------------------------------------------

COMMON = (
    *("{", "}", "[", "]", '"', "'", "(", ")", ",", ":", "=", "\\", "\n", " ", "<", ">", "</", "-", ";", "é"),
    *("f", "true", "1", "null", "a=1", '"name"', '"arguments"', '{"name": "f", "arguments": {', "\\u00"),
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    None,
    {},
    {"f": {"properties": {"a": {"type": "integer"}, "w": {"type": ["object", "null"]}}}},
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str], str, Any]:
    """A family, an answer in pieces, the end of its prompt, and tools. Words of it are numbered."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    format_ = FORMATS[name]
    pieces = st.sampled_from([*filter(None, format_.texts()), *COMMON])
    drawn = draw(st.lists(st.tuples(pieces, st.booleans()), max_size=14))
    text = [piece + (f"w{at:02}" if has_word else "") for at, (piece, has_word) in enumerate(drawn)]
    opened = format_.anchors[0] + (format_.reasoning.opener if format_.reasoning else "")
    return name, text, draw(st.sampled_from(["", opened])), draw(st.sampled_from(SCHEMAS))


@given(answers())
@settings(max_examples=drawn(75, whole=1500), deadline=None)
def test_nothing_is_lost_and_cuts_do_not_matter(answer: tuple[str, list[str], str, Any]) -> None:
    name, pieces, prompt_tail, tools = answer
    format_, text = FORMATS[name], "".join(pieces)
    machines_ = [AnswerMachine(format_, prompt_tail, tools=tools, mint=lambda: "id") for _ in range(3)]
    one, two, three = (parts_of(m, t) for m, t in zip(machines_, ([text], text, pieces), strict=True))
    assert one == two == three
    told = " ".join(part.text for part in one)
    envelope = format_.calls is not None and format_.calls.envelope is not None
    kept = re.sub(r'"(?:[^"\\]|\\.)*"', "", text) if envelope else text  # other members may be strings
    for word in re.findall(r"w\d\d", kept):
        assert told.count(word) == 1
    for called, arguments in answer_of(one).calls:
        assert called
        assert arguments.startswith("{") or not arguments


@given(answers(), st.data())
@settings(max_examples=drawn(25, whole=500), deadline=None)
def test_cuts_do_not_matter_between_tokens(
    answer: tuple[str, list[str], str, Any], data: st.DataObject
) -> None:
    name, pieces, prompt_tail, tools = answer
    texts = sorted({text.strip() for text in FORMATS[name].texts()} - {""})
    markers = data.draw(st.lists(st.sampled_from(texts), unique=True))
    format_ = family(name, {text: number for number, text in enumerate(markers)})
    tokens: list[str | int] = [token for piece in pieces for token in format_.pieces(piece)]
    spread: list[str | int] = []
    for token in tokens:
        spread += [token] if isinstance(token, int) else list(token)
    first, second = (read(format_, own, prompt_tail, tools) for own in (tokens, spread))
    assert first == second
    assert not re.search("[\ud800-\udfff]", "".join(part.text for part in first))
