"""The replicas of every model, which come and go: the load of each, its phase and its health.

A source lists a pool's members (`list_members`): the configuration's list at the start and whenever it is
read again, or discovery. Rules:

1. A change is taken over as a whole, and away from the requests' way: the table of the new members is built
   in steps between which requests go on with the old ones, and then the two are exchanged at once.
2. A member that drains takes no new requests, and leaves the table, so that its conversations move once. Its
   open requests go on. One that no source lists any more is gone with the last of them, or after `LINGER_S`.
3. An engine that said that it drains is asked again after `ENGINE_DRAIN_S`, unless it said so anew: its
   successor may have the same address. It is asked earlier where nobody else takes a request.
4. Members that join a pool which has some are new to its conversations (slow start, `policy`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from gateway.config.whole import HopProtocol, ModelConfig
from gateway.routing.health import (
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
from gateway.routing.lost_homes import REMEMBERED_MS, FormerHomes, LostHome, LostReason
from gateway.routing.maglev import Table, key_of
from gateway.routing.members import (
    HANDOVER_S,
    MOVES,
    DrainCause,
    Handover,
    Listed,
    MemberPhase,
    Origin,
    Standing,
    bounded,
    id_of,
    origin_of,
    phase_of,
)
from gateway.routing.policy import SLOW_START_MS, Affinity, RouteReason, View, choose, home_of, loads
from shared.process import logs, metrics
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import ApiError
from shared.wire.ids import ReplicaId
from shared.wire.load_report import LoadReport

SWEEP_S: Final = 1.0
"""The time between two looks for members whose time is over, in seconds."""
ENGINE_DRAIN_S: Final = 5.0
"""The time for which the word of an engine that it drains counts, in seconds. It repeats it while it lives;
after that, another may be there."""
LINGER_S: Final = 3600.0
"""The time after which a member that is not listed any more is forgotten, in seconds. Its requests run on."""
REFUSED_S: Final = 60.0
"""The time between two log lines about what a replica refuses, in seconds."""
LEAVING_MAX: Final = 1024
"""The number of members that are not listed any more and have open requests; the oldest are forgotten."""

EJECTIONS: Final = metrics.Counter(
    "penstock_gateway_ejections", "Replicas that were left alone for a time, by the reason.", ("reason",)
)
RETURNS: Final = metrics.Counter("penstock_gateway_ejections_ended", "Ejected replicas that work again.")

log = logs.get(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    id: ReplicaId
    """A name for logs and metrics: host and port of its URL, with the path where it has one."""
    url: str
    protocol: HopProtocol
    view: View
    health: ReplicaHealth
    phase: MemberPhase = MemberPhase.JOINING
    standings: dict[str, Standing] = field(default_factory=dict)
    """Its source's word about it, by the model of each pool that lists it."""
    drained_by: set[DrainCause] = field(default_factory=set)
    engine_drains_until_s: float = 0.0
    """The end of `ENGINE_DRAIN_S`, on the monotonic clock."""
    left_at_s: float | None = None
    """When the last source ceased to list it, on the monotonic clock. None while one lists it."""
    routes: Counter[RouteReason] = field(default_factory=Counter)
    """The requests that it was chosen for, by the reason."""
    refused_s: float = -math.inf
    """When operators were told last that it refuses requests, on the monotonic clock."""
    started_s: int = 0
    """When its process started, by its own clock, as it reports. 0 as long as it has not said."""
    restarted_ms: int | None = None
    """When another process was found there, whose cache was empty. None where none was."""

    def to(self, phase: MemberPhase) -> None:
        """Move to a phase, if it is another one."""
        if phase is not self.phase:
            assert phase in MOVES[self.phase], f"{self.id}: {self.phase} -> {phase}"
            self.phase = phase


class Placement(Struct, eq=False):
    """A request's place at a replica. `release` ends it."""

    replica: Replica
    route: RouteReason
    service_class: int
    waiting: int
    """Its prompt tokens that no report has, and that are not known to be computed."""
    ticket: Ticket
    sent_ms: int = 0
    """When it was sent."""
    first_events: FirstEvents | None = None
    """Where the time to its first event counts. None where it is no stream, and once it has come."""
    history_len: int = 0
    """The prompt tokens that its conversation's home has computed before; 0 where it has no history."""
    lost: LostHome | None = None
    """That home, where it is another replica."""


