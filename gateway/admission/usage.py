"""Accounting: what callers used, by key, tenant, model and day.

Rules:

1. A request counts once, when it is settled, on the day (UTC) on which its tokens were reserved. One that was
   refused before that counts nowhere: it was not admitted.
2. What is counted is what the quotas are charged: `prompt + completion + estimated` of all rows is the sum of
   all settlements. `estimated` are tokens that no engine reported: the reservation of a request whose engine
   was lost, or whose gateway died. Where that gateway lives after all, its settlement replaces the estimate.
3. Rows are bounded: `ROWS_MAX` for each tenant and day, beyond which all further keys and models share the
   row `OTHERS`, so that the sums stay exact. A day is kept for as long as the configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from shared.wire.ids import KeyId, TenantId

ROWS_MAX: Final = 20_000
"""The rows of one tenant on one day that have a key and a model of their own."""
OTHERS: Final = "*"
"""The key and the model of the row that all others share. No key and no model has this name."""


class Used(Struct, frozen=True):
    """The tokens that a request is charged."""

    prompt: int = 0
    """Tokens of its prompts, as the engine reported."""
    cached: int = 0
    """Those of them that were found in a prefix cache."""
    completion: int = 0
    """Tokens of its answers, as the engine reported, and those of a prediction that turned out wrong."""
    estimated: int = 0
    """Tokens that are charged without a report: those that had been reserved."""
    predicted: int = 0
    """Those of the completion's that were taken from what the caller predicted."""
    mispredicted: int = 0
    """Those of the completion's that were tried from there, and are in no answer."""

    @property
    def tokens(self) -> int:
        """All that the quotas are charged."""
        return self.prompt + self.completion + self.estimated


NOTHING: Final = Used()


class Payer(Struct, frozen=True, cache_hash=True):
    """The row that a request is counted in."""

    tenant: TenantId
    key: KeyId
    model: str
    """The model's configured name."""


class Totals(Struct):
    """The sums of a row, or of several."""

    requests: int = 0
    """Requests that were admitted, whatever their end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    estimated_requests: int = 0
    """The requests that were charged without an engine's report."""
    estimated_tokens: int = 0

    def count(self, used: Used) -> None:
        """Add one request."""
        self.requests += 1
        self.prompt_tokens += used.prompt
        self.cached_tokens += used.cached
        self.completion_tokens += used.completion
        if used.estimated:
            self.estimated_requests += 1
            self.estimated_tokens += used.estimated

    def uncount_estimate(self, tokens: int) -> None:
        """Take away one request that was counted as an estimate. What is left may be less than nothing, where
        these are added to others."""
        self.requests -= 1
        if tokens:
            self.estimated_requests -= 1
            self.estimated_tokens -= tokens

    def add(self, other: Totals) -> None:
        """Add another row's sums."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.estimated_requests += other.estimated_requests
        self.estimated_tokens += other.estimated_tokens

    @property
    def total_tokens(self) -> int:
        """All tokens that were charged."""
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sums in their order."""
        return (
            self.requests,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.estimated_requests,
            self.estimated_tokens,
        )


class UsageRow(Struct, frozen=True):
    """The tokens and requests of a key with a model on a day."""

    tenant: TenantId
    key: KeyId
    model: str
    day: int
    """The days since 1970-01-01."""
    totals: Totals


Sheet = dict[tuple[KeyId, str], Totals]
"""A tenant's rows of one day, by key and model."""


class UsageRows:
    """The rows in this process's memory."""

    def __init__(self, days_kept: int) -> None:
        self._days_kept: Final = days_kept
        self._days: dict[int, dict[TenantId, Sheet]] = {}

    def count(self, payer: Payer, day: int, used: Used) -> None:
        """Add one request to its row."""
        self._row(payer, day).count(used)

    def add(self, row: UsageRow) -> None:
        """Add a row's sums to those of the same key, model and day."""
        self._row(Payer(row.tenant, row.key, row.model), row.day).add(row.totals)

    def uncount_estimate(self, payer: Payer, day: int, tokens: int) -> None:
        """Take away one that was counted as an estimate of so many tokens."""
        self._row(payer, day).uncount_estimate(tokens)

    def _row(self, payer: Payer, day: int) -> Totals:
        try:
            return self._days[day][payer.tenant][payer.key, payer.model]
        except KeyError:
            return self._new_row(payer, day)

    def of(self, tenant: TenantId, first: int, last: int) -> Iterator[UsageRow]:
        """A tenant's rows of the days from `first` to `last`."""
        for day in sorted(self._days):
            if first <= day <= last:
                for (key, model), totals in self._days[day].get(tenant, {}).items():
                    yield UsageRow(tenant, key, model, day, totals)

    def tenants(self, first: int = 0, last: float = math.inf) -> set[TenantId]:
        """The tenants with rows on the days from `first` to `last`."""
        return {tenant for day, sheets in self._days.items() if first <= day <= last for tenant in sheets}

    def take(self, tenant: TenantId) -> list[tuple[int, Sheet]]:
        """All rows of a tenant, each day by itself. None of them is left here."""
        sheets = ((day, self._days[day].pop(tenant, None)) for day in tuple(self._days))
        return [(day, sheet) for day, sheet in sheets if sheet is not None]

    def _new_row(self, payer: Payer, day: int) -> Totals:
        if day not in self._days:
            for old in [known for known in self._days if known <= day - self._days_kept]:
                del self._days[old]
        sheet = self._days.setdefault(day, {}).setdefault(payer.tenant, {})
        row = (payer.key, payer.model) if len(sheet) < ROWS_MAX else (KeyId(OTHERS), OTHERS)
        return sheet.setdefault(row, Totals())
