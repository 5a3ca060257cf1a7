"""Seeded choices, and the exchange that they make.

Rules:
1. Every topic is a function of a `Draw`: the source of choices, and the exchanges before.
2. Wordings come through `Draw.wording`: of eight, one is held out from training, and is asked only in the
   evaluation. All other choices come through `Draw.pick`.
3. An exchange carries the pattern of a right answer, so that an evaluation needs no second table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
HELD_OUT_EVERY = 8


@dataclass(frozen=True, slots=True)
class Exchange:
    topic: str
    question: str
    answer: str
    check: str
    follow_up: str = ""  # what a "tell me more" would bring; empty where there is nothing more


class Draw:
    """Seeded choices for one conversation; `past` are its exchanges so far.

    `held_out` says whether wordings come from the part that training never sees.
    """

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.rng = Random(seed)
        self.held_out = held_out
        self.past: list[Exchange] = []

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def wording(self, options: Sequence[T]) -> T:
        """One of `options` from this draw's side of the split; lists too short to split are shared."""
        if len(options) < HELD_OUT_EVERY:
            return self.rng.choice(options)
        held_out = slice(HELD_OUT_EVERY - 1, None, HELD_OUT_EVERY)
        if self.held_out:
            return self.rng.choice(options[held_out])
        seen = list(options)
        del seen[held_out]
        return self.rng.choice(seen)


def exact(text: str) -> str:
    """A pattern that finds `text` as whole words."""
    return rf"(?<![\w.]){re.escape(text)}(?!\w)"
