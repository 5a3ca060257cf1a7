"""The grammar of a whole answer, as a model of noise follows it."""

from __future__ import annotations

import ast
import json
import os
import random
import re
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from engine.api.ask.grammar import Asked, Grammar, checked, grammar_of
from engine.api.formats.format import (
    AnswerFormat,
    ArgumentsKind,
    CallFormat,
    Envelope,
    ReasoningFormat,
    TaggedArgument,
)
from engine.contract.grammars import compiled, failure
from shared.apis.structure import Structure, StructureKind
from shared.apis.tools import FunctionSpec, ToolChoice, ToolMode
from shared.wire.errors import InvalidRequest, UnsupportedParameter
from tests.engine.api import walks

DRAWN = int(os.environ.get("GRAMMAR_SCHEMAS", "60"))
"""Schemas that are drawn; 1,000 are a matter of ten seconds."""
ENDS = ("\n</parameter>\n", "</param>", "</function>")
REQUIRED = ToolChoice(ToolMode.REQUIRED)
AUTO = ToolChoice(ToolMode.AUTO)
THINK = ReasoningFormat(("<think>\n",), ("\n</think>\n\n",))
IDS = {mark: walks.token_id(mark) for mark in walks.MARKS}
_JSON = {"arguments": ArgumentsKind.JSON, "is_list": False, "separator": "\n", "closer": "\n</tool_call>"}
HERMES = CallFormat(
    openers=("<tool_call>\n",),
    begin='{"name": "',
    middles=('", "arguments": ',),
    end="}",
    envelope=Envelope(),
    **_JSON,  # type: ignore[arg-type]
)
XML = CallFormat(
    openers=("<tool_call>\n",),
    begin="<function=",
    middles=(">\n",),
    arguments=ArgumentsKind.TAGGED,
    end="</function>",
    closer="\n</tool_call>",
    separator="\n",
    is_list=False,
    argument=TaggedArgument("<parameter=", ">\n", "\n</parameter>\n"),
)
LLAMA = CallFormat(
    openers=("",),
    begin='{"name": "',
    middles=('", "parameters": ',),
    arguments=ArgumentsKind.JSON,
    end="}",
    closer="",
    separator="; ",
    is_list=False,
    envelope=Envelope(arguments="parameters"),
)
PYTHON = CallFormat(
    openers=("[",),
    begin="",
    middles=("(",),
    arguments=ArgumentsKind.PYTHON,
    end=")",
    closer="]",
    separator=", ",
    is_list=True,
)
MISTRAL = CallFormat(
    openers=("[TOOL_CALLS]",),
    begin="",
    middles=("[ARGS]",),
    arguments=ArgumentsKind.JSON,
    end="",
    closer="",
    separator="",
    is_list=False,
)
GEMMA = CallFormat(
    openers=("<tool_call>call:",),
    begin="",
    middles=("",),
    arguments=ArgumentsKind.RELAXED,
    end="",
    closer="</tool_call>",
    separator="",
    is_list=False,
    delimiter='<|"|>',
)
TEXTUAL = CallFormat(
    openers=("",),
    begin='<function name="',
    middles=('">',),
    arguments=ArgumentsKind.TAGGED,
    end="",
    closer="</function>",
    separator="",
    is_list=False,
    argument=TaggedArgument('<param name="', '">', "</param>"),
)
FORMATS = {
    "hermes": HERMES,
    "xml": XML,
    "llama": LLAMA,
    "python": PYTHON,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "textual": TEXTUAL,
}
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


def of(calls: CallFormat | None, *, reasons: bool = False, **more: Any) -> AnswerFormat:
    return AnswerFormat("test", THINK if reasons else None, calls, token_ids=IDS, **more)


def function(name: str, schema: Any = None, *, strict: bool | None = None) -> FunctionSpec:
    raw = msgspec.UNSET if schema is None else msgspec.Raw(json.dumps(schema).encode())
    return FunctionSpec(name, parameters=raw, strict=strict)


def structure(schema: Any, *, strict: bool = False) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), strict=strict, param="here")


