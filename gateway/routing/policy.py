"""The choice among a pool's replicas. Pure: numbers in, a decision out.

A prompt that begins as an earlier one did is computed from where they part, at the replica that computed the
earlier one; at any other it is computed whole. So the requests of one conversation should meet, and they
should not queue for it longer than it saves. Gateways hold no index of what is cached where: an index is
blind after a restart, behind by what is on its way, and every worker's differs. They compute the place from
the request.

1. A conversation's *home* is the replica to which its key belongs (`table`). Where a pool has `owners`, so
   many replicas own a *prefix* (the model, the tenant, the system prompt), by its key, and the home is one of
   them: the one whose key and the conversation's make the largest hash (rendezvous hashing, Thaler and
   Ravishankar 1996). Gateways and workers agree on it without talking, and a pool that changes moves little
   but its share.
2. Load is the prompt tokens that a request would wait for: those that the replica reported, plus those that
   this worker has sent and no report has. Requests in flight would mislead, as most of them are decoding.
   An engine prefers higher classes by their weights, so the tokens of a lower class count by the quotient of
   its weight and the request's own, and all others in full.
3. The replica with the least cost is chosen: its load, and the tokens that are computed twice because the
   conversation is not at home. Those are, at another owner, the history behind the prefix now, and this turn
   when the conversation comes home; at any other replica, the prefix too.
4. A load is believed as far as it is known. What is missing, because a report is late or the replica is new,
   is the pool's median: nothing would draw every gateway's requests to a replica that is cut off, or that has
   just been started. Of an engine that does not report, the load is the prompts of this worker whose answers
   have not begun.

How a request is counted neither twice nor never. It counts as sent from the moment at which its replica is
chosen, and a report that was made before it arrived does not change that. It stops to count at the first
report that has it in it: that in the headers of its own stream, which the engine sends once the request is in
its queue, or, where the answer is not a stream, a frame that the engine sends at that moment with the
stream's id (shared.http2.stream). Both travel on the request's own connection, in order with all reports that
are pushed there: those before do not have it, and those after do. From then on its tokens are the engine's to
count. An engine that does not report tells by its first byte that the prompt is computed.

A worker learns of what other workers send when it is reported, so all of them may send to one replica within
an interval what each believes to be little. That is bounded by the rate of requests, and rule 1 spreads them,
by their conversations.

Rule 3, the least cost, has no constant to tune. In the simulation (`python -m tests.bench routing`) it
replaces a bound on the load above the least of twice the tokens saved, which keeps a hot prefix at its owners
while other replicas idle. How many owners are right depends on the caches alone: all replicas, unless the
prefixes in use exceed one replica's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import compress, islice
from operator import mul
from statistics import median_low
from typing import Final

from msgspec import Struct, field

from gateway.routing.maglev import Table
from shared.wire.load_report import DEFAULT, FLEX, INTERVAL_MS, LoadReport

INTERVALS_MAX: Final = 3
"""The intervals between two reports for which the last is believed in full. An engine says its interval."""
LATE_MS: Final = INTERVALS_MAX * INTERVAL_MS
"""The time for which the report of an engine that has something to do is believed in full. So long after that
time no report is believed at all."""
SLOW_START_MS: Final = 10_000
"""The age at which a new replica's own load is believed in full."""
WEIGHTS: Final = (1, 4, 16)
"""The weights of the service classes in the engine's scheduler."""
REQUEST_LEN: Final = 32
"""The prompt tokens that a request in progress weighs as much as: it takes part of every step. This spreads
short prompts, which are as good as computed when they arrive."""
NEVER_MS: Final = 1 << 62
_FULL: Final = 1000
_PARTS: Final = tuple(tuple(min(_FULL, _FULL * other // own) for other in WEIGHTS) for own in WEIGHTS)
"""Weights that tokens of each class have for a request, in thousandths, by the class of the request."""
_PARTS_OF: Final = tuple(zip(*_PARTS, strict=True))
"""These weights by the class of the tokens, and then of the request."""
_MASK: Final = 2**64 - 1


class RouteReason(StrEnum):
    """Why a replica was chosen."""

    __hash__ = str.__hash__  # it is counted by, and Enum's own hash is slow

    AFFINITY = "affinity"
    """It is the conversation's home."""
    LOAD = "load"
    """The queue at home costs more than its cache saves."""
    RETRY = "retry"
    """Another replica was tried before."""
    PANIC = "panic"
    """Every replica that is left has failed lately, so all are used."""
    FALLBACK = "fallback"
    """The model that was asked for could not answer, and this is another one's."""


class Affinity(Struct, frozen=True):
    """Where a request's prompt may be cached, and for whom it waits. Lengths in tokens: `prefix_len <=
    history_len <= prompt_len`."""

    prefix: int
    """The key of the beginning that it shares with other conversations."""
    session: int
    """The key of its conversation."""
    prefix_len: int
    history_len: int
    """The tokens that were computed when its last answer was complete; at its first turn the prefix."""
    prompt_len: int
    service_class: int = DEFAULT
    tenant: str = ""
    """The tenant that sent the request."""

    @property
    def stray_len(self) -> int:
        """The tokens that are computed twice when it is computed by an owner that is not its home."""
        return self.history_len + self.prompt_len - 2 * self.prefix_len


def nowhere(tenant: str = "") -> Affinity:
    """The affinity of a request that has no choice of replicas."""
    return Affinity(0, 0, 0, 0, 0, tenant=tenant)


class View(Struct):
    """A worker's knowledge of one replica's load. Times are of its monotonic clock. Tokens are by the class
    of the request that would wait for them, in thousandths."""

    since_ms: int
    """When the replica was added to the pool, or was back after a long time away."""
    told: tuple[int, ...] = (0, 0, 0)
    """The waiting prompt tokens by its last report."""
    sequences: int = 0
    """The sequences that are there by its last report, of all workers."""
    fresh_until_ms: int = NEVER_MS
    """The time up to which the last report is believed in full. `NEVER_MS` of a replica that has never
    reported, such as an engine of another make: what this worker has in flight there is then all that is
    known, and believed."""
    sent: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Prompt tokens to compute that this worker has sent and no report has."""
    requests: int = 0
    """The requests of this worker that are there."""
    uncounted: int = 0
    """Those of them whose prompt tokens are in `sent`."""
    loads: Sequence[int] = ()
    """The sum of all that, in tokens. Empty until somebody asks: where there is one replica, nobody does."""

    def report(self, report: LoadReport, now_ms: int) -> None:
        """Take over what the replica says of itself."""
        self.told = tuple(sum(map(mul, report.waiting, parts)) for parts in _PARTS)
        self.sequences = report.sequences
        self.fresh_until_ms = now_ms + INTERVALS_MAX * report.interval_ms
        self.loads = ()

    def returned(self, away_ms: int, now_ms: int) -> None:
        """Begin slowly again after an ejection that lasted so long."""
        if away_ms >= SLOW_START_MS:
            self.since_ms = now_ms

    def enter(self, service_class: int, tokens: int) -> None:
        """Count a request of this class that is sent there, with the prompt tokens that it has to compute."""
        self.requests += 1
        self.loads = ()
        if tokens:
            self.uncounted += 1
            self._send(service_class, tokens)

    def count(self, service_class: int, tokens: int) -> None:
        """Take note that a report has these tokens of a request, or that they are computed."""
        self.uncounted -= 1
        self._send(service_class, -tokens)

    def leave(self) -> None:
        """Take note that a request has ended."""
        self.requests -= 1
        self.loads = ()

    @property
    def reports(self) -> bool:
        """True if it has reported, at any time."""
        return self.fresh_until_ms < NEVER_MS

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens that are to be computed, of all classes, as far as this worker knows."""
        return (self.told[FLEX] + self.sent[FLEX]) // _FULL

    @property
    def is_idle(self) -> bool:
        """True if nothing of this worker is there."""
        return not (self.requests or any(self.sent))

    def _send(self, service_class: int, tokens: int) -> None:
        """Add to what was sent. This and the sum are written out, as every request comes here."""
        flex, default, priority = self.sent
        parts = _PARTS_OF[service_class]
        self.sent = [flex + tokens * parts[0], default + tokens * parts[1], priority + tokens * parts[2]]
        self.loads = ()

    def sums(self) -> Sequence[int]:
        """Work out `loads`."""
        told, sent, requests = self.told, self.sent, REQUEST_LEN * max(self.requests, self.sequences)
        self.loads = (
            (told[0] + sent[0]) // _FULL + requests,
            (told[1] + sent[1]) // _FULL + requests,
            (told[2] + sent[2]) // _FULL + requests,
        )
        return self.loads


class ReplicaChoice(Struct, frozen=True):
    """A decision: the index of a replica."""

    replica: int
    route: RouteReason
    computed_len: int
    """The prompt tokens that it is expected to compute."""


def loads(views: Sequence[View], now_ms: int, service_class: int = DEFAULT) -> list[int]:
    """The loads to decide by, for a request of this class: the prompt tokens before it (rule 2), as far as
    they are known (rule 4)."""
    known = [(view.loads or view.sums())[service_class] for view in views]
    old_ms = now_ms - SLOW_START_MS
    late = [i for i, view in enumerate(views) if now_ms > view.fresh_until_ms]
    new = [i for i, view in enumerate(views) if old_ms < view.since_ms]
    if late:
        _fade(known, late, views, now_ms, service_class)
    if new:
        middle = _middle(known, new)
        for i in new:
            part = _part(now_ms - views[i].since_ms, SLOW_START_MS)
            known[i] = (known[i] * part + max(known[i], middle) * (_FULL - part)) // _FULL
    return known


def _fade(
    known: list[int], late: Sequence[int], views: Sequence[View], now_ms: int, service_class: int
) -> None:
    """Put the pool's median in place of what late reports say. What this worker has sent itself it knows,
    however late they are."""
    own = [view.sent[service_class] // _FULL + REQUEST_LEN * view.requests for view in views]
    told = [load - mine for load, mine in zip(known, own, strict=True)]
    silent = [i for i, view in enumerate(views) if not view.reports]
    middle = _middle(told, [*late, *silent])
    for i in late:
        part = _part(views[i].fresh_until_ms + LATE_MS - now_ms, LATE_MS)
        known[i] = own[i] + (told[i] * part + middle * (_FULL - part)) // _FULL


def _part(amount: int, whole: int) -> int:
    """The quotient in thousandths, from 0 to all."""
    return max(0, min(_FULL, _FULL * amount // whole))


def _middle(values: Sequence[int], without: Sequence[int]) -> int:
    """The median of the values but those at some indices, or of all where there is no other."""
    left_out = frozenset(without)
    return median_low([value for i, value in enumerate(values) if i not in left_out] or values)


def choose(
    table: Table, loads: Sequence[int], affinity: Affinity, owners: int | None, usable: Sequence[bool]
) -> ReplicaChoice | None:
    """The replica for a request: the one with the least cost (rule 3), to which counts that it is not the
    home (rule 1); None when none is usable. `loads` and `usable` are by the table's indices. `owners`: how
    many replicas own a prefix; None is all."""
    least = min(compress(loads, usable), default=None)
    if least is None:
        return None
    owned = () if owners is None else tuple(islice(table.walk(affinity.prefix), owners))
    home = _home(table, affinity.session, owned, usable)
    stray_len = affinity.stray_len
    if loads[home] <= least + stray_len:  # as nearly always: no other can cost less
        return ReplicaChoice(home, RouteReason.AFFINITY, affinity.prompt_len - affinity.history_len)
    costs = [
        load + stray_len + (0 if i in owned or not owned else affinity.prefix_len)
        for i, load in enumerate(loads)
    ]
    costs[home] = loads[home]
    lowest = min(compress(costs, usable))
    equals = [i for i, cost in enumerate(costs) if cost == lowest and usable[i]]
    if home in equals:
        return ReplicaChoice(home, RouteReason.AFFINITY, affinity.prompt_len - affinity.history_len)
    best = _of_largest_hash(table, affinity.session, equals)
    cached_len = affinity.prefix_len if best in owned or not owned else 0
    return ReplicaChoice(best, RouteReason.LOAD, affinity.prompt_len - cached_len)


def home_of(table: Table, affinity: Affinity, owners: int | None) -> int:
    """A conversation's home, if all replicas are usable."""
    owned = () if owners is None else tuple(islice(table.walk(affinity.prefix), owners))
    return _home(table, affinity.session, owned, [True] * len(table.ids))


def _home(table: Table, session: int, owned: Sequence[int], usable: Sequence[bool]) -> int:
    """The usable owner with the largest hash; where there is none, or all replicas are owners, the first
    usable one from the conversation's slot."""
    if not (candidates := [i for i in owned if usable[i]]):
        return next(i for i in table.walk(session) if usable[i])
    return _of_largest_hash(table, session, candidates)


def _of_largest_hash(table: Table, session: int, members: Sequence[int]) -> int:
    ids = table.ids
    return max(members, key=lambda i: _mixed(session ^ ids[i]))


def _mixed(value: int) -> int:
    """The finalizer of splitmix64 (Steele et al., 2014): every bit of the result depends on every bit of the
    value."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
