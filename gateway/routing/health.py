"""The health of a replica, judged by what becomes of its requests. Pure: times in, decisions out.

Requests tell more than probes do. An engine whose core hangs answers every probe, and sends the headers of
every stream, so that one which looks at headers sends it ever more. Here a stream has worked when its first
data event has come.

Rules:

1. A request counts once. It worked when its first event has come (a stream) or its answer has begun (any
   other). When the stream breaks later, that success is taken back and a failure counts in its place: an
   engine that resets every stream after a few events would be half good otherwise. The caller's mistakes, a
   full queue and a client that leaves say nothing of the replica.
2. A replica is ejected after `ROW_MAX` failures in a row, or when more than half of at least `RATE_MIN`
   requests failed in the last `WINDOW_S` seconds. Only an answer that came to its end interrupts a row: where
   streams break, others always begin in between. It is left alone for `EJECTION_MS_MIN`, and for twice as
   long after each further ejection, up to `EJECTION_MS_MAX`, plus up to a quarter by chance: many gateways
   that ejected it at one moment do not return at one moment. A replica that was well for
   `EJECTION_MS_MAX` begins with the shortest time again.
3. After that time it is on trial: one request decides. One that works ends the ejection, one that fails
   begins the next, also when it breaks after its first event. One that tells nothing in as long as the
   ejection lasted lets another try. Where the failure was a stream that broke after its first event, another
   first event proves nothing: then the request has to come to its end, or to last as long as the ejection
   did, before more are sent.
4. Requests that were sent before an ejection change nothing in it, so that the failures of one moment count
   once, and what still arrives does not end it.
5. Of a pool at most half is away at a time, though one may always be. Beyond that all are used (`usable`):
   what fails everywhere is no fault of a replica, and the rest could not carry the load.
6. A replica is *silent* when several of its streams wait for their first event for far longer than the pool
   takes, while none there begins and others elsewhere do in good time (`silent`). Where all are slow, none
   is silent. Nor is one whose reports say that prompt tokens wait and that it has computed some lately: a
   giant prompt takes its time. One whose core hangs reports a queue too, but computes nothing of it.
7. Requests that the replica answers with an error of its own (5xx) may be at fault themselves: not every
   engine calls a mistake of its caller's by its name. So where these are all failures of the last `WINDOW_S`,
   and of one tenant, while others were sent here as well, they neither eject it nor decide a trial. Where the
   replica, or what is before it, refuses a request as no engine should (`Outcome.REFUSED`: a path that is not
   there, a method), the same holds whether others were sent here or not: a server may lack one path of many.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import islice
from random import Random
from typing import Final

from msgspec import Struct

ROW_MAX: Final = 3
RATE_MIN: Final = 10
WINDOW_S: Final = 10
EJECTION_MS_MIN: Final = 5_000
EJECTION_MS_MAX: Final = 60_000
JITTER: Final = 0.25
"""The part of an ejection's time that chance adds at most."""
SILENT_MIN: Final = 3
"""The streams that wait at a silent replica, at least; on trial one is enough."""
LATE_MS_MIN: Final = 2_000
LATE_FACTOR: Final = 4
"""A first event is late after so many times the pool's 95th percentile."""
SAMPLES_MAX: Final = 256
SAMPLES_MIN: Final = 20
SORT_EVERY: Final = 16
_PERCENTILE: Final = 0.95


class Outcome(StrEnum):
    """The outcome of a request for the replica that it was sent to."""

    WORKED = "worked"
    NEUTRAL = "neutral"
    """It ended for reasons of its own: the caller's mistake, a full queue, a disconnect."""
    UNREACHABLE = "unreachable"
    """No connection, or the replica said that it is not ready."""
    LOST = "lost"
    """The connection or the stream broke."""
    FAILED = "failed"
    """The replica answered with an error of its own (5xx), or with what is no answer."""
    REFUSED = "refused"
    """The replica, or what is before it, did not take what the gateway sent, through no fault of the
    caller's."""
    LATE = "late"
    """The first event did not come in time."""
    STALLED = "stalled"
    """The next event did not come in time."""

    @property
    def is_failure(self) -> bool:
        return self is not Outcome.WORKED and self is not Outcome.NEUTRAL


class Reason(StrEnum):
    """Why a replica was ejected."""

    ROW = "row"
    RATE = "rate"
    SILENT = "silent"
    TRIAL = "trial"
    """The request that was to decide has failed."""