def made(asked: Asked, format_: AnswerFormat | None = None, *, reasons: bool = False) -> Grammar:
    return checked(walks.vocabulary(), format_, asked, reasons=reasons)


def answers(grammar: Grammar, count: int = 6) -> list[str]:
    """Those of some random answers that end."""
    found = [walks.walk(grammar.text, random.Random(seed), ENDS) for seed in range(count)]
    ended = [walks.text_of(tokens) for tokens in found if tokens is not None]
    assert ended, "none ends"
    return ended


def accepts(grammar: Grammar, *parts: str) -> bool:
    """True if an answer may be these texts; a mark among them is its token."""
    matcher = compiled(walks.vocabulary(), grammar.text)
    for part in parts:
        for token in [IDS[part]] if part in IDS else walks.tokenizer().encode(part).ids:
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
        grammar = made(Asked(structure=structure(schema, strict=seed % 2 == 0)))
        assert not grammar.ignored
        tokens = walks.walk(grammar.text, rng)
        if tokens is not None:
            ended += 1
            value = parsed(walks.text_of(tokens))
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(value)
    assert ended > DRAWN // 6 * 0.8


def test_any_object() -> None:
    grammar = made(Asked(structure=Structure(StructureKind.JSON_OBJECT, param="response_format")))
    assert all(isinstance(parsed(text), dict) for text in answers(grammar))
    assert not accepts(grammar, "[1]")


@pytest.mark.parametrize("pattern", ["a/b{2,4}", r"[^/\n]{1,4}\/x", "^ab$", "é|x+", "a\nb", "(?:a|/)*"])
def test_a_regular_expression_is_the_whole_answer(pattern: str) -> None:
    grammar = made(Asked(structure=Structure(StructureKind.REGEX, pattern, param="here")))
    assert all(re.fullmatch(pattern, text) for text in answers(grammar))


def test_a_choice_is_one_of_the_texts_whatever_is_in_them() -> None:
    texts = ("a", "ab", 'quo"te\\', "new\nline", "%json {}", "<[3]>", "// x", "/x/", "é😀", "start: x")
    grammar = made(Asked(structure=Structure(StructureKind.CHOICE, choices=texts, param="here")))
    assert set(answers(grammar, 60)) <= set(texts)
    assert all(accepts(grammar, text) for text in texts)


@pytest.mark.parametrize(
    "source",
    ['start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n', 'root ::= num ("+" num)*\nnum ::= [0-9]{1,3}\n'],
    ids=["lark", "gbnf"],
)
def test_a_grammar_of_the_callers(source: str) -> None:
    grammar = made(Asked(structure=Structure(StructureKind.GRAMMAR, source, param="here")))
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
        'start: x::0x1\nx::_: "a"',
        "start: /((x{100}){100}){100}/",
        "start: A{1000}\nA: /x{1000}/",
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
        made(Asked(structure=Structure(StructureKind.GRAMMAR, source, param="structured_outputs.grammar")))
    assert refused.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize(
    "pattern", ["((x{100}){100}){100}", "x{1000000}", "a\\", "(?=a)b", r"(a)\1", "(" * 3000 + ")" * 3000]
)
def test_a_regular_expression_that_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(Asked(structure=Structure(StructureKind.REGEX, pattern, param="here")))
    assert refused.value.param == "here"


def test_what_has_no_answer_is_refused_and_does_not_end_cleanly() -> None:
    with pytest.raises(InvalidRequest):
        made(Asked(structure=structure({"$ref": "#"})))


def test_white_space_is_bounded() -> None:
    grammar = made(Asked(structure=structure({"type": "array", "items": {"type": "integer"}})))
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
    grammar = made(Asked(structure=structure(schema)))
    assert grammar.ignored == ("here.properties.a.uniqueItems",)
    assert accepts(grammar, '{"a": [1, 1]}')
    assert not accepts(grammar, '{"a": 1}')
    with pytest.raises(InvalidRequest):
        made(Asked(structure=structure({**schema, "additionalProperties": False}, strict=True)))


def test_nothing_to_hold_costs_nothing() -> None:
    assert made(Asked(), of(HERMES, reasons=True)).text == ""
    assert made(Asked((function("f"),)), of(None)).text == ""


