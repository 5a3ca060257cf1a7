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
2. Load is the prompt tokens that wait to be computed: those that the replica reported, plus those that this
   worker has sent since. Requests in flight would mislead, as most of them are decoding.
3. The replica with the least cost is chosen: its load, and the tokens that are computed twice because the
   conversation is not at home. Those are, at another owner, the history behind the prefix now, and this turn
   when the conversation comes home; at any other replica, the prefix too.
4. A load is believed as far as it is known. What is missing, because a report is late or the replica is new,
   is the pool's median: nothing would draw every gateway's requests to a replica that is cut off, or that has
   just been started. Until engines report, the load is the prompts of this worker whose answers have not
   begun.

Rule 3 has no constant to tune. In the simulation (`penstock bench routing`) it replaces a bound on the load
above the least of twice the tokens saved, which keeps a hot prefix at its owners while other replicas idle.
How many owners are right depends on the caches alone: all replicas, unless the prefixes in use exceed one
replica's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import compress, islice
from statistics import median_low
from typing import Final

from msgspec import Struct

from gateway.routing.table import Table

REPORT_INTERVAL_MS: Final = 100
"""The longest time between two reports of a replica."""
LATE_MS: Final = 3 * REPORT_INTERVAL_MS
"""The age up to which a report is believed in full. At twice this age it is not believed at all."""
SLOW_START_MS: Final = 10_000
"""The age at which a new replica's own load is believed in full."""
REQUEST_LEN: Final = 32
"""The prompt tokens that a request in progress weighs as much as: it takes part of every step. This spreads
short prompts, which are as good as computed when they arrive."""
_FULL: Final = 1000
_MASK: Final = 2**64 - 1


class Route(StrEnum):
    """Why a replica was chosen."""

    AFFINITY = "affinity"
    """It is the conversation's home."""
    LOAD = "load"
    """The queue at home costs more than its cache saves."""
    RETRY = "retry"
    """Another replica was tried before."""
    PANIC = "panic"
    """Every replica that is left has failed lately, so all are used."""
    HEDGE = "hedge"
    """Another replica has not begun to answer in the time that nearly all take."""


class Affinity(Struct, frozen=True):
    """Where a request's prompt may be cached. Lengths in tokens: `prefix_len <= history_len <=
    prompt_len`."""

    prefix: int
    """The key of the beginning that it shares with other conversations."""
    session: int
    """The key of its conversation."""
    prefix_len: int
    history_len: int
    """The tokens that were computed when its last answer was complete; at its first turn the prefix."""
    prompt_len: int

    @property
    def stray_len(self) -> int:
        """The tokens that are computed twice when it is computed by an owner that is not its home."""
        return self.history_len + self.prompt_len - 2 * self.prefix_len


NOWHERE: Final = Affinity(0, 0, 0, 0, 0)
"""The affinity of a request that has no choice of replicas."""


class View(Struct):
    """A worker's knowledge of one replica's load. Times are of its monotonic clock."""

    since_ms: int
    """When the replica was added to the pool."""
    reported: int = 0
    """The waiting prompt tokens by its last report."""
    reported_at_ms: int | None = None
    """None for a replica that has never reported, such as an engine of another make: what this worker has in
    flight there is then all that is known, and believed."""
    sent: int = 0
    """Prompt tokens to compute that this worker has sent since the last report; before the first, those of
    the requests whose answers have not begun."""
    requests: int = 0
    """The requests of this worker that are there."""

    @property
    def load(self) -> int:
        return self.reported + self.sent + REQUEST_LEN * self.requests


class Choice(Struct, frozen=True):
    """A decision: the index of a replica."""

    replica: int
    route: Route
    computed_len: int
    """The prompt tokens that it is expected to compute."""


def loads(views: Sequence[View], now_ms: int) -> list[int]:
    """The loads to decide by (rule 4)."""
    trusts = [_trust(view, now_ms) for view in views]
    if min(trusts, default=_FULL) == _FULL:
        return [view.load for view in views]
    known = [view.load for view, trust in zip(views, trusts, strict=True) if trust == _FULL]
    middle = median_low(known or [view.load for view in views])
    return [
        (view.load * trust + middle * (_FULL - trust)) // _FULL
        for view, trust in zip(views, trusts, strict=True)
    ]


def _trust(view: View, now_ms: int) -> int:
    """How far a view is believed, in thousandths."""
    started = _FULL * (now_ms - view.since_ms) // SLOW_START_MS
    if view.reported_at_ms is None:
        return max(0, min(_FULL, started))
    fresh = _FULL * (2 * LATE_MS - (now_ms - view.reported_at_ms)) // LATE_MS
    return max(0, min(_FULL, started, fresh))


def choose(
    table: Table, loads: Sequence[int], affinity: Affinity, owners: int | None, usable: Sequence[bool]
) -> Choice | None:
    """The replica for a request by rules 1 and 3; None when none is usable. `loads` and `usable` are by the
    table's indices. `owners`: how many replicas own a prefix; None is all."""
    least = min(compress(loads, usable), default=None)
    if least is None:
        return None
    owned = () if owners is None else tuple(islice(table.walk(affinity.prefix), owners))
    home = _home(table, affinity.session, owned, usable)
    stray_len = affinity.stray_len
    if loads[home] <= least + stray_len:  # as nearly always: no other can cost less
        return Choice(home, Route.AFFINITY, affinity.prompt_len - affinity.history_len)
    costs = [
        load + stray_len + (0 if i in owned or not owned else affinity.prefix_len)
        for i, load in enumerate(loads)
    ]
    costs[home] = loads[home]
    lowest = min(compress(costs, usable))
    equals = [i for i, cost in enumerate(costs) if cost == lowest and usable[i]]
    if home in equals:
        return Choice(home, Route.AFFINITY, affinity.prompt_len - affinity.history_len)
    best = _of_largest_hash(table, affinity.session, equals)
    cached_len = affinity.prefix_len if best in owned or not owned else 0
    return Choice(best, Route.LOAD, affinity.prompt_len - cached_len)


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
