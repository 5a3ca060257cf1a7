"""The replicas of every model: the load of each, and its health. The list is static and comes from the
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.config import HopProtocol, ModelConfig
from gateway.routing.ejections import observe_ejection, observe_return
from gateway.routing.health import Health, Outcome, Ticket, usable
from gateway.routing.policy import SLOW_START_MS, Affinity, Route, View, choose, loads
from gateway.routing.table import Table, key_of
from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import ReplicaId


@dataclass(slots=True)
class Replica:
    id: ReplicaId
    """A name for logs and metrics: host and port of its URL, with the path where it has one."""
    url: str
    protocol: HopProtocol
    view: View
    health: Health


@dataclass(slots=True)
class Placement:
    """A request's place at a replica. `release` ends it."""

    replica: Replica
    route: Route
    waiting: int
    """Its prompt tokens that are not known to be computed."""
    ticket: Ticket
    placed_ms: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """The replicas of one model, in the order of its configuration."""

    replicas: tuple[Replica, ...]
    table: Table
    owners: int | None


class Replicas:
    """The replicas by model, with one entry per URL also when several models are served there."""

    def __init__(self, models: Iterable[ModelConfig], clock: Clock = SYSTEM_CLOCK, seed: int = 0) -> None:
        """`seed` is of chance: gateways that eject one replica are not to return to it at one moment."""
        self._clock: Final = clock
        self._seed: Final = seed
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
            return None if only.id in tried else self._placed(only, Route.AFFINITY, 0)
        now_ms = self._now_ms()
        left = [replica.id not in tried for replica in pool.replicas]
        may, is_panic = usable([replica.health for replica in pool.replicas], left, now_ms)
        views = [replica.view for replica in pool.replicas]
        choice = choose(pool.table, loads(views, now_ms), affinity, pool.owners, may)
        if choice is None:
            return None
        route = Route.RETRY if tried else Route.PANIC if is_panic else choice.route
        return self._placed(pool.replicas[choice.replica], route, choice.computed_len)

    def awaits(self, placement: Placement, on_late: Callable[[], None]) -> None:
        """Note that a stream was sent. `on_late` is called when its replica is found silent before the
        first event."""
        placement.ticket.on_late = on_late
        placement.replica.health.awaits(placement.ticket, self._now_ms())

    def began(self, placement: Placement) -> None:
        """Note that the answer has begun: its prompt is computed, and the replica works."""
        _computed(placement)
        now_ms = self._now_ms()
        replica = placement.replica
        away_ms = replica.health.began(placement.ticket, now_ms)
        if away_ms is not None:
            observe_return(replica.id, away_ms)
            if away_ms >= SLOW_START_MS:
                replica.view.since_ms = now_ms

    def release(self, placement: Placement, outcome: Outcome) -> None:
        """Remove the request's load, and note how it went."""
        _computed(placement)
        replica = placement.replica
        replica.view.requests -= 1
        assert replica.view.sent >= 0
        assert replica.view.requests >= 0
        ejection = replica.health.note(placement.ticket, outcome, self._now_ms())
        if ejection is not None:
            observe_ejection(replica.id, ejection)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def _placed(self, replica: Replica, route: Route, waiting: int) -> Placement:
        replica.view.sent += waiting
        replica.view.requests += 1
        now_ms = self._now_ms()
        return Placement(replica, route, waiting, replica.health.admit(now_ms), now_ms)

    def _pool(self, model: ModelConfig) -> _Pool:
        replicas = tuple(self._entry(url, model.protocol) for url in model.replicas)
        return _Pool(replicas, Table([replica.id for replica in replicas]), model.prefix_owners)

    def _entry(self, url: str, protocol: HopProtocol) -> Replica:
        url = url.rstrip("/")
        parts = urlsplit(url)
        since_ms = int(self._clock.monotonic() * 1000) - SLOW_START_MS  # all replicas at a start are as old
        id_ = ReplicaId(parts.netloc + parts.path)
        new = Replica(id_, url, protocol, View(since_ms), Health(self._seed ^ key_of(id_.encode())))
        return self._by_url.setdefault(url, new)


def _computed(placement: Placement) -> None:
    placement.replica.view.sent -= placement.waiting
    placement.waiting = 0