@dataclass(slots=True)
class _Pool:
    """The replicas of one model."""

    model: str
    protocol: HopProtocol
    owners: int | None
    wanted: dict[str, Standing]
    """The members that its source listed last, by URL."""
    listed: dict[str, Standing] = field(default_factory=dict)
    """Those of them that were taken over."""
    replicas: tuple[Replica, ...] = ()
    """Those that were ready when the table was built, in its order."""
    table: Table = field(default_factory=lambda: Table(()))
    changes: int = 0
    """The number of changes for which the table is to be built anew."""
    built: int = 0
    """The number of those for which it was."""
    former: FormerHomes | None = None
    """Where conversations were at home before the last change. None where none was so far."""
    lost_until_ms: int = 0
    """Until when conversations may miss what their homes had."""

    @property
    def is_stale(self) -> bool:
        return self.built != self.changes


class Replicas:
    """The replicas by model, with one entry per URL also when several models are served there."""

    def __init__(self, models: Iterable[ModelConfig], clock: Clock = SYSTEM_CLOCK, seed: int = 0) -> None:
        """`seed` is of chance: gateways that eject one replica are not to return to it at one moment."""
        self._clock: Final = clock
        self._seed: Final = seed
        self.on_gone: Callable[[Replica], None] = lambda _: None
        """Called with each member that is gone."""
        self._by_url: dict[str, Replica] = {}
        self._first_events: Final[dict[str, FirstEvents]] = {}
        self._by_origin: dict[Origin, list[Replica]] = {}
        self._pools: Final[dict[str, _Pool]] = {}
        self._stale: Final = asyncio.Event()
        self._turn = 0
        self._handover = Handover()
        self._starts = True
        for model in models:
            wanted, _ = bounded(Listed(url) for url in model.replicas)
            pool = _Pool(model.name, model.protocol, model.prefix_owners, wanted)
            self._pools[model.name] = pool
            ready = self._ready_urls(pool)
            self._exchange(pool, wanted, ready, Table([*map(id_of, ready)]))
        self._starts = False

    # -- requests ---------------------------------------------------------------------------------

    def next_turn(self) -> int:
        """The number of a request, by which requests without a prompt go round. All attempts of a request
        have the same one."""
        self._turn += 1
        return self._turn

    def has_choice(self, model: str) -> bool:
        """True if the model has more than one replica, or lately had another, or another process there."""
        pool = self._pools[model]
        return len(pool.replicas) > 1 or (pool.lost_until_ms > 0 and pool.lost_until_ms > self._now_ms())

    def place(self, model: str, affinity: Affinity, tried: Collection[ReplicaId] = ()) -> Placement | None:
        """Choose a replica that is ready and was not tried yet, and add the request's load to it. Where there
        is none, choose one that has said that it drains (rule 3: where nobody else takes it). None when there
        is none either."""
        placed = self._place(model, affinity, tried)
        if placed is not None:
            return placed
        replica = self._said_to_drain(model, tried)
        if replica is None:
            return None
        return self._placed(replica, RouteReason.RETRY if tried else RouteReason.PANIC, affinity, 0)

    def _said_to_drain(self, model: str, tried: Collection[ReplicaId]) -> Replica | None:
        """The replica that alone keeps from new requests, and said so first: it may have been restarted."""
        said = [
            one
            for one in self.members(model)
            if one.drained_by == {DrainCause.ENGINE}
            and one.id not in tried
            and phase_of(one.standings.values(), (), 0) is MemberPhase.READY
        ]
        return min(said, key=lambda one: one.engine_drains_until_s, default=None)

    def _place(self, model: str, affinity: Affinity, tried: Collection[ReplicaId]) -> Placement | None:
        """The choice among those that are ready."""
        pool = self._pools[model]
        if len(pool.replicas) == 1:
            only = pool.replicas[0]
            if not _is_ready(only) or only.id in tried:
                return None
            placed = self._placed(only, RouteReason.AFFINITY, affinity, 0)
            if placed.history_len:
                placed.lost = self._lost_home(pool, affinity, placed, [True])
            return placed
        left = [_is_ready(replica) and replica.id not in tried for replica in pool.replicas]
        now_ms = self._now_ms()
        may, is_panic = usable([replica.health for replica in pool.replicas], left, now_ms)
        views = [replica.view for replica in pool.replicas]
        known = loads(views, now_ms, affinity.service_class)
        choice = choose(pool.table, known, affinity, pool.owners, may)
        if choice is None:
            return None
        route = RouteReason.RETRY if tried else RouteReason.PANIC if is_panic else choice.route
        placed = self._placed(pool.replicas[choice.replica], route, affinity, choice.computed_len)
        if placed.history_len:
            placed.lost = self._lost_home(pool, affinity, placed, may)
        return placed

    def _lost_home(
        self, pool: _Pool, affinity: Affinity, placed: Placement, may: Sequence[bool]
    ) -> LostHome | None:
        """The home that has what was computed of the conversation, where that is another replica than the one
        that was chosen."""
        former, own = pool.former, placed.replica.id
        before = own if former is None or pool.lost_until_ms <= self._now_ms() else former.of(affinity)
        if before != own and not ((there := self.find(before)) and _is_ready(there)):
            return LostHome(before, LostReason.DRAINS)
        if placed.route is not RouteReason.AFFINITY or not all(may):
            home = home_of(pool.table, affinity, pool.owners)
            if pool.replicas[home] is not placed.replica:
                reason = LostReason.BUSY if may[home] else LostReason.FAILED
                return LostHome(pool.replicas[home].id, reason)
        if former is None or before == own:
            return None
        return LostHome(before, LostReason.MOVED, former.until_ms)

    def lost_home(self, placement: Placement) -> LostHome | None:
        """The home of a request's conversation, where it was lost: another replica, or another process."""
        lost, restarted_ms = placement.lost, placement.replica.restarted_ms
        if restarted_ms is None or self._now_ms() - restarted_ms > REMEMBERED_MS:
            return lost
        moved_later = lost is not None and (lost.reason is not LostReason.MOVED or lost.at_ms > restarted_ms)
        return lost if moved_later else LostHome(placement.replica.id, LostReason.RESTARTED)

    def counted(self, placement: Placement) -> None:
        """Note that the request's prompt need not be counted here: its replica has reported it, or it is
        computed."""
        waiting, placement.waiting = placement.waiting, 0
        if waiting:
            placement.replica.view.count(placement.service_class, waiting)

    def awaits(self, placement: Placement, model: str, on_late: Callable[[], None]) -> None:
        """Note that a stream was sent. `on_late` is called when its replica is found silent before the
        first event."""
        now_ms = self._now_ms()
        placement.first_events = self.first_events(model)
        placement.sent_ms, placement.ticket.on_late = now_ms, on_late
        placement.replica.health.awaits(placement.ticket, now_ms)

    def first_events(self, model: str) -> FirstEvents:
        """How long a model's streams take to their first events."""
        return self._first_events.setdefault(model, FirstEvents())

    def began(self, placement: Placement, *, is_opening: bool = False) -> None:
        """Note that the answer has begun: the replica works, and its prompt is computed. With `is_opening` it
        is not yet: `told` follows."""
        self.counted(placement)
        now_ms = self._now_ms()
        if placement.first_events is not None and not is_opening:
            placement.first_events.add(now_ms - placement.sent_ms)
            placement.first_events = None
        if (away_ms := placement.replica.health.began(placement.ticket, now_ms)) is not None:
            _observe_return(placement.replica.id, away_ms)
            placement.replica.view.returned(away_ms, now_ms)

    def told(self, placement: Placement) -> None:
        """Note the first event that tells of an answer which had begun before."""
        if placement.first_events is not None:
            placement.first_events.add(self._now_ms() - placement.sent_ms)
            placement.first_events = None

    def look(self, is_mute: Callable[[Replica], bool]) -> None:
        """Find the replicas that are silent, and end the attempts that wait for them. `is_mute` says whether
        a replica's connections have given no sign of life though they were asked for one."""
        now_ms = self._now_ms()
        for model, pool in self._pools.items():
            for replica in pool.replicas:
                replica.health.is_suspect = is_mute(replica)
            late_ms = self.first_events(model).late_ms
            if late_ms is None:
                continue
            found = silent([replica.health for replica in pool.replicas], late_ms, now_ms)
            for replica in pool.replicas:
                health = replica.health
                if health.phase is not HealthPhase.EJECTED and any(health is one for one in found):
                    _observe_ejection(replica.id, health.eject(Reason.SILENT, Outcome.LATE, now_ms))
                if health.is_silenced:
                    for ticket in health.late(late_ms, now_ms):  # also those that found no room before
                        if ticket.on_late is not None:
                            ticket.on_late()

    def release(self, placement: Placement, outcome: Outcome) -> None:
        """Remove the request's load, and note how it went."""
        self.counted(placement)
        replica = placement.replica
        replica.view.leave()
        assert min(replica.view.sent) >= 0
        assert replica.view.requests >= 0
        now_ms = self._now_ms()
        away_ms = replica.health.concluded(placement.ticket, now_ms) if outcome is Outcome.WORKED else None
        if away_ms is not None:
            _observe_return(replica.id, away_ms)
            replica.view.returned(away_ms, now_ms)
        if (ejection := replica.health.note(placement.ticket, outcome, now_ms)) is not None:
            _observe_ejection(replica.id, ejection)
        if replica.left_at_s is not None:
            self._settle(replica)

    def refused(self, replica: Replica, error: ApiError) -> None:
        """Tell operators what a replica, or what is before it, refuses through no fault of a caller's."""
        now_s = self._clock.monotonic()
        if now_s - replica.refused_s >= REFUSED_S:
            replica.refused_s = now_s
            log.warning("replica.refuses", replica=replica.id, error=error.code, detail=error.detail)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def _placed(self, replica: Replica, route: RouteReason, affinity: Affinity, waiting: int) -> Placement:
        replica.view.enter(affinity.service_class, waiting)
        replica.routes[route] += 1
        ticket = replica.health.admit(self._now_ms(), affinity.tenant)
        history_len = affinity.history_len if affinity.history_len > affinity.prefix_len else 0
        return Placement(replica, route, affinity.service_class, waiting, ticket, history_len=history_len)

    # -- reports ----------------------------------------------------------------------------------

    def observe(self, replica: Replica, report: LoadReport) -> None:
        """Take over what a replica reports of its load. One that drains gets nothing new, unless none is left
        beside it: what it says may be out of date, and it refuses by itself."""
        now_ms = self._now_ms()
        if report.started_s > replica.started_s:
            self._started(replica, report.started_s, now_ms)
        replica.view.report(report, now_ms)
        replica.health.report(report.computed, sum(report.waiting), now_ms)
        if not report.draining:
            self.undrain(replica, DrainCause.ENGINE)
        elif DrainCause.ENGINE in replica.drained_by or self._is_spare(replica):
            self.drain(replica, DrainCause.ENGINE)

    def _started(self, replica: Replica, started_s: int, now_ms: int) -> None:
        """Note which process answers at a replica, which is another one than before where one is known."""
        if replica.started_s:
            replica.restarted_ms = now_ms
            for model in replica.standings:
                self._pools[model].lost_until_ms = now_ms + REMEMBERED_MS
        replica.started_s = started_s

    def observe_origin(self, scheme: str, host: str, port: int, report: LoadReport) -> None:
        """Take over what was reported on a connection to this origin."""
        for replica in self._by_origin.get((scheme, host, port), ()):
            self.observe(replica, report)

    def _is_spare(self, replica: Replica) -> bool:
        """True if each of its models has another member that is ready."""
        pools = (self._pools[model].replicas for model in replica.standings)
        return all(any(_is_ready(one) and one is not replica for one in members) for members in pools)

    # -- members ----------------------------------------------------------------------------------

    def members(self, model: str | None = None) -> Iterator[Replica]:
        """All members, or those that a model's source lists."""
        if model is None:
            yield from self._by_url.values()
        elif (pool := self._pools.get(model)) is not None:
            yield from (self._by_url[url] for url in pool.listed if url in self._by_url)

    def find(self, id_: str) -> Replica | None:
        """The member of this id."""
        return next((replica for replica in self._by_url.values() if replica.id == id_), None)

    @property
    def are_all_away(self) -> bool:
        """True if no replica of any model may be sent a request: none is ready, or those that are failed."""
        now_ms = self._now_ms()
        return not any(_is_ready(replica) and replica.health.allows(now_ms) for replica in self.members())

    def urls(self, model: str) -> Sequence[str]:
        """The URLs of a model's members that are not leaving, those that are ready first."""
        found = [one for one in self.members(model) if one.phase in (MemberPhase.READY, MemberPhase.JOINING)]
        return [one.url for one in sorted(found, key=lambda one: one.phase is not MemberPhase.READY)]

    def counts(self) -> dict[tuple[object, ...], float]:
        """The number of members by model and phase."""
        counts: Counter[tuple[object, ...]] = Counter()
        for replica in self._by_url.values():
            counts.update((model, replica.phase.value) for model in replica.standings or ("none",))
        return dict(counts)

    def take(self, models: Iterable[ModelConfig]) -> None:
        """Note the replicas that the configuration has now."""
        for model in models:
            if model.replicas:
                self.list_members(model.name, (Listed(url) for url in model.replicas))

    def list_members(self, model: str, listed: Iterable[Listed]) -> None:
        """Note what a model's source lists. `keep` takes it over."""
        pool = self._pools[model]
        wanted, left_out = bounded(listed)
        if left_out:
            log.warning("members.too_many", model=model, left_out=left_out)
        if wanted != pool.wanted:
            pool.wanted = wanted
            self._invalidate(pool)

    def drain(self, replica: Replica, cause: DrainCause) -> None:
        """Send no new requests to a member. Its open ones finish."""
        if cause is DrainCause.ENGINE:
            replica.engine_drains_until_s = self._clock.monotonic() + ENGINE_DRAIN_S
        if cause not in replica.drained_by:
            replica.drained_by.add(cause)
            self._settle(replica)

    def undrain(self, replica: Replica, cause: DrainCause) -> None:
        """Take back what `drain` did for this cause."""
        if cause in replica.drained_by:
            replica.drained_by.remove(cause)
            self._settle(replica)

    @property
    def drained(self) -> list[str]:
        """The ids of the members that operators drain."""
        return [one.id for one in self._by_url.values() if DrainCause.OPERATOR in one.drained_by]

    def take_drained(self, ids: Collection[str]) -> None:
        """Drain these and no others for operators. Those that are not listed yet are drained once they
        are, within `HANDOVER_S`."""
        self._handover = Handover(frozenset(ids), self._clock.monotonic() + HANDOVER_S)
        for replica in self._by_url.values():
            change = self.drain if replica.id in self._handover.ids else self.undrain
            change(replica, DrainCause.OPERATOR)

    async def keep(self) -> None:
        """Take over what sources list, and build the tables that are stale, until cancelled."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            for pool in self._pools.values():
                while pool.is_stale:
                    await self._rebuild(pool)

    async def sweep(self) -> None:
        """Look after members whose time is over, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_S)
            now_s = self._clock.monotonic()
            for replica in list(self._by_url.values()):
                if DrainCause.ENGINE in replica.drained_by and now_s >= replica.engine_drains_until_s:
                    self.undrain(replica, DrainCause.ENGINE)
                if replica.left_at_s is not None and now_s - replica.left_at_s >= LINGER_S:
                    self._forget(replica)

    def _invalidate(self, pool: _Pool) -> None:
        pool.changes += 1
        self._stale.set()

    async def _rebuild(self, pool: _Pool) -> None:
        """Take changes over as a whole: the new table is built in steps, then exchanged at once (rule 1)."""
        changes, wanted, ready = pool.changes, pool.wanted, self._ready_urls(pool)
        table = Table([*map(id_of, ready)], is_filled=False)
        for _ in table.fill():
            await asyncio.sleep(0)
        pool.built = changes
        self._exchange(pool, wanted, ready, table)

    def _ready_urls(self, pool: _Pool) -> list[str]:
        """The URLs of the members that are ready once `wanted` is taken over."""
        known = ((url, standing, self._by_url.get(url)) for url, standing in pool.wanted.items())
        return [
            url
            for url, standing, replica in known
            if standing is Standing.READY
            and (
                not self._is_to_drain(id_of(url))
                if replica is None
                else not replica.drained_by and replica.protocol == pool.protocol
            )
        ]

    def _is_to_drain(self, id_: ReplicaId) -> bool:
        return id_ in self._handover.ids and self._clock.monotonic() < self._handover.until_s

    def _exchange(self, pool: _Pool, listed: dict[str, Standing], ready: Sequence[str], table: Table) -> None:
        """Exchange a pool's members and its table at once."""
        before, now_ms = pool.listed, self._now_ms()
        had_some = any(map(_is_ready, pool.replicas))
        members = {url: self._entry(url, pool) for url in listed}
        if pool.replicas:
            pool.former = FormerHomes(pool.table, tuple(one.id for one in pool.replicas), pool.owners, now_ms)
            pool.lost_until_ms = now_ms + REMEMBERED_MS
        pool.listed, pool.replicas, pool.table = listed, tuple(members[url] for url in ready), table
        for url, replica in members.items():
            if replica.protocol != pool.protocol:
                log.error("member.two_protocols", model=pool.model, replica=replica.id)
                continue
            was_ready = _is_ready(replica)
            replica.standings[pool.model] = listed[url]
            self._settle(replica)
            if _is_ready(replica) and not was_ready:
                replica.view.since_ms = now_ms if had_some else now_ms - SLOW_START_MS
        for url in before.keys() - listed.keys():
            if (left := self._by_url.get(url)) is not None and pool.model in left.standings:
                del left.standings[pool.model]
                self._settle(left)
        leaving = [replica for replica in self._by_url.values() if replica.left_at_s is not None]
        for replica in leaving[: max(0, len(leaving) - LEAVING_MAX)]:
            self._forget(replica)

    def _settle(self, replica: Replica) -> None:
        """Move a member to the phase that follows from what is known of it."""
        if replica.phase is MemberPhase.GONE:
            return
        was_ready = _is_ready(replica)
        phase = phase_of(replica.standings.values(), replica.drained_by, replica.view.requests)
        if replica.standings:
            replica.left_at_s = None
        elif replica.left_at_s is None:
            replica.left_at_s = self._clock.monotonic()
        if phase is MemberPhase.GONE:
            self._forget(replica)
            return
        self._move(replica, phase)
        for model in replica.standings:
            pool = self._pools[model]
            if _is_ready(replica) is not was_ready and (replica in pool.replicas) is was_ready:
                self._invalidate(pool)

    def _move(self, replica: Replica, phase: MemberPhase) -> None:
        if phase is not replica.phase and not self._starts:
            log.info("member.moved", replica=replica.id, before=replica.phase.value, phase=phase.value)
        replica.to(phase)

    def _forget(self, replica: Replica) -> None:
        self._move(replica, MemberPhase.GONE)
        if self._by_url.get(replica.url) is replica:
            del self._by_url[replica.url]
            self._by_origin[origin_of(replica.url)].remove(replica)
        self.on_gone(replica)

    def _entry(self, url: str, pool: _Pool) -> Replica:
        """The member at a URL, a new one if need be."""
        if (known := self._by_url.get(url)) is not None:
            return known
        id_ = id_of(url)
        health = ReplicaHealth(self._seed ^ key_of(id_.encode()))
        new = self._by_url[url] = Replica(id_, url, pool.protocol, View(self._now_ms()), health)
        if self._is_to_drain(id_):
            new.drained_by.add(DrainCause.OPERATOR)
        self._by_origin.setdefault(origin_of(url), []).append(new)
        return new


def _is_ready(replica: Replica) -> bool:
    return replica.phase is MemberPhase.READY


# -- what operators see ---------------------------------------------------------------------------


def _observe_ejection(replica: ReplicaId, ejection: Ejection) -> None:
    EJECTIONS.inc(ejection.reason.value)
    log.warning(
        "replica.ejected",
        replica=replica,
        reason=ejection.reason.value,
        outcome=ejection.outcome.value,
        for_ms=ejection.length_ms,
    )


def _observe_return(replica: ReplicaId, away_ms: int) -> None:
    RETURNS.inc()
    log.info("replica.returned", replica=replica, away_ms=away_ms)
