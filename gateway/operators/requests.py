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
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.responses import json_response
from gateway.operators import around
from gateway.operators.operations import Asks, Merge, Operation, OperatorRequest, Parameter, Table, does
from gateway.request.exchange import Exchange, LiveRequests
from gateway.request.recorder import KeptSince, Recorder, summary_of, ticks_of
from gateway.routing.sessions import session_id
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.trace.axis import Axis, Bar, Visit
from shared.trace.request_records import RequestPage, RequestRecord, RequestRecords, RequestSummary
from shared.trace.why import so_far
from shared.wire.end_reason import EndReason
from shared.wire.errors import InvalidRequest, NotFound

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
_TEXTS: Final = ("tenant", "model", "endpoint", "session", "end_reason", "status", "state")
_STATUSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx")
_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": NAME_LEN_MAX}
_STATUS: Final = {"type": "string", "pattern": "^([0-9]{3}|[1-5]xx)$"}
_PARAMETERS: Final = (
    Parameter("state", "Without it both.", {"enum": ["live", "done"]}),
    *(Parameter(name, "Only of this one.", _TEXT) for name in ("tenant", "model", "endpoint")),
    Parameter("session", "Only of this one: its hash, or the name that the caller gives it.", _TEXT),
    Parameter("end_reason", "Of completed requests alone.", {"enum": [*EndReason]}),
    Parameter(
        "status",
        "One such as 429, or a class such as 5xx.",
        {"type": "string", "pattern": "^([0-9]{3}|[1-5]xx)$"},
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


def parse(parameters: Mapping[str, str]) -> RequestsQuery:
    """The question in a query string. Raises InvalidRequest, naming the parameter."""
    asked: dict[str, object] = {}
    for name, text in parameters.items():
        if name in _NUMBERS:
            asked[name] = _number(name, text)
        elif name in _TEXTS and 0 < len(text) <= NAME_LEN_MAX:
            asked[name] = text
        elif name in _TEXTS:
            raise InvalidRequest(f"{name} must have 1 to {NAME_LEN_MAX} characters.", param=name)
        else:
            known = ", ".join((*_TEXTS, *_NUMBERS))
            raise InvalidRequest(f"There are the parameters {known}.", param=name[:64])
    state = asked.pop("state", None)
    if state not in (None, "live", "done"):
        raise InvalidRequest("state must be live or done.", param="state")
    if (reason := asked.get("end_reason")) is not None and reason not in EndReason.__members__.values():
        raise InvalidRequest(f"end_reason must be one of {', '.join(EndReason)}.", param="end_reason")
    status = str(asked.get("status", "200"))
    if status not in _STATUSES and not (len(status) == 3 and status.isascii() and status.isdecimal()):
        raise InvalidRequest("status must be one such as 429, or a class such as 5xx.", param="status")
    return msgspec.convert({**asked, "live": state != "done", "done": state != "live"}, RequestsQuery)


def _number(name: str, text: str) -> int:
    least = 1 if name == "limit" else 0
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and least <= int(text) <= _NUMBERS[name]):
        raise InvalidRequest(f"{name} must be a whole number from {least} to {_NUMBERS[name]}.", param=name)
    return int(text)


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
            _PARAMETERS,
            asks=Asks.EVERY,
            merges={"data": Merge.JOIN, "before": Merge.MOST},
        )
    )
    async def _list(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest."""
        query = parse(asked.request.query)
        return _json(self.page(query, await self._lives(query)))

    @does(
        Operation(
            "Tell all of the requests of this id.",
            RequestRecords,
            errors=(NotFound,),
            asks=Asks.EVERY,
            merges={"data": Merge.JOIN},
        )
    )
    async def _show(self, asked: OperatorRequest) -> web.Response:
        """Raises NotFound."""
        lives = await self._lives(RequestsQuery())
        asked_for = [one for one in self._live if one.request_id == asked.id][:SAME_ID_MAX]
        live = [self._live_record(one, lives) for one in asked_for]
        done = self._recorder.find(asked.id, SAME_ID_MAX - len(live))
        if done:
            others = await around.looked_at(self._recorder.newest_first(), min(map(around.since_of, done)))
            done = [around.told(record, [*others, *lives]) for record in done]
        found = (*live, *done)
        if not found:
            raise NotFound(_not_kept(asked.id, self._recorder.since))
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

    def _live_record(self, exchange: Exchange, lives: Sequence[RequestSummary]) -> RequestRecord:
        visits = tuple(Visit(*visit) for visit in exchange.stages.entered(is_over=False))
        bars = tuple(Bar("gateway", visit.stage, visit.takes_ms, visit.from_ms) for visit in visits)
        ticks = ticks_of(exchange.progress.ticks, exchange.stages.began_s)
        summary, stage = self._live_summary(exchange), visits[-1].stage
        there = around.beside(summary, lives) if stage == "wait" else ""
        causes = so_far(exchange.record, stage, visits[-1].takes_ms, there)
        return RequestRecord(
            summary=summary,
            visits=visits,
            axis=Axis(bars),
            causes=tuple(one.text for one in causes),
            ticks=ticks,
        )


def _not_kept(request_id: str, since: KeptSince) -> str:
    kinds = (
        ("answered ones", since.answered),
        ("failed and slow ones", since.troubled),
        ("refused ones", since.refused),
        ("those of callers without a key", since.strangers),
    )
    kept = ", ".join(f"{kind} since {at:%Y-%m-%d %H:%M:%S}" for kind, at in kinds)
    return (
        f"There is no such request among the live ones and those that are kept: {kept} UTC. Older ones are "
        f"in the logs of gateways and engines: penstock trace {request_id} --logs FILE..."
    )


def _json(answer: RequestPage | RequestRecords) -> web.Response:
    return json_response(HTTPStatus.OK, msgspec.json.encode(answer), {})
