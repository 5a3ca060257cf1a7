"""The recorder: what became of the latest requests, for operators who ask.

Rules:

1. It is bounded in number and in bytes. What is common does not displace what is looked for: there are four
   rings, and in each of them every tenant has a part (`gateway.request.ring`).

       answered    the latest requests that ended well
       troubled    those that failed, and those that took long for one of their tenant's: kept longest
       refused     what a tenant was refused: a mistake, a quota
       strangers   whatever came without a valid key

   With `records` 0, or without an admin listener, nothing is kept.
2. A request took long if it, or its first byte, took more than nearly all of its tenant's before it: the
   bound rises with each that does, and sinks with each other, so that one in `SLOW_IN` is above.
3. A record is the completed line, as it was logged, the visits to the stages, and the ticks of its events. It
   holds no text of prompts or answers. The line is kept as the log's JSON, so that its bytes are known.
4. Nothing is worked out before somebody asks: a request costs the time to keep what there is already. What
   was worked out is kept, too, as who asks mostly asks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import chain
from typing import Final

import msgspec
from msgspec import Struct

from gateway.relay.stream import TICK_LEN, Ticks
from gateway.request.ring import Ring
from shared.telemetry.stages import Stamps
from shared.trace.axis import Visit, axis
from shared.trace.request_records import RequestRecord, RequestSummary, Tick
from shared.trace.why import reasons
from shared.wire.completed_line import GatewayLine
from shared.wire.end_reason import EndReason

BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of all records together: half of them are for the troubled, of the rest five eighths for the
answered."""
SUMMARY_LEN: Final = 1024
"""Bytes that a record takes beside its JSON, about."""

STAMP_LEN: Final = 64
"""Bytes that the visit to a stage takes, about."""

TICKS_LEN: Final = 300
"""Bytes that the ticks of a request take beside `TICK_LEN` for each, about."""

SLOW_IN: Final = 50
"""Of so many requests about one is slow."""
PACES_MAX: Final = 4096
"""Tenants of whom it is known how long their requests take."""
_RISE: Final = 1.25
_FALL: Final = _RISE ** (-1 / (SLOW_IN - 1))
_SERVER_ERROR: Final = 500

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(GatewayLine).decode


class _Entry(Struct):
    request_id: str
    number: int
    data: bytes
    """The line as JSON."""
    stamps: Stamps
    ticks: Ticks | None
    """None where no event was passed on."""
    bytes_len: int
    summary: RequestSummary | None = None
    """None until somebody asks."""

    def summarized(self) -> RequestSummary:
        if self.summary is None:
            self.summary = summary_of(_decode(self.data), self.number)
        return self.summary


class _Pace(Struct):
    """How long a tenant's requests take at most, but for one in `SLOW_IN`."""

    total_ms: float = 0.0
    first_ms: float = 0.0

    def is_slow(self, total_ms: float, first_ms: float) -> bool:
        """True if a request that took so long took long. The bounds follow it."""
        slow = False
        if total_ms > self.total_ms:
            self.total_ms, slow = self.total_ms * _RISE or total_ms, True
        else:
            self.total_ms *= _FALL
        if first_ms > self.first_ms:
            self.first_ms, slow = self.first_ms * _RISE or first_ms, True
        else:
            self.first_ms *= _FALL
        return slow


class KeptSince(Struct, frozen=True):
    """The times since when all requests are kept, by their kinds."""

    answered: datetime
    troubled: datetime
    refused: datetime
    strangers: datetime


