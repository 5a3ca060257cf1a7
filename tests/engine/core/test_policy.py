from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import policy
from engine.core.block_manager import PageChain
from engine.core.cost import StepCost
from engine.core.messages import ServiceClass
from engine.core.policy import Circumstances
from engine.core.sequence import Sequence
from engine.core.tenants import Seats
from tests.engine.core.harness import greedy

FLEX, DEFAULT, PRIORITY = ServiceClass
COST = StepCost(token_s=0.001, row_s=0.0, pair_s=0.0, fixed_s=0.0)
"""A prompt of 100 tokens takes 0.1 s."""


def sequence(
    handle: int,
    arrived_at: float,
    *,
    prompt_len: int = 100,
    preempted: bool = False,
    service_class: ServiceClass = DEFAULT,
    tenant: str = "",
) -> Sequence:
    chain, prompt = PageChain(b"", 4), array("I", [1] * prompt_len)
    seq = Sequence(handle, greedy(4), prompt_len, prompt, chain, arrived_at, tenant, service_class)
    if preempted:
        seq.admit(0, [0], 0, arrived_at)
        seq.preempt(arrived_at)
    return seq


def seats_of(running: Iterable[Sequence]) -> Seats:
    seats = Seats(slots=8, pages=100)
    for seq in running:
        seats.add(seq.tenant, slots=1, pages=len(seq.pages))
    return seats


def handles(sequences: list[Sequence]) -> list[int]:
    return [seq.handle for seq in sequences]


def stalled(
    handle: int, paused_at: float, *, resumed: bool = False, service_class: ServiceClass = DEFAULT
) -> Sequence:
    seq = sequence(handle, 0.0, service_class=service_class)
    seq.admit(0, [0], 0, 0.0)
    seq.pause(paused_at)
    seq.stall(paused_at)
    if resumed:
        seq.resume(paused_at)
    return seq


def ordered(*waiting: Sequence, now: float = 10.0, leads: Mapping[str, int] | None = None) -> list[int]:
    return handles(policy.by_response_ratio(waiting, Circumstances(now, COST, leads or {})))


def test_equals_are_served_as_they_came() -> None:
    assert ordered(sequence(3, 5.0), sequence(2, 1.0), sequence(1, 5.0)) == [2, 1, 3]


def test_a_short_prompt_passes_a_long_one_that_has_not_waited_many_times_longer() -> None:
    """A second is everybody's head start."""
    long, short = sequence(1, 0.0, prompt_len=2000), sequence(2, 9.9, prompt_len=100)
    assert ordered(long, short) == [2, 1]  # 1 + 11 s / 2 s against 1 + 1.1 s / 0.1 s
    assert ordered(sequence(1, -20.0, prompt_len=2000), short) == [1, 2]  # 1 + 31 s / 2 s


def test_what_the_cache_holds_is_no_service() -> None:
    long = sequence(1, 9.0, prompt_len=2000)
    long.expected_len = 50
    assert ordered(sequence(2, 9.0), long) == [1, 2]


def test_a_higher_class_weighs_four_times_as_much_and_waiting_outweighs_it() -> None:
    flex, default = sequence(1, 9.0, service_class=FLEX), sequence(2, 10.0)
    priority = sequence(3, 10.0, service_class=PRIORITY)
    assert ordered(flex, default, priority) == [3, 2, 1]  # 16 and 4 times 1 + 1 s / 0.1 s, 1 + 2 s / 0.1 s
    assert ordered(sequence(1, 5.0, service_class=FLEX), default, priority) == [3, 1, 2]


def test_preempted_work_stands_before_newcomers_of_its_class_and_not_of_a_higher_one() -> None:
    preempted = sequence(9, 9.9, preempted=True, prompt_len=2000, tenant="ahead")
    newcomers = sequence(1, 1.0), sequence(2, 2.0)
    priority = sequence(3, 2.0, service_class=PRIORITY)
    flex = sequence(4, 1.0, service_class=FLEX)
    leads = {"ahead": 10_000}
    assert ordered(*newcomers, priority, flex, preempted, leads=leads) == [3, 9, 1, 2, 4]
    low = sequence(9, 9.9, preempted=True, prompt_len=2000, service_class=FLEX)
    assert ordered(*newcomers, low, flex) == [1, 2, 9, 4]


