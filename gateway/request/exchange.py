"""A request in progress, and the set of all requests in progress: their number, their tenants, and a way to
end them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from msgspec import Struct

from gateway.admission.quota import Decision, ReservationId, Window, Windows
from gateway.admission.usage import Payer
from gateway.client.deadlines import Watch
from gateway.client.interface import Body, ClientConnection, Sink
from gateway.config.timeouts import TimeoutsConfig
from gateway.directory.accounts import Accounts
from gateway.endpoints.dialect import LimitHeaders
from gateway.endpoints.routes import Resource
from gateway.identity.caller import Principal
from gateway.relay.stream import Progress
from gateway.request.record import ExchangeRecord
from gateway.stored.keeping import Kept
from shared.apis.validation import named
from shared.fairness.fair_share import FairShare
from shared.process.clock import Clock
from shared.telemetry.stages import Stages
from shared.wire.errors import ApiError, NotReady, Overloaded
from shared.wire.ids import (
    FALLBACK_HEADER,
    IGNORED_FIELDS_HEADER,
    REQUEST_ID_HEADER,
    KeyId,
    RequestId,
    SessionId,
    TenantId,
)

ENGINE_TIMING_LEN_MAX: Final = 1024
IGNORED_LEN_MAX: Final = 8 * 1024
_TIMING: Final = re.compile(r"\s*[\w-]+(;[\w-]+=[\w.-]+)*\s*")


class Exchange(Struct, eq=False):
    """The state that the stages of one request share."""

    method: str
    path: str
    """The path as it was sent, without the query."""
    resource: Resource
    """What is served at this path."""
    headers: Mapping[str, str]
    """The headers that were sent, looked up by small letters."""
    body: Body
    connection: ClientConnection
    request_id: RequestId
    record: ExchangeRecord
    """The completed line, filled in as the request passes its stages."""
    stages: Stages
    mark: Callable[[tuple[str, float]], None]
    """`mark((stage, clock.monotonic()))` begins a stage (`Stages.mark`)."""
    watch: Watch
    client: Sink
    accounts: Accounts
    """Keys and tenants as they were when the request came: a reload does not change them midway."""
    timeouts: TimeoutsConfig
    """The deadlines of the configuration until model and tenant are known, then theirs."""
    clock: Clock
    reservation: ReservationId
    arrived_s: float
    progress: Progress
    principal: Principal | None = None
    is_seated: bool = False
    """True if the request has asked for its seat, so that it has a lease to renew."""
    streams: bool = False
    """True if the request asks for a stream. False until its body has been parsed."""
    session: SessionId | None = None
    """The session that the caller names. None where it names none, and until its body has been parsed."""
    reserved: int = 0
    """The tokens reserved."""
    estimated: int = 0
    """The tokens to charge where no engine reports what was used."""
    payer: Payer | None = None
    """Where the request is counted. None until its tokens are reserved."""
    reserved_s: float = 0.0
    """When its tokens were reserved, in seconds of the wall clock."""
    decision: Decision | None = None
    """The last decision of the quotas. None before the first."""
    windows: Windows | None = None
    """The caller's quotas as they stood last. None as long as they were not looked up."""
    ignored_fields: str = ""
    is_plain: bool = True
    """False if the request has fields of which the engine may ignore a part (`Parsed.is_plain`)."""
    fallback: str = ""
    """The model that is asked in place of the requested one. Empty while that is asked itself."""
    kept: Kept | None = None
    """Its part in responses that are kept. None where it has none, and until its body has been parsed."""
    query: str = ""
    """The query of a request that is answered here."""
    engine_timing: str = ""
    """The engine's `server-timing`, with its names marked as the engine's. Empty without one."""

    def admit(self, payer: Payer, tokens: int, estimated: int) -> None:
        """Note that so many tokens were reserved, and how many the request is estimated to use."""
        self.payer, self.reserved, self.reserved_s = payer, tokens, self.clock.wall()
        self.estimated = estimated

    def begin_fallback(self, model: str, reservation: ReservationId, charged: int) -> None:
        """Note that another model is to be asked, under a reservation of its own. `charged` is the part of
        the one before that is not given back; what was lost with it is paid with that."""
        self.fallback, self.reservation = model, reservation
        self.payer, self.reserved, self.estimated = None, 0, 0
        self.record.reserved_tokens += charged
        self.progress.lost = False

    def bound_by(self, timeouts: TimeoutsConfig) -> None:
        """Take over other deadlines. Only the total counts now."""
        if timeouts is self.timeouts:  # as for most callers
            self.watch.relax()
            return
        self.timeouts = timeouts
        self.watch.bound(timeouts.total_s)
        self.client.slow_client_s = timeouts.slow_client_s

    def set_engine_timing(self, value: str) -> None:
        entries = value[:ENGINE_TIMING_LEN_MAX].split(",")
        named = (entry.strip() for entry in entries if _TIMING.fullmatch(entry))
        self.engine_timing = ", ".join(f"engine-{entry}" for entry in named)

    def add_ignored(self, told: str) -> None:
        """Add the names that an engine of ours tells: it alone knows what of a schema it does not hold."""
        names = [*filter(None, self.ignored_fields.split(", "))]
        names += told[:IGNORED_LEN_MAX].split(", ")
        self.ignored_fields = named(dict.fromkeys(names))

    def answer_headers(self) -> dict[str, str]:
        """The headers that every answer has, beside those of its content."""
        timing = self.stages.server_timing()
        headers = {
            REQUEST_ID_HEADER: self.request_id,
            "server-timing": f"{timing}, {self.engine_timing}" if self.engine_timing else timing,
        }
        if self.ignored_fields:
            headers[IGNORED_FIELDS_HEADER] = self.ignored_fields
        if self.fallback:
            headers[FALLBACK_HEADER] = self.fallback
        dialect = self.resource.dialect
        if dialect.id_header:
            headers[dialect.id_header] = self.request_id
        if self.windows is not None:
            _add_windows(headers, self.windows, dialect.limits, self.clock)
        return headers


