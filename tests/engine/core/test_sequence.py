from __future__ import annotations

from array import array

import pytest

from engine.contract.messages import FinishReason, Want
from engine.core.pages.block_manager import PageChain, PageIdentity
from engine.core.sequence import MOVES, Hold, IllegalMove, Sequence, Status
from tests.engine.core.harness import greedy


def sequence(prompt_len: int = 5, max_tokens: int = 8, **sampling: object) -> Sequence:
    return Sequence(
        handle=1,
        sampling=greedy(max_tokens, **sampling),
        prompt_len=prompt_len,
        tokens=array("I", range(prompt_len)),
        chain=PageChain(b"", 4),
        arrived_at=10.0,
    )


def move(seq: Sequence, status: Status) -> None:
    match status:
        case Status.WAITING:
            seq._move(Status.WAITING, 10.0)  # nothing leads back into the queue
        case Status.RUNNING:
            seq.admit(0, [1, 2], 0, 10.0)
        case Status.STALLED:
            seq.pause(10.0)
            try:
                seq.stall(10.0)
            finally:
                seq.resume(10.0)
        case Status.YIELDED:
            seq.step_aside(10.0)
        case Status.PREEMPTED:
            seq.preempt(10.0)
        case Status.FINISHED:
            seq.finish(10.0)


PATHS = {
    Status.WAITING: [],
    Status.RUNNING: [Status.RUNNING],
    Status.STALLED: [Status.RUNNING, Status.STALLED],
    Status.YIELDED: [Status.RUNNING, Status.YIELDED],
    Status.PREEMPTED: [Status.RUNNING, Status.PREEMPTED],
    Status.FINISHED: [Status.FINISHED],
}


HOLDINGS = {
    Status.WAITING: (False, False),
    Status.RUNNING: (True, True),
    Status.STALLED: (False, True),
    Status.YIELDED: (False, True),
    Status.PREEMPTED: (False, False),
    Status.FINISHED: (False, False),
}
"""Whether a sequence holds a slot and pages, by status."""


@pytest.mark.parametrize("source", Status)
def test_a_sequence_makes_the_moves_of_its_table_and_no_others(source: Status) -> None:
    for target in Status:
        seq = sequence()
        for status in PATHS[source]:
            move(seq, status)
        assert seq.status is source
        if target in MOVES[source]:
            move(seq, target)
            assert seq.status is target
            assert (seq.slot is not None, bool(seq.pages)) == HOLDINGS[target]
        else:
            with pytest.raises(IllegalMove):
                move(seq, target)
            assert seq.status is source


def test_every_status_can_be_reached_and_all_but_one_left() -> None:
    assert set().union(*MOVES.values()) | {Status.WAITING} == set(Status)
    assert [status for status in Status if not MOVES[status]] == [Status.FINISHED]


def test_lengths_are_derived() -> None:
    seq = sequence(prompt_len=5)
    assert (seq.output_len, seq.pending_len, seq.reusable_len, seq.kv_len_max) == (0, 5, 4, 12)
    seq.admit(0, [1, 2], 4, 11.0)
    assert seq.pending_len == 1
    seq.computed_len = 5
    seq.append(7, 12.0)
    assert (seq.output_len, seq.pending_len, seq.reusable_len) == (1, 1, 5)


def test_what_holds_a_sequence_back_has_a_name() -> None:
    seq = sequence(prompt_len=5, max_tokens=2)
    assert seq.hold is None
    seq.awaits = PageIdentity(b"page")
    assert seq.hold is Hold.FETCHING
    seq.pause(11.0)
    assert seq.hold is Hold.PAUSED
    seq.resume(12.0)
    with pytest.raises(AssertionError):
        seq.admit(0, [1, 2], 0, 12.0)
    seq.awaits = None
    seq.admit(0, [1, 2], 0, 12.0)
    seq.launch(1, 5, Want.SAMPLE)
    assert seq.hold is None, "the second token may be computed beside the first"
    seq.launch(2, 1, Want.SAMPLE)
    assert seq.hold is Hold.LAST_COMING
    seq.pause(13.0)
    assert seq.hold is Hold.PAUSED


def test_a_prefix_hit_never_covers_the_last_token() -> None:
    with pytest.raises(AssertionError):
        sequence(prompt_len=5).admit(0, [1, 2], 5, 11.0)


def test_prompt_logprobs_forbid_a_prefix_hit_until_they_are_sent() -> None:
    seq = sequence(prompt_len=5, prompt_logprobs=0)
    assert seq.reusable_len == 0
    seq.prompt_logprobs_sent = 3
    assert seq.reusable_len == 3
    seq.prompt_logprobs_sent = 4  # all: the last prompt position has no follower
    assert seq.reusable_len == 4


def test_time_is_counted_in_the_phase_in_which_it_passes() -> None:
    seq = sequence()
    seq.admit(0, [1, 2], 0, 11.0)  # queue 1
    seq.preempt(13.0)  # prefill 2
    seq.admit(0, [1, 2], 0, 17.0)  # preempted 4
    seq.computed_len = 5
    seq.append(7, 25.0)  # prefill 8
    seq.preempt(41.0)  # decode 16
    seq.finish(73.0)  # preempted 32
    report = seq.finished(FinishReason.ABORTED)
    assert (report.queue_s, report.prefill_s, report.decode_s, report.preempted_s) == (1, 10, 16, 36)
    assert report.preemptions == 2


def test_paused_time_is_counted_apart_in_every_status() -> None:
    seq = sequence()
    seq.pause(11.0)  # queue 1
    seq.resume(13.0)  # stalled 2
    seq.admit(0, [1, 2], 0, 17.0)  # queue 4
    seq.pause(25.0)  # prefill 8
    seq.computed_len = 5
    seq.append(7, 33.0)  # it was in flight
    seq.stall(41.0)
    seq.resume(57.0)
    seq.admit(0, [1, 2], 5, 89.0)  # stalled 64, waiting for a slot included
    seq.pause(90.0)  # decode 1
    seq.stall(90.0)
    seq.preempt(100.0)
    seq.resume(105.0)  # stalled 15
    seq.finish(107.0)  # preempted 2
    report = seq.finished(FinishReason.ABORTED)
    times_s = (report.queue_s, report.prefill_s, report.decode_s, report.preempted_s, report.stalled_s)
    assert times_s == (5, 8, 1, 2, 81)
    assert report.preemptions == 0, "it did not run"


def test_a_paused_sequence_is_not_admitted_and_an_unpaused_one_not_stalled() -> None:
    seq = sequence()
    seq.pause(11.0)
    with pytest.raises(AssertionError):
        seq.admit(0, [1, 2], 0, 12.0)
    seq.resume(12.0)
    seq.admit(0, [1, 2], 0, 12.0)
    with pytest.raises(AssertionError):
        seq.stall(13.0)
