"""Which replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ModelConfig
from gateway.routing.policy import least_loaded
from gateway.routing.replicas import Replicas

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@given(LOADS, st.integers(0, 100))
def test_the_least_loaded_is_chosen(loads: list[int], turn: int) -> None:
    assert loads[least_loaded(loads, turn % len(loads))] == min(loads)


@given(st.integers(1, 20))
def test_equals_take_turns(count: int) -> None:
    assert sorted(least_loaded([0] * count, turn) for turn in range(count)) == list(range(count))


def replicas(*urls: str) -> Replicas:
    return Replicas([ModelConfig(name="m", replicas=urls)])


def test_one_giant_weighs_more_than_many_small() -> None:
    pool = replicas("http://a:1", "http://b:1")
    giant = pool.take("m", 100_000)
    assert giant is not None
    others = [pool.take("m", 100) for _ in range(10)]
    assert all(other is not None and other.id != giant.id for other in others)


def test_each_is_tried_once() -> None:
    pool = replicas("http://a:1", "http://b:1")
    first = pool.take("m", 1)
    assert first is not None
    second = pool.take("m", 1, {first.id})
    assert second is not None
    assert {first.id, second.id} == {"a:1", "b:1"}
    assert pool.take("m", 1, {first.id, second.id}) is None


def test_load_is_given_back() -> None:
    pool = replicas("http://a:1/")
    replica = pool.take("m", 50)
    assert replica is not None
    assert (replica.url, replica.tokens, replica.requests) == ("http://a:1", 50, 1)
    pool.give_back(replica, 50)
    assert (replica.tokens, replica.requests) == (0, 0)


def test_models_on_one_replica_share_its_load() -> None:
    pool = Replicas([ModelConfig(name=name, replicas=("http://a:1",)) for name in "mn"])
    assert pool.take("m", 50) is pool.take("n", 1)
    assert [replica.tokens for replica in pool._by_url.values()] == [51]
