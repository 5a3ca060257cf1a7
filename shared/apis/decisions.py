"""OpenAI's decisions (beta): `/v1/decisions`. Questions about one input, each answered by probabilities.
Nothing is generated: a request costs the tokens of its input, once, and of its questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from shared.apis.generation import GenerationRequest, PromptTokensDetails
from shared.apis.nothing import FALSE, LOOKED_INTO, NONE, Nothing, unsupported
from shared.apis.prompt import AskedOption, AskedQuestion, DecisionPrompt, QuestionKind
from shared.apis.validation import surplus_fields
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import ITEMS_MAX, MESSAGES_MAX, Unshown

QUESTIONS_MAX: Final = 400
CHOICES_MAX: Final = 255
"""The most choices of a question. A model may have labels for fewer (`shared.text.deciding`)."""
LEVELS_MAX: Final = 10
"""The most levels of a score, as vLLM has it: a digit for each."""
JSON_LEN_MAX: Final = 256 * 1024
"""Bytes of a part of JSON, written without blanks."""
T = TypeVar("T")


# -- what is said ---------------------------------------------------------------------------------


class DecisionPart(Unshown, omit_defaults=True):
    """A part of a message, of a call's output or of a question's instructions."""

    type: str
    """`input_text`, `output_text`, `refusal` or `input_json`."""
    text: str | None = None
    refusal: str | None = None
    data: dict[str, Any] | list[dict[str, Any]] | None = None
    """The value of a part of JSON."""
    image_url: str | None = None
    detail: Annotated[str, Meta(max_length=16)] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None
    """Accepted: whatever is shared is cached."""

    def bare(self) -> None:
        """Leave out what says nothing here."""
        self.image_url = self.detail = self.prompt_cache_breakpoint = None


_Parts = Annotated[list[DecisionPart], Meta(max_length=MESSAGES_MAX)]
_Text = str | _Parts


class DecisionItem(Unshown, omit_defaults=True):
    """A message, a call, or a call's output."""

    type: str | None = None
    """`message`, which is the default, `function_call`, `function_call_output`, `custom_tool_call` or
    `custom_tool_call_output`."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Text | None = None
    phase: str | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: _Text | None = None


Input = str | Annotated[list[DecisionItem], Meta(min_length=1, max_length=ITEMS_MAX)]


# -- what is asked --------------------------------------------------------------------------------


class Predicate(Unshown, tag_field="type", tag="predicate", omit_defaults=True):
    """Asks for the probability that a statement about the input is true."""

    instructions: _Text
    name: str | None = None


class GivenChoice(Unshown, omit_defaults=True):
    value: str | bool
    """A text and a boolean of the same letters are two values."""
    description: str = ""


class ChoiceQuestion(Unshown, tag_field="type", tag="choice", omit_defaults=True):
    instructions: _Text
    choices: Annotated[list[GivenChoice], Meta(min_length=2, max_length=CHOICES_MAX)]
    name: str | None = None


class GivenLevel(Unshown, omit_defaults=True):
    label: str
    description: str = ""


class ScoreQuestion(Unshown, tag_field="type", tag="score", omit_defaults=True):
    instructions: _Text
    levels: Annotated[list[GivenLevel], Meta(min_length=2, max_length=LEVELS_MAX)]
    """The levels in their order, the lowest first."""
    name: str | None = None


Question = Predicate | ChoiceQuestion | ScoreQuestion
Questions = Annotated[list[Question], Meta(min_length=1, max_length=QUESTIONS_MAX)]


class DecisionsRequest(GenerationRequest, kw_only=True, dict=True):
    path: ClassVar[str] = "/v1/decisions"
    operation: ClassVar[str] = "decisions"
    prompt_param: ClassVar[str] = "questions"
    prompt_beside: ClassVar[frozenset[str]] = frozenset({"input"})
    answers: ClassVar[bool] = False
    ability: ClassVar[str] = "decisions"
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **dict.fromkeys(("input", "questions"), LOOKED_INTO),
        "joint": FALSE,
        "temperature": (1,),
        "instructions": NONE,
    }

    input: Input
    """The subject of the questions: a text, or the items of a conversation."""
    questions: Questions

    # accepted, without effect on the answer
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @cached_property
    def prompt_form(self) -> DecisionPrompt:
        asked = [_asked(one, f"questions[{index}]") for index, one in enumerate(self.questions)]
        return DecisionPrompt(_said(self.input), asked)

    def check(self, fields: Mapping[str, Raw]) -> None:
        if self.stream:
            raise InvalidRequest("Decisions are not streamed.", param="stream")
        for index, one in enumerate(self.questions):
            if isinstance(one, ChoiceQuestion):
                _check_distinct(one.choices, f"questions[{index}].choices")
        _ = self.prompt_form  # made here, where work is shared out

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        found = dict.fromkeys(surplus_fields(self.questions, fields["questions"], "questions", "questions"))
        if not isinstance(self.input, str):
            found |= dict.fromkeys(surplus_fields(self.input, fields["input"], "input", "input"))
        return [*found]


def _check_distinct(choices: Sequence[GivenChoice], where: str) -> None:
    seen: set[tuple[type, str | bool]] = set()
    for at, choice in enumerate(choices):
        key = type(choice.value), choice.value
        if key in seen:
            place = f"{where}[{at}].value"
            raise InvalidRequest(f"{place} is there twice.", param=place)
        seen.add(key)


def _asked(question: Question, place: str) -> AskedQuestion:
    instructions = _text(question.instructions, f"{place}.instructions")
    match question:
        case Predicate():
            return AskedQuestion(QuestionKind.PREDICATE, instructions)
        case ChoiceQuestion():
            # as JSON: a boolean is another choice than the text of its name
            options = [AskedOption(_json(one.value), one.description) for one in question.choices]
            return AskedQuestion(QuestionKind.CHOICE, instructions, tuple(options))
        case ScoreQuestion():
            levels = [AskedOption(one.label, one.description) for one in question.levels]
            return AskedQuestion(QuestionKind.SCORE, instructions, tuple(levels))


# -- the input as one text ------------------------------------------------------------------------


def _said(given: Input) -> str:
    """The input as one text. Messages of the user alone are their texts; in any other conversation each item
    is headed by who says it. Raises InvalidRequest, and UnsupportedParameter for what is not read."""
    if isinstance(given, str):
        said = given
    else:
        is_users = all(item.role == "user" and item.type in (None, "message") for item in given)
        calls: dict[str, str] = {}
        said = "\n\n".join(
            [_item(item, f"input[{index}]", calls, headed=not is_users) for index, item in enumerate(given)]
        )
    if not said:
        raise InvalidRequest("input must not be empty.", param="input")
    return said


def _item(item: DecisionItem, place: str, calls: dict[str, str], *, headed: bool) -> str:
    """One item's text; `calls` are the names of the calls before it, by their ids."""
    match item.type or "message":
        case "message":
            role = _given(item.role, f"{place}.role")
            text = _text(item.content, f"{place}.content")
            return f"[{role}]\n{text}" if headed else text
        case "function_call" | "custom_tool_call" as kind:
            of, given = ("arguments", item.arguments) if kind == "function_call" else ("input", item.input)
            name, text = _given(item.name, f"{place}.name"), _given(given, f"{place}.{of}")
            name = name if item.namespace is None else f"{item.namespace}.{name}"
            calls[_given(item.call_id, f"{place}.call_id")] = name
            return f"[assistant calls {name}]\n{text}"
        case "function_call_output" | "custom_tool_call_output":
            call_id, where = _given(item.call_id, f"{place}.call_id"), f"{place}.output"
            if call_id not in calls:
                param = f"{place}.call_id"
                raise InvalidRequest(f"{param} is of no call before it.", param=param)
            return f"[result of {calls[call_id]}]\n{_text(item.output, where)}"
        case _:
            raise unsupported(f"{place}.type")


