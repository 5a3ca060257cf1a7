"""Causes of a sequence's waits: pure functions from the records of steps.

A sequence keeps a few marks (`SequenceMarks`): of the step before it came, before it was admitted, and of
its first token. What the steps between two of them did is the difference of their sums. So a token costs
nothing, and the end of a sequence some microseconds, however long it was.

The wait     lasted from the record at which it came to that at which it was admitted, and is put down to
             what sequences lacked for the most of that time. Where that is nothing, it was its grammar's
             compiling, if that took half of it or more, or no step was computed; else the step under way.
The prefill  lasted from there to its first token.
The gaps     between its tokens are the intervals of the steps since then, since a sequence that decodes is in
             every step. Steps during which it was preempted or paused are left out: those are causes of their
             own (`Interruption`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import Struct

from engine.api.told.steps import BEGINNING, GAPS_MAX, StepMark, StepRing
from engine.contract.messages import Move, ServiceClass
from engine.contract.records import Lack, StepRecord
from shared.wire.causes import COUNT_MAX, Cause, CauseCode

INTERRUPTIONS_MAX: Final = 16
"""Interruptions of one sequence that are kept: the longest."""
WAIT_MS_MIN: Final = 1.0
"""Milliseconds below which nothing is said about a wait or an interruption."""
GAP_FACTOR: Final = 2.0
"""A gap is worth telling when it is so many times as long as the mean one."""
SLOW_FACTOR: Final = 2.0
"""A step is slow when it took so many times as long as expected."""

_WAITS: Final = {
    Lack.NOTHING: CauseCode.WAITED_STEP,
    Lack.SLOTS: CauseCode.WAITED_SLOTS,
    Lack.PAGES: CauseCode.WAITED_PAGES,
    Lack.TURN: CauseCode.WAITED_TURN,
}
_PREEMPTIONS: Final = {
    Move.PREEMPTED_CLASS: CauseCode.PREEMPTED_CLASS,
    Move.PREEMPTED_SHARE: CauseCode.PREEMPTED_SHARE,
    Move.PREEMPTED_PAGES: CauseCode.PREEMPTED_PAGES,
    Move.PREEMPTED_STALLED: CauseCode.STALLED,
}


class Interruption(NamedTuple):
    """A time in which a sequence that had begun was not computed."""

    code: CauseCode
    seconds: float
    after: int
    """The number of the last step before it."""
    last: int
    """The number of the last step in it."""
    swapped: bool = False


class SequenceMarks(Struct, eq=False):
    """The steps at which a sequence came, was admitted, and got its first token, and its interruptions."""

    service_class: ServiceClass
    prompt_len: int
    arrived: StepMark = BEGINNING
    admitted: StepMark | None = None
    first_token: StepMark | None = None
    admitted_before: tuple[int, ...] = (0, 0, 0)
    """Sequences that had been admitted when it came, for each class, FLEX first."""
    admitted_first: tuple[int, ...] | None = None
    """Sequences that had been admitted when it was admitted itself; None until then."""
    interruptions: tuple[Interruption, ...] = ()

    def interrupted(self, interruption: Interruption) -> None:
        """Keep an interruption that is over."""
        kept = (*self.interruptions, interruption)
        if len(kept) > INTERRUPTIONS_MAX:
            shortest = min(kept, key=lambda one: one.seconds)
            kept = tuple(one for one in kept if one is not shortest)
        self.interruptions = kept


@dataclass(frozen=True, slots=True)
class Timing:
    """The time that a sequence spent in each stage, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    preemptions: int = 0
    stalled_s: float = 0.0
    swaps: int = 0
    """The preemptions after which its pages were kept in host memory."""

    @property
    def life_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s + self.preempted_s + self.stalled_s


class Spent(NamedTuple):
    """The time that a sequence spent, and the tokens that it computed."""

    timing: Timing
    cached_len: int
    tokens: int
    grammar_s: float = 0.0
    """The core's time for its grammar, in seconds, beside the rest."""


def causes_of(marks: SequenceMarks, spent: Spent, ring: StepRing, *, shared: bool = False) -> Iterator[Cause]:
    """The causes of a sequence's waits, in the order of its life. `shared` says that its request has other
    sequences."""
    admitted = marks.admitted or ring.mark()
    if spent.timing.queue_s * 1e3 >= WAIT_MS_MIN:
        yield wait_cause(marks, admitted, spent, ring, shared=shared)
    if marks.admitted is not None and spent.timing.prefill_s * 1e3 >= WAIT_MS_MIN:
        yield prefill_cause(marks, marks.first_token or ring.mark(), spent, ring, shared=shared)
    if marks.first_token is not None:
        for step in gaps(marks.first_token.number, spent, marks.interruptions, ring):
            yield gap_cause(step, shared=shared)
    for one in marks.interruptions:
        if one.seconds * 1e3 >= WAIT_MS_MIN:
            yield Cause(
                code=one.code,
                ms=milliseconds(one.seconds),
                step=_count(one.last),
                steps=_count(one.last - one.after),
                swapped=one.swapped,
            )


