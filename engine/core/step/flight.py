"""The scheduler's record of a step from its plan to its commit.

Rule H. A plan with a step in flight goes by lengths, which are known ahead, and not by tokens, which are not:
the runner finds a token that is coming where the step in flight leaves it. A sequence that reaches
`max_tokens` by what is in flight gets no further row. One that ends otherwise (by a stop token, an abort, a
stall deadline, a numeric failure) may leave rows in flight behind; these are *late*, and bring nothing. Its
slot and its pages are held back until the last step that works on them is committed, and count as taken until
then. Pages are given to the prefix cache when a commit knows their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.contract.messages import Plan
from engine.contract.records import Lack
from engine.core.estimate.cost import Work
from engine.core.pages.block_manager import PageIdentity
from engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ComingState:
    """A snapshot of the state that a step in flight comes to (`engine.core.step.state_tier`)."""

    place: int
    identity: PageIdentity


@dataclass(slots=True)
class InFlight:
    """A step from its plan to its commit: what `commit` must know of it, and what it holds back."""

    plan: Plan
    rows: list[Sequence]
    """The sequence of each row of the plan."""
    prefills: list[Sequence]
    """Sequences that had more than one token to compute when the step was planned."""
    work: Work
    planned_at: float
    """The core's clock when the step was planned, in seconds."""
    lack: Lack = Lack.NOTHING
    """The reason why sequences still waited for admission when it was planned."""
    tables: list[tuple[list[int], float]] = field(default_factory=list)
    """Pages of sequences that ended and whose last row is in this step, and until when they are kept
    (`BlockManager.release`); released at its commit."""
    slots: list[int] = field(default_factory=list)
    """Slots of sequences that left them and whose last row is in this step; free from its commit on."""
    states: list[ComingState] = field(default_factory=list)
    """Snapshots of states that this step comes to; kept from its commit on."""