def test_back_from_a_stall_it_goes_first() -> None:
    priority = sequence(1, 0.0, service_class=PRIORITY)
    assert ordered(priority, stalled(4, 6.0, resumed=True, service_class=FLEX)) == [4, 1]


def test_a_tenant_that_is_ahead_goes_behind() -> None:
    ours, theirs = sequence(1, 0.0, tenant="a"), sequence(2, 9.0, tenant="b")
    assert ordered(ours, theirs) == [1, 2]
    assert ordered(ours, theirs, leads={"a": 8192, "b": 0}) == [2, 1]


def test_a_flood_pushes_its_own_tail_back() -> None:
    """Nobody is ahead yet, and still the flood's third request counts its first two."""
    flood = [sequence(handle, 9.0, tenant="a", prompt_len=2048) for handle in range(1, 30)]
    other = sequence(99, 9.5, tenant="b", prompt_len=2048)
    assert ordered(*flood, other)[:3] == [1, 2, 99]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 500), st.sampled_from("ab"),
                          st.sampled_from(ServiceClass), st.booleans()), max_size=12))  # fmt: skip
def test_an_order_loses_and_doubles_nobody_and_puts_no_preempted_behind_its_class(
    worlds: list[tuple[float, int, str, ServiceClass, bool]],
) -> None:
    waiting = [
        sequence(i, at, prompt_len=n, tenant=t, service_class=c, preempted=p)
        for i, (at, n, t, c, p) in enumerate(worlds)
    ]
    order = ordered(*waiting, leads={"a": 5000, "b": 0})
    assert sorted(order) == list(range(len(waiting)))
    for service_class in ServiceClass:
        preempted = [worlds[i][4] for i in order if worlds[i][3] is service_class]
        assert preempted == sorted(preempted, reverse=True)


@pytest.mark.parametrize(("pending", "budget", "length"), [(5, 9, 5), (9, 5, 5), (9, 0, 0)])
def test_chunk_len(pending: int, budget: int, length: int) -> None:
    assert policy.chunk_len(pending, budget) == length


@pytest.mark.parametrize(
    ("target_s", "decodes_s", "prompts", "room_s"),
    [
        (0.1, 0.01, [0.0], 0.005),  # one prompt: a gap half as long again
        (0.1, 0.01, [9.0], 0.005),  # it need not hurry: nobody waits behind it
        (0.1, 0.01, [0.0, 1.0], 0.016),
        (0.1, 0.01, [0.5, 2.0], 0.04),  # one is late
        (0.1, 0.01, [0.0] * 50, 0.09),  # they come faster than they are computed: what the target leaves
        (0.1, 0.08, [0.0], 0.04),  # decodes that nearly fill the target, or overfill it, do not stop prompts
        (0.1, 0.2, [0.0], 0.1),
        (0.1, 0.2, [0.0] * 50, 0.32),
        (math.inf, 0.01, [0.0], math.inf),  # nobody set a target
    ],
)
def test_prompts_get_as_long_as_the_decodes_each_up_to_the_target(
    target_s: float, decodes_s: float, prompts: list[float], room_s: float
) -> None:
    odd, even = [policy.prompt_room_s(target_s, decodes_s, prompts, is_odd=odd) for odd in (True, False)]
    assert (odd + even) / 2 == pytest.approx(room_s)
    assert odd / even == pytest.approx(1.15 / 0.85) if len(prompts) == 1 and odd < math.inf else odd == even