class Recorder:
    """The latest completed requests."""

    def __init__(self, records_max: int, bytes_max: int = BYTES_MAX) -> None:
        """Each kind has room for `records_max`, as far as its part of the bytes goes."""
        self.is_on: Final = records_max > 0
        self._began_at: Final = datetime.now(UTC)
        self._answered: Final = Ring[_Entry](records_max, bytes_max * 5 // 16)
        self._troubled: Final = Ring[_Entry](records_max, bytes_max // 2)
        self._refused: Final = Ring[_Entry](records_max, bytes_max // 8)
        self._strangers: Final = Ring[_Entry](records_max, bytes_max // 16)
        self._rings: Final = (self._answered, self._troubled, self._refused, self._strangers)
        self._paces: Final[dict[str, _Pace]] = {}
        self._number = 0

    def __len__(self) -> int:
        return sum(ring.records for ring in self._rings)

    @property
    def bytes_len(self) -> int:
        """Bytes of all records, about."""
        return sum(ring.bytes_len for ring in self._rings)

    @property
    def number(self) -> int:
        """The number of the latest record: as long as it is the same, so are the records."""
        return self._number

    @property
    def since(self) -> KeptSince:
        """Since when all are kept: the recorder's beginning, where none had to go."""
        return KeptSince(*(self._since(ring) for ring in self._rings))

    def _since(self, ring: Ring[_Entry]) -> datetime:
        return datetime.fromtimestamp(ring.lost / 1e6, UTC) if ring.lost else self._began_at

    def add(
        self, line: GatewayLine, stamps: Stamps, logged: bytes | None = None, ticks: Ticks | None = None
    ) -> None:
        """Keep a completed request, where the recorder is on. `logged` is the line's JSON, where the log has
        it already; `ticks` are on the clock of the stamps."""
        number = self._number = max(self._number + 1, int(line.ts.timestamp() * 1e6))
        data = _encode(line) if logged is None else logged
        bytes_len = len(data) + SUMMARY_LEN + STAMP_LEN * len(stamps.names)
        if ticks is not None:
            bytes_len += TICKS_LEN + TICK_LEN * len(ticks.events)
        entry = _Entry(line.request_id, number, data, stamps, ticks, bytes_len)
        self._ring_of(line).add(entry, line.tenant or "")

    def _ring_of(self, line: GatewayLine) -> Ring[_Entry]:
        if line.tenant is None:
            return self._strangers
        if line.end_reason is not EndReason.OK:
            is_refusal = line.end_reason is EndReason.REFUSED and line.status < _SERVER_ERROR
            return self._refused if is_refusal else self._troubled
        pace = self._paces.get(line.tenant)
        if pace is None:
            if len(self._paces) >= PACES_MAX:
                self._paces.clear()  # they are learned again
            pace = self._paces[line.tenant] = _Pace()
        return self._troubled if pace.is_slow(line.total_ms, line.first_byte_ms or 0.0) else self._answered

    def newest_first(self, before: int | None = None) -> Iterator[RequestSummary]:
        """The requests in short; with `before` those older than the one of this number."""
        parts = chain.from_iterable(ring.newest_first() for ring in self._rings)
        for entry in merge(*parts, key=lambda one: -one.number):
            if before is None or entry.number < before:
                yield entry.summarized()

    def find(self, request_id: str, records_max: int) -> list[RequestRecord]:
        """The records of this id, the newest first."""
        found = [one for one in chain.from_iterable(self._rings) if one.request_id == request_id]
        found.sort(key=lambda one: -one.number)
        return [_record(entry) for entry in found[:records_max]]


def summary_of(line: GatewayLine, number: int) -> RequestSummary:
    """A completed request in short."""
    return RequestSummary(
        request_id=line.request_id,
        trace_id=line.trace_id,
        is_live=False,
        number=number,
        began_at=line.ts - timedelta(milliseconds=line.total_ms),
        total_ms=line.total_ms,
        stage=line.stage,
        method=line.method,
        endpoint=line.endpoint,
        stream=line.stream,
        tenant=line.tenant,
        key_id=line.key_id,
        model=line.model,
        session=line.session,
        status=line.status,
        end_reason=line.end_reason,
        error_code=line.error_code,
        retry=line.retry,
        idempotency=line.idempotency,
        service_tier=line.service_tier,
        quota_meter=line.quota_meter,
        quota_scope=line.quota_scope,
        replica=line.replica,
        attempts=line.attempts,
        prompt_tokens=line.prompt_tokens or 0,
        cached_tokens=line.cached_tokens,
        completion_tokens=line.completion_tokens,
        events=line.events,
        first_byte_ms=line.first_byte_ms,
    )


def _record(entry: _Entry) -> RequestRecord:
    line = _decode(entry.data)
    visits = tuple(Visit(*visit) for visit in entry.stamps.visits())
    causes = tuple(one.text for one in reasons(line))
    shown = axis(line, (), visits)
    return RequestRecord(
        summary=entry.summarized(),
        line=line,
        visits=visits,
        axis=shown,
        causes=causes,
        ticks=ticks_of(entry.ticks, entry.stamps.began_s[0]),
    )


def ticks_of(ticks: Ticks | None, began_s: float) -> tuple[Tick, ...]:
    """The ticks of a request whose headers came at this time on the clock."""
    return () if ticks is None else tuple(Tick(at_ms, events) for at_ms, events in ticks.since(began_s))
