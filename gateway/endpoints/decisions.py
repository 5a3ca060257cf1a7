"""OpenAI's decisions at the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.endpoints.endpoint import Endpoint
from shared.apis.decisions import DecisionPart, DecisionsAnswer, DecisionsRequest, Input, Questions
from shared.apis.validation import surplus_fields

_decode_input: Final = msgspec.json.Decoder(Input).decode
_decode_questions: Final = msgspec.json.Decoder(Questions).decode


def shaped_input(value: Raw, left_out: list[str]) -> Raw:
    """The input of a request that was read, without what the shapes of its items do not have, and what says
    nothing in them."""
    items = _decode_input(value)
    if isinstance(items, str):
        return value
    return _shaped(
        "input", items, value, left_out, (part for item in items for part in (item.content, item.output))
    )


def shaped_questions(value: Raw, left_out: list[str]) -> Raw:
    """The questions without what their shapes do not have, whose names are added to `left_out`."""
    questions = _decode_questions(value)
    return _shaped("questions", questions, value, left_out, (one.instructions for one in questions))


def _shaped(
    name: str, shapes: Sequence[Any], value: Raw, left_out: list[str], texts: Iterable[object]
) -> Raw:
    left_out += dict.fromkeys(surplus_fields(shapes, value, name, name))
    for text in texts:
        for part in text if isinstance(text, list) else ():
            assert isinstance(part, DecisionPart)
            part.bare()
    return Raw(msgspec.json.encode(shapes))


DECISIONS: Final = Endpoint(
    shape=DecisionsRequest,
    answer=DecisionsAnswer,
    summary="Decide questions about an input.",
    passes=frozenset(
        {
            *("model", "input", "questions", "prompt_cache_key", "safety_identifier"),  # OpenAI's
            "joint",  # vLLM's: how a model reads the questions
        }
    ),
    is_optional=True,
    maxima=(),
    nested=(("input", shaped_input), ("questions", shaped_questions)),
)