class HealthPhase(Enum):
    WELL = "well"
    EJECTED = "ejected"
    TRIAL = "trial"


MOVES: Final[dict[HealthPhase, frozenset[HealthPhase]]] = {
    HealthPhase.WELL: frozenset({HealthPhase.EJECTED}),
    HealthPhase.EJECTED: frozenset({HealthPhase.TRIAL, HealthPhase.WELL}),
    HealthPhase.TRIAL: frozenset({HealthPhase.EJECTED, HealthPhase.WELL}),
}
"""From an ejection straight back to health leads a request that worked while all replicas were used."""


class Ejection(Struct, frozen=True):
    reason: Reason
    outcome: Outcome
    """The last failure."""
    length_ms: int


class _Verdict(Struct, eq=False):
    """An outcome that counts."""

    second: int
    is_failure: bool


class Ticket(Struct, eq=False):
    """A request's part in the record of its replica."""

    epoch: int
    """The ejections before it was placed."""
    tenant: str = ""
    """The tenant that sent the request."""
    success: _Verdict | None = None
    """The note that is taken back if it fails after all."""
    on_late: Callable[[], None] | None = None
    """Called when its replica is found silent while it waits."""


@dataclass(slots=True)
class _Latest:
    """The times at which something happened last: for one tenant, and for any other."""

    tenant: str = ""
    at_ms: int = -sys.maxsize
    other_ms: int = -sys.maxsize

    def note(self, tenant: str, now_ms: int) -> None:
        if tenant != self.tenant:
            self.tenant, self.other_ms = tenant, self.at_ms
        self.at_ms = now_ms

    def of_others(self, tenant: str) -> int:
        """The time at which it happened last for another tenant than this one."""
        return self.other_ms if tenant == self.tenant else self.at_ms


