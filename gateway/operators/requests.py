"""`GET /admin/v1/requests` and `GET /admin/v1/requests/{id}`: live and recent requests, for operators.

Rules:

1. An answer is bounded, in rows and in the work that it takes: the ring is searched, and one page is made.
2. It tells of every tenant, so it is for operators alone (as rule 1 of `gateway.operators.server` says).
3. Others have their turn after every `AT_ONCE` live requests: consoles ask for a thousand of them each
   second. So a request that ends meanwhile may be told of twice, as live and as completed.
4. Who has the newest page of completed requests is told so (`gateway.operators.versions`). Live ones change
   by themselves, so a page of both has no version while there are any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Final, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.client.responses import json_response
from gateway.operators import around
from gateway.operators.elsewhere import NOBODY, Elsewhere
from gateway.operators.operations import (
    Asks,
    Merge,
    Operation,
    OperatorRequest,
)
from gateway.operators.versions import Versions, etag_of, is_known, unchanged
from gateway.request.exchange import Exchange, LiveRequests
from gateway.request.recorder import KeptSince, Recorder, summary_of, ticks_of
from gateway.routing.sessions import session_id
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.settings import Moment, Rule
from shared.trace.axis import Axis, Bar, Visit
from shared.trace.request_records import RequestPage, RequestRecord, RequestRecords, RequestSummary
from shared.trace.request_text import record_text
from shared.trace.why import so_far
from shared.wire.end_reason import MEANINGS, EndReason
from shared.wire.errors import NotFound
from shared.wire.ids import KeyId

REQUESTS: Final = "/admin/v1/requests"
REQUEST: Final = "/admin/v1/requests/{id}"
CLOCKS_S: Final = 0.1
"""By so much two looks at both clocks may differ, in seconds, because something else ran between them."""
LIMIT: Final = 100
LIMIT_MAX: Final = 1000
AT_ONCE: Final = 100
"""Live requests that are looked at before other tasks have their turn."""
SAME_ID_MAX: Final = 16
"""Records of one id that are answered."""
NAME_LEN_MAX: Final = 512
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LEN_MAX)]
End = Annotated[
    str,
    Meta(extra_json_schema={"enum": [*EndReason]}),
    Rule(f"be one of {', '.join(EndReason)}", frozenset(EndReason).__contains__),
]
Status = Annotated[
    str, Meta(pattern="^([0-9]{3}|[1-5]xx)$"), Rule("be one such as 429, or a class such as 5xx", bool)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsQuery:
    """An operator's question."""

    state: Literal["live", "done"] | None = None
    """Without it both."""
    id: Name | None = None
    """Only of this one."""
    trace_id: Name | None = None
    """Only of this one."""
    tenant: Name | None = None
    """Only of this one."""
    model: Name | None = None
    """Only of this one."""
    endpoint: Name | None = None
    """Only of this one."""
    error_code: Name | None = None
    """Only of this one."""
    session: Name | None = None
    """Only of this one: its hash, or the name that the caller gives it."""
    end_reason: End | None = None
    """Of completed requests alone."""
    status: Status | None = None
    """One such as 429, or a class such as 5xx."""
    min_ms: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Only what took so long, or has taken so long."""
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT
    """Rows at most."""
    before: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    """Only completed requests before this number."""
    since: Moment | None = None
    """Only what was in progress at this moment, or later."""
    until: Moment | None = None
    """Only what began by this moment."""

    @property
    def lives(self) -> bool:
        """True if live requests are asked for."""
        return self.state != "done" and self.before is None

    @property
    def is_over(self) -> bool:
        """True if completed requests are asked for."""
        return self.state != "live"

    def covers(self, one: RequestSummary) -> bool:
        """True if the request is asked for."""
        return (
            one.total_ms >= self.min_ms
            and self.id in (None, one.request_id)
            and self.trace_id in (None, one.trace_id)
            and (self.until is None or one.began_at <= self.until)
            and (self.since is None or one.began_at + timedelta(milliseconds=one.total_ms) >= self.since)
            and self.tenant in (None, one.tenant)
            and self.model in (None, one.model)
            and self.endpoint in (None, one.endpoint)
            and self.error_code in (None, one.error_code)
            and (self.session is None or self._is_of_session(one))
            and self.end_reason in (None, one.end_reason)
            and self.status in (None, str(one.status), f"{(one.status or 0) // 100}xx")
        )

    def _is_of_session(self, one: RequestSummary) -> bool:
        asked, session, tenant = self.session, one.session, one.tenant
        assert asked is not None
        return session is not None and (session == asked or session == session_id(tenant or "", asked))


class RequestsApi:
    """The handlers."""

    def __init__(
        self,
        live: LiveRequests,
        recorder: Recorder,
        clock: Clock = SYSTEM_CLOCK,
        elsewhere: Elsewhere = NOBODY,
    ) -> None:
        self._elsewhere: Final = elsewhere
        self._live: Final = live
        self._recorder: Final = recorder
        self._clock: Final = clock
        self._versions: Final = Versions()
        self._ahead_s = 0.0

    @Operation(
        f"GET {REQUESTS}",
        "List live and recent requests, the newest first.",
        RequestPage,
        RequestsQuery,
        is_of_all=True,
        is_watched=True,
        asks=Asks.EVERY,
        merges={"data": Merge.PAGE, "before": Merge.MOST},
    )
    async def _list(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest."""
        query: RequestsQuery = asked.query
        etag = self._etag(asked.request, query)
        if etag and is_known(asked.request, etag):
            return unchanged(etag_of(etag))
        page = self.page(query, await self._lives(query))
        return _json(page, etag_of(etag) if etag else {})

    def _etag(self, request: web.BaseRequest, query: RequestsQuery) -> str | None:
        """The version of the page; None while it tells of what lives, which changes by itself."""
        if query.lives and len(self._live):
            return None
        return self._versions.of(request, self._recorder.number if query.is_over else 0)

    @Operation(
        f"GET {REQUEST}",
        "Tell all of the requests of this id.",
        RequestRecords,
        errors=(NotFound,),
        is_of_all=True,
        asks=Asks.EVERY,
        merges={"data": Merge.JOIN},
    )
    async def _show(self, asked: OperatorRequest) -> web.Response:
        """Raises NotFound."""
        lives = await self._lives(RequestsQuery())
        asked_for = [one for one in self._live if one.request_id == asked.id][:SAME_ID_MAX]
        live = [self._live_record(one, lives) for one in asked_for]
        done = self._recorder.find(asked.id, SAME_ID_MAX - len(live))
        if done:
            others = await around.looked_at(self._recorder.newest_first(), min(map(around.since_of, done)))
            others += lives
            if around.ask_elsewhere(done):
                others += await self._of_elsewhere(done, asked.operator.key)
            done = [around.told(record, others) for record in done]
        found = (*live, *done)
        if not found:
            raise NotFound(_not_kept(asked.id, self._recorder.since))
        return _json(RequestRecords(tuple(map(_worded, found))))

    async def _of_elsewhere(self, done: Sequence[RequestRecord], operator: KeyId) -> list[RequestSummary]:
        """What others have of the time of these records, and of their callers' tries before them."""
        until = _moment(max(one.summary.began_at + around.lasted(one.summary) for one in done))
        since = _moment(min(one.summary.began_at for one in done))
        asks = [self._elsewhere.requests(operator, REQUESTS, since=since, until=until)]
        tried = next((one for one in done if one.summary.retry), None)
        if tried is not None:
            before, tenant = _moment(around.since_of(tried)), tried.summary.tenant
            asks.append(
                self._elsewhere.requests(operator, REQUESTS, since=before, until=since, tenant=tenant)
            )
        return [one for some in await asyncio.gather(*asks) for one in some]

    def page(self, query: RequestsQuery, lives: Iterable[RequestSummary]) -> RequestPage:
        """The requests that are asked for, of those that live and those that are kept."""
        found = sorted(lives, key=lambda one: one.total_ms)[: query.limit]
        if query.is_over:
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
        if not query.lives:
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
            began_at=datetime.fromtimestamp(exchange.arrived_s + self._wall_ahead_s(), UTC),
            total_ms=round(total_s * 1e3, 3),
            stage=exchange.stages.now,
            stream=exchange.streams,
            session=exchange.session,
            status=None,
            end_reason=None,
            events=exchange.progress.events,
        )

    def _wall_ahead_s(self) -> float:
        """The wall clock's lead over the monotonic one. It stays the same while they agree about the time
        that goes by, so that what arrived first began first."""
        ahead_s = self._clock.wall() - self._clock.monotonic()
        if abs(ahead_s - self._ahead_s) > CLOCKS_S:
            self._ahead_s = ahead_s
        return self._ahead_s

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


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


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


def _worded(record: RequestRecord) -> RequestRecord:
    """A record with what is said of it in words, by those who say it everywhere."""
    meaning = None if record.line is None else MEANINGS[record.line.end_reason]
    return msgspec.structs.replace(record, meaning=meaning, text="\n".join(record_text(record)))


def _json(answer: RequestPage | RequestRecords, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_response(HTTPStatus.OK, msgspec.json.encode(answer), headers or {})