@pytest.mark.parametrize(
    ("target_s", "fixed_s", "room_s"),
    [
        (0.1, 0.01, 0.09),
        (0.1, 0.07, 0.28),  # most of a step that keeps to the target would go into what is fixed
        (0.1, 0.2, 0.8),
        (math.inf, 0.01, math.inf),
    ],
)
def test_with_nobody_streaming_a_steps_fixed_part_is_a_fifth_of_it_at_most(
    target_s: float, fixed_s: float, room_s: float
) -> None:
    assert policy.room_alone_s(target_s, fixed_s) == pytest.approx(room_s)


@pytest.mark.parametrize(
    ("budget", "room_s", "least_s", "kept"),
    [
        (1600, 0.16, 0.001, (100, 0.01)),
        (17, 0.16, 0.001, (2, 0.01)),
        (1600, 0.16, 0.03, (100, 0.03)),  # as much as one token needs that reads a long context
        (1600, 0.16, 0.2, (100, 0.08)),  # but not more than the others keep
    ],
)
def test_a_part_is_kept_for_who_has_been_computed_for_longest(
    budget: int, room_s: float, least_s: float, kept: tuple[int, float]
) -> None:
    assert policy.kept_for_eldest(budget, room_s, least_s) == pytest.approx(kept)


def test_a_prompt_is_late_beyond_its_time_alone() -> None:
    prompt = sequence(1, 0.0)
    late = [policy.lateness(prompt, Circumstances(now, COST, {})) for now in (0.0, 0.05, 0.1, 0.4)]
    assert late == pytest.approx([0.0, 0.5, 1.0, 4.0])


@pytest.mark.parametrize(
    ("freed", "needed", "victims"),
    [
        ({1: 3, 2: 3, 3: 3, 4: 9}, 1, [4]),  # the lowest class, whatever it costs
        ({1: 3, 2: 3, 3: 3, 4: 0}, 1, [3]),  # the latest arrival
        ({1: 3, 2: 2, 3: 3, 4: 0}, 1, [2]),  # the cheapest to restore
        ({1: 3, 2: 3, 3: 3, 4: 0}, 4, [3, 2]),  # as many as needed
        ({1: 3, 2: 3, 3: 0, 4: 0}, 1, [2]),  # who would free nothing is left alone
        ({1: 1, 2: 1, 3: 1, 4: 0}, 4, []),  # not feasible: nobody suffers
        ({1: 0, 2: 0, 3: 0, 4: 0}, 1, []),
    ],
)
def test_victims(freed: dict[int, int], needed: int, victims: list[int]) -> None:
    flex = sequence(4, 0.0, service_class=FLEX)
    running = [sequence(2, 2.0), sequence(3, 3.0), sequence(1, 1.0), flex]
    chosen = policy.choose_victims(
        running, needed, lambda seq: freed[seq.handle], lambda seq: 0.1 * freed[seq.handle], seats_of(running)
    )
    assert handles(chosen) == victims


@pytest.mark.parametrize(
    ("freed", "victim"),
    [
        ({1: 1, 2: 1, 3: 9, 4: 9}, 2),  # the longest away
        ({1: 1, 2: 0, 3: 9, 4: 9}, 1),  # of those who free something
        ({1: 0, 2: 0, 3: 0, 4: 1}, 4),  # even of one that was resumed
        ({1: 0, 2: 0, 3: 0, 4: 0}, 2),
    ],
)
def test_of_the_stalled_the_longest_away_goes_first(freed: dict[int, int], victim: int) -> None:
    seqs = [stalled(4, 1.0, resumed=True), stalled(1, 3.0), stalled(2, 2.0), stalled(3, 3.0)]
    assert policy.choose_stalled(seqs, lambda seq: freed[seq.handle]).handle == victim


def test_of_the_stalled_the_lowest_class_goes_first() -> None:
    seqs = [stalled(1, 1.0), stalled(2, 5.0, service_class=FLEX), stalled(3, 0.0, service_class=PRIORITY)]
    assert policy.choose_stalled(seqs, lambda _: 1).handle == 2
