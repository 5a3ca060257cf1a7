"""A replica that computes what waits there is slow, not silent."""

from __future__ import annotations

import pytest

from gateway.routing.health import SAMPLES_MIN, SILENT_MIN, SORT_EVERY, HealthPhase, silent
from shared.wire.load_report import LoadReport
from tests.gateway.routing.test_health import LATE_MS, Replica, begin, pool_of, replicas, take, wait


def test_a_replica_that_computes_its_queue_is_not_silent() -> None:
    """Giant prompts beside quick peers."""
    healths, now_ms = pool_of(3)
    wait(healths[0], now_ms)
    for at_ms in range(now_ms, now_ms + 30 * LATE_MS, 100):
        healths[0].report(at_ms // 100, 900_000, at_ms)
        begin(healths[1], at_ms)
        assert silent(healths, LATE_MS, at_ms) == []


@pytest.mark.parametrize("waiting", [900_000, 0], ids=["its core hangs", "its events are lost"])
def test_a_queue_of_which_nothing_is_computed_does_not_explain_silence(waiting: int) -> None:
    healths, now_ms = pool_of(3)
    healths[0].report(500, 900_000, now_ms)
    wait(healths[0], now_ms)
    for at_ms in range(now_ms, now_ms + LATE_MS, 100):
        healths[0].report(501 if waiting else at_ms, waiting and waiting + at_ms, at_ms)
        begin(healths[1], at_ms)
        assert silent(healths, LATE_MS, at_ms) == []
    begin(healths[1], now_ms + LATE_MS)
    assert silent(healths, LATE_MS, now_ms + LATE_MS) == [healths[0]]


def test_a_trial_that_is_computed_is_waited_for() -> None:
    replica = Replica()
    replica.now_ms += replica.eject().length_ms
    wait(replica.health, replica.now_ms, 1)
    replica.now_ms += LATE_MS
    replica.health.report(1, 900_000, replica.now_ms)
    assert not replica.health.is_silent(LATE_MS, replica.now_ms)


def test_a_giant_prompt_beside_quick_peers_is_not_moved() -> None:
    pool, clock = replicas("http://a:1", "http://b:1")
    given_up: list[None] = []
    home = take(pool).replica
    for _ in range(max(SAMPLES_MIN, SORT_EVERY)):
        quick = take(pool, tried={home.id})
        pool.awaits(quick, "m", lambda: None)
        pool.began(quick)
    giants = [take(pool, tried={quick.replica.id}) for _ in range(SILENT_MIN)]
    for giant in giants:
        pool.awaits(giant, "m", lambda: given_up.append(None))
    for computed in range(100):
        clock.advance(0.2)
        pool.observe(home, LoadReport((0, 500_000 - computed, 0), SILENT_MIN, computed=computed))
        quick = take(pool, tried={home.id})
        pool.awaits(quick, "m", lambda: None)
        pool.began(quick)
        pool.look(lambda _: False)
    assert not given_up
    assert home.health.phase is HealthPhase.WELL
