"""`GET /admin/v1/overview`: the last hours by the minute, for operators.

Rules:

1. Requests are counted where they end (`gateway.request.minutes`), and added up over workers and gateways.
   Quantiles are worked out of the sums by whoever asks.
2. Engines' queues and pages are read once a minute, by each process for itself, of `LOADS_MAX` engines at
   most: a graph begins when the gateway does, not when somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.responses import json_response
from gateway.operators.engines import EngineView
from gateway.operators.operations import Asks, Merge, Operation, OperatorRequest
from gateway.operators.versions import Versions, etag_of, is_known, unchanged
from gateway.request.minutes import MINUTES_MAX, NONE, Cell, Minutes, edges_ms
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.settings import Moment
from shared.wire.silence import Silent

OVERVIEW: Final = "/admin/v1/overview"
EVERY_S: Final = 60.0
LOADS_MAX: Final = 64
"""Engines whose queues and pages are kept."""


@dataclass(frozen=True, slots=True)
class OverviewQuery:
    """The minutes that are asked for."""

    since: Moment | None = None
    """Only minutes that began then or later."""


class MinuteRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests that ended in one minute, of one model at one replica."""

    at: datetime
    """The minute's beginning."""
    model: str
    replica: str
    """The one that was asked last; "none" where none was."""
    requests: int = 0
    errors: dict[str, int] = {}
    """Those without their whole answer, by the error's code, or the reason of their end."""
    first_token: dict[str, int] = {}
    """Streams by the time to their first token: the bucket in `edges_ms`, and how many are in it."""
    gaps: dict[str, int] = {}
    """Streams by their mean time between two tokens, in the same buckets."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class LoadRow(Struct, frozen=True, kw_only=True):
    """An engine in one minute."""

    at: datetime
    """The minute's beginning."""
    replica: str
    models: list[str]
    waiting: int | None
    """Sequences that wait for a slot."""
    running: int | None
    pages_used_percent: float | None
    """Pages of the KV cache that sequences hold."""


class Overview(Silent, frozen=True):
    """The last hours, the oldest minute first."""

    edges_ms: list[float]
    """The upper ends of the buckets, in milliseconds. The last one has all that is longer, too."""
    rows: list[MinuteRow]
    loads: list[LoadRow]


class OverviewApi:
    """The handler, and the work that reads the engines."""

    def __init__(
        self,
        minutes: Minutes,
        engines: Callable[[], Awaitable[Sequence[EngineView]]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._minutes: Final = minutes
        self._engines: Final = engines
        self._clock: Final = clock
        self._loads: Final[deque[tuple[LoadRow, ...]]] = deque(maxlen=MINUTES_MAX)
        self._versions: Final = Versions()
        self._read = 0
        """How many times the engines were read."""

    async def watch(self) -> None:
        """Read the engines' queues and pages, for ever."""
        while True:
            await self._clock.sleep(EVERY_S)
            now = datetime.fromtimestamp(self._clock.wall(), UTC).replace(second=0, microsecond=0)
            views = await self._engines()
            self._loads.append(tuple(_load(view, now) for view in views[:LOADS_MAX] if view.figures))
            self._read += 1

    @Operation(
        f"GET {OVERVIEW}",
        "Tell the last hours by the minute.",
        Overview,
        OverviewQuery,
        is_of_all=True,
        is_watched=True,
        asks=Asks.EVERY,
        merges={"edges_ms": Merge.FIRST, "rows": Merge.ROWS, "loads": Merge.JOIN},
    )
    async def _answer(self, asked: OperatorRequest) -> web.Response:
        etag = self._versions.of(asked.request, *self._minutes.version, self._read)
        if is_known(asked.request, etag):
            return unchanged(etag_of(etag))
        return json_response(
            HTTPStatus.OK, msgspec.json.encode(self.overview(asked.query.since)), etag_of(etag)
        )

    def overview(self, since: datetime | None = None) -> Overview:
        """What is kept of the minutes from then on."""
        least = datetime.fromtimestamp(self._clock.wall(), UTC) - timedelta(minutes=MINUTES_MAX)
        since = least if since is None else max(since, least)
        loads = [one for rows in self._loads for one in rows if one.at >= since]
        return Overview(edges_ms=edges_ms(), rows=list(self._rows(since)), loads=loads)

    def _rows(self, since: datetime) -> Iterator[MinuteRow]:
        for minute in self._minutes.since(since):
            for (model, replica), cell in minute.cells.items():
                yield _row(minute.at, model or NONE, replica or NONE, cell)


def _row(at: datetime, model: str, replica: str, cell: Cell) -> MinuteRow:
    return MinuteRow(
        at=at,
        model=model,
        replica=replica,
        requests=cell.requests,
        errors=cell.errors,
        first_token=_filled(cell.first),
        gaps=_filled(cell.gaps),
        prompt_tokens=cell.prompt_tokens,
        cached_tokens=cell.cached_tokens,
        completion_tokens=cell.completion_tokens,
    )


def _filled(buckets: Sequence[int]) -> dict[str, int]:
    return {str(at): count for at, count in enumerate(buckets) if count}


def _load(view: EngineView, at: datetime) -> LoadRow:
    told = view.figures
    assert told is not None
    pages = sum(told.pages.values())
    return LoadRow(
        at=at,
        replica=view.id,
        models=view.models,
        waiting=sum(told.waiting.values()) if told.waiting else None,
        running=told.running,
        pages_used_percent=round(100 * told.pages.get("owned", 0) / pages, 1) if pages else None,
    )
