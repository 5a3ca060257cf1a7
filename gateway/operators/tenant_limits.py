"""`GET /admin/v1/limits`: tenants' limits, and what of them is used at the moment, for operators.

Rules:

1. The answer is this process's: the live requests are its own, and so are the windows where quotas are
   kept in memory. Where they are kept in Redis, every process tells the same windows.
2. A page is bounded, and the store is asked for one tenant after the other, for those with limits alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.admission.quota import QuotaStore, Scope, StoreUnavailable, Subject, Windows
from gateway.config.quotas import NO_LIMITS, ModelLimits, QuotaLimits
from gateway.config.whole import TenantConfig
from gateway.directory.accounts import AccountsReader
from gateway.operators.operations import Asks, Merge, Operation, OperatorRequest
from gateway.operators.versions import Versions
from gateway.request.exchange import LiveRequests
from shared.wire.errors import QuotaUnavailable
from shared.wire.ids import TenantId

LIMITS: Final = "/admin/v1/limits"
LIMIT: Final = 100
LIMIT_MAX: Final = 200
NAME_LEN_MAX: Final = 512
Name = Annotated[str, Meta(max_length=NAME_LEN_MAX)]


@dataclass(frozen=True, slots=True)
class LimitsQuery:
    """A page of tenants."""

    after: Name = ""
    """Tenants after this id."""
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT
    """Tenants at most."""
    tenant: Name | None = None
    """Only this one."""


class TenantLimits(Struct, frozen=True, kw_only=True):
    """A tenant's limits, and how they stand."""

    tenant: str
    service_tier: str
    limits: QuotaLimits
    """The tenant's own; null is no limit."""
    model_limits: tuple[ModelLimits, ...]
    """Its limits for single models."""
    windows: Windows
    """The rest of requests and tokens per minute, of the day's and of the month's budget; null where
    there is no such limit."""
    live: int
    """Its requests in progress in this process."""


class LimitsPage(Struct, frozen=True):
    """A part of the tenants."""

    data: tuple[TenantLimits, ...]
    has_more: bool
    """True if there are more after the last one's id."""


class LimitsApi:
    """The handler."""

    def __init__(self, quotas: QuotaStore, accounts: AccountsReader, live: LiveRequests) -> None:
        self._quotas: Final = quotas
        self._versions: Final = Versions()
        self._accounts: Final = accounts
        self._live: Final = live

    @Operation(
        f"GET {LIMITS}",
        "Tell tenants' limits, and what of them is used.",
        LimitsPage,
        LimitsQuery,
        errors=(QuotaUnavailable,),
        asks=Asks.EVERY,
        is_watched=True,
        merges={"data": Merge.JOIN, "has_more": Merge.ANY},
    )
    async def _answer(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest, and QuotaUnavailable when the store cannot be asked."""
        query: LimitsQuery = asked.query
        tenants = (one for one in self._accounts.now.tenants.all() if one.id > query.after)
        found = sorted((one for one in tenants if query.tenant in (None, one.id)), key=lambda one: one.id)
        live = Counter(one.principal.tenant for one in self._live if one.principal is not None)
        shown = found[: query.limit]
        try:
            rows = [await self._row(tenant, live[TenantId(tenant.id)]) for tenant in shown]
        except StoreUnavailable as error:
            message = "The store of quotas does not answer."
            raise QuotaUnavailable(message, retry_after_s=1.0, detail=str(error)) from None
        page = LimitsPage(tuple(rows), has_more=len(found) > len(shown))
        return self._versions.told(asked.request, msgspec.json.encode(page))

    async def _row(self, tenant: TenantConfig, live: int) -> TenantLimits:
        windows = Windows()
        if tenant.limits != NO_LIMITS:
            id_ = TenantId(tenant.id)
            windows = await self._quotas.windows((Subject(Scope.TENANT, tenant.id, tenant.limits, id_),))
        return TenantLimits(
            tenant=tenant.id,
            service_tier=tenant.service_tier,
            limits=tenant.limits,
            model_limits=tenant.model_limits,
            windows=windows,
            live=live,
        )
