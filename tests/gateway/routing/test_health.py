"""Which replicas are well: ejections, trials, the half that always stays."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
import pytest

from gateway.config.whole import ModelConfig
from gateway.routing.health import (
    EJECTION_MS_MAX,
    EJECTION_MS_MIN,
    JITTER,
    LATE_FACTOR,
    LATE_MS_MIN,
    RATE_MIN,
    ROW_MAX,
    SAMPLES_MAX,
    SAMPLES_MIN,
    SILENT_MIN,
    SORT_EVERY,
    WINDOW_S,
    Ejection,
    FirstEvents,
    HealthPhase,
    Outcome,
    Reason,
    ReplicaHealth,
    Ticket,
    silent,
    usable,
)
from gateway.routing.maglev import key_of
from gateway.routing.policy import Affinity, RouteReason
from gateway.routing.replicas import Placement, Replicas
from shared.wire.ids import ReplicaId
from tests.fakes import VirtualClock
from tests.gateway.conftest import until

FAILURES = [outcome for outcome in Outcome if outcome.is_failure and outcome is not Outcome.REFUSED]
"""Those that eject whosever they are, where nobody else was sent here."""


class Replica:
    """One replica's record, and its time."""

    def __init__(self, seed: int = 1) -> None:
        self.health = ReplicaHealth(seed)
        self.now_ms = 1_000_000

    def send(self) -> Ticket:
        return self.health.admit(self.now_ms)

    def fail(self, ticket: Ticket | None = None, outcome: Outcome = Outcome.LOST) -> Ejection | None:
        return self.health.note(ticket or self.send(), outcome, self.now_ms)

    def work(self, ticket: Ticket | None = None) -> int | None:
        """A request works and ends. Returns what `ReplicaHealth.began` does."""
        ticket = ticket or self.send()
        away_ms = self.health.began(ticket, self.now_ms)
        ended_ms = self.health.concluded(ticket, self.now_ms)
        away_ms = ended_ms if away_ms is None else away_ms
        assert self.health.note(ticket, Outcome.WORKED, self.now_ms) is None
        return away_ms

    def begin(self) -> Ticket:
        """Send a stream, whose first event comes at once."""
        ticket = self.send()
        self.health.began(ticket, self.now_ms)
        return ticket

    def eject(self) -> Ejection:
        ejections = [self.fail() for _ in range(ROW_MAX)]
        assert ejections[:-1] == [None] * (ROW_MAX - 1)
        ejection = ejections[-1]
        assert ejection is not None
        return ejection

    @property
    def allows(self) -> bool:
        return self.health.allows(self.now_ms)


@pytest.fixture
def replica() -> Replica:
    return Replica()


# -- ejection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", FAILURES)
def test_three_failures_in_a_row_eject(replica: Replica, outcome: Outcome) -> None:
    for _ in range(ROW_MAX - 1):
        assert replica.fail(outcome=outcome) is None
        assert replica.allows
    ejection = replica.fail(outcome=outcome)
    assert ejection is not None
    assert (ejection.reason, ejection.outcome) == (Reason.ROW, outcome)
    assert not replica.allows


def test_an_answer_ends_the_row(replica: Replica) -> None:
    for _ in range(3 * RATE_MIN):
        for _ in range(ROW_MAX - 1):
            replica.work()
        for _ in range(ROW_MAX - 1):
            assert replica.fail() is None
    assert replica.allows


def test_what_is_no_fault_of_the_replica_does_not_count(replica: Replica) -> None:
    for _ in range(10 * RATE_MIN):
        assert replica.health.note(replica.send(), Outcome.NEUTRAL, replica.now_ms) is None
    assert replica.fail() is None
    assert replica.health.note(replica.send(), Outcome.NEUTRAL, replica.now_ms) is None
    assert replica.fail() is None
    assert replica.fail() is not None, "and does not end a row either"


