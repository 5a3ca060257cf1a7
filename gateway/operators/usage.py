"""`GET /admin/v1/usage`: what callers used, for operators.

Rules:

1. Usage is read page by page, so that neither the store nor this process is held up by it.
2. The tenants that are looked up are the present ones and all others that have usage on these days: the sums
   are those of all that was charged.
3. An answer has at most `ROWS_MAX` rows. What would have more is refused, never cut.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Final, cast

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.admission.quota import QuotaStore, StoreUnavailable
from gateway.admission.usage import Totals, UsageRow
from gateway.config.accounting import DAYS_MAX
from gateway.directory.accounts import AccountsReader
from gateway.operators.operations import Asks, Merge, Operation, OperatorRequest
from gateway.operators.versions import Versions
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.settings import Rule
from shared.wire.errors import InvalidRequest, QuotaUnavailable
from shared.wire.ids import TenantId
from shared.wire.usage_report import DIMENSIONS, Dimension, UsageEntry, UsageReport

USAGE: Final = "/admin/v1/usage"
ROWS_MAX: Final = 50_000
NAME_LEN_MAX: Final = 512
_EPOCH: Final = date(1970, 1, 1)
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LEN_MAX)]
Day = Annotated[date, Rule("be a day like 2026-11-01", bool)]
_SOME: Final = f"be some of {', '.join(DIMENSIONS)}, each once"
By = Annotated[
    str,
    Meta(pattern="^({0})(,({0}))*$".format("|".join(DIMENSIONS))),
    Rule(_SOME, lambda by: len(set(by.split(","))) == len(by.split(","))),
]


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """An operator's question."""

    from_: Day | None = None
    """The first day; the first of the month of the last one without it."""
    to: Day | None = None
    """The last day; today without it."""
    by: By = "tenant"
    """What is summed, each once, with commas between."""
    tenant: Name | None = None
    """Only what this one used."""
    key: Name | None = None
    """Only what this one used."""
    model: Name | None = None
    """Only what this one used."""

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """What is summed, in the order in which it is asked for."""
        return tuple(cast(Dimension, name) for name in self.by.split(","))

    def days(self, today: date) -> tuple[date, date]:
        """The first day and the last. Raises InvalidRequest."""
        last = self.to or today
        first = self.from_ or last.replace(day=1)
        if not timedelta(0) <= last - first < timedelta(days=DAYS_MAX):
            raise InvalidRequest(f"from must be to, or at most {DAYS_MAX - 1} days before it.", param="from")
        return first, last

    def covers(self, row: UsageRow) -> bool:
        """True if a row of the tenant and the days that are asked for is meant."""
        return self.key in (None, row.key) and self.model in (None, row.model)


class UsageReports:
    """The handler."""

    def __init__(
        self,
        quotas: QuotaStore,
        accounts: AccountsReader,
        clock: Clock = SYSTEM_CLOCK,
        *,
        is_kept: bool = True,
    ) -> None:
        """`is_kept`: usage outlives this process."""
        self._since: Final = None if is_kept else datetime.fromtimestamp(clock.wall(), UTC)
        self._quotas: Final = quotas
        self._versions: Final = Versions()
        self._accounts: Final = accounts
        self._clock: Final = clock

    @Operation(
        f"GET {USAGE}",
        "Sum up what callers used.",
        UsageReport,
        UsageQuery,
        is_of_all=True,
        is_watched=True,
        asks=Asks.UNSHARED,
        merges={"by": Merge.FIRST, "since": Merge.MOST, "rows": Merge.ROWS},
    )
    async def _answer(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest, and QuotaUnavailable when the store cannot be asked."""
        today = datetime.fromtimestamp(self._clock.wall(), UTC).date()
        query: UsageQuery = asked.query
        first, last = query.days(today)
        try:
            groups = await self._sums(query, first, last)
        except StoreUnavailable as error:
            message = "The store of usage does not answer."
            raise QuotaUnavailable(message, retry_after_s=1.0, detail=str(error)) from None
        by = query.dimensions
        rows = tuple(_entry(by, group, groups[group]) for group in sorted(groups))
        report = UsageReport(first=first, last=last, by=by, rows=rows, since=self._since)
        return self._versions.told(asked.request, msgspec.json.encode(report))

    async def _sums(self, query: UsageQuery, first: date, last: date) -> dict[tuple[str | int, ...], Totals]:
        values: list[Callable[[UsageRow], str | int]] = [_VALUES[name] for name in query.dimensions]
        groups: dict[tuple[str | int, ...], Totals] = {}
        async for row in self._rows(query, (first - _EPOCH).days, (last - _EPOCH).days):
            group = tuple([value(row) for value in values])
            if (totals := groups.get(group)) is None:
                if len(groups) >= ROWS_MAX:
                    raise InvalidRequest(
                        f"This has more than {ROWS_MAX} rows; ask for fewer days or one tenant.", param="by"
                    )
                totals = groups[group] = Totals()
            totals.add(row.totals)
        return groups

    async def _rows(self, query: UsageQuery, first: int, last: int) -> AsyncIterator[UsageRow]:
        if query.tenant is None:
            tenants = self._accounts.now.tenants.ids | await self._quotas.payers(first, last)
        else:
            tenants = {TenantId(query.tenant)}
        for tenant in tenants:
            async for row in self._quotas.usage(tenant, first, last):
                if query.covers(row):
                    yield row


_VALUES: Final[Mapping[Dimension, Callable[[UsageRow], str | int]]] = {
    "tenant": lambda row: row.tenant,
    "key": lambda row: row.key,
    "model": lambda row: row.model,
    "day": lambda row: row.day,
}


def _entry(by: tuple[Dimension, ...], group: tuple[str | int, ...], totals: Totals) -> UsageEntry:
    named: dict[str, str | int] = dict(zip(by, group, strict=True))
    if "day" in named:
        named["day"] = (_EPOCH + timedelta(days=int(named["day"]))).isoformat()
    sums = {name: getattr(totals, name) for name in Totals.__struct_fields__}
    return msgspec.convert({**named, **sums, "total_tokens": totals.total_tokens}, UsageEntry)
