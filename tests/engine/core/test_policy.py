"""The rank of waiting sequences and of running prefills, and the disciplines to choose from."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.contract.messages import ServiceClass
from engine.core.queue import policy
from engine.core.queue.policy import Circumstances
from engine.core.sequence import Sequence
from shared.process.settings import settings_of
from tests.engine.core.sequences import COST, FLEX, PRIORITY, handles, sequence, stalled


def ordered(*waiting: Sequence, now: float = 10.0, leads: Mapping[str, int] | None = None) -> list[int]:
    return handles(policy.by_response_ratio(waiting, Circumstances(now, COST, leads or {})))


def test_equal_sequences_are_served_in_the_order_of_arrival() -> None:
    assert ordered(sequence(3, 5.0), sequence(2, 1.0), sequence(1, 5.0)) == [2, 1, 3]


def test_a_short_prompt_passes_a_long_one_that_has_not_waited_many_times_longer() -> None:
    """Every sequence has a head start of a second."""
    long, short = sequence(1, 0.0, prompt_len=2000), sequence(2, 9.9, prompt_len=100)
    assert ordered(long, short) == [2, 1]  # 1 + 11 s / 2 s against 1 + 1.1 s / 0.1 s
    assert ordered(sequence(1, -20.0, prompt_len=2000), short) == [1, 2]  # 1 + 31 s / 2 s


def test_a_prefix_in_the_cache_shortens_the_service_that_ranks_a_prompt() -> None:
    long = sequence(1, 9.0, prompt_len=2000)
    long.expected_len = 50
    assert ordered(sequence(2, 9.0), long) == [1, 2]


def test_a_higher_class_weighs_four_times_as_much_and_waiting_outweighs_it() -> None:
    flex, default = sequence(1, 9.0, service_class=FLEX), sequence(2, 10.0)
    priority = sequence(3, 10.0, service_class=PRIORITY)
    assert ordered(flex, default, priority) == [3, 2, 1]  # 16 and 4 times 1 + 1 s / 0.1 s, 1 + 2 s / 0.1 s
    assert ordered(sequence(1, 5.0, service_class=FLEX), default, priority) == [3, 1, 2]


def test_the_ratio_is_the_weight_times_one_plus_the_wait_in_services() -> None:
    circumstances = Circumstances(10.0, COST, {})
    for service_class, weight in policy.WEIGHTS.items():
        newcomer = sequence(1, 10.0, service_class=service_class)
        service_s = COST.service_s(newcomer.expected_len)
        ratio = weight * (1.0 + policy.HEAD_START_S / service_s)
        assert policy.response_ratio(newcomer, circumstances) == pytest.approx(ratio)


def test_a_share_is_halved_by_each_thousand_tokens_beyond_the_free_ones() -> None:
    assert policy.share(0) == policy.share(policy.SHARE_FREE) == 1.0
    assert policy.share(policy.SHARE_FREE + policy.SHARE_HALVED_BY) == 0.5
    assert policy.share(policy.SHARE_FREE + 3 * policy.SHARE_HALVED_BY) == 0.125
    assert policy.share(1 << 60) > 0.0


def test_a_preempted_sequence_ranks_before_newcomers_of_its_class_and_not_of_a_higher_one() -> None:
    preempted = sequence(9, 9.9, preempted=True, prompt_len=2000, tenant="ahead")
    newcomers = sequence(1, 1.0), sequence(2, 2.0)
    priority = sequence(3, 2.0, service_class=PRIORITY)
    flex = sequence(4, 1.0, service_class=FLEX)
    leads = {"ahead": 10_000}
    assert ordered(*newcomers, priority, flex, preempted, leads=leads) == [3, 9, 1, 2, 4]
    low = sequence(9, 9.9, preempted=True, prompt_len=2000, service_class=FLEX)
    assert ordered(*newcomers, low, flex) == [1, 2, 9, 4]


def test_a_resumed_sequence_that_holds_its_pages_goes_first() -> None:
    priority = sequence(1, 0.0, service_class=PRIORITY)
    assert ordered(priority, stalled(4, 6.0, resumed=True, service_class=FLEX)) == [4, 1]


def test_fairness_puts_a_tenant_that_is_ahead_behind_the_others() -> None:
    ours, theirs = sequence(1, 0.0, tenant="a"), sequence(2, 9.0, tenant="b")
    assert ordered(ours, theirs) == [1, 2]
    assert ordered(ours, theirs, leads={"a": 8192, "b": 0}) == [2, 1]


def test_fairness_lets_a_flood_push_only_its_own_tail_back() -> None:
    """No tenant is ahead yet, and still the flood's second request counts its first."""
    flood = [sequence(handle, 9.0, tenant="a", prompt_len=2048) for handle in range(1, 30)]
    other = sequence(99, 9.5, tenant="b", prompt_len=2048)
    assert ordered(*flood, other)[:3] == [1, 99, 2]


