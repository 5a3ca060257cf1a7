"""Laws of routing, health and retries, over random faults in virtual time."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from random import Random
from typing import Final

import pytest

from gateway.config.whole import ModelConfig
from gateway.request.dispatch import REPEATS_MAX, Sending
from gateway.routing.health import EJECTION_MS_MAX, JITTER, HealthPhase, Outcome
from gateway.routing.maglev import key_of
from gateway.routing.policy import Affinity
from gateway.routing.replicas import Placement, Replica, Replicas
from gateway.routing.retries import FLOOR, PART_PERCENT, RetryBudget
from shared.wire.ids import ReplicaId
from tests.fakes import VirtualClock

SCHEDULES: Final = 1_000
REQUESTS: Final = 30
FAULTS: Final = ("well", "well", "well", "refuses", "breaks", "resets", "errors", "silent", "full")
TOKENS: Final = 10
AWAY_MS_MAX: Final = int(EJECTION_MS_MAX * (1 + JITTER)) + 1
GIVES_UP_MS: Final = 8_000
"""When a stream without a first event ends."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of ejections are not logged."""
    for name in ("_observe_ejection", "_observe_return"):
        monkeypatch.setattr(f"gateway.routing.replicas.{name}", lambda *_: None)


@dataclass
class Request:
    number: int
    sending: Sending
    charged: list[int] = field(default_factory=list)
    """What was charged, each time that it was."""
    ends: list[str] = field(default_factory=list)
    working: int = 0
    """The replicas that work on it."""
    sent: int = 0
    """The replicas that were sent it."""