def wait_cause(
    marks: SequenceMarks, admitted: StepMark, spent: Spent, ring: StepRing, *, shared: bool
) -> Cause:
    """The cause of the time before the first admission."""
    before, after = marks.arrived.sums, admitted.sums
    lacking_s = [late - early for early, late in zip(before.lacking_s, after.lacking_s, strict=True)]
    lack = max(Lack, key=lambda one: (lacking_s[one], -one))
    first = marks.admitted_first or ring.admitted
    taken = [late - early for early, late in zip(marks.admitted_before, first, strict=True)]
    higher = sum(taken[marks.service_class + 1 :])
    steps = ring.between(marks.arrived.number, admitted.number)
    seen = next((step for step in steps if step.lack is lack), admitted.step)
    is_compiled = 2 * spent.grammar_s >= spent.timing.queue_s or admitted.number == marks.arrived.number
    waits_for_grammar = lack is Lack.NOTHING and spent.grammar_s > 0.0 and is_compiled
    return Cause(
        code=CauseCode.WAITED_GRAMMAR if waits_for_grammar else _WAITS[lack],
        ms=milliseconds(spent.timing.queue_s),
        step=_count(admitted.number),
        steps=_count(admitted.number - marks.arrived.number),
        requests=_count(seen.holders) if lack in (Lack.SLOTS, Lack.PAGES) else 0,
        held_percent=_count(seen.held_percent) if lack is Lack.PAGES else 0,
        prompt_tokens=_count(after.prompt_tokens - before.prompt_tokens) if lack is Lack.TURN else 0,
        higher_class=_count(higher),
        first=_count(sum(taken) - higher),
        shared=shared,
    )


def prefill_cause(
    marks: SequenceMarks, first_token: StepMark, spent: Spent, ring: StepRing, *, shared: bool
) -> Cause:
    """The cause of the time from the admission to the first token."""
    assert marks.admitted is not None
    before, after = marks.admitted.sums, first_token.sums
    steps, own_tokens = first_token.number - marks.admitted.number, marks.prompt_len - spent.cached_len
    prompts = [step.prompts for step in ring.between(marks.admitted.number, first_token.number)]
    is_over = marks.first_token is not None
    return Cause(
        code=CauseCode.PREFILL,
        ms=milliseconds(spent.timing.prefill_s),
        step=_count(first_token.number),
        steps=_count(steps),
        own_tokens=_count(own_tokens),
        cached_tokens=_count(spent.cached_len),
        prompt_tokens=_count(after.prompt_tokens - before.prompt_tokens - own_tokens) if is_over else 0,
        requests=_count(max(prompts, default=1) - 1),
        decodes=_count((after.decodes - before.decodes) // max(1, steps)),
        shared=shared,
    )


def gaps(after: int, spent: Spent, interruptions: Sequence[Interruption], ring: StepRing) -> list[StepRecord]:
    """The steps of the longest gaps between tokens that are worth telling, the longest first."""
    mean_s = spent.timing.decode_s / max(1, spent.tokens - 1)
    found: list[StepRecord] = []
    for step in ring.longest_since(after):
        if step.interval_s < max(GAP_FACTOR * mean_s, WAIT_MS_MIN / 1e3) or len(found) == GAPS_MAX:
            break
        if not any(one.after < step.number <= one.last for one in interruptions):
            found.append(step)
    return found


def gap_cause(step: StepRecord, *, shared: bool) -> Cause:
    """The cause of a gap between two tokens."""
    return Cause(
        code=_gap_code(step),
        ms=milliseconds(step.interval_s),
        step=_count(step.number),
        steps=1,
        requests=_count(step.prompts),
        prompt_tokens=_count(step.prompt_tokens),
        decodes=_count(sum(step.decodes)),
        pages=_count(step.copied_pages),
        expected_ms=milliseconds(step.expected_s),
        shared=shared,
    )


def _gap_code(step: StepRecord) -> CauseCode:
    is_slow = 0.0 < SLOW_FACTOR * step.expected_s < step.step_s
    if step.step_s < step.interval_s / 2:
        return CauseCode.GAP_HOST
    has_chunks = step.prompt_tokens > step.prompts  # a single token of a prompt takes what a decode does
    if has_chunks and not (is_slow and step.step_s > 2 * SLOW_FACTOR * step.expected_s):
        return CauseCode.GAP_PROMPTS
    if is_slow:
        return CauseCode.GAP_SLOW
    return CauseCode.GAP_COPIES if step.copied_pages else CauseCode.GAP_DECODES


def preemption_code(move: Move) -> CauseCode:
    """The cause that a preemption is told as."""
    return _PREEMPTIONS[move]


def _count(number: int) -> int:
    return min(max(0, number), COUNT_MAX)


def milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
