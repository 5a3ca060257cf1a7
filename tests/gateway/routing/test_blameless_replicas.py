"""Errors that one tenant alone gets from a replica say nothing of it where others use it, too."""

from __future__ import annotations

import pytest

from gateway.config.whole import ModelConfig
from gateway.routing.affinity import affinity_of
from gateway.routing.health import RATE_MIN, ROW_MAX, WINDOW_S, HealthPhase, Outcome
from gateway.routing.maglev import key_of
from gateway.routing.policy import Affinity, RouteReason, nowhere
from gateway.routing.replicas import Replicas
from shared.apis.completions import CompletionRequest
from tests.fakes import VirtualClock
from tests.gateway.routing.test_health import FAILURES, Replica

MANY = 3 * RATE_MIN


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED])
@pytest.mark.parametrize(("own", "other"), ["ab", "ba"])
def test_errors_that_one_of_several_tenants_alone_gets_eject_nobody(
    replica: Replica, own: str, other: str, outcome: Outcome
) -> None:
    """They may be of what it asks for. Another tenant was sent here before."""
    replica.work(replica.health.admit(replica.now_ms, other))
    for _ in range(MANY):
        ticket = replica.health.admit(replica.now_ms, own)
        assert replica.fail(ticket, outcome) is None
    assert replica.allows


def test_what_is_refused_to_one_tenant_ejects_nobody_though_nobody_else_was_sent_here(
    replica: Replica,
) -> None:
    """A server may lack the one path that it asks for."""
    for _ in range(MANY):
        assert replica.fail(replica.health.admit(replica.now_ms, "a"), Outcome.REFUSED) is None
    assert replica.fail(replica.health.admit(replica.now_ms, "b"), Outcome.REFUSED) is not None


@pytest.mark.parametrize("outcome", [one for one in FAILURES if one is not Outcome.FAILED])
def test_what_no_request_can_cause_ejects_whosever_it_is(replica: Replica, outcome: Outcome) -> None:
    replica.work(replica.health.admit(replica.now_ms, "b"))
    ended = [replica.fail(replica.health.admit(replica.now_ms, "a"), outcome) for _ in range(ROW_MAX)]
    assert ended[-1] is not None


@pytest.mark.parametrize("second", [Outcome.FAILED, Outcome.LOST, Outcome.REFUSED])
def test_errors_that_another_tenant_gets_as_well_eject(replica: Replica, second: Outcome) -> None:
    replica.work(replica.health.admit(replica.now_ms, "b"))
    for _ in range(ROW_MAX):
        assert replica.fail(replica.health.admit(replica.now_ms, "a"), Outcome.FAILED) is None
    assert replica.fail(replica.health.admit(replica.now_ms, "b"), second) is not None


def test_errors_eject_where_the_others_were_long_ago(replica: Replica) -> None:
    replica.work(replica.health.admit(replica.now_ms, "b"))
    replica.now_ms += 1000 * WINDOW_S + 1
    ended = [replica.fail(replica.health.admit(replica.now_ms, "a"), Outcome.FAILED) for _ in range(ROW_MAX)]
    assert ended[-1] is not None


def test_an_error_that_one_tenant_alone_gets_decides_no_trial(replica: Replica) -> None:
    replica.now_ms += replica.eject().length_ms + 1000 * WINDOW_S
    other = replica.health.admit(replica.now_ms, "b")
    assert replica.health.note(other, Outcome.NEUTRAL, replica.now_ms) is None
    assert replica.fail(replica.health.admit(replica.now_ms, "a"), Outcome.FAILED) is None
    assert replica.allows, "another request decides"
    assert replica.work(replica.health.admit(replica.now_ms, "b")) is not None
    assert replica.health.phase is HealthPhase.WELL


def test_a_request_that_has_no_choice_of_replicas_counts_for_its_tenant_too() -> None:
    pool = Replicas([ModelConfig(name=model, replicas=("http://a:1",)) for model in "mn"], VirtualClock())
    first = pool.place("m", nowhere("b"))
    assert first is not None
    pool.release(first, Outcome.WORKED)
    for _ in range(MANY):
        for model in "mn":
            place = pool.place(model, nowhere("a"))
            assert place is not None
            pool.release(place, Outcome.FAILED)
            assert place.replica.health.phase is HealthPhase.WELL


@pytest.mark.parametrize("models", ["m", "mn"])
def test_a_tenant_whose_requests_are_answered_with_errors_leaves_a_pool_that_others_use_whole(
    models: str,
) -> None:
    """Whatever models it asks for of the same engines."""
    urls = ("http://a:1", "http://b:1", "http://c:1")
    pool = Replicas([ModelConfig(name=model, replicas=urls) for model in models], VirtualClock())
    sent = set()
    for session in range(1, 64):
        place = pool.place("m", Affinity(0, key_of(b"%d" % session), 0, 0, 1, tenant="b"))
        assert place is not None
        sent.add(place.replica.id)
        pool.began(place)
        pool.release(place, Outcome.WORKED)
    assert len(sent) == 3
    for session in range(1, 64):
        model = models[session % len(models)]
        request = CompletionRequest(model=model, prompt=f"{session}")
        place = pool.place(model, affinity_of(request, model, "a", 1, 1))
        assert place is not None
        assert place.route is not RouteReason.PANIC
        pool.release(place, Outcome.FAILED)
        assert place.replica.health.phase is HealthPhase.WELL