@pytest.mark.parametrize("prompt_len", [1, 12, 100])
def test_fairness_puts_what_comes_alone_before_a_flood_of_shorter_prompts_but_its_first(
    prompt_len: int,
) -> None:
    """However short they are: of prompts of a tenth of its length ten go first, and not all two hundred."""
    flood = [sequence(handle, 9.0, tenant="a", prompt_len=prompt_len) for handle in range(1, 200)]
    other = sequence(999, 9.1, tenant="b", prompt_len=10 * prompt_len)
    order = ordered(*flood, other)
    assert order.index(999) <= 12
    assert [handle for handle in order if handle != 999] == list(range(1, 200))


def test_the_tenth_of_a_line_of_equals_has_a_tenth_of_the_rank_of_its_first() -> None:
    line = [sequence(handle, 10.0, tenant="a", prompt_len=100) for handle in range(1, 40)]
    others = sequence(91, 10.0, tenant="b", prompt_len=9000), sequence(92, 10.0, tenant="c", prompt_len=11000)
    order = ordered(*line, *others)
    assert order.index(91) < order.index(10) < order.index(92)  # 1 + 1 s / 9 s, a tenth of 1 + 1 s / 0.1 s


def test_a_wait_for_others_of_the_own_tenant_counts_against_no_other_tenant() -> None:
    """A crowd's request of ninety seconds passes a newcomer where its tenant had nothing, and not where
    others of it were admitted just now."""
    crowd, newcomer = sequence(1, 10.0, tenant="crowd"), sequence(2, 99.9, tenant="b")
    for admitted_at, order in (({}, [1, 2]), ({"crowd": 99.95}, [2, 1])):
        circumstances = Circumstances(100.0, COST, {}, admitted_at)
        assert handles(policy.by_response_ratio([crowd, newcomer], circumstances)) == order


def test_a_lone_tenants_line_is_in_the_order_of_whole_waits() -> None:
    old, new = sequence(1, 0.0, prompt_len=200), sequence(2, 99.0, prompt_len=100)
    circumstances = Circumstances(100.0, COST, {}, {"": 100.0})
    assert handles(policy.by_response_ratio([new, old], circumstances)) == [1, 2]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 500), st.sampled_from("ab"),
                          st.sampled_from(ServiceClass), st.booleans()), max_size=12))  # fmt: skip
def test_an_order_has_every_sequence_once_and_no_preempted_one_behind_its_class(
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


def test_the_discipline_option_names_all_disciplines() -> None:
    discipline = next(setting for setting in settings_of(EngineConfig) if setting.name == "discipline")
    assert discipline.kind.choices == tuple(policy.DISCIPLINES)
    assert discipline.default == "response-ratio"


def test_fifo_serves_in_the_order_of_arrival_for_every_class_tenant_and_length() -> None:
    waiting = [
        sequence(3, 2.0, service_class=ServiceClass.PRIORITY),
        sequence(1, 1.0, prompt_len=4000, tenant="ahead"),
        sequence(2, 1.0, prompt_len=10),
        sequence(4, 3.0, preempted=True),
        stalled(5, 9.0, resumed=True),
    ]
    order = policy.DISCIPLINES["fifo"].order(waiting, Circumstances(10.0, COST, {"ahead": 9000}))
    assert handles(order) == [5, 1, 2, 3, 4]
