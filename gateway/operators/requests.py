"""`GET /admin/v1/requests` and `GET /admin/v1/requests/{id}`: live and recent requests, for operators.

    state                       live, done; both without it
    tenant, model, endpoint     only of this one
    session                     only of this one: its hash, or the name that the caller gives it
    status                      a status such as 429, or a class such as 5xx; of completed requests alone
    end_reason                  a word of `shared.wire.end_reason`; of completed requests alone
    min_ms                      only what took so long, or has taken so long
    limit                       rows at most: 100 without it, `LIMIT_MAX` at most
    before                      completed requests before this number: what a page's `before` says

Rules:

1. An answer is bounded, in rows and in the work that it takes: the ring is searched, and one page is made.
2. It tells of every tenant, so it is for operators alone (as rule 1 of `gateway.operators.server` says).
3. Others have their turn after every `AT_ONCE` live requests: consoles ask for a thousand of them each
   second. So a request that ends meanwhile may be told of twice, as live and as completed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.responses import json_response
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
from gateway.request.exchange import Exchange, LiveRequests
from gateway.request.recorder import Recorder, summary_of, ticks_of
from gateway.routing.sessions import session_id
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.trace.axis import Axis, Bar, Visit
from shared.trace.request_records import RequestPage, RequestRecord, RequestRecords, RequestSummary
from shared.wire.end_reason import EndReason
from shared.wire.errors import NotFound

REQUESTS: Final = "/admin/v1/requests"
REQUEST: Final = "/admin/v1/requests/{id}"
LIMIT: Final = 100
LIMIT_MAX: Final = 1000
AT_ONCE: Final = 100
"""Live requests that are looked at before other tasks have their turn."""
SAME_ID_MAX: Final = 16
"""Records of one id that are answered."""
NAME_LEN_MAX: Final = 512
_NUMBERS: Final = {"limit": LIMIT_MAX, "before": 2**53, "min_ms": 10**12}
_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": NAME_LEN_MAX}
_STATUS: Final = {"type": "string", "pattern": "^([0-9]{3}|[1-5]xx)$"}
PARAMETERS: Final = (
    Parameter("state", "Without it both.", {"enum": ["live", "done"]}),
    *(Parameter(name, "Only of this one.", _TEXT) for name in ("tenant", "model", "endpoint")),
    Parameter("session", "Only of this one: its hash, or the name that the caller gives it.", _TEXT),
    Parameter("end_reason", "Of completed requests alone.", {"enum": [*EndReason]}),
    Parameter(
        "status",
        "One such as 429, or a class such as 5xx.",
        {"type": "string", "pattern": "^([0-9]{3}|[1-5]xx)$"},
        "one such as 429, or a class such as 5xx",
    ),
    *(
        Parameter(name, told, {"type": "integer", "minimum": int(name == "limit"), "maximum": _NUMBERS[name]})
        for name, told in (
            ("min_ms", "Only what took so long, or has taken so long."),
            ("limit", f"Rows at most; {LIMIT} without it."),
            ("before", "Only completed requests before this number."),
        )
    ),
)


class RequestsQuery(Struct, frozen=True, kw_only=True):
    """An operator's question."""

    live: bool = True
    done: bool = True
    tenant: str | None = None
    model: str | None = None
    endpoint: str | None = None
    session: str | None = None
    status: str | None = None
    end_reason: str | None = None
    min_ms: int = 0
    limit: int = LIMIT
    before: int | None = None

    def covers(self, one: RequestSummary) -> bool:
        """True if the request is asked for."""
        return (
            one.total_ms >= self.min_ms
            and self.tenant in (None, one.tenant)
            and self.model in (None, one.model)
            and self.endpoint in (None, one.endpoint)
            and (self.session is None or self._is_of_session(one))
            and self.end_reason in (None, one.end_reason)
            and self.status in (None, str(one.status), f"{(one.status or 0) // 100}xx")
        )

    def _is_of_session(self, one: RequestSummary) -> bool:
        asked, session, tenant = self.session, one.session, one.tenant
        assert asked is not None
        return session is not None and (session == asked or session == session_id(tenant or "", asked))