class World:
    """A model's replicas, each with a fault that changes, and the dispatcher's rules on virtual time."""

    def __init__(self, seed: int, size: int, faults: tuple[str, ...] = FAULTS) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock()
        urls = [f"http://engine-{i}:1" for i in range(size)]
        self.pool = Replicas([ModelConfig(name="m", replicas=tuple(urls))], self.clock, seed)
        self.replicas: list[Replica] = list(self.pool._by_url.values())
        self.budget = RetryBudget()
        self.faults = {one.id: "well" for one in self.replicas}
        self.kinds = faults
        self.slow_ms = 1
        self.events: list[tuple[float, int, object]] = []
        self.order = itertools.count()
        self.requests: list[Request] = []

    def at(self, delay_ms: float, act: object) -> None:
        heapq.heappush(self.events, (self.clock.monotonic() + delay_ms / 1000, next(self.order), act))

    def run(self) -> None:
        while self.events:
            due_s, _, act = heapq.heappop(self.events)
            self.clock.advance(max(0.0, due_s - self.clock.monotonic()))
            assert callable(act)
            act()
            self.check()

    def check(self) -> None:
        """What holds at every moment."""
        assert self.budget.retrying <= max(FLOOR, self.most_active * PART_PERCENT // 100)
        now_ms = self.pool._now_ms()
        for replica in self.replicas:
            assert replica.health._until_ms - now_ms <= AWAY_MS_MAX
        if self.random.random() < 0.8:
            return
        affinity = Affinity(0, key_of(b"%d" % now_ms), 0, 0, 0)
        place = self.pool.place("m", affinity)
        assert place is not None, "somebody is always asked"
        self.pool.release(place, Outcome.NEUTRAL)

    most_active = 0

    # -- the life of a request --------------------------------------------------------------------

    def arrive(self) -> None:
        request = Request(len(self.requests), Sending(self.budget, "acme"))
        self.requests.append(request)
        self.budget.active += 1
        self.most_active = max(self.most_active, self.budget.active)
        self.send(request, "none")

    def send(self, request: Request, failure: str) -> None:
        affinity = Affinity(0, key_of(b"%d" % request.number), 0, 0, TOKENS)
        place = self.pool.place("m", affinity, request.sending.tried)
        if place is None:
            self.end(request, failure)
            return
        fault = self.faults[place.replica.id]
        if fault == "refuses":
            self.at(1, lambda: self.failed(request, place, Outcome.UNREACHABLE, is_sent=False))
            return
        request.working += 1
        request.sent += 1
        assert request.working == 1, "never two at a time"
        attempt = Attempt(self, request, place)
        self.pool.awaits(place, "m", attempt.late)
        delay_ms = self.random.randint(5, 50) * self.slow_ms
        match fault:
            case "breaks":
                self.at(delay_ms, lambda: attempt.fail(Outcome.LOST))
            case "errors":
                self.at(delay_ms, lambda: attempt.fail(Outcome.FAILED))
            case "full":
                self.at(delay_ms, lambda: attempt.fail(Outcome.NEUTRAL))
            case "silent":
                self.at(GIVES_UP_MS, attempt.timeout)
            case _:
                self.at(delay_ms, lambda: attempt.begin(breaks=fault == "resets"))

    def failed(self, request: Request, place: Placement, outcome: Outcome, *, is_sent: bool) -> None:
        request.sending.tried.add(place.replica.id)
        self.pool.release(place, outcome)
        if is_sent and not request.sending.repeat():
            self.end(request, "error")
        else:
            self.send(request, "error")

    def end(self, request: Request, how: str) -> None:
        request.ends.append(how)
        request.sending.give_back()
        request.sending.places = 0
        self.budget.active -= 1

    def look(self) -> None:
        self.pool.look(lambda replica: self.faults[replica.id] == "silent" and self.random.random() < 0.2)

    def change(self) -> None:
        self.faults[self.random.choice(self.replicas).id] = self.random.choice(self.kinds)


class Attempt:
    """One replica's work on a request."""

    def __init__(self, world: World, request: Request, place: Placement) -> None:
        self.world, self.request, self.place = world, request, place
        self.is_over = False

    def over(self) -> bool:
        """True if it was over already. It is now."""
        was, self.is_over = self.is_over, True
        self.request.working -= not was
        return was

    def late(self) -> None:
        if not self.is_over and self.request.sending.may_repeat():
            self.fail(Outcome.LOST)

    def fail(self, outcome: Outcome) -> None:
        if not self.over():
            self.world.failed(self.request, self.place, outcome, is_sent=True)

    def timeout(self) -> None:
        if not self.over():
            self.world.pool.release(self.place, Outcome.LATE)
            self.world.end(self.request, "timeout")

    def begin(self, *, breaks: bool) -> None:
        if self.is_over:
            return
        self.world.pool.began(self.place)
        self.request.sending.give_back()
        self.request.sending.places = 0
        self.world.at(self.world.random.randint(20, 2_000), lambda: self.finish(breaks=breaks))

    def finish(self, *, breaks: bool) -> None:
        if not self.over():
            self.world.pool.release(self.place, Outcome.LOST if breaks else Outcome.WORKED)
            self.request.charged.append(TOKENS)
            self.world.end(self.request, "cut" if breaks else "whole")


def schedule(seed: int) -> World:
    world = World(seed, size=Random(seed).randint(1, 6))
    at_ms = 0.0
    for _ in range(REQUESTS):
        at_ms += world.random.expovariate(1 / 150)
        world.at(at_ms, world.arrive)
    for _ in range(world.random.randint(0, 8)):
        world.at(world.random.uniform(0, at_ms), world.change)
    for i in range(int(at_ms / 500)):
        world.at(i * 500, world.look)
    world.run()
    return world


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_faults_lose_nothing_and_charge_nothing_twice(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        world = schedule(seed)
        for request in world.requests:
            assert len(request.ends) == 1, "answered, or told, once"
            assert len(request.charged) == (request.ends[0] in ("whole", "cut"))
            assert request.sent <= 1 + REPEATS_MAX
            assert request.working == 0
        assert (world.budget.active, world.budget.retrying) == (0, 0)
        for replica in world.replicas:
            assert (sum(replica.view.sent), replica.view.requests, replica.health._waiting) == (0, 0, {})


@pytest.mark.parametrize("seed", range(6))
def test_what_works_again_is_used_again(seed: int) -> None:
    """No ejection is for ever: after the faults, every replica is well once requests have come."""
    world = World(seed, size=3)
    for at_ms in range(0, 20_000, 50):
        world.at(at_ms, world.arrive)
        world.at(at_ms, world.change if at_ms % 1_000 == 0 else world.look)
    world.run()
    world.faults = dict.fromkeys(world.faults, "well")
    for at_ms in range(0, 2 * AWAY_MS_MAX, 250):
        world.at(at_ms, world.arrive)
        world.at(at_ms, world.look)
    world.run()
    assert {replica.health.phase for replica in world.replicas} == {HealthPhase.WELL}


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_pool_where_all_are_slow_ejects_none(size: int) -> None:
    world = World(size, size, faults=("well",))
    for at_ms in range(0, 60_000, 40):
        world.at(at_ms, world.arrive)
        if at_ms % 240 == 0:
            world.at(at_ms, world.look)

    def slow_down() -> None:
        world.slow_ms = 400  # up to twenty seconds, where it was fifty milliseconds

    world.at(10_000, slow_down)
    world.run()
    assert [replica.health.ejections for replica in world.replicas] == [0] * size
    assert {request.ends[0] for request in world.requests} == {"whole"}


def test_a_dead_replica_costs_requests_nothing_but_a_second_try() -> None:
    for seed in range(5):
        world = World(seed, 3, faults=("refuses",))
        world.faults[ReplicaId("engine-0:1")] = "refuses"
        for at_ms in range(0, 20_000, 25):
            world.at(at_ms, world.arrive)
        world.run()
        assert {request.ends[0] for request in world.requests} == {"whole"}


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_that_breaks_every_stream_is_sent_one_at_a_time_after_its_ejection(seed: int) -> None:
    """Others begin while it fails, and the first event of a trial proves nothing."""
    world = World(seed, 3, faults=("resets",))
    broken = world.replicas[0]
    world.faults[broken.id] = "resets"
    for at_ms in range(0, 60_000, 25):
        world.at(at_ms, world.arrive)
    begun_s = world.clock.monotonic()
    ejected_s = most = 0.0

    def look() -> None:
        nonlocal ejected_s, most
        now_s = world.clock.monotonic()
        if broken.health.ejections and not ejected_s:
            ejected_s = now_s
        if ejected_s and now_s > ejected_s + 2.1:  # all that were sent before have ended
            most = max(most, broken.view.requests)

    for at_ms in range(0, 60_000, 50):
        world.at(at_ms, look)
    world.run()
    assert begun_s < ejected_s < begun_s + 5
    assert broken.health.ejections >= 3, "it was tried again"
    assert most == 1
