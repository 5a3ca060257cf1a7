"""Answers as models write them, and what the machine makes of them: for the tests and the suites."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from engine.api.answer.parts import Part, PartKind
from engine.api.formats.families import FAMILIES
from engine.api.formats.format import AnswerFormat, ArgumentsKind, CallFormat
from engine.api.formats.machine import AnswerMachine
from engine.api.formats.reading import read_format

Arguments = Mapping[str, Any]


def family(name: str, token_ids: Mapping[str, int] | None = None) -> AnswerFormat:
    found = read_format(name, own=None, chat_template=None, token_ids=token_ids or {})
    assert found is not None
    return found


FORMATS: Final = {each.name: family(each.name) for each in FAMILIES}


class Answer(NamedTuple):
    """What came out of an answer."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]


def written(format_: AnswerFormat, calls: Iterable[tuple[str, Arguments]]) -> str:
    """The calls as the format's template writes them."""
    own = format_.calls
    assert own is not None
    each = [
        own.begin + name + own.middle + arguments_text(own, arguments) + own.end for name, arguments in calls
    ]
    if own.is_list:
        return own.opener + own.separator.join(each) + own.closer
    return own.separator.join(own.opener + call + own.closer for call in each)


def arguments_text(own: CallFormat, arguments: Arguments) -> str:
    match own.arguments:
        case ArgumentsKind.JSON:
            return json.dumps(arguments, ensure_ascii=False)
        case ArgumentsKind.TAGGED:
            tag = own.argument
            assert tag is not None
            return "".join(
                tag.begin + key + tag.middle + _raw(value) + tag.end for key, value in arguments.items()
            )
        case ArgumentsKind.PYTHON:
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        case ArgumentsKind.RELAXED:
            return _relaxed(arguments, own.delimiter)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _relaxed(value: Any, delimiter: str) -> str:
    if isinstance(value, str):
        return delimiter + value + delimiter
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_relaxed(own, delimiter)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_relaxed(own, delimiter) for own in value) + "]"
    return json.dumps(value)


def parts_of(
    machine: AnswerMachine, tokens: Iterable[str | int], texts: Mapping[int, str] | None = None
) -> list[Part]:
    """What the machine makes of an answer: of ids, whose texts the decoder leaves out unless they are among
    `texts`, and of texts. Parts of one kind are joined."""
    released: list[Part] = []
    for token in tokens:
        if isinstance(token, int):
            released += machine.feed(token, (texts or {}).get(token, ""))
        else:
            released += machine.feed(-1, token)
    joined: list[Part] = []
    for part in released + machine.finish():
        last = joined[-1] if joined else None
        if last is not None and last.kind is part.kind is not PartKind.CALL:
            joined[-1] = last._replace(text=last.text + part.text)
        else:
            joined.append(part)
    return joined


def read(
    format_: AnswerFormat,
    tokens: Iterable[str | int],
    prompt_tail: str = "",
    tools: Mapping[str, Any] | None = None,
) -> list[Part]:
    machine = AnswerMachine(
        format_, prompt_tail, tools={} if tools is None else tools, mint=lambda: "call_id"
    )
    return parts_of(machine, tokens)


def answer_of(parts: Iterable[Part]) -> Answer:
    text, reasoning, calls = "", "", list[tuple[str, str]]()
    for part in parts:
        match part.kind:
            case PartKind.TEXT:
                text += part.text
            case PartKind.REASONING:
                reasoning += part.text
            case PartKind.CALL:
                calls.append((part.text, ""))
            case PartKind.ARGUMENTS:
                assert part.call == len(calls) - 1, "calls come one after another"
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return Answer(text, reasoning, calls)
