"""The recorder: what became of the latest requests, for operators who ask.

Rules:

1. It is bounded in number and in bytes; the oldest go first. With `records` 0, or without an admin listener,
   nothing is kept.
2. A record is the completed line, as it was logged, the visits to the stages, and the ticks of its events. It
   holds no text of prompts or answers. The line is kept as the log's JSON, so that its bytes are known.
3. Nothing is worked out before somebody asks: a request costs the time to keep what there is already. What
   was worked out is kept, too, as who asks mostly asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import msgspec
from msgspec import Struct

from gateway.relay.ticks import TICK_LEN, Ticks
from shared.telemetry.stages import Stamps
from shared.trace.axis import Visit, axis
from shared.trace.request_records import RequestRecord, RequestSummary, Tick
from shared.trace.sentences import sentence
from shared.wire.completed_line import GatewayLine

BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of all records together."""
SUMMARY_LEN: Final = 1024
"""Bytes that a record takes beside its JSON, about."""

STAMP_LEN: Final = 64
"""Bytes that the visit to a stage takes, about."""

TICKS_LEN: Final = 300
"""Bytes that the ticks of a request take beside `TICK_LEN` for each, about."""

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
    summary: RequestSummary | None = None
    """None until somebody asks."""

    @property
    def bytes_len(self) -> int:
        ticks_len = 0 if self.ticks is None else TICKS_LEN + TICK_LEN * len(self.ticks)
        return len(self.data) + SUMMARY_LEN + STAMP_LEN * len(self.stamps.names) + ticks_len

    def summarized(self) -> RequestSummary:
        if self.summary is None:
            self.summary = summary_of(_decode(self.data), self.number)
        return self.summary


class Recorder:
    """The latest completed requests."""

    def __init__(self, records_max: int, bytes_max: int = BYTES_MAX) -> None:
        self._records_max: Final = records_max
        self._bytes_max: Final = bytes_max
        self._entries: deque[_Entry] = deque()
        self._number = 0
        self.bytes_len = 0
        """Bytes of all records, about."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self._records_max > 0

    @property
    def number(self) -> int:
        """The number of the latest record: as long as it is the same, so are the records."""
        return self._number

    def add(
        self, line: GatewayLine, stamps: Stamps, logged: bytes | None = None, ticks: Ticks | None = None
    ) -> None:
        """Keep a completed request. `logged` is the line's JSON, where the log has it already; `ticks` are
        on the clock of the stamps."""
        if not self.is_on:
            return
        self._number = max(self._number + 1, int(line.ts.timestamp() * 1e6))
        data = _encode(line) if logged is None else logged
        entry = _Entry(line.request_id, self._number, data, stamps, ticks)
        self._entries.append(entry)
        self.bytes_len += entry.bytes_len
        while len(self._entries) > self._records_max or self.bytes_len > self._bytes_max:
            self.bytes_len -= self._entries.popleft().bytes_len

    def newest_first(self, before: int | None = None) -> Iterator[RequestSummary]:
        """The requests in short; with `before` those older than the one of this number."""
        for entry in reversed(self._entries):
            if before is None or entry.number < before:
                yield entry.summarized()

    def find(self, request_id: str, records_max: int) -> list[RequestRecord]:
        """The records of this id, the newest first."""
        found = []
        for entry in reversed(self._entries):
            if entry.request_id == request_id:
                found.append(_record(entry))
                if len(found) == records_max:
                    break
        return found


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
    causes = tuple(sentence(cause) for cause in line.causes or ())
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