def _add_windows(headers: dict[str, str], windows: Windows, names: LimitHeaders, clock: Clock) -> None:
    """Add the headers that tell the caller's limits."""
    if (window := windows.requests) is not None:
        _add_window(headers, names.requests, window, names.reset, clock)
    if (window := windows.tokens) is not None:
        _add_window(headers, names.tokens, window, names.reset, clock)
    if (window := windows.day) is not None:
        _add_window(headers, names.day, window, names.reset, clock)
    if (window := windows.month) is not None:
        _add_window(headers, names.month, window, names.reset, clock)


def _add_window(
    headers: dict[str, str],
    names: tuple[str, str, str],
    window: Window,
    duration: Callable[[int, Clock], str],
    clock: Clock,
) -> None:
    limit, remaining, reset = names
    headers[limit] = str(window.limit)
    headers[remaining] = str(window.remaining)
    headers[reset] = duration(window.reset_ms, clock)


def _is_response(exchange: Exchange, id_: str) -> bool:
    return exchange.kept is not None and exchange.kept.response_id == id_


class LiveRequests:
    """The requests in progress.

    A tenant's part of the places is bounded by what is left of them (`shared.fairness.fair_share`), so that a
    tenant whose requests never get on, such as those whose bodies do not arrive, leaves room for the others.
    """

    def __init__(self, live_max: int) -> None:
        self._share = FairShare(live_max)
        self._claims: dict[Exchange, TenantId] = {}
        self._exchanges: set[Exchange] = set()
        self._drained = asyncio.Event()
        """Set once the gateway drains and no request is left."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._exchanges)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self._exchanges)

    def enter(self, exchange: Exchange) -> None:
        """Add a request; `leave` must follow. Raises NotReady while the gateway drains."""
        if self._stopping:
            raise NotReady("The gateway is shutting down.", retry_after_s=1.0)
        self._exchanges.add(exchange)

    def claim(self, exchange: Exchange, tenant: TenantId) -> None:
        """Take a place among the live requests for the tenant. Raises Overloaded when the tenant has its
        share."""
        if not self._share.acquire(tenant, 1):
            raise Overloaded(
                "The gateway is serving as many requests as it may.",
                retry_after_s=1.0,
                detail=f"requests: {self._share.describe(tenant, 1)}",
            )
        self._claims[exchange] = tenant

    def leave(self, exchange: Exchange) -> None:
        self._exchanges.remove(exchange)
        if (tenant := self._claims.pop(exchange, None)) is not None:
            self._share.release(tenant, 1)
        if self._stopping and not self._exchanges:
            self._drained.set()

    def end(
        self,
        tenant: TenantId | None,
        request_id: RequestId,
        reason: Callable[[], ApiError],
        asking: Exchange | None = None,
    ) -> int:
        """End the requests of exactly this id that are a tenant's, with None any tenant's. Several may carry
        it: the caller chose it. The one that asks for this may carry it, too, and goes on. Of a response that
        is to be kept, its own id is meant, too. Returns how many."""
        found = [
            exchange
            for exchange in self._exchanges
            if (exchange.request_id == request_id or _is_response(exchange, request_id))
            and exchange is not asking
            and exchange.principal is not None
            and tenant in (None, exchange.principal.tenant)
        ]
        for exchange in found:
            exchange.watch.end(reason())
        return len(found)

    def end_keys(self, keys: Collection[KeyId], accounts: Accounts, reason: Callable[[], ApiError]) -> int:
        """End the requests of these keys, where their tenants ask for it. `accounts` are the newest; a tenant
        that is not there any more counts as it was. Returns how many."""
        found = []
        for exchange in self._exchanges:
            if (principal := exchange.principal) is not None and principal.key in keys:
                is_known = principal.tenant in accounts.tenants.ids
                tenants = (accounts if is_known else exchange.accounts).tenants
                if tenants.tenant(principal).on_revoke == "end":
                    found.append(exchange)
        for exchange in found:
            exchange.watch.end(reason())
        return len(found)

    def end_all(self, reason: Callable[[], ApiError]) -> None:
        for exchange in list(self._exchanges):
            exchange.watch.end(reason())

    def reservations(self) -> list[ReservationId]:
        """The reservations whose leases are to be renewed."""
        return [exchange.reservation for exchange in self._exchanges if exchange.is_seated]

    async def drain(self, within_s: float, hurry: asyncio.Event, reason: Callable[[], ApiError]) -> bool:
        """Refuse new requests, wait for the open ones, and end what is left after so long, or once `hurry` is
        set.

        Returns whether nothing had to be ended.
        """
        self._stopping = True
        if not self._exchanges:
            self._drained.set()
        waiting = [asyncio.create_task(event.wait()) for event in (self._drained, hurry)]
        await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if self._drained.is_set():
            return True
        self.end_all(reason)
        await self._drained.wait()
        return False
