"""What sequences waited for, found from the records of steps."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from engine.api.told.attribution import (
    INTERRUPTIONS_MAX,
    Interruption,
    SequenceMarks,
    Spent,
    Timing,
    causes_of,
)
from engine.api.told.halts import Halts
from engine.api.told.steps import (
    BEGINNING,
    GAPS_MAX,
    LONG_MAX,
    NEWEST,
    NO_STEP,
    STEPS_MAX,
    UNREAD_MAX,
    StepMark,
    StepRing,
)
from engine.contract.messages import Move, ServiceClass
from engine.contract.records import Lack, StepRecord
from shared.trace.sentences import sentence
from shared.wire.causes import Cause, CauseCode

DEFAULT = ServiceClass.DEFAULT


class Steps:
    """A ring, and the steps that a test puts into it."""

    def __init__(self) -> None:
        self.ring = StepRing()

    def add(
        self,
        interval_s: float = 0.01,
        *,
        step_s: float | None = None,
        expected_s: float = 0.01,
        prompts: int = 0,
        prompt_tokens: int = 0,
        decodes: int = 1,
        copied_pages: int = 0,
        lack: Lack = Lack.NOTHING,
    ) -> StepMark:
        step_s = interval_s if step_s is None else step_s
        step = StepRecord(
            *(self.ring.last.number + 1, interval_s, step_s, expected_s, prompts, prompt_tokens),
            *((0, decodes, 0), copied_pages, lack, 37, 98),
        )
        self.ring.push(step)
        return self.ring.mark()

    def decoding(
        self, spent: Spent, *interruptions: Interruption, since: StepMark = BEGINNING
    ) -> list[Cause]:
        """The causes of a sequence that has decoded since then."""
        marks = SequenceMarks(DEFAULT, 10, since, since, since, interruptions=interruptions)
        return list(causes_of(marks, spent, self.ring))


def spent(queue_s: float = 0.0, prefill_s: float = 0.0, decode_s: float = 0.0, tokens: int = 1) -> Spent:
    return Spent(Timing(queue_s, prefill_s, decode_s), 0, tokens)


@pytest.mark.parametrize(
    ("lack", "says"),
    [
        (Lack.NOTHING, "queued 1.8 s: a step was being computed, 3 of a higher class went first"),
        (Lack.SLOTS, "queued 1.8 s: no slot (37 sequences run), 3 of a higher class went first"),
        (Lack.PAGES, "queued 1.8 s: no pages (37 sequences hold 98 %), 3 of a higher class went first"),
        (
            Lack.TURN,
            "queued 1.8 s: the steps computed 1,000 prompt tokens of others, 3 of a higher class went first",
        ),
    ],
)
def test_a_wait_is_put_down_to_what_was_lacking_for_longest(lack: Lack, says: str) -> None:
    steps = Steps()
    arrived = steps.add(lack=Lack.TURN, prompt_tokens=77)
    steps.add(0.4, lack=lack, prompt_tokens=1000)
    steps.add(0.3, lack=Lack.SLOTS if lack is not Lack.SLOTS else Lack.PAGES)
    marks = SequenceMarks(
        DEFAULT, 10, arrived, steps.ring.mark(), admitted_before=(5, 0, 1), admitted_first=(5, 0, 4)
    )
    steps.add(0.9, lack=Lack.PAGES)
    [wait] = causes_of(marks, spent(queue_s=1.8), steps.ring)
    assert sentence(wait) == says
    assert (wait.step, wait.steps) == (3, 2)


def test_a_sequence_that_still_waits_has_the_cause_of_its_wait() -> None:
    steps = Steps()
    steps.add(2.0, lack=Lack.PAGES)
    marks = SequenceMarks(DEFAULT, 10, admitted_before=(5, 5, 5))
    steps.ring.admitted = [6, 7, 5]
    [wait] = causes_of(marks, spent(queue_s=2.0), steps.ring)
    assert (wait.code, wait.first, wait.higher_class) == (CauseCode.WAITED_PAGES, 3, 0)


@pytest.mark.parametrize(
    ("grammar_s", "steps_between", "lack", "code"),
    [
        (0.06, 1, Lack.NOTHING, CauseCode.WAITED_GRAMMAR),
        (0.01, 0, Lack.NOTHING, CauseCode.WAITED_GRAMMAR),
        (0.01, 1, Lack.NOTHING, CauseCode.WAITED_STEP),
        (0.0, 0, Lack.NOTHING, CauseCode.WAITED_STEP),
        (0.06, 1, Lack.SLOTS, CauseCode.WAITED_SLOTS),
    ],
)
def test_a_wait_for_its_grammar_is_no_wait_for_a_step(
    grammar_s: float, steps_between: int, lack: Lack, code: CauseCode
) -> None:
    steps = Steps()
    arrived = steps.add()
    for _ in range(steps_between):
        steps.add(0.01, lack=lack)
    marks = SequenceMarks(DEFAULT, 10, arrived, steps.ring.mark())
    [wait] = causes_of(marks, spent(queue_s=0.1)._replace(grammar_s=grammar_s), steps.ring)
    assert wait.code == code


def test_a_short_wait_is_not_told() -> None:
    assert list(causes_of(SequenceMarks(DEFAULT, 10), spent(queue_s=0.0001), StepRing())) == []


def test_a_prefill_tells_what_was_computed_beside_it() -> None:
    steps = Steps()
    admitted = steps.add()
    steps.add(0.2, prompts=3, prompt_tokens=900, decodes=20)
    first = steps.add(0.2, prompts=2, prompt_tokens=600, decodes=20)
    marks = SequenceMarks(DEFAULT, 500, BEGINNING, admitted, first)
    [prefill] = causes_of(marks, Spent(Timing(prefill_s=0.4), 100, 1), steps.ring)
    assert sentence(prefill) == (
        "prefill of 400 ms: 400 prompt tokens of its own (100 more were cached) in 2 steps, "
        "beside 1,100 prompt tokens of 2 other requests and 20 streams"
    )


def test_a_prompt_of_one_token_tells_all_that_was_computed_beside_it() -> None:
    steps = Steps()
    admitted = steps.add()
    first = steps.add(0.2, prompts=2, prompt_tokens=101, decodes=0)
    marks = SequenceMarks(DEFAULT, 500, BEGINNING, admitted, first)
    [prefill] = causes_of(marks, Spent(Timing(prefill_s=0.2), 499, 1), steps.ring)
    assert sentence(prefill) == (
        "prefill of 200 ms: 1 prompt token of its own (499 more were cached) in 1 step, "
        "beside 100 prompt tokens of another request"
    )


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ({"prompts": 3, "prompt_tokens": 3, "expected_s": 0.3, "decodes": 200}, CauseCode.GAP_DECODES),
        ({"prompts": 1, "prompt_tokens": 1920, "expected_s": 0.3}, CauseCode.GAP_PROMPTS),
        ({"prompts": 1, "prompt_tokens": 19, "expected_s": 0.05}, CauseCode.GAP_SLOW),
        ({"step_s": 0.01}, CauseCode.GAP_HOST),
        ({"copied_pages": 50, "expected_s": 0.3}, CauseCode.GAP_COPIES),
        ({"expected_s": 0.02}, CauseCode.GAP_SLOW),
        ({"expected_s": 0.0}, CauseCode.GAP_DECODES),
        ({"expected_s": 0.3, "decodes": 200}, CauseCode.GAP_DECODES),
    ],
)
def test_the_cause_of_a_gap(step: dict[str, float], code: CauseCode) -> None:
    steps = Steps()
    for _ in range(20):
        steps.add()
    steps.add(0.31, **step)  # type: ignore[arg-type]
    [gap] = steps.decoding(spent(decode_s=0.51, tokens=22))
    assert (gap.code, gap.ms, gap.step) == (code, 310.0, 21)


def test_even_gaps_are_not_told() -> None:
    steps = Steps()
    for _ in range(20):
        steps.add(0.2)
    assert steps.decoding(spent(decode_s=4.0, tokens=21)) == []


def test_the_longest_gaps_of_a_sequence_that_is_older_than_the_ring() -> None:
    steps = Steps()
    began = steps.add(9.0)
    for step in range(3 * STEPS_MAX):
        steps.add({5: 0.5, 700: 0.9, 2000: 0.7, 2500: 0.3}.get(step, 0.01))
    found = steps.decoding(spent(decode_s=40.0, tokens=3 * STEPS_MAX), since=began)
    assert [cause.ms for cause in found] == [900.0, 700.0, 500.0]
    late = steps.decoding(spent(decode_s=10.0, tokens=900), since=StepMark(replace(NO_STEP, number=2300)))
    assert [cause.ms for cause in late] == [300.0]


def test_steps_that_get_ever_shorter_fill_no_memory() -> None:
    steps = Steps()
    for step in range(500):
        steps.add(10.0 - step / 100)
    longest = steps.ring.longest_since(0)
    assert len(longest) == LONG_MAX
    assert [step.number for step in longest[:GAPS_MAX]] == [1, 2, 3]
    assert [step.number for step in longest[-NEWEST:]] == list(range(493, 501))
    assert len(list(steps.ring.between(0, 500))) == 500


def test_steps_during_a_pause_or_a_preemption_are_no_gaps_of_it() -> None:
    steps = Steps()
    for step in range(30):
        steps.add(1.0 if step in (9, 20) else 0.01)
    [gap, stall, preempted] = steps.decoding(
        spent(decode_s=0.3, tokens=20),
        Interruption(CauseCode.STALLED, 12.0, 8, 11),
        Interruption(CauseCode.PREEMPTED_CLASS, 1.2, 25, 27, swapped=True),
        Interruption(CauseCode.STALLED, 0.0, 29, 29),
    )
    assert (gap.ms, gap.step) == (1000.0, 21)
    assert sentence(stall) == "stalled 12 s: this client did not read"
    assert sentence(preempted).startswith("preempted for 1.2 s: a request of a higher class took its place")


def test_only_the_longest_interruptions_are_kept() -> None:
    marks = SequenceMarks(DEFAULT, 10)
    for number in range(3 * INTERRUPTIONS_MAX):
        marks.interrupted(Interruption(CauseCode.STALLED, float(number % 20), number, number))
    assert len(marks.interruptions) == INTERRUPTIONS_MAX
    assert min(one.seconds for one in marks.interruptions) >= 12.0


def test_halts_do_not_overlap() -> None:
    steps = Steps()
    halts = Halts(steps.ring)
    steps.add()
    halts.moved(Move.PREEMPTED_PAGES, False, 1.0)
    assert halts.is_preempted
    assert halts.preempted_s(3.0) == 2.0
    halts.pause(4.0)
    halts.moved(Move.PREEMPTED_STALLED, False, 5.0)
    assert (halts.stalled_s(6.0), halts.preempted_s(6.0)) == (2.0, 3.0)
    halts.resume(7.0)
    steps.add()
    halts.moved(Move.READMITTED, True, 9.0)
    assert (halts.stalled_s(10.0), halts.preempted_s(10.0), halts.preemptions) == (3.0, 5.0, 1)
    assert halts
    steps.add()
    over = halts.take_over(10.0, is_last=False)
    assert [(one.code, one.seconds, one.after, one.last, one.swapped) for one in over] == [
        (CauseCode.PREEMPTED_PAGES, 3.0, 1, 3, False),
        (CauseCode.STALLED, 3.0, 1, 3, False),
        (CauseCode.STALLED, 2.0, 1, 3, True),
    ]
    assert (bool(halts), halts.swaps) == (False, 0), "it was not preempted while it ran"
    halts.moved(Move.PREEMPTED_CLASS, False, 10.0)
    halts.moved(Move.READMITTED, True, 10.5)
    [preempted] = halts.take_over(10.5, is_last=False)
    assert (preempted.code, preempted.swapped, halts.swaps) == (CauseCode.PREEMPTED_CLASS, True, 1)
    halts.pause(11.0)
    [last] = halts.take_over(12.0, is_last=True)
    assert (last.code, last.seconds) == (CauseCode.STALLED, 1.0)


def test_long_steps_are_the_same_however_often_one_asks() -> None:
    """The search in one pass finds what a look at every pair of steps finds."""
    rng = random.Random(1)
    often, seldom, all_steps = Steps(), Steps(), []
    for number in range(1, 1500):
        decodes, interval_s = rng.choice([0, 1, 1, 5]), rng.choice([0.01, rng.random()])
        often.add(interval_s, decodes=decodes)
        seldom.add(interval_s, decodes=decodes)
        if decodes:
            all_steps.append((interval_s, number))
        if not number % 50:
            since = rng.randrange(number)
            found = [step.interval_s for step in often.ring.longest_since(since)[:GAPS_MAX]]
            assert found == sorted([s for s, n in all_steps if n > since], reverse=True)[:GAPS_MAX]
    assert often.ring.longest_since(0) == seldom.ring.longest_since(0)


def test_sums_are_the_same_however_often_one_asks() -> None:
    rng = random.Random(2)
    often, seldom = Steps(), StepRing()
    for _ in range(3 * UNREAD_MAX // 2):
        step = often.add(
            1.0, prompt_tokens=rng.randrange(9), decodes=rng.randrange(9), lack=rng.choice([*Lack])
        )
        seldom.push(step.step)
    assert seldom.sums == often.ring.sums
    assert sum(seldom.sums.lacking_s) == 3 * UNREAD_MAX // 2