# -- reasoning ----------------------------------------------------------------------------------------


def test_a_structure_begins_behind_reasoning() -> None:
    grammar = made(Asked(structure=structure(ADD)), of(None, reasons=True), reasons=True)
    answer = '{"a": 1, "unit": "km", "note": ""}'
    assert accepts(grammar, "so {\n", "</think>", "\n\n" + answer)
    assert not accepts(grammar, answer)
    assert not accepts(grammar, "so", "<tool_call>")
    closed = made(Asked(structure=structure(ADD)), of(None, reasons=True))
    assert accepts(closed, answer)
    assert accepts(closed, "<think>", "so", "</think>", answer)
    assert not accepts(closed, "so", "</think>", answer)


def test_a_thinking_budget_ends_reasoning_and_only_that() -> None:
    asked = Asked(structure=structure(ADD), thinking_budget=3)
    grammar = made(asked, of(None, reasons=True), reasons=True)
    matcher = compiled(walks.vocabulary(), grammar.text)
    for _ in range(3):
        assert len(walks.allowed(matcher)) > 100
        assert matcher.consume_token(walks.token_id("a"))
    assert walks.allowed(matcher) == [IDS["</think>"]]
    alone = made(Asked(thinking_budget=0), of(None, reasons=True), reasons=True)
    assert walks.allowed(compiled(walks.vocabulary(), alone.text)) == [IDS["</think>"]]
    spelled = AnswerFormat("spelled", THINK)
    with pytest.raises(UnsupportedParameter):
        grammar_of(spelled, asked, reasons=True)


def test_a_call_ends_reasoning_where_the_family_has_it_so() -> None:
    asked = Asked((function("add", ADD),), REQUIRED)
    call = ("<tool_call>", '\n{"name": "add", "arguments": {"a":1,"unit":"km","note":""}}\n', "</tool_call>")
    for ends in (False, True):
        grammar = made(asked, of(HERMES, reasons=True, call_ends_reasoning=ends), reasons=True)
        assert accepts(grammar, "so", "</think>", *call)
        assert accepts(grammar, "so", *call) is ends


# -- calls --------------------------------------------------------------------------------------------


def arguments_in(name: str, text: str) -> Any:
    """The arguments of the first call in an answer."""
    match name:
        case "hermes" | "llama":
            envelope = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
            return envelope.get("arguments", envelope.get("parameters"))
        case "mistral":
            return json.JSONDecoder().raw_decode(text.split("[ARGS]")[1])[0]
        case "python":
            (first, *_) = ast.parse(text, mode="eval").body.elts  # type: ignore[attr-defined]
            return {one.arg: ast.literal_eval(one.value) for one in first.keywords}
        case "xml" | "textual":
            tag = (
                ("<parameter=", ">\n", "\n</parameter>")
                if name == "xml"
                else ('<param name="', '">', "</param>")
            )
            found = re.findall(r"(\w+)".join(tag[:2]) + "(.*?)" + tag[2], text, re.DOTALL)
            return {key: int(value) if key == "a" else value for key, value in found}
    string = r'<\|"\|>(.*?)<\|"\|>'
    call = re.match(rf"<tool_call>call:add\{{a:(-?\d+),unit:{string},note:{string}\}}", text, re.DOTALL)
    assert call is not None
    return {"a": int(call[1]), "unit": call[2], "note": call[3]}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_must_come_has_the_familys_form_and_follows_its_schema(name: str) -> None:
    schema = PLAIN if name in ("python", "gemma") else ADD
    functions = function("other"), function("add", schema, strict=True)
    asked = Asked(functions, ToolChoice(ToolMode.REQUIRED, "add"), is_parallel=False)
    grammar = made(asked, of(FORMATS[name]))
    assert not grammar.ignored
    for text in answers(grammar):
        jsonschema_rs.validate(schema, arguments_in(name, text))
    assert not accepts(grammar, "hello")


