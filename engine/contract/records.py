"""The record of a step, for whoever looks back."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Lack(IntEnum):
    """The reason why sequences still waited when a step was planned."""

    NOTHING = 0
    """None waited."""
    SLOTS = 1
    PAGES = 2
    TURN = 3
    """The step's tokens and time went to others."""


class StepRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The record of one step, of a constant size. It names no sequence and no tenant."""

    number: int
    interval_s: float
    """Time from the commit before, or from the moment at which there was work again, to this commit: the gap
    between two tokens of a sequence that decodes."""
    step_s: float
    """The part of it that the step took."""
    expected_s: float
    """The time that the learned cost of a step expected for it; 0.0 before it learned."""
    prompts: int
    """Rows that computed a part of a prompt."""
    prompt_tokens: int
    decodes: tuple[int, ...]
    """Rows that computed a token of an answer, for each class, FLEX first."""
    copied_pages: int
    """Pages that were copied to host memory, and back."""
    lack: Lack
    holders: int
    """Sequences that held pages after the step."""
    held_percent: int
    """The part of all pages that they held."""
