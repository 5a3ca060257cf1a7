"""The grammar of a whole answer, as a model of noise follows it."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from engine.api.ask.grammar import AskedForm, Grammar, checked, grammar_of
from engine.api.formats.format import AnswerFormat, ArgumentsKind
from engine.api.formats.machine import AnswerMachine
from engine.api.formats.own_grammars import NESTING_MAX, RULES_MAX, checked_grammar
from engine.contract.grammars import MESSAGE_LEN_MAX, compiled, failure
from shared.apis.structure import Structure, StructureKind
from shared.apis.tools import AskedFunction, FunctionSpec, ToolChoice, ToolMode
from shared.wire.errors import InvalidRequest, UnsupportedParameter
from tests import answer_texts
from tests.engine.api import walks

DRAWN = int(os.environ.get("GRAMMAR_SCHEMAS", "60"))
"""Schemas that are drawn; 1,000 are a matter of ten seconds."""
ENDS = ("\n</parameter>\n", "</param>", "</function>")
REQUIRED = ToolChoice(ToolMode.REQUIRED)
AUTO = ToolChoice(ToolMode.AUTO)
IDS = {mark: walks.token_id(mark) for mark in walks.MARKS}
SPELLED = {name: own for name, own in answer_texts.FORMATS.items() if own.calls is not None}
"""Of families that write calls; their marks are no tokens, but texts."""
MARKED = {name: answer_texts.family(name, IDS) for name in SPELLED}
FORMATS = {
    **MARKED,
    **{f"{name}, spelled": SPELLED[name] for name in ("hermes", "lfm2", "minicpm5", "qwen3.5")},
}
EACH = pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
HERMES, QWEN = MARKED["hermes"], MARKED["qwen3"]
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["km", "mi"]},
        "note": {"type": "string"},
    },
    "required": ["a", "unit", "note"],
    "additionalProperties": False,
}
PLAIN = {**ADD, "properties": {**ADD["properties"], "a": {"type": "integer"}}}  # type: ignore[dict-item]


KINDS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "integer"}},
        "at": {"$ref": "#/$defs/place"},
        "unit": {"enum": ["km", 'it\'s "x"']},
    },
    "required": ["text", "tags", "at"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            },
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def function(name: str, schema: Any = None, *, strict: bool | None = None) -> FunctionSpec:
    raw = msgspec.UNSET if schema is None else msgspec.Raw(json.dumps(schema).encode())
    return FunctionSpec(name, parameters=raw, strict=strict)


def structure(schema: Any, *, strict: bool = False) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), strict=strict, param="here")


def is_marked(format_: AnswerFormat | None) -> bool:
    return format_ is None or bool(format_.token_ids)


def made(asked: AskedForm, format_: AnswerFormat | None = None, *, reasons: bool = False) -> Grammar:
    return checked(walks.vocabulary(marked=is_marked(format_)), format_, asked, reasons=reasons)


def answers(grammar: Grammar, count: int = 6) -> list[str]:
    """Those of some random answers that end."""
    found = [walks.walk(grammar.text, random.Random(seed), ENDS) for seed in range(count)]
    ended = [walks.text_of(tokens) for tokens in found if tokens is not None]
    assert ended, "none ends"
    return ended


def accepts(grammar: Grammar, *parts: str, marked: bool = True) -> bool:
    """True if an answer may be these texts; what is a mark in them is its token, where marks are tokens."""
    matcher = compiled(walks.vocabulary(marked=marked), grammar.text)
    for part in parts:
        for token in walks.tokenizer(marked=marked).encode(part).ids:
            if not matcher.consume_token(token):
                return False
    assert not failure(matcher)
    return matcher.is_accepting()


def parsed(text: str) -> Any:
    """JSON; a number that is too large for a float is a large one."""
    return json.loads(text, parse_float=lambda number: max(-1e300, min(float(number), 1e300)))


# -- structure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(6))
def test_every_answer_that_ends_follows_its_schema(block: int) -> None:
    ended = 0
    for seed in range(block, DRAWN, 6):
        rng = random.Random(seed)
        schema = walks.schema(rng, strict=seed % 2 == 0)
        grammar = made(AskedForm(structure=structure(schema, strict=seed % 2 == 0)))
        assert not grammar.ignored
        tokens = walks.walk(grammar.text, rng)
        if tokens is not None:
            ended += 1
            value = parsed(walks.text_of(tokens))
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(value)
    assert ended > DRAWN // 6 * 0.8


def test_any_object() -> None:
    grammar = made(AskedForm(structure=Structure(StructureKind.JSON_OBJECT, param="response_format")))
    assert all(isinstance(parsed(text), dict) for text in answers(grammar))
    assert not accepts(grammar, "[1]")


@pytest.mark.parametrize("pattern", ["a/b{2,4}", r"[^/\n]{1,4}\/x", "^ab$", "é|x+", "a\nb", "(?:a|/)*"])
def test_a_regular_expression_is_the_whole_answer(pattern: str) -> None:
    grammar = made(AskedForm(structure=Structure(StructureKind.REGEX, pattern, param="here")))
    assert all(re.fullmatch(pattern, text) for text in answers(grammar))


def test_a_choice_is_one_of_the_texts_whatever_is_in_them() -> None:
    texts = ("a", "ab", 'quo"te\\', "new\nline", "%json {}", "<[3]>", "// x", "/x/", "é😀", "start: x")
    grammar = made(AskedForm(structure=Structure(StructureKind.CHOICE, choices=texts, param="here")))
    assert set(answers(grammar, 60)) <= set(texts)
    assert all(accepts(grammar, text) for text in texts)


@pytest.mark.parametrize(
    "source",
    ['start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n', 'root ::= num ("+" num)*\nnum ::= [0-9]{1,3}\n'],
    ids=["lark", "gbnf"],
)
def test_a_grammar_of_the_callers(source: str) -> None:
    grammar = made(AskedForm(structure=Structure(StructureKind.GRAMMAR, source, param="here")))
    assert all(re.fullmatch(r"\d{1,3}(\+\d{1,3})*", text) for text in answers(grammar))


@pytest.mark.parametrize(
    "source",
    [
        '%llguidance {"no_forcing": true}\nstart: "a"',
        'start: %json {"type": "string", "x-guidance": {"lenient": true}}',
        'start: A\nA: %regex {"substring_chars": "abc"}',
        "start: <|im_start|>",
        "start: <[0-MAX]>",
        "start: @answer",
        'start: "x" | "y" @answer',
        'start: x::0x1\nx::_: "a"',
        'start: x::0x0\nx::_: "a" x::incr(_) | "b"',
        "start: /((x{100}){100}){100}/",
        "start: A{1000}\nA: /x{1000}/",
        '%ignore /((x{100}){100}){100}/\nstart: "a"',
        '%ignore A{1000}\nstart: "a"\nA: /x{1000}/',
        "start: A9\nA0: /aaaaaaaaaa/\n" + "\n".join(f"A{i + 1}: A{i}{{10}}" for i in range(9)),
        "start: " + "(" * 100 + '"a"' + ")" * 100,
        "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1}' for i in range(3000)) + '\nr3000: "y"',
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "root ::= missing",
        "what is this",
        "start: missing",
        "start: start",
        "x" * 100_000,
    ],
    ids=lambda source: source[:24],
)
def test_a_grammar_that_reaches_out_or_costs_too_much_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(
            AskedForm(structure=Structure(StructureKind.GRAMMAR, source, param="structured_outputs.grammar"))
        )
    assert refused.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize(
    ("most", "source"),
    [
        (RULES_MAX, lambda count: 'start: "x"' + "".join(f'\nr{i}: "x"' for i in range(count - 1))),
        (NESTING_MAX, lambda depth: f'start: {"(" * depth}"a"{")" * depth}'),
        (NESTING_MAX, lambda depth: f'root ::= {"(" * depth}"a"{")" * depth}'),
    ],
    ids=["rules", "nesting", "nesting in GBNF"],
)
def test_a_grammar_is_refused_by_the_bound_that_it_exceeds(most: int, source: Callable[[int], str]) -> None:
    checked_grammar(source(most), "here")
    with pytest.raises(InvalidRequest, match=f"more than {most} "):
        checked_grammar(source(most + 1), "here")


def test_what_is_said_of_a_grammar_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(AskedForm(structure=Structure(StructureKind.GRAMMAR, f"start: {'x' * 5_000}", param="here")))
    assert len(refused.value.message) < 2 * MESSAGE_LEN_MAX


@pytest.mark.parametrize(
    "pattern", ["((x{100}){100}){100}", "x{1000000}", "a\\", "(?=a)b", r"(a)\1", "(" * 3000 + ")" * 3000]
)
def test_a_regular_expression_that_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(AskedForm(structure=Structure(StructureKind.REGEX, pattern, param="here")))
    assert refused.value.param == "here"


def test_what_has_no_answer_is_refused_and_does_not_end_cleanly() -> None:
    with pytest.raises(InvalidRequest):
        made(AskedForm(structure=structure({"$ref": "#"})))


def test_white_space_is_bounded() -> None:
    grammar = made(AskedForm(structure=structure({"type": "array", "items": {"type": "integer"}})))
    assert accepts(grammar, "[\n" + " " * 32 + "1,  2]")
    assert not accepts(grammar, "[   1]")
    assert not accepts(grammar, "[\n\n1]")
    assert not accepts(grammar, "[\n" + " " * 33 + "1]")


def test_a_schema_that_is_not_strict_is_held_in_part_and_the_rest_is_named() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    grammar = made(AskedForm(structure=structure(schema)))
    assert grammar.ignored == ("here.properties.a.uniqueItems",)
    assert accepts(grammar, '{"a": [1, 1]}')
    assert not accepts(grammar, '{"a": 1}')
    with pytest.raises(InvalidRequest):
        made(AskedForm(structure=structure({**schema, "additionalProperties": False}, strict=True)))


def test_one_of_is_held_where_its_schemas_do_not_meet_else_as_any_of() -> None:
    apart = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    assert made(AskedForm(structure=structure(apart))).ignored == ()
    meeting = {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]}
    grammar = made(AskedForm(structure=structure(meeting)))
    assert grammar.ignored == ("here.oneOf",)
    assert accepts(grammar, "3")


def test_nothing_to_hold_costs_nothing() -> None:
    assert made(AskedForm(), QWEN).text == ""
    assert made(AskedForm((function("f"),)), None).text == ""


# -- reasoning ----------------------------------------------------------------------------------------


def test_a_structure_begins_behind_reasoning() -> None:
    grammar = made(AskedForm(structure=structure(ADD)), QWEN, reasons=True)
    answer = '{"a": 1, "unit": "km", "note": ""}'
    assert accepts(grammar, "so {\n", "</think>", "\n\n" + answer)
    assert not accepts(grammar, answer)
    assert not accepts(grammar, "so", "<tool_call>")
    closed = made(AskedForm(structure=structure(ADD)), QWEN)
    assert accepts(closed, answer)
    assert accepts(closed, "<think>", "so", "</think>", answer)
    assert not accepts(closed, "so", "</think>", answer)
    spelled = made(AskedForm(structure=structure(ADD)), SPELLED["qwen3"], reasons=True)
    assert accepts(spelled, "so {\n</think>\n\n" + answer, marked=False)
    assert not accepts(spelled, "so {\n</think>\n\nHello", marked=False)


def test_a_thinking_budget_ends_reasoning_and_only_that() -> None:
    asked = AskedForm(structure=structure(ADD), thinking_budget=3)
    matcher = compiled(walks.vocabulary(), made(asked, QWEN, reasons=True).text)
    for _ in range(3):
        assert len(walks.allowed(matcher)) > 100
        assert matcher.consume_token(walks.token_id("a"))
    assert walks.allowed(matcher) == [IDS["</think>"]]
    alone = made(AskedForm(thinking_budget=0), QWEN, reasons=True)
    assert walks.allowed(compiled(walks.vocabulary(), alone.text)) == [IDS["</think>"]]
    with pytest.raises(UnsupportedParameter):
        grammar_of(SPELLED["qwen3"], asked, reasons=True)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_a_call_ends_reasoning_where_the_family_has_it_so(name: str) -> None:
    grammar = made(AskedForm((function("f", {}),), REQUIRED), MARKED[name], reasons=True)
    body = {"qwen3": '\n{"name": "f", "arguments": {}}\n', "qwen3.5": "\n<function=f>\n</function>\n"}[name]
    assert accepts(grammar, "so", "</think>", "<tool_call>", body, "</tool_call>")
    assert accepts(grammar, "so", "<tool_call>", body, "</tool_call>") is MARKED[name].call_ends_reasoning


def test_text_and_structure_stand_in_the_familys_frames() -> None:
    grammar = made(AskedForm(structure=structure({"type": "integer"})), MARKED["gpt-oss"])
    assert accepts(grammar, "<|channel|>", "final", "<|message|>", "12")
    assert accepts(
        made(AskedForm((function("f"),), AUTO), MARKED["granite"]), "<response>", "Hi", "</response>"
    )


# -- calls --------------------------------------------------------------------------------------------


def calls_in(grammar: Grammar, format_: AnswerFormat, schema: Any) -> Iterator[list[tuple[str, str]]]:
    """The calls of some random answers, as the machine reads them: names and arguments."""
    marked = is_marked(format_)
    for seed in range(2):
        tokens = walks.walk(grammar.text, random.Random(seed), ENDS, marked=marked)
        machine = AnswerMachine(format_, "", tools={"add": schema, "other": {}})
        parts, held = [], list[int]()
        for token in tokens or ():
            held.append(token)
            text = walks.text_of(held, marked=marked)
            done = not text.endswith("\ufffd")
            parts += machine.feed(token, text if done else "")
            held = [] if done else held
        answer = answer_texts.answer_of([*parts, *machine.finish()])
        if tokens is not None:
            assert not answer.text, walks.text_of(tokens, marked=marked)
            yield answer.calls


@EACH
@pytest.mark.parametrize("is_parallel", [False, True])
def test_calls_that_must_come_are_read_back_and_follow_their_schemas(
    format_: AnswerFormat, is_parallel: bool
) -> None:
    assert format_.calls is not None
    knows_json = format_.calls.arguments in (ArgumentsKind.JSON, ArgumentsKind.TAGGED)
    schema = ADD if knows_json else PLAIN
    functions = function("other"), function("add", schema, strict=True)
    grammar = made(AskedForm(functions, ToolChoice(ToolMode.REQUIRED, "add"), is_parallel), format_)
    assert not grammar.ignored
    for calls in calls_in(grammar, format_, schema):
        assert len(calls) == 1 or (calls and is_parallel)
        for name, arguments in calls:
            assert name == "add"
            jsonschema_rs.validate(schema, json.loads(arguments))


@EACH
def test_arguments_of_all_kinds_are_read_back_as_their_schema_has_them(format_: AnswerFormat) -> None:
    grammar = made(AskedForm((function("add", KINDS),), REQUIRED, is_parallel=False), format_)
    for ((_, arguments),) in calls_in(grammar, format_, KINDS):
        jsonschema_rs.validate(KINDS, parsed(arguments))


def test_one_call_and_then_the_end() -> None:
    call = ("<tool_call>", '\n{"name": "f", "arguments": {}}\n', "</tool_call>")
    for choice in (REQUIRED, AUTO):
        one = made(AskedForm((function("f"),), choice, is_parallel=False), HERMES)
        assert accepts(one, *call)
        assert not accepts(one, *call, "\n", *call)
        assert accepts(made(AskedForm((function("f"),), choice), HERMES), *call, "\n", *call)


@EACH
def test_auto_is_text_until_a_trigger_from_which_the_name_holds(format_: AnswerFormat) -> None:
    calls = format_.calls
    assert calls is not None
    grammar = made(AskedForm((function("add"), function("adds", PLAIN)), AUTO), format_)
    assert accepts(grammar, "Hello, (world).", marked=is_marked(format_))
    matcher = compiled(walks.vocabulary(marked=is_marked(format_)), grammar.text)
    before = "" if calls.opener == calls.bare_opener else "Now "
    text = before + (calls.opener + calls.begin).lstrip()
    tokenizer = walks.tokenizer(marked=is_marked(format_))
    assert matcher.consume_tokens(tokenizer.encode(text).ids)
    assert {tokenizer.decode([token])[0] for token in walks.allowed(matcher)} == {"a"}


@EACH
def test_a_function_is_called_with_the_arguments_that_it_lists(format_: AnswerFormat) -> None:
    listed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    marked = is_marked(format_)
    for schema, own, other in (
        (listed, {"a": 1}, {"a": 1, "m": 33}),
        ({**listed, "properties": {}, "required": []}, {}, {"m": 33}),
        (None, {}, {"m": 33}),
    ):
        grammar = made(AskedForm((function("add", schema),), REQUIRED, is_parallel=False), format_)
        assert accepts(grammar, answer_texts.written(format_, [("add", own)]), marked=marked)
        assert not accepts(grammar, answer_texts.written(format_, [("add", other)]), marked=marked)
    others: list[dict[str, Any]] = [{"additionalProperties": True}, {"required": ["m"]}]
    for more in (*others, {"anyOf": [{"required": ["m"]}, {}]}):
        schema = {**listed, **more, "properties": {"a": {"type": "integer"}}}
        grammar = made(AskedForm((function("add", schema),), REQUIRED, is_parallel=False), HERMES)
        assert accepts(grammar, answer_texts.written(HERMES, [("add", {"a": 1, "m": 33})]))


def test_auto_holds_arguments_to_a_schema_that_is_strict_alone() -> None:
    call = ("<tool_call>", '\n{"name": "add", "arguments": {"x": 1}}\n', "</tool_call>")
    assert accepts(made(AskedForm((function("add", ADD),), AUTO), HERMES), "Sure.\n", *call)
    assert not accepts(made(AskedForm((function("add", ADD, strict=True),), AUTO), HERMES), "Sure.\n", *call)


def test_where_strict_mode_is_the_default_it_holds_what_it_takes() -> None:
    """One that it does not take, or that makes the grammar too large, is held as one that is not strict."""
    call = ("<tool_call>", '\n{"name": "f", "arguments": {"x": 1}}\n', "</tool_call>")

    def asked(schema: Any, strict: bool | None = None, count: int = 1) -> AskedForm:
        raw = msgspec.Raw(json.dumps(schema).encode())
        names = ["f", *(f"f{i}" for i in range(1, count))]
        return AskedForm(
            tuple(AskedFunction(one, parameters=raw, strict=strict) for one in names),
            AUTO,
            places=("here",) * count,
        )

    closed: dict[str, Any] = dict(ADD)
    assert not accepts(made(asked(closed), HERMES), *call)
    assert accepts(made(asked(closed, strict=False), HERMES), *call)
    for open_ in (
        {k: v for k, v in closed.items() if k != "additionalProperties"},
        {**closed, "allOf": [{}]},
        {"type": "wrong"},
    ):
        assert accepts(made(asked(open_), HERMES), *call)
    many = {"type": "array", "items": {"anyOf": [{"const": i} for i in range(400)]}}
    large = {**closed, "properties": {"x": many}, "required": ["x"]}
    assert accepts(made(asked(large, count=12), HERMES), "Sure.")


def test_none_bans_the_trigger() -> None:
    asked = AskedForm((function("f"),))
    grammar = made(asked, QWEN, reasons=True)
    assert accepts(grammar, "so", "</think>", "\n\nHello <tool_call")
    assert not accepts(grammar, "so", "</think>", "<tool_call>")
    spelled = made(asked, SPELLED["minicpm5"])
    assert accepts(spelled, "Hello <function>", marked=False)
    assert not accepts(spelled, 'Hello <function name="', marked=False)


@EACH
def test_with_a_structure_the_text_follows_it_and_calls_may_come_instead(format_: AnswerFormat) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text = structure({**schema, "additionalProperties": False})
    grammar = made(AskedForm((function("add", PLAIN),), AUTO, structure=text), format_)
    marked = is_marked(format_)
    assert accepts(grammar, '{"n": 1}', marked=marked)
    assert not accepts(grammar, "Hello", marked=marked)
    call = answer_texts.written(format_, [("add", {"a": 1, "unit": "km", "note": "x"})])
    assert accepts(grammar, call, marked=marked)


def test_a_schema_that_cannot_be_held_is_any_object_unless_it_is_strict() -> None:
    lookahead: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(?=x)y"}},
    }
    grammar = made(AskedForm((function("f", lookahead),), REQUIRED), HERMES)
    assert grammar.ignored == ("tools[0].function.parameters",)
    assert accepts(grammar, "<tool_call>", '\n{"name": "f", "arguments": {"z": 1}}\n', "</tool_call>")
    closed: dict[str, Any] = {**lookahead, "required": ["a"], "additionalProperties": False}
    with pytest.raises(InvalidRequest) as refused:
        made(AskedForm((function("f", closed, strict=True),), REQUIRED), HERMES)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("format_", [HERMES, AnswerFormat("plain")])
def test_a_strict_schema_is_checked_whatever_the_choice(format_: AnswerFormat) -> None:
    wrong = FunctionSpec("f", parameters=msgspec.Raw(b'{"type":"object","foo":1}'), strict=True)
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(format_, AskedForm((wrong,)), reasons=False)
    assert str(refused.value.param).startswith("tools[0].function.parameters")


@pytest.mark.parametrize("name", ['f" | "g', "f)/ x: /", "f\n%ignore /a/", "<[3]>", "}]}", "é\\"])
@pytest.mark.parametrize("family", ["hermes", "qwen3.5", "mistral", "gemma-4", "lfm2"])
def test_a_name_is_no_grammar(name: str, family: str) -> None:
    """The door takes plain names alone; the grammar does not rest on that."""
    grammar = made(AskedForm((function(name),), REQUIRED), MARKED[family])
    shown = json.dumps(name)[1:-1] if family == "hermes" else name
    assert all(shown in text for text in answers(grammar, 2))


def test_a_model_without_a_format_refuses_tools() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        made(AskedForm((function("f"),), AUTO), None)
    assert refused.value.param == "tools"