def parse(asked: Mapping[str, Any]) -> RequestsQuery:
    """The question in the parameters of a query string."""
    state = asked.get("state")
    told = {name: value for name, value in asked.items() if name != "state"}
    return msgspec.convert({**told, "live": state != "done", "done": state != "live"}, RequestsQuery)


class RequestsApi:
    """The handlers."""

    def __init__(self, live: LiveRequests, recorder: Recorder, clock: Clock = SYSTEM_CLOCK) -> None:
        self._live: Final = live
        self._recorder: Final = recorder
        self._clock: Final = clock

    @property
    def table(self) -> Table:
        """The handlers."""
        return {REQUESTS: {"GET": self._list}, REQUEST: {"GET": self._show}}

    @does(
        Operation(
            "List live and recent requests, the newest first.",
            RequestPage,
            PARAMETERS,
            is_of_all=True,
            asks=Asks.EVERY,
            merges={"data": Merge.PAGE, "before": Merge.MOST, **SILENT},
        )
    )
    async def _list(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest."""
        query = parse(asked.query)
        return _json(self.page(query, await self._lives(query)))

    @does(
        Operation(
            "Tell all of the requests of this id.",
            RequestRecords,
            errors=(NotFound,),
            is_of_all=True,
            asks=Asks.EVERY,
            merges={"data": Merge.JOIN, **SILENT},
        )
    )
    async def _show(self, asked: OperatorRequest) -> web.Response:
        """Raises NotFound."""
        live = [self._live_record(one) for one in self._live if one.request_id == asked.id]
        done = self._recorder.find(asked.id, SAME_ID_MAX - len(live[:SAME_ID_MAX]))
        found = (*live[:SAME_ID_MAX], *done)
        if not found:
            raise NotFound("There is no such request among the live ones and the latest.")
        return _json(RequestRecords(found))

    def page(self, query: RequestsQuery, lives: Iterable[RequestSummary]) -> RequestPage:
        """The requests that are asked for, of those that live and those that are kept."""
        found = sorted(lives, key=lambda one: one.total_ms)[: query.limit]
        if query.done:
            for one in self._recorder.newest_first(query.before):
                if len(found) == query.limit:
                    last = found[-1]
                    return RequestPage(tuple(found), last.number if not last.is_live else one.number + 1)
                if query.covers(one):
                    found.append(one)
        return RequestPage(tuple(found))

    async def _lives(self, query: RequestsQuery) -> list[RequestSummary]:
        """The live requests that are asked for. Others have their turn in between (rule 3)."""
        found: list[RequestSummary] = []
        if not query.live or query.before is not None:
            return found
        for at, exchange in enumerate(list(self._live), 1):
            if query.covers(one := self._live_summary(exchange)):
                found.append(one)
            if at % AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    def _live_summary(self, exchange: Exchange) -> RequestSummary:
        total_s = self._clock.monotonic() - exchange.arrived_s
        return msgspec.structs.replace(
            summary_of(exchange.record, 0),
            is_live=True,
            began_at=datetime.fromtimestamp(self._clock.wall(), UTC) - timedelta(seconds=total_s),
            total_ms=round(total_s * 1e3, 3),
            stage=exchange.stages.now,
            stream=exchange.streams,
            session=exchange.session,
            status=None,
            end_reason=None,
            events=exchange.progress.events,
        )

    def _live_record(self, exchange: Exchange) -> RequestRecord:
        visits = tuple(Visit(*visit) for visit in exchange.stages.entered(is_over=False))
        bars = tuple(Bar("gateway", visit.stage, visit.takes_ms, visit.from_ms) for visit in visits)
        ticks = ticks_of(exchange.progress.ticks, exchange.stages.began_s)
        return RequestRecord(
            summary=self._live_summary(exchange), visits=visits, axis=Axis(bars), ticks=ticks
        )


def _json(answer: RequestPage | RequestRecords) -> web.Response:
    return json_response(HTTPStatus.OK, msgspec.json.encode(answer), {})
