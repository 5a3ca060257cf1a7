"""The members of a pool: what a source says of them, and the phase that follows. Pure.

        JOINING <──> READY ──> DRAINING ──> GONE
           │           ^          │          ^
           │           └──────────┘          │
           └─────────────────────────────────┘

A source (the configuration, DNS, Kubernetes) lists a pool's members. A member that drains takes no new
requests, and those that are there finish. It drains when its source says that it ends or lists it no more,
when an operator says so, or the engine itself. A listed member that has no more reason to drain is ready
again; one that is listed no more is gone with its last request.

A list has at most `REPLICAS_MAX` members. Of a longer one, those are taken whose keys are the smallest, so
that all gateways take the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum, StrEnum
from heapq import nsmallest
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.config.whole import REPLICAS_MAX
from gateway.routing.maglev import key_of
from shared.wire.ids import ReplicaId

Origin = tuple[str, str, int]
"""Scheme, host and port."""


class MemberPhase(StrEnum):
    JOINING = "joining"
    """It is listed, and its source says that it is not ready."""
    READY = "ready"
    DRAINING = "draining"
    """It takes no new requests."""
    GONE = "gone"


MOVES: Final[Mapping[MemberPhase, frozenset[MemberPhase]]] = {
    MemberPhase.JOINING: frozenset({MemberPhase.READY, MemberPhase.DRAINING, MemberPhase.GONE}),
    MemberPhase.READY: frozenset({MemberPhase.JOINING, MemberPhase.DRAINING, MemberPhase.GONE}),
    MemberPhase.DRAINING: frozenset({MemberPhase.JOINING, MemberPhase.READY, MemberPhase.GONE}),
    MemberPhase.GONE: frozenset(),
}


class Standing(Enum):
    """A source's word about a member."""

    READY = "ready"
    WAITING = "waiting"
    """It is not ready yet, or not at the moment."""
    ENDING = "ending"
    """It is about to end."""


class DrainCause(StrEnum):
    """Who wants a member to drain, besides its sources."""

    OPERATOR = "operator"
    ENGINE = "engine"


HANDOVER_S: Final = 60.0
"""The time for which a drain that was handed over waits for its member to be listed, in seconds."""


class Handover(Struct, frozen=True):
    """The members that operators have drained at another worker, which this one takes over."""

    ids: frozenset[str] = frozenset()
    until_s: float = 0.0
    """The end of `HANDOVER_S`, on the monotonic clock."""


class Listed(Struct, frozen=True):
    """A member as a source lists it."""

    url: str
    standing: Standing = Standing.READY


def phase_of(standings: Collection[Standing], causes: Collection[DrainCause], requests: int) -> MemberPhase:
    """The phase of a member, by what the sources of its pools say: nothing when none lists it."""
    if not standings:
        return MemberPhase.DRAINING if requests else MemberPhase.GONE
    if causes or Standing.ENDING in standings:
        return MemberPhase.DRAINING
    return MemberPhase.READY if Standing.READY in standings else MemberPhase.JOINING


def bounded(listed: Iterable[Listed]) -> tuple[dict[str, Standing], int]:
    """The standings by URL, at most `REPLICAS_MAX`, and the number of members that were left out. Of entries
    with one URL the last counts."""
    standings = {one.url.rstrip("/"): one.standing for one in listed}
    left_out = len(standings) - REPLICAS_MAX
    if left_out <= 0:
        return standings, 0
    kept = nsmallest(REPLICAS_MAX, standings, key=lambda url: key_of(url.encode()))
    return {url: standings[url] for url in kept}, left_out


def id_of(url: str) -> ReplicaId:
    """The name of the member at a URL."""
    parts = urlsplit(url)
    return ReplicaId(parts.netloc + parts.path)


def origin_of(url: str) -> Origin:
    """Where its connections lead."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
