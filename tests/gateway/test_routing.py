"""Which replica."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ModelConfig
from gateway.routing.policy import least_loaded
from gateway.routing.replicas import Outcome, Replica, Replicas
from shared.ids import ReplicaId
from tests.fakes import VirtualClock

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@given(LOADS, st.integers(0, 100))
def test_the_least_loaded_is_chosen(loads: list[int], turn: int) -> None:
    assert loads[least_loaded(loads, turn % len(loads))] == min(loads)


@given(st.integers(1, 20))
def test_equally_loaded_replicas_take_turns(count: int) -> None:
    assert sorted(least_loaded([0] * count, turn) for turn in range(count)) == list(range(count))


def replicas(*urls: str) -> tuple[Replicas, VirtualClock]:
    clock = VirtualClock()
    return Replicas([ModelConfig(name="m", replicas=urls)], clock), clock


def take(pool: Replicas, tokens: int = 1, tried: Collection[ReplicaId] = ()) -> Replica:
    replica = pool.acquire("m", tokens, pool.next_turn(), tried)
    assert replica is not None
    return replica


def test_one_large_request_weighs_more_than_many_small_ones() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    giant = take(pool, 100_000)
    assert all(take(pool, 100).id != giant.id for _ in range(10))


def test_each_replica_is_tried_once_per_request() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    first = take(pool)
    second = take(pool, tried={first.id})
    assert {first.id, second.id} == {"a:1", "b:1"}
    assert pool.acquire("m", 1, pool.next_turn(), {first.id, second.id}) is None


def test_load_is_released() -> None:
    pool, _ = replicas("http://a:1/")
    replica = take(pool, 50)
    assert (replica.url, replica.tokens, replica.requests) == ("http://a:1", 50, 1)
    pool.release(replica, 50, Outcome.NEUTRAL)
    assert (replica.tokens, replica.requests) == (0, 0)


def test_models_on_one_replica_share_its_load() -> None:
    pool = Replicas([ModelConfig(name=name, replicas=("http://a:1",)) for name in "mn"])
    assert pool.acquire("m", 50, 0) is pool.acquire("n", 1, 0)
    assert [replica.tokens for replica in pool._by_url.values()] == [51]


def test_two_replicas_behind_one_address_are_two() -> None:
    pool, _ = replicas("http://lb:80/a", "http://lb:80/b")
    first = take(pool)
    assert {first.id, take(pool, tried={first.id}).id} == {"lb:80/a", "lb:80/b"}


def test_a_failed_replica_cools_for_a_time_that_doubles() -> None:
    pool, clock = replicas("http://a:1", "http://b:1")

    def fail(replica: Replica) -> None:
        pool.release(replica, 1, Outcome.FAILED)

    first = take(pool)
    take(pool, 1000, {first.id})  # so that the first is always the least loaded
    fail(first)
    for cooling_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.advance(cooling_s - 0.01)
        assert take(pool).id != first.id
        clock.advance(0.01)
        again = take(pool)
        assert again is first
        fail(again)
    clock.advance(30.0)
    pool.release(take(pool), 1, Outcome.WORKED)
    fail(take(pool))
    clock.advance(1.0)
    assert take(pool) is first, "an answer ends the row of failures"


def test_failures_while_a_replica_cools_count_once() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    other = take(pool)
    failing = [take(pool, 1, {other.id}) for _ in range(10)]
    for replica in failing:
        pool.release(replica, 1, Outcome.FAILED)
    assert failing[0].failures == 1


def test_while_all_replicas_cool_all_are_used() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    for _ in range(2):
        pool.release(take(pool), 1, Outcome.FAILED)
    assert {take(pool).id, take(pool).id} == {"a:1", "b:1"}


def test_retries_do_not_take_the_turns_of_other_requests() -> None:
    """Two replicas, one of which always fails: the next request must not begin at that one each time."""
    pool, _ = replicas("http://a:1", "http://b:1")
    begun = []
    for _ in range(6):
        turn = pool.next_turn()
        first = pool.acquire("m", 1, turn)
        assert first is not None
        second = pool.acquire("m", 1, turn, {first.id})
        assert second is not None
        begun.append(first.id)
        pool.release(first, 1, Outcome.NEUTRAL)
        pool.release(second, 1, Outcome.NEUTRAL)
    assert begun == ["b:1", "a:1"] * 3