def _text(value: _Text | None, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidRequest(f"{where} is required.", param=where)
    return "\n".join([_part(part, f"{where}[{at}]") for at, part in enumerate(value)])


def _part(part: DecisionPart, place: str) -> str:
    match part.type:
        case "input_text" | "output_text":
            return _given(part.text, f"{place}.text")
        case "refusal":
            return _given(part.refusal, f"{place}.refusal")
        case "input_json":
            text = _json(_given(part.data, f"{place}.data"))
            if len(text.encode()) > JSON_LEN_MAX:
                message = f"{place}.data must have at most {JSON_LEN_MAX} bytes."
                raise InvalidRequest(message, param=f"{place}.data")
            return text
        case _:
            raise unsupported(place if part.type == "input_image" else f"{place}.type")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _given(value: T | None, where: str) -> T:
    if value is None:
        raise InvalidRequest(f"{where} is required.", param=where)
    return value


# -- answers --------------------------------------------------------------------------------------


class PredicateAnswer(Unshown, tag_field="type", tag="predicate", kw_only=True):
    name: str | None
    probability: float
    """The probability that it is true."""


class ChoiceProbability(Unshown):
    value: str | bool
    probability: float


class ChoiceAnswer(Unshown, tag_field="type", tag="choice", kw_only=True):
    name: str | None
    choice: str | bool
    """The likeliest."""
    probabilities: list[ChoiceProbability]
    confidence: float
    """The likeliest one's probability, times that of all labels among all tokens: a model that would rather
    have said something else is not confident."""


class ScoreProbability(Unshown):
    value: int
    """The number of the level, from 0."""
    label: str
    probability: float


class ScoreAnswer(Unshown, tag_field="type", tag="score", kw_only=True):
    name: str | None
    score: float
    """The mean of the levels' numbers."""
    probabilities: list[ScoreProbability]
    confidence: float
    """It counts as that of a choice does."""


class DecisionInputDetails(PromptTokensDetails):
    cache_write_tokens: Literal[0] = 0
    """Keeping a prefix costs nothing."""


class DecisionOutputDetails(Struct, frozen=True):
    reasoning_tokens: Literal[0] = 0


class DecisionUsage(Struct):
    input_tokens: int
    input_tokens_details: DecisionInputDetails
    total_tokens: int
    output_tokens: Literal[0] = 0
    """Nothing is generated."""
    output_tokens_details: DecisionOutputDetails = DecisionOutputDetails()


class DecisionsAnswer(Unshown):
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    """In the order of the questions."""
    model: str
    usage: DecisionUsage
