"""The reference answers of the Berkeley Function Calling Leaderboard, written in every family's format and
read back at every cut.

Each answer is one or more calls with arguments. They are written as the family's format has them, and where
TRL ships the family's chat template, by that template, too. An answer counts as

- *right*, where the same calls came back with the same values: whole, one character at a time, and cut in two
  at every place (`CUTS_MAX` places of a longer text);
- *told as text*, where a value is not of the type that its schema states, in a notation that writes strings
  as they are: what it was cannot be known then;
- *not said*, where the family's template does not write the calls: it refuses more than one, leaves all but
  one out, or writes quotes and backslashes of a string into a string of Python's as they are;
- *wrong* else.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.api.formats.format import AnswerFormat, ArgumentsKind
from engine.api.formats.notations import schema_types
from shared.fairness.fair_threads import at_once
from shared.process.clock import SYSTEM_CLOCK
from shared.text.chat_template import ChatTemplate, variables_read
from shared.wire.errors import InvalidRequest
from tests.answer_texts import FORMATS, answer_of, read, written
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.suites.cache import SuiteFailed, wheel
from tests.suites.templates import SPECIAL, prompt_of, shipped

SUMMARY: Final = "BFCL's reference answers in every family's format, read back"
BFCL: Final = ("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
ANSWERS: Final = 2501
CUTS_MAX: Final = 24
TEMPLATES: Final = {
    "qwen2_5": "hermes",
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_8": "qwen3.5",
    "nemotron_3_nano": "qwen3.5",
    "glm4moe": "glm-4",
    "llama3_1": "llama-3",
    "gptoss": "gpt-oss",
    "lfm2_2_5": "lfm2",
    "gemma4_v5": "gemma-4",
}
ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|tool_response>", "<|user|>", "</s>")
"""What ends a turn in these templates: the engine does not pass it on."""
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
    "null": (type(None),),
}
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class Reference(NamedTuple):
    """The calls that answer a question of the leaderboard, and the schemas of their functions."""

    name: str
    calls: list[tuple[str, dict[str, Any]]]
    tools: dict[str, Any]


def run(cache: Path) -> list[Figure]:
    references = list(_references(cache))
    figures = [figure("answers", len(references), "answers", at_least(ANSWERS))]
    for name, format_ in FORMATS.items():
        if format_.calls is not None:
            counts = Counter(_written(name, format_, reference) for reference in references)
            figures += _figures(name, counts)
    sources = shipped(cache)
    for template, family in TEMPLATES.items():
        judge = _Rendered(sources[template])
        counts = Counter(judge.kind(template, FORMATS[family], reference) for reference in references)
        figures += _figures(f"{family}, by the template {template}", counts)
    return figures


def _figures(name: str, counts: Counter[str]) -> Iterator[Figure]:
    for kind in ("right", "told as text", "not said"):
        if counts[kind] or kind == "right":
            yield figure(f"{name}: {kind}", counts[kind], "answers")
    yield figure(f"{name}: wrong", counts["wrong"], "answers", at_most(0))


# -- what is written ----------------------------------------------------------------------------------


def _references(cache: Path) -> Iterator[Reference]:
    """The leaderboard's answers. Raises SuiteFailed."""
    with zipfile.ZipFile(wheel(cache, *BFCL)) as files:
        folder = "bfcl_eval/data/possible_answer/"
        for path in sorted(name for name in files.namelist() if name.startswith(folder)):
            questions = {line["id"]: line for line in _lines(files, path.replace("possible_answer/", ""))}
            for line in _lines(files, path):
                truth = line["ground_truth"]
                if all(isinstance(call, dict) for call in truth) and line["id"] in questions:
                    yield Reference(
                        line["id"], [_call(call) for call in truth], _tools(questions[line["id"]])
                    )


def _lines(files: zipfile.ZipFile, path: str) -> Iterator[dict[str, Any]]:
    try:
        text = files.read(path).decode()
    except KeyError as error:
        raise SuiteFailed(f"{path} is not there") from error
    return map(json.loads, filter(None, text.splitlines()))