@dataclass(slots=True)
class ReplicaHealth:
    """The record of one replica. All times are of one monotonic clock."""

    seed: int = 0
    """The seed of its chance: another for each replica and each gateway."""
    phase: HealthPhase = HealthPhase.WELL
    is_suspect: bool = False
    """True while its connections are silent though they were asked for a sign of life."""
    is_silenced: bool = False
    """True after it was ejected as silent, until a first event comes."""
    ejections: int = 0
    """How often it was ejected."""
    began_ms: int | None = None
    """When a stream's first event came last. None before the first."""
    took_ms: int = 0
    """The time that it took."""
    computed: int = 0
    """The prompt tokens that it has computed, by its last report."""
    computed_ms: int | None = None
    """When a report last said that it had computed some, of a queue that is not empty yet."""
    _level: int = 0
    """The ejections since it was last well for long."""
    _until_ms: int = 0
    _length_ms: int = 0
    _left_ms: int = 0
    """When it left health last."""
    _well_ms: int = 0
    """When it came back last."""
    _trial: Ticket | None = None
    _trial_ms: int = 0
    _decided: Ticket | None = None
    """The request that ended the last ejection."""
    _breaks: bool = False
    """True after it was ejected for a stream that broke after its first event."""
    _row: int = 0
    """The failures since an answer last came to its end."""
    _window: list[tuple[int, int, int]] = field(default_factory=lambda: [(-1, 0, 0)] * WINDOW_S)
    """The successes and failures of each of the last seconds, each at the second modulo the length."""
    _waiting: dict[Ticket, int] = field(default_factory=dict)
    """The streams that wait for their first event, and since when, the oldest first."""
    _sent: _Latest = field(default_factory=_Latest)
    """The requests that were placed here."""
    _refused: _Latest = field(default_factory=_Latest)
    """The failures that were errors of its own."""
    _broke_ms: int = -sys.maxsize
    """The time of the last failure of another kind."""
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    # -- for the choice of a replica --------------------------------------------------------------

    def allows(self, now_ms: int) -> bool:
        """True if the replica may be sent a request."""
        if self.is_suspect:
            return False
        if self.phase is HealthPhase.EJECTED and now_ms >= self._until_ms:
            self._to(HealthPhase.TRIAL)
            self._trial = None
        match self.phase:
            case HealthPhase.WELL:
                return True
            case HealthPhase.EJECTED:
                return False
            case HealthPhase.TRIAL:
                return self._trial is None or now_ms - self._trial_ms >= self._length_ms

    # -- for requests -----------------------------------------------------------------------------

    def admit(self, now_ms: int, tenant: str = "") -> Ticket:
        """Note that a request of this tenant's is placed here."""
        ticket = Ticket(self.ejections, tenant)
        self._sent.note(tenant, now_ms)
        if self.phase is not HealthPhase.WELL and self.allows(now_ms):
            if self._trial is not None and self._trial.success is not None:
                self._breaks = False  # it goes on since then
            self._trial, self._trial_ms = ticket, now_ms
        return ticket

    def awaits(self, ticket: Ticket, now_ms: int) -> None:
        """Note that a stream was sent, whose first event is now due."""
        self._waiting[ticket] = now_ms

    def began(self, ticket: Ticket, now_ms: int) -> int | None:
        """Note that an answer has begun. Returns for how long the replica was away when that ended it, in
        milliseconds."""
        if (since_ms := self._waiting.pop(ticket, None)) is not None:
            self.began_ms, self.took_ms, self.is_silenced = now_ms, now_ms - since_ms, False
        if ticket.epoch != self.ejections or ticket.success is not None:
            return None
        ticket.success = _Verdict(now_ms // 1000, is_failure=False)
        self._add(ticket.success, 1)
        return None if self._breaks or self.phase is HealthPhase.WELL else self._return(ticket, now_ms)

    def concluded(self, ticket: Ticket, now_ms: int) -> int | None:
        """Note that an answer came to its end; `note` follows. Returns as `began` does."""
        if ticket.epoch != self.ejections or ticket.success is None:
            return None
        self._row = 0
        return None if self.phase is HealthPhase.WELL else self._return(ticket, now_ms)

    def _return(self, ticket: Ticket, now_ms: int) -> int:
        self._to(HealthPhase.WELL)
        self._breaks = False
        self._trial, self._well_ms, self._decided = None, now_ms, ticket
        return now_ms - self._left_ms

    def note(self, ticket: Ticket, outcome: Outcome, now_ms: int) -> Ejection | None:
        """Note how a request ended. Returns the ejection that this causes."""
        self._waiting.pop(ticket, None)
        is_trial = ticket is self._trial
        if is_trial:
            self._trial = None
        if not outcome.is_failure or ticket.epoch != self.ejections:
            return None
        has_begun = self._take_back(ticket)
        self._row += 1
        self._add(_Verdict(now_ms // 1000, is_failure=True), 1)
        if self._is_of_its_tenant(ticket, outcome, now_ms):
            return None
        match self.phase:
            case HealthPhase.WELL:
                reason = Reason.TRIAL if ticket is self._decided else self._verdict(now_ms // 1000)
            case _:
                reason = Reason.TRIAL if is_trial and self.phase is HealthPhase.TRIAL else None
        if reason is None:
            return None
        self._breaks = has_begun
        return self.eject(reason, outcome, now_ms)

    def _is_of_its_tenant(self, ticket: Ticket, outcome: Outcome, now_ms: int) -> bool:
        """True if a failure says nothing of the replica, as all are of one tenant (rule 7). Notes the
        failure."""
        since_ms, tenant = now_ms - 1000 * WINDOW_S, ticket.tenant
        if outcome is not Outcome.FAILED and outcome is not Outcome.REFUSED:
            self._broke_ms = now_ms
            return False
        self._refused.note(tenant, now_ms)
        is_alone = max(self._refused.of_others(tenant), self._broke_ms) < since_ms
        return is_alone and (outcome is Outcome.REFUSED or self._sent.of_others(tenant) >= since_ms)

    def eject(self, reason: Reason, outcome: Outcome, now_ms: int) -> Ejection:
        if self.phase is HealthPhase.WELL:
            self._left_ms = now_ms
            if now_ms - self._well_ms >= EJECTION_MS_MAX:
                self._level = 0
        self._to(HealthPhase.EJECTED)
        length_ms = min(EJECTION_MS_MAX, EJECTION_MS_MIN << self._level)
        self._length_ms = length_ms + int(length_ms * JITTER * self._random.random())
        self._until_ms = now_ms + self._length_ms
        self._level = min(self._level + 1, EJECTION_MS_MAX.bit_length())
        self.ejections += 1
        self.is_silenced |= reason is Reason.SILENT
        self._trial = None
        self._row = 0
        self._window = [(-1, 0, 0)] * WINDOW_S
        return Ejection(reason, outcome, self._length_ms)

    # -- silence ----------------------------------------------------------------------------------

    def report(self, computed: int, waiting: int, now_ms: int) -> None:
        """Take note of how many prompt tokens it says that it has computed, and how many wait."""
        if not waiting:
            self.computed_ms = None
        elif computed != self.computed:  # less after a restart
            self.computed_ms = now_ms
        self.computed = computed

    def is_silent(self, late_ms: int, now_ms: int) -> bool:
        """True if several streams wait for their first event for `late_ms`, and none has begun since, nor
        was any part of the queue computed."""
        if self.computed_ms is not None and now_ms - self.computed_ms < late_ms:
            return False
        if self.phase is HealthPhase.WELL:
            since_ms = next(islice(self._waiting.values(), SILENT_MIN - 1, None), now_ms)
        else:
            since_ms = now_ms if self._trial is None else self._waiting.get(self._trial, now_ms)
        return now_ms - since_ms >= late_ms and (self.began_ms is None or now_ms - self.began_ms >= late_ms)

    def late(self, late_ms: int, now_ms: int) -> list[Ticket]:
        """The streams that wait for their first event for at least `late_ms`."""
        return [ticket for ticket, since_ms in self._waiting.items() if now_ms - since_ms >= late_ms]

    # -- counting ---------------------------------------------------------------------------------

    def _take_back(self, ticket: Ticket) -> bool:
        """Take back that its answer has begun. Returns whether it had."""
        success, ticket.success = ticket.success, None
        if success is not None:
            self._add(success, -1)
        return success is not None

    def _add(self, verdict: _Verdict, by: int) -> None:
        """Add to the window's second, unless that is over."""
        at = verdict.second % WINDOW_S
        second, good, bad = self._window[at]
        if second < verdict.second:
            second, good, bad = verdict.second, 0, 0
        if second == verdict.second:
            is_failure = verdict.is_failure
            self._window[at] = second, good + by * (not is_failure), bad + by * is_failure

    def _verdict(self, second: int) -> Reason | None:
        """The reason to eject the replica: failures in a row, or a rate of them (rule 2). None without
        one."""
        if self._row >= ROW_MAX:
            return Reason.ROW
        recent = [(good, bad) for at, good, bad in self._window if at > second - WINDOW_S]
        good, bad = (sum(column) for column in zip(*recent, strict=True))
        return Reason.RATE if good + bad >= RATE_MIN and bad > good else None

    def _to(self, phase: HealthPhase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase


def usable(
    healths: Sequence[ReplicaHealth], left: Sequence[bool], now_ms: int
) -> tuple[Sequence[bool], bool]:
    """Which of a pool's replicas may be used of those that are left to try, and True if these are some that
    are ejected, as more than half may not be away (rule 5)."""
    well = [
        (health.phase is HealthPhase.WELL and not health.is_suspect) or health.allows(now_ms)
        for health in healths
    ]
    if well.count(False) > max(1, len(well) // 2):
        return left, True
    both = [is_well and is_left for is_well, is_left in zip(well, left, strict=True)]
    return (both, False) if any(both) else (left, True)


def silent(healths: Sequence[ReplicaHealth], late_ms: int, now_ms: int) -> list[ReplicaHealth]:
    """The silent ones of a pool, where others begin in good time (rule 6)."""
    begins = any(
        one.began_ms is not None and now_ms - one.began_ms < late_ms and one.took_ms < late_ms // 2
        for one in healths
    )
    return [health for health in healths if begins and health.is_silent(late_ms, now_ms)]


class FirstEvents:
    """How long a pool takes to a stream's first event: the 95th percentile of the last `SAMPLES_MAX`, worked
    out after every `SORT_EVERY`."""

    __slots__ = ("_added", "_p95_ms", "_samples")

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=SAMPLES_MAX)
        self._added = 0
        self._p95_ms: int | None = None

    def add(self, ms: int) -> None:
        self._samples.append(ms)
        self._added += 1
        if self._added >= SORT_EVERY and len(self._samples) >= SAMPLES_MIN:
            self._added = 0
            self._p95_ms = sorted(self._samples)[int(len(self._samples) * _PERCENTILE)]

    @property
    def p95_ms(self) -> int | None:
        """None before there are `SAMPLES_MIN`."""
        return self._p95_ms

    @property
    def late_ms(self) -> int | None:
        """The time after which a first event is late. None as long as that is unknown."""
        return None if self._p95_ms is None else max(LATE_MS_MIN, LATE_FACTOR * self._p95_ms)
