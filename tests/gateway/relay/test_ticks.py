"""The ticks of an answer: bounded, in order, and over all of its length."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.relay.stream import TICKS_MAX, Ticks


def ticks_of(reads: int, events_per_read: int = 1) -> tuple[Ticks, int]:
    """The ticks of as many reads, a millisecond apart, and how often the clock was looked at."""
    ticks, noted = Ticks(), 0
    for read in range(1, reads + 1):
        if read * events_per_read >= ticks.due:
            ticks.note(read * events_per_read, float(read))
            noted += 1
    return ticks, noted


def test_a_short_answer_has_a_tick_for_each_read() -> None:
    ticks, _ = ticks_of(TICKS_MAX)
    assert list(ticks.events) == list(range(1, TICKS_MAX + 1))
    assert (len(ticks), ticks.stride) == (TICKS_MAX, 1)
    assert ticks.since(1.0)[:2] == [(0.0, 1), (1000.0, 2)]


def test_a_read_of_no_event_has_none_and_one_of_many_has_one() -> None:
    assert (len(Ticks()), Ticks().due) == (0, 1)
    ticks, noted = ticks_of(5, events_per_read=100)
    assert (list(ticks.events), noted) == ([100, 200, 300, 400, 500], 5)


def test_the_65th_tick_drops_every_second_one() -> None:
    ticks, _ = ticks_of(TICKS_MAX + 1)
    assert list(ticks.events) == list(range(1, TICKS_MAX + 2, 2))
    assert (ticks.stride, ticks.due) == (2, TICKS_MAX + 3)


@pytest.mark.parametrize("reads", [100, 1_000, 100_000])
@pytest.mark.parametrize("events_per_read", [1, 3])
def test_a_long_answer_has_few_over_all_of_its_length(reads: int, events_per_read: int) -> None:
    ticks, noted = ticks_of(reads, events_per_read)
    assert TICKS_MAX / 2 <= len(ticks) <= TICKS_MAX
    assert len(ticks.at_s) == len(ticks.events)
    assert (ticks.at_s[0], ticks.events[0]) == (1.0, events_per_read)
    assert all(later - one >= ticks.stride for one, later in pairwise(ticks.events))
    assert all(later > one for one, later in pairwise(ticks.at_s))
    assert reads * events_per_read < ticks.due
    assert noted <= TICKS_MAX * (1 + reads.bit_length() / 2)
