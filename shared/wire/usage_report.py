"""The answer to `GET /admin/v1/usage`: what callers used, summed by what was asked for."""

from __future__ import annotations

from datetime import date, datetime
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType, field

from shared.wire.silence import Silent

Dimension = Literal["tenant", "key", "model", "day"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("tenant", "key", "model", "day")


class UsageEntry(Struct, frozen=True, kw_only=True):
    """One sum. It has the dimensions that were asked for, and no other."""

    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    """The public part of an API key, or the id of a token's or a certificate's holder. A tenant with very
    many keys on one day has an entry `*` for all further ones."""
    model: str | UnsetType = UNSET
    day: date | UnsetType = UNSET
    """The day (UTC) on which the requests were admitted."""
    requests: int
    """Requests that were admitted, whatever their end."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a prefix cache."""
    completion_tokens: int
    estimated_requests: int
    """Requests that no engine reported about: its part of the answer was lost, or the gateway died."""
    estimated_tokens: int
    """The tokens that these were charged: what had been reserved."""
    total_tokens: int
    """All tokens that were charged: prompt, completion and estimated ones."""


class UsageReport(Silent, frozen=True, kw_only=True):
    """The usage of some days."""

    first: date = field(name="from")
    last: date = field(name="to")
    """The last day that is included."""
    by: tuple[Dimension, ...]
    rows: tuple[UsageEntry, ...]
    """Sorted by the dimensions in their order."""
    since: datetime | None = None
    """When the gateway began to count, where it counts in memory alone: its restart forgets all. Null where
    usage outlives it."""