def test_more_than_half_of_ten_failing_within_ten_seconds_eject(replica: Replica) -> None:
    for _ in range(RATE_MIN // 2):
        replica.work()
        assert replica.fail() is None
    replica.work()
    assert replica.fail() is None, "half is not more than half"
    ejection = replica.fail()
    assert ejection is not None
    assert ejection.reason is Reason.RATE


def test_failures_that_are_long_past_do_not_count(replica: Replica) -> None:
    for _ in range(20):
        for _ in range(2):
            assert replica.fail() is None
        replica.work()
        replica.now_ms += 10_000
    assert replica.allows


def test_a_stream_that_breaks_counts_as_a_failure_and_not_as_a_success(replica: Replica) -> None:
    """An engine that resets every stream after three events, while others begin."""
    running = [replica.begin() for _ in range(2)]
    for _ in range(ROW_MAX):
        assert replica.allows
        running += [replica.begin(), replica.begin()]
        replica.now_ms += 20
        ejection = replica.fail(running.pop(0))
    assert ejection is not None
    assert ejection.reason is Reason.ROW, "what begins in between interrupts no row"
    assert not replica.allows


def test_where_streams_broke_a_first_event_does_not_end_the_ejection(replica: Replica) -> None:
    for _ in range(ROW_MAX):
        ejection = replica.fail(replica.begin())
    assert ejection is not None
    replica.now_ms += ejection.length_ms
    trial = replica.begin()
    assert not replica.allows, "no other is sent until it is decided"
    replica.now_ms += 300
    again = replica.fail(trial)
    assert again is not None
    assert again.reason is Reason.TRIAL
    replica.now_ms += again.length_ms
    assert replica.work() is not None, "it came to its end"
    assert replica.allows
    assert replica.health.phase is HealthPhase.WELL


def test_a_trial_that_goes_on_for_as_long_as_the_ejection_lets_the_next_decide(replica: Replica) -> None:
    for _ in range(ROW_MAX):
        ejection = replica.fail(replica.begin())
    assert ejection is not None
    replica.now_ms += ejection.length_ms
    long = replica.begin()
    replica.now_ms += ejection.length_ms - 1
    assert not replica.allows
    replica.now_ms += 1
    assert replica.allows
    assert replica.health.began(replica.send(), replica.now_ms) == 2 * ejection.length_ms
    assert replica.health.phase is HealthPhase.WELL
    assert replica.fail(long) is None, "one failure is no row"


def test_a_success_that_is_long_past_is_taken_back_without_harm(replica: Replica) -> None:
    old = replica.send()
    replica.health.began(old, replica.now_ms)
    for _ in range(20):
        replica.now_ms += 1_000
        replica.work()
    assert replica.fail(old) is None
    assert replica.health.began(old, replica.now_ms) is None, "counted once"


def test_a_success_that_has_left_the_window_is_taken_back_from_no_later_second(replica: Replica) -> None:
    """The two have one place in the window."""
    old = replica.begin()
    replica.now_ms += 1_000 * WINDOW_S
    streams = [replica.begin() for _ in range(6)]
    failures = [replica.fail(old), replica.fail()]
    for stream in streams[:2]:
        replica.health.concluded(stream, replica.now_ms)  # which ends the row
        failures += [replica.fail(), replica.fail()]
    assert failures == [None] * 6, "as many have begun as have failed"


# -- the time away, and the way back --------------------------------------------------------------


def test_an_ejection_lasts_five_seconds_and_doubles_up_to_a_minute(replica: Replica) -> None:
    lengths_ms = [replica.eject().length_ms]
    for _ in range(6):
        replica.now_ms += lengths_ms[-1] - 1
        assert not replica.allows
        replica.now_ms += 1
        assert replica.allows
        ejection = replica.fail()
        assert ejection is not None
        assert ejection.reason is Reason.TRIAL
        lengths_ms.append(ejection.length_ms)
    for length_ms, doubled_ms in zip(lengths_ms, (5_000, 10_000, 20_000, 40_000, *[60_000] * 3), strict=True):
        assert doubled_ms <= length_ms <= doubled_ms * (1 + JITTER)
    assert len(set(lengths_ms)) == len(lengths_ms), "chance has a part in each"


def test_gateways_do_not_return_at_one_moment() -> None:
    lengths_ms = {Replica(seed).eject().length_ms for seed in range(20)}
    assert len(lengths_ms) > 15


def test_one_trial_at_a_time_decides(replica: Replica) -> None:
    replica.now_ms += replica.eject().length_ms
    trial = replica.send()
    assert not replica.allows
    away_ms = replica.work(trial)
    assert away_ms is not None
    assert away_ms >= EJECTION_MS_MIN
    assert replica.allows
    assert replica.health.phase is HealthPhase.WELL


def test_a_trial_that_breaks_after_its_first_event_has_failed(replica: Replica) -> None:
    replica.now_ms += replica.eject().length_ms
    trial = replica.send()
    assert replica.health.began(trial, replica.now_ms) is not None
    assert replica.allows
    replica.work()
    ejection = replica.fail(trial)
    assert ejection is not None
    assert ejection.reason is Reason.TRIAL
    assert not replica.allows


def test_a_trial_that_says_nothing_of_the_replica_leaves_the_place_to_another(replica: Replica) -> None:
    replica.now_ms += replica.eject().length_ms
    replica.health.note(replica.send(), Outcome.NEUTRAL, replica.now_ms)
    assert replica.allows
    assert replica.work() is not None


def test_a_trial_that_never_ends_is_not_the_last(replica: Replica) -> None:
    length_ms = replica.eject().length_ms
    replica.now_ms += length_ms
    hanging = replica.send()
    replica.now_ms += length_ms - 1
    assert not replica.allows
    replica.now_ms += 1
    assert replica.allows
    second = replica.send()
    assert replica.fail(hanging) is None, "it decides no more"
    assert replica.work(second) is not None


def test_a_replica_that_was_well_for_long_begins_with_the_shortest_time(replica: Replica) -> None:
    for well_ms, most_ms in ((EJECTION_MS_MAX - 1, 4), (EJECTION_MS_MAX, 1)):
        for _ in range(2):
            ejection = replica.eject()
            replica.now_ms += ejection.length_ms
            replica.work()
        replica.now_ms += well_ms
        ejection = replica.eject()
        assert ejection.length_ms >= most_ms * EJECTION_MS_MIN
        assert ejection.length_ms < 2 * most_ms * EJECTION_MS_MIN
        replica.now_ms += ejection.length_ms
        replica.work()
        replica.now_ms += EJECTION_MS_MAX


def test_requests_from_before_an_ejection_change_nothing(replica: Replica) -> None:
    begun, waiting, failing = replica.send(), replica.send(), [replica.send() for _ in range(9)]
    replica.health.began(begun, replica.now_ms)
    ejection = replica.eject()
    assert all(replica.fail(ticket) is None for ticket in (begun, *failing))
    assert replica.work(waiting) is None
    assert not replica.allows
    assert replica.health.ejections == 1
    replica.now_ms += ejection.length_ms
    assert replica.fail() is not None


def test_a_request_that_works_while_all_are_used_ends_an_ejection(replica: Replica) -> None:
    replica.eject()
    assert replica.work() is not None
    assert replica.allows


def test_failures_while_all_are_used_do_not_lengthen_an_ejection(replica: Replica) -> None:
    length_ms = replica.eject().length_ms
    assert [replica.fail() for _ in range(20)] == [None] * 20
    replica.now_ms += length_ms
    assert replica.allows


# -- pools ----------------------------------------------------------------------------------------


def pool_of(size: int, ejected: Iterable[int] = ()) -> tuple[list[ReplicaHealth], int]:
    replicas = [Replica(seed) for seed in range(size)]
    for at in ejected:
        replicas[at].eject()
    return [one.health for one in replicas], replicas[0].now_ms


@pytest.mark.parametrize("size", range(1, 9))
def test_at_most_half_of_a_pool_is_away_and_one_may_always_be(size: int) -> None:
    for count in range(size + 1):
        healths, now_ms = pool_of(size, range(count))
        may, is_panic = usable(healths, [True] * size, now_ms)
        assert is_panic == (count > max(1, size // 2) or count == size)
        assert sum(may) == (size if is_panic else size - count)


def test_when_all_that_are_well_were_tried_an_ejected_one_is() -> None:
    healths, now_ms = pool_of(3, [0])
    assert usable(healths, [True, False, False], now_ms) == ([True, False, False], True)


def test_a_suspect_is_passed_over(replica: Replica) -> None:
    replica.health.is_suspect = True
    assert not replica.allows
    healths, now_ms = pool_of(3)
    healths[1].is_suspect = True
    assert usable(healths, [True] * 3, now_ms) == ([True, False, True], False)


def test_what_is_late_is_told_by_the_latest_first_events() -> None:
    times = FirstEvents()
    for ms in [1000] * SAMPLES_MAX + [1] * SAMPLES_MAX:
        times.add(ms)
    assert times.p95_ms == 1


# -- silence --------------------------------------------------------------------------------------

LATE_MS = 2_000


def wait(health: ReplicaHealth, now_ms: int, count: int = SILENT_MIN) -> list[Ticket]:
    """Streams that wait for their first event."""
    tickets = [health.admit(now_ms) for _ in range(count)]
    for ticket in tickets:
        health.awaits(ticket, now_ms)
    return tickets


def begin(health: ReplicaHealth, now_ms: int) -> None:
    ticket = health.admit(now_ms)
    health.awaits(ticket, now_ms)
    health.began(ticket, now_ms)


def test_a_replica_where_nothing_begins_while_others_begin_is_silent() -> None:
    healths, now_ms = pool_of(3)
    tickets = wait(healths[0], now_ms)
    begin(healths[1], now_ms + LATE_MS - 1)
    assert silent(healths, LATE_MS, now_ms + LATE_MS - 1) == []
    assert silent(healths, LATE_MS, now_ms + LATE_MS) == [healths[0]]
    assert healths[0].late(LATE_MS, now_ms + LATE_MS) == tickets
    healths[0].note(tickets[0], Outcome.NEUTRAL, now_ms + LATE_MS)
    assert silent(healths, LATE_MS, now_ms + LATE_MS) == [], "two may be unlucky"


def test_a_replica_where_some_begin_is_not_silent() -> None:
    healths, now_ms = pool_of(3)
    wait(healths[0], now_ms)
    for health in healths[:2]:
        begin(health, now_ms + 1)
    assert silent(healths, LATE_MS, now_ms + LATE_MS) == []


def test_where_all_are_slow_none_is_silent() -> None:
    healths, now_ms = pool_of(3)
    for health in healths:
        begin(health, now_ms)
        wait(health, now_ms)
    assert silent(healths, LATE_MS, now_ms + 50 * LATE_MS) == []


def test_one_that_begins_late_is_no_measure_for_others() -> None:
    healths, now_ms = pool_of(3)
    late = wait(healths[0], now_ms, 1)
    wait(healths[1], now_ms)
    healths[0].began(late[0], now_ms + LATE_MS - 1)
    assert silent(healths, LATE_MS, now_ms + LATE_MS) == []


def test_on_trial_one_that_waits_is_enough_and_those_from_before_do_not_count(replica: Replica) -> None:
    wait(replica.health, replica.now_ms)
    replica.now_ms += replica.eject().length_ms
    assert replica.allows
    assert not replica.health.is_silent(LATE_MS, replica.now_ms)
    wait(replica.health, replica.now_ms, 1)
    replica.now_ms += LATE_MS
    assert replica.health.is_silent(LATE_MS, replica.now_ms)


def test_how_late_is_late_is_learned() -> None:
    pool = FirstEvents()
    for _ in range(max(SAMPLES_MIN, SORT_EVERY) - 1):
        pool.add(100)
        assert pool.late_ms is None
    for _ in range(SORT_EVERY):
        pool.add(100)
    assert (pool.p95_ms, pool.late_ms) == (100, LATE_MS_MIN)
    for _ in range(1_000):
        pool.add(3_000)
    assert (pool.p95_ms, pool.late_ms) == (3_000, LATE_FACTOR * 3_000)
    assert len(pool._samples) < 1_000


# -- the replicas of a gateway --------------------------------------------------------------------


def replicas(*urls: str) -> tuple[Replicas, VirtualClock]:
    clock = VirtualClock()
    return Replicas([ModelConfig(name="m", replicas=urls)], clock), clock


def take(pool: Replicas, session: int = 0, tried: Collection[ReplicaId] = ()) -> Placement:
    session = session or key_of(b"%d" % pool.next_turn())
    place = pool.place("m", Affinity(0, session, 0, 0, 1), tried)
    assert place is not None
    return place


def eject(pool: Replicas, session: int = 1) -> Placement:
    for _ in range(ROW_MAX):
        pool.release(place := take(pool, session), Outcome.LOST)
    return place


async def test_an_ejected_replica_is_passed_over_until_its_trial(log: io.StringIO) -> None:
    pool, clock = replicas("http://a:1", "http://b:1")
    home = eject(pool).replica
    assert {take(pool).replica is home for _ in range(9)} == {False}
    clock.advance(EJECTION_MS_MIN * (1 + JITTER) / 1000)
    trial = take(pool, session=1)
    assert trial.replica is home, "it is the home of this conversation"
    assert take(pool, session=1).replica is not home
    pool.began(trial)
    assert take(pool, session=1).replica is home
    await until(lambda: log.getvalue().count('"replica.') >= 2)
    lines = [msgspec.json.decode(line) for line in log.getvalue().splitlines()]
    told: list[dict[str, Any]] = [line for line in lines if line["event"].startswith("replica.")]
    assert [line["event"] for line in told] == ["replica.ejected", "replica.returned"]
    assert {line["replica"] for line in told} == {home.id}
    assert (told[0]["reason"], told[0]["outcome"]) == ("row", "lost")


def test_one_that_was_long_away_starts_slowly() -> None:
    pool, clock = replicas("http://a:1", "http://b:1")
    for is_long in (False, True):
        home = eject(pool).replica
        since_ms = home.view.since_ms
        clock.advance(EJECTION_MS_MIN * (1 + JITTER) / 1000)
        if is_long:
            clock.advance(60.0)
        pool.began(take(pool, session=1))
        assert (home.view.since_ms > since_ms) == is_long


def test_while_more_than_half_are_ejected_all_are_used() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    first = eject(pool).replica
    for _ in range(ROW_MAX):
        pool.release(take(pool, tried={first.id}), Outcome.LOST)
    places = [take(pool, session=key_of(b"%d" % i)) for i in range(20)]
    assert {place.replica.id for place in places} == {"a:1", "b:1"}
    assert {place.route for place in places} == {RouteReason.PANIC}


async def test_a_silent_replica_is_ejected_and_those_that_wait_for_it_are_told() -> None:
    pool, clock = replicas("http://a:1", "http://b:1")
    given_up: list[Placement] = []

    def send(tried: ReplicaId) -> Placement:
        place = take(pool, tried={tried})
        pool.awaits(place, "m", lambda: given_up.append(place))
        return place

    home = take(pool).replica
    other = take(pool, tried={home.id}).replica
    for _ in range(max(SAMPLES_MIN, SORT_EVERY)):
        pool.began(send(home.id))
    waiting = [send(other.id) for _ in range(SILENT_MIN)]
    clock.advance(LATE_MS_MIN / 1000)
    pool.look(lambda _: False)
    assert not given_up, "nobody begins: all may be slow"
    pool.began(send(home.id))
    for _ in range(2):
        pool.look(lambda _: False)
    assert home.health.phase is HealthPhase.EJECTED
    assert set(map(id, given_up)) == set(map(id, waiting))
    assert home.health.ejections == 1


def test_a_replica_whose_connections_are_mute_gets_nothing_new() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    home = take(pool, session=1).replica
    pool.look(lambda replica: replica is home)
    assert take(pool, session=1).replica is not home
    pool.look(lambda _: False)
    assert take(pool, session=1).replica is home
