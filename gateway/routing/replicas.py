"""The replicas of every model: the load of each, and which have failed lately. The list is static and comes
from the configuration.

A replica that fails is passed over for a cooling time, which doubles with every failure in a row and ends
with the first answer: a dead one always has the least load, and would attract every request. While all
replicas of a model cool, all are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

from gateway.config import HopProtocol, ModelConfig
from gateway.routing.policy import SLOW_START_MS, Affinity, Route, View, choose, loads
from gateway.routing.table import Table
from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import ReplicaId

COOLING_S_MIN: Final = 1.0
COOLING_S_MAX: Final = 30.0


class Outcome(Enum):
    """The outcome of a dispatch, for its replica."""

    WORKED = "worked"
    FAILED = "failed"
    """The replica could not be connected to, was not ready, broke off, or produced nothing in time."""
    NEUTRAL = "neutral"
    """The request ended for reasons of its own: the caller's mistake, a full queue, a disconnect."""


@dataclass(slots=True)
class Replica:
    id: ReplicaId
    """A name for logs and metrics: host and port of its URL, with the path where it has one."""
    url: str
    protocol: HopProtocol
    view: View
    failures: int = 0
    """The number of failures in a row."""
    cools_until_s: float = 0.0
    """The end of the cooling time, in seconds on the monotonic clock."""


@dataclass(slots=True)
class Placement:
    """A request's place at a replica. `release` ends it."""

    replica: Replica
    route: Route
    waiting: int
    """Its prompt tokens that are not known to be computed."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """The replicas of one model, in the order of its configuration."""

    replicas: tuple[Replica, ...]
    table: Table
    owners: int | None


class Replicas:
    """The replicas by model, with one entry per URL also when several models are served there."""

    def __init__(self, models: Iterable[ModelConfig], clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock: Final = clock
        self._by_url: dict[str, Replica] = {}
        self._pools: Final = {model.name: self._pool(model) for model in models}
        self._turn = 0

    def next_turn(self) -> int:
        """The number of a request, by which requests without a prompt go round. All attempts of a request
        have the same one."""
        self._turn += 1
        return self._turn

    def has_choice(self, model: str) -> bool:
        """True if the model has more than one replica."""
        return len(self._pools[model].replicas) > 1

    def place(self, model: str, affinity: Affinity, tried: Collection[ReplicaId] = ()) -> Placement | None:
        """Choose a replica that was not tried yet, and add the request's load to it. None when all were
        tried."""
        pool = self._pools[model]
        if len(pool.replicas) == 1:
            only = pool.replicas[0]
            return None if only.id in tried else _placed(only, Route.AFFINITY, 0)
        now_s = self._clock.monotonic()
        usable = [replica.id not in tried and replica.cools_until_s <= now_s for replica in pool.replicas]
        if is_panic := not any(usable):
            usable = [replica.id not in tried for replica in pool.replicas]
        views = [replica.view for replica in pool.replicas]
        choice = choose(pool.table, loads(views, int(now_s * 1000)), affinity, pool.owners, usable)
        if choice is None:
            return None
        route = Route.RETRY if tried else Route.PANIC if is_panic else choice.route
        return _placed(pool.replicas[choice.replica], route, choice.computed_len)

    def began(self, placement: Placement) -> None:
        """Note that the answer has begun: its prompt is computed."""
        placement.replica.view.sent -= placement.waiting
        placement.waiting = 0

    def release(self, placement: Placement, outcome: Outcome) -> None:
        """Remove the request's load, and note how it went."""
        self.began(placement)
        replica = placement.replica
        replica.view.requests -= 1
        assert replica.view.sent >= 0
        assert replica.view.requests >= 0
        if outcome is Outcome.WORKED:
            replica.failures, replica.cools_until_s = 0, 0.0
        elif outcome is Outcome.FAILED:
            self._cool(replica)

    def _cool(self, replica: Replica) -> None:
        """Begin a cooling time, unless one runs: failures in it are of requests that were sent before it."""
        now_s = self._clock.monotonic()
        if now_s < replica.cools_until_s:
            return
        cooling_s = min(COOLING_S_MAX, COOLING_S_MIN * 2**replica.failures)
        replica.failures += 1
        replica.cools_until_s = now_s + cooling_s

    def _pool(self, model: ModelConfig) -> _Pool:
        replicas = tuple(self._entry(url, model.protocol) for url in model.replicas)
        return _Pool(replicas, Table([replica.id for replica in replicas]), model.prefix_owners)

    def _entry(self, url: str, protocol: HopProtocol) -> Replica:
        url = url.rstrip("/")
        parts = urlsplit(url)
        since_ms = int(self._clock.monotonic() * 1000) - SLOW_START_MS  # all replicas at a start are as old
        new = Replica(ReplicaId(parts.netloc + parts.path), url, protocol, View(since_ms))
        return self._by_url.setdefault(url, new)


def _placed(replica: Replica, route: Route, waiting: int) -> Placement:
    replica.view.sent += waiting
    replica.view.requests += 1
    return Placement(replica, route, waiting)