def test_one_call_and_then_the_end() -> None:
    call = ("<tool_call>", '\n{"name": "f", "arguments": {}}\n', "</tool_call>")
    for choice in (REQUIRED, AUTO):
        one = made(Asked((function("f"),), choice, is_parallel=False), of(HERMES))
        assert accepts(one, *call)
        assert not accepts(one, *call, "\n", *call)
        assert accepts(made(Asked((function("f"),), choice), of(HERMES)), *call, "\n", *call)


@pytest.mark.parametrize("name", FORMATS)
def test_auto_is_text_until_a_trigger_from_which_the_name_holds(name: str) -> None:
    grammar = made(Asked((function("add"), function("adds", PLAIN)), AUTO), of(FORMATS[name]))
    assert accepts(grammar, "Hello, (world).")
    heads = {
        "hermes": ("<tool_call>", '\n{"name": "'),
        "xml": ("<tool_call>", "\n<function="),
        "llama": ('{"name": "',),
        "python": ("[",),
        "mistral": ("[TOOL_CALLS]",),
        "gemma": ("<tool_call>", "call:"),
        "textual": ('Now: <function name="',),
    }
    matcher = compiled(walks.vocabulary(), grammar.text)
    for part in heads[name]:
        for token in [IDS[part]] if part in IDS else walks.tokenizer().encode(part).ids:
            assert matcher.consume_token(token), part
    assert {walks.text_of([token])[0] for token in walks.allowed(matcher)} == {"a"}


def test_auto_holds_arguments_to_a_schema_that_is_strict_alone() -> None:
    call = ("<tool_call>", '\n{"name": "add", "arguments": {"x": 1}}\n', "</tool_call>")
    assert accepts(made(Asked((function("add", ADD),), AUTO), of(HERMES)), "Sure.\n", *call)
    assert not accepts(made(Asked((function("add", ADD, strict=True),), AUTO), of(HERMES)), "Sure.\n", *call)


def test_none_bans_the_trigger() -> None:
    asked = Asked((function("f"),))
    grammar = made(asked, of(HERMES, reasons=True), reasons=True)
    assert accepts(grammar, "so", "</think>", "\n\nHello <tool_call")
    assert not accepts(grammar, "so", "</think>", "<tool_call>")
    spelled = made(asked, of(TEXTUAL))
    assert accepts(spelled, "Hello <function>")
    assert not accepts(spelled, 'Hello <function name="')


@pytest.mark.parametrize("name", FORMATS)
def test_with_a_structure_the_text_follows_it_and_calls_may_come_instead(name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = Asked(
        (function("add", PLAIN),), AUTO, structure=structure({**schema, "additionalProperties": False})
    )
    grammar = made(asked, of(FORMATS[name]))
    assert accepts(grammar, '{"n": 1}')
    assert not accepts(grammar, "Hello")
    if name == "llama":
        assert accepts(grammar, '{"name": "add", "parameters": {}}')


def test_a_schema_that_cannot_be_held_is_any_object_unless_it_is_strict() -> None:
    lookahead = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    grammar = made(Asked((function("f", lookahead),), REQUIRED), of(HERMES))
    assert grammar.ignored == ("tools[0].function.parameters",)
    assert accepts(grammar, "<tool_call>", '\n{"name": "f", "arguments": {"z": 1}}\n', "</tool_call>")
    closed = {**lookahead, "required": ["a"], "additionalProperties": False}
    with pytest.raises(InvalidRequest) as refused:
        made(Asked((function("f", closed, strict=True),), REQUIRED), of(HERMES))
    assert refused.value.param == "tools"


@pytest.mark.parametrize("name", ['f" | "g', "f)/ x: /", "f\n%ignore /a/", "<[3]>", "}]}", "é\\"])
@pytest.mark.parametrize("calls", FORMATS)
def test_a_name_is_no_grammar(name: str, calls: str) -> None:
    """The door takes plain names alone; the grammar does not rest on that."""
    grammar = made(Asked((function(name),), REQUIRED), of(FORMATS[calls]))
    shown = json.dumps(name)[1:-1] if FORMATS[calls].envelope else name
    assert all(shown in text for text in answers(grammar, 4))


def test_a_model_without_a_format_refuses_tools() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        made(Asked((function("f"),), AUTO), None)
    assert refused.value.param == "tools"
