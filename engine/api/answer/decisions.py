"""Decisions' answers: for each question the probabilities of its options, from the log-probabilities of their
labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Raw, Struct

from engine.api.answer.encoder import Answered, Heading, Unstreamed, Vocabulary, encode, filled
from engine.api.answer.outputs import Delta
from shared.apis.decisions import (
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    DecisionInputDetails,
    DecisionsAnswer,
    DecisionsRequest,
    DecisionUsage,
    Predicate,
    PredicateAnswer,
    Question,
    ScoreAnswer,
    ScoreProbability,
    ScoreQuestion,
)
from shared.apis.generation import Usage

TEXT_COPIES: Final = 3
"""The copies of a text that an answer holds: as it is held, as JSON, and in the piece that is written."""


class DecidedRequest(Struct, frozen=True):
    """The part of a request that its answer needs: the questions, without their texts."""

    questions: Sequence[Question]
    held_len: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def decided(request: DecisionsRequest, _fields: Mapping[str, Raw]) -> DecidedRequest:
    questions = [_without_texts(question) for question in request.questions]
    text_len = sum(4 * len(text) for question in questions for text in _told(question))
    return DecidedRequest(questions, TEXT_COPIES * text_len)


def _without_texts(question: Question) -> Question:
    match question:
        case Predicate(name=name):
            return Predicate("", name)
        case ChoiceQuestion(choices=choices, name=name):
            return ChoiceQuestion("", [type(one)(one.value) for one in choices], name)
        case ScoreQuestion(levels=levels, name=name):
            return ScoreQuestion("", [type(one)(one.label) for one in levels], name)


def _told(question: Question) -> Iterator[str]:
    """The texts of a question that its answer repeats."""
    yield question.name or ""
    if isinstance(question, ChoiceQuestion):
        yield from (one.value for one in question.choices if isinstance(one.value, str))
        yield max((one.value for one in question.choices if isinstance(one.value, str)), key=len, default="")
    elif isinstance(question, ScoreQuestion):
        yield from (one.label for one in question.levels)


class DecisionsEncoder(Unstreamed):
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        assert isinstance(answered.repeated, DecidedRequest)
        self._model = heading.model
        self._outputs, self._questions = answered.scored, answered.repeated.questions

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        tokens, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
        told = DecisionUsage(tokens, DecisionInputDetails(cached), tokens)
        pairs = zip(self._questions, self._outputs, strict=True)
        answers = ([encode(answer_of(question, output.scores))] for question, output in pairs)
        return filled(DecisionsAnswer([], self._model, told), b'"answers":[', answers)


def answer_of(question: Question, scores: Sequence[float]) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    """The answer to a question whose labels have these log-probabilities among all tokens."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    whole = math.fsum(weights)
    probabilities = [weight / whole for weight in weights]
    likeliest = probabilities.index(max(probabilities))
    # that of all labels among all tokens, times that of the likeliest among the labels
    confidence = min(1.0, math.exp(top))
    match question:
        case Predicate(name=name):
            return PredicateAnswer(name=name, probability=probabilities[1])
        case ChoiceQuestion(choices=choices, name=name):
            values = [one.value for one in choices]
            told = [ChoiceProbability(*pair) for pair in zip(values, probabilities, strict=True)]
            return ChoiceAnswer(
                name=name, choice=values[likeliest], probabilities=told, confidence=confidence
            )
        case ScoreQuestion(levels=levels, name=name):
            labels = [one.label for one in levels]
            pairs = enumerate(zip(labels, probabilities, strict=True))
            return ScoreAnswer(
                name=name,
                score=math.fsum(at * probability for at, probability in enumerate(probabilities)),
                probabilities=[
                    ScoreProbability(at, label, probability) for at, (label, probability) in pairs
                ],
                confidence=confidence,
            )
