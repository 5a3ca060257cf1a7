"""`GET /admin/v1/usage`: what callers used, for operators.

    from, to               days like 2026-11-01, both included; this month without them
    by                     tenant, key, model, day: one or several with commas between; tenant without it
    tenant, key, model     only what this one used

Rules:

1. Usage is read page by page, so that neither the store nor this process is held up by it.
2. The tenants that are looked up are the present ones and all others that have usage on these days: the sums
   are those of all that was charged.
3. An answer has at most `ROWS_MAX` rows. What would have more is refused, never cut.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.admission.quota import QuotaStore, StoreUnavailable
from gateway.admission.usage import Totals, UsageRow
from gateway.config.accounting import DAYS_MAX
from gateway.directory.accounts import AccountsReader
from gateway.operators.operations import (
    SILENT,
    Asks,
    Merge,
    Operation,
    OperatorRequest,
    Parameter,
    Table,
    does,
)
from gateway.operators.versions import Versions
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import InvalidRequest, QuotaUnavailable
from shared.wire.ids import TenantId
from shared.wire.usage_report import DIMENSIONS, Dimension, UsageEntry, UsageReport

USAGE: Final = "/admin/v1/usage"
ROWS_MAX: Final = 50_000
NAME_LEN_MAX: Final = 512
_EPOCH: Final = date(1970, 1, 1)
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": NAME_LEN_MAX}
_DAY: Final = {"type": "string", "format": "date", "maxLength": 10}
_SOME: Final = f"some of {', '.join(DIMENSIONS)}, each once"
_BY: Final = {"type": "string", "pattern": "^({0})(,({0}))*$".format("|".join(DIMENSIONS))}
PARAMETERS: Final = (
    Parameter("from", "The first day; the first of the month of the last one without it.", _DAY),
    Parameter("to", "The last day; today without it.", _DAY),
    Parameter("by", "What is summed, each once, with commas between.", _BY, _SOME),
    *(Parameter(name, "Only what this one used.", _NAME) for name in ("tenant", "key", "model")),
)


class UsageQuery(Struct, frozen=True):
    """An operator's question."""

    first: date
    last: date
    by: tuple[Dimension, ...]
    tenant: str | None
    key: str | None
    model: str | None

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

    @property
    def table(self) -> Table:
        """The handlers."""
        return {USAGE: {"GET": self._answer}}

    @does(
        Operation(
            "Sum up what callers used.",
            UsageReport,
            PARAMETERS,
            is_of_all=True,
            is_watched=True,
            asks=Asks.UNSHARED,
            merges={"by": Merge.FIRST, "since": Merge.MOST, "rows": Merge.ROWS, **SILENT},
        )
    )
    async def _answer(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest, and QuotaUnavailable when the store cannot be asked."""
        today = datetime.fromtimestamp(self._clock.wall(), UTC).date()
        query = parse(asked.query, today)
        try:
            groups = await self._sums(query)
        except StoreUnavailable as error:
            message = "The store of usage does not answer."
            raise QuotaUnavailable(message, retry_after_s=1.0, detail=str(error)) from None
        rows = tuple(_entry(query.by, group, groups[group]) for group in sorted(groups))
        report = UsageReport(first=query.first, last=query.last, by=query.by, rows=rows, since=self._since)
        return self._versions.told(asked.request, msgspec.json.encode(report))

    async def _sums(self, query: UsageQuery) -> dict[tuple[str | int, ...], Totals]:
        values: list[Callable[[UsageRow], str | int]] = [_VALUES[name] for name in query.by]
        groups: dict[tuple[str | int, ...], Totals] = {}
        async for row in self._rows(query):
            group = tuple([value(row) for value in values])
            if (totals := groups.get(group)) is None:
                if len(groups) >= ROWS_MAX:
                    raise InvalidRequest(
                        f"This has more than {ROWS_MAX} rows; ask for fewer days or one tenant.", param="by"
                    )
                totals = groups[group] = Totals()
            totals.add(row.totals)
        return groups

    async def _rows(self, query: UsageQuery) -> AsyncIterator[UsageRow]:
        first, last = (query.first - _EPOCH).days, (query.last - _EPOCH).days
        if query.tenant is None:
            tenants = self._accounts.now.tenants.ids | await self._quotas.payers(first, last)
        else:
            tenants = {TenantId(query.tenant)}
        for tenant in tenants:
            async for row in self._quotas.usage(tenant, first, last):
                if query.covers(row):
                    yield row


def parse(parameters: Mapping[str, Any], today: date) -> UsageQuery:
    """Raises InvalidRequest, which names the parameter."""
    last = _day(parameters, "to", today)
    first = _day(parameters, "from", last.replace(day=1))
    if not timedelta(0) <= last - first < timedelta(days=DAYS_MAX):
        raise InvalidRequest(f"from must be to, or at most {DAYS_MAX - 1} days before it.", param="from")
    asked = parameters.get("by", "tenant").split(",")
    by = tuple(name for name in DIMENSIONS if name in asked)
    if len(by) != len(asked):
        raise InvalidRequest(f"by must be {_SOME}.", param="by")
    one = parameters.get
    return UsageQuery(
        first, last, tuple(sorted(by, key=asked.index)), one("tenant"), one("key"), one("model")
    )


def _day(parameters: Mapping[str, Any], name: str, otherwise: date) -> date:
    if (text := parameters.get(name)) is None:
        return otherwise
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError:
        raise InvalidRequest(f"{name} must be a day like 2026-11-01.", param=name) from None


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
