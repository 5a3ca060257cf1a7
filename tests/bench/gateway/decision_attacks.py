"""Attacks by decisions: hundreds of prompts in a request, of which nothing is sampled."""

from __future__ import annotations

from functools import partial
from typing import Final

from shared.apis.decisions import QUESTIONS_MAX
from tests.bench.gateway.attack import MODEL, Attack, Body, Ends, Law, Who, encoded

DECISIONS: Final = "/v1/decisions"
QUESTION: Final = "Is this said of number {} of those that are listed?"
CHOICES: Final = [f"c{at}" for at in range(90)]


def decisions(count: int = QUESTIONS_MAX, words: int = 300, choices: bool = False) -> Body:
    """As many questions about an input of so many words."""
    questions: list[dict[str, object]] = [
        {"type": "choice", "choices": [{"value": one} for one in CHOICES], "instructions": f"Which? {at}"}
        if choices
        else {"type": "predicate", "instructions": QUESTION.format(at)}
        for at in range(count)
    ]
    return partial(encoded, {"model": MODEL, "input": "and so on " * (words // 3), "questions": questions})


def decision_attacks() -> list[Attack]:
    two, may = (Who.ATTACKER, Who.ACCOMPLICE), frozenset({200, 503})
    questions, path = f"{QUESTIONS_MAX} questions", DECISIONS
    return [
        Attack(
            f"{questions}, no budget",
            Law.RESERVATION,
            decisions(),
            path,
            count=8,
            at_once=4,
            who=(Who.ZERO, Who.SEATLESS, Who.BROKE),
            statuses=frozenset({429}),
        ),
        Attack(f"a flood of {questions}", Law.SEATS, decisions(), path, 4, 4, two, may),
        Attack("60 questions of 90 choices", Law.LOOPS, decisions(60, choices=True), path, 4, 2, two, may),
        Attack(
            f"{questions} that are left before they are answered",
            Law.CHARGES,
            decisions(),
            path,
            count=6,
            at_once=6,
            statuses=may,
            ends=Ends.ON_CUE,
        ),
        Attack(f"{questions} that are left at once", Law.CHARGES, decisions(), path, 8, 4, ends=Ends.AT_ONCE),
        Attack(
            "questions on a small budget",
            Law.CHARGES,
            decisions(count=6, words=60),
            path,
            count=8,
            at_once=2,
            who=(Who.POOR,),
            statuses=frozenset({200, 429}),
        ),
    ]