def _call(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    [(name, arguments)] = call.items()
    return name, _first_of_each(arguments)


def _first_of_each(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument's first accepted value. An empty one among several says that it may be left out."""
    values = {}
    for key, accepted in arguments.items():
        options = accepted if isinstance(accepted, list) else [accepted]
        said = [option for option in options if option != ""] or options
        values[key] = _plain(said[0]) if said else []
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _first_of_each(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _tools(question: Mapping[str, Any]) -> dict[str, Any]:
    return {function["name"]: _schema(function["parameters"]) for function in question["function"]}


def _schema(schema: Any) -> Any:
    """A schema with JSON Schema's names of types."""
    if isinstance(schema, list):
        return [_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    stated = schema.get("type")
    named = {"type": _TYPES.get(stated, stated)} if isinstance(stated, str) else {}
    return {key: _schema(value) for key, value in schema.items()} | named


# -- what is read -------------------------------------------------------------------------------------


def _written(name: str, format_: AnswerFormat, reference: Reference) -> str:
    text = written(format_, reference.calls)
    kind, said = judged(format_, text, "", reference)
    if kind == "wrong":
        sys.stderr.write(f"{name}, {reference.name}: {text!r} came back as {said!r}\n")
    return kind


def judged(format_: AnswerFormat, text: str, prompt_tail: str, reference: Reference) -> tuple[str, object]:
    """What the answer counts as, and what came back."""
    one = read(format_, [text], prompt_tail, reference.tools)
    for cut in _cuts(text):
        if read(format_, [text[:cut], text[cut:]], prompt_tail, reference.tools) != one:
            return "wrong", f"another answer if cut at {cut}"
    if read(format_, text, prompt_tail, reference.tools) != one:
        return "wrong", "another answer one by one"
    answer = answer_of(one)
    try:
        calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    except ValueError:
        return "wrong", answer
    if answer.text or answer.reasoning or not _same(calls, reference, format_):
        return "wrong", answer
    return ("right" if _equal(calls, reference.calls) else "told as text"), answer


def _cuts(text: str) -> Sequence[int]:
    step = max(1, len(text) // CUTS_MAX)
    return range(1, len(text), step)


def _equal(calls: object, others: object) -> bool:
    """True if they are the same JSON, in which 1 and 1.0 are one number, and true is not 1."""
    texts = [json.dumps(_numbers(value), sort_keys=True) for value in (calls, others)]
    return texts[0] == texts[1]


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _same(calls: list[tuple[str, Any]], reference: Reference, format_: AnswerFormat) -> bool:
    """True if these are the calls, where values that are no strings though their schema says so, or the other
    way round, may have come back as the other."""
    if len(calls) != len(reference.calls):
        return False
    is_text = format_.calls is not None and format_.calls.arguments is ArgumentsKind.TAGGED
    for (name, arguments), (wanted, values) in zip(calls, reference.calls, strict=True):
        if name != wanted or arguments.keys() != values.keys():
            return False
        properties = reference.tools.get(name, {}).get("properties", {})
        for key, value in values.items():
            is_said = _is_of(value, schema_types(properties.get(key)))
            if not _equal(arguments[key], value) and (is_said or not is_text):
                return False
    return True


def _is_of(value: object, types: tuple[str, ...]) -> bool:
    """True if the schema tells a value's text from a string's, or says that it is a string."""
    own = [kind for name in types or ("string",) for kind in _KINDS.get(name, ())]
    return type(value) in own


def _says(text: str, format_: AnswerFormat, reference: Reference) -> bool:
    """True if the text is that of the calls."""
    names = Counter(name for name, _ in reference.calls)
    if any(text.count(name) < count for name, count in names.items()):
        return False
    is_python = format_.calls is not None and format_.calls.arguments is ArgumentsKind.PYTHON
    return not is_python or all(mark not in repr(_texts(reference.calls)) for mark in ("\\", '"'))


def _texts(value: Any) -> list[str]:
    """Every string in a value."""
    if isinstance(value, Mapping):
        return _texts(list(value.values()))
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


class _Rendered:
    """Answers as a chat template writes them."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, SPECIAL, SYSTEM_CLOCK, variables_read(source, SPECIAL))

    def kind(self, template: str, format_: AnswerFormat, reference: Reference) -> str:
        try:
            prompt, text = self._answer(reference)
        except InvalidRequest:
            return "not said"
        kind, said = judged(format_, text, prompt[-256:], reference)
        if kind == "wrong" and not _says(text, format_, reference):
            return "not said"
        if kind == "wrong":
            sys.stderr.write(f"{template}, {reference.name}: {text!r} came back as {said!r}\n")
        return kind

    def _answer(self, reference: Reference) -> tuple[str, str]:
        """The prompt, and what the template writes behind it."""
        question = {"role": "user", "content": "?"}
        calls = [
            {
                "id": f"call{number:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(reference.calls)
        ]
        answer = {"role": "assistant", "content": None, "tool_calls": calls}
        tools = [
            {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
            for name, schema in reference.tools.items()
        ]
        prompt = self._text({"messages": [question], "tools": tools}, opens=True)
        whole = self._text({"messages": [question, answer], "tools": tools}, opens=False)
        if not whole.startswith(prompt):
            prompt = prompt[
                : next(at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b)
            ]
        text = whole[len(prompt) :]
        return prompt, text[: min((text.find(end) for end in ENDS if end in text), default=len(text))]

    def _text(self, chat: Any, *, opens: bool) -> str:
        return at_once(self._template.slices(prompt_of(chat, opens=opens)))
