"""The home that a conversation has lost, with what was computed of it: so that a prompt that is computed
again has its reason.

A pool remembers the table before its last change for `REMEMBERED_MS`. Nothing is kept for a conversation:
its former home follows from its key. Whether anything was lost the engine tells, which found less than half
of the history in its cache (`gateway.request.record`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from gateway.routing.maglev import Table
from gateway.routing.policy import Affinity, home_of
from shared.wire.ids import ReplicaId

REMEMBERED_MS: Final = 600_000
"""The time after a change for which its cause is told."""


class LostReason(StrEnum):
    """Why a conversation was not computed where its history is."""

    DRAINS = "drains"
    """Its home takes no new requests, or is gone."""
    RESTARTED = "restarted"
    """Another process is there, whose cache was empty."""
    FAILED = "failed"
    """Its home has failed lately."""
    BUSY = "busy"
    """Its home had more to do than its cache would have saved."""
    MOVED = "moved"
    """Replicas came, and another is its home."""


class LostHome(Struct, frozen=True):
    """The replica that had a conversation's history."""

    replica: ReplicaId
    reason: LostReason
    at_ms: int = 0
    """When its conversations moved, on the monotonic clock; 0 where it is not known."""


class FormerHomes(Struct, frozen=True):
    """A pool's table before its last change."""

    table: Table
    replicas: tuple[ReplicaId, ...]
    owners: int | None
    until_ms: int
    """When it was exchanged, on the monotonic clock."""

    def of(self, affinity: Affinity) -> ReplicaId:
        """The home of a conversation then, if all were well."""
        return self.replicas[home_of(self.table, affinity, self.owners)]
