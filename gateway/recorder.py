"""The recorder: what became of the latest requests, for operators who ask.

Rules:

1. It is bounded in number and in bytes; the oldest go first. With `records` 0, or without an admin listener,
   nothing is kept.
2. A record is the completed line, as it was logged, and the visits to the stages. It holds no text of prompts
   or answers. It is kept as JSON, so that its bytes are known and a request costs some microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final

import msgspec
from msgspec import Struct

from shared.completed_line import GatewayLine
from shared.trace.axis import Visit, axis
from shared.trace.record import RequestRecord, RequestSummary
from shared.trace.sentences import sentence

BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of all records together."""
SUMMARY_LEN: Final = 1024
"""Bytes that a record takes beside its JSON, about."""

_encode: Final = msgspec.json.Encoder().encode


class _Stored(Struct, frozen=True, array_like=True):
    line: GatewayLine
    visits: tuple[Visit, ...]


_decode: Final = msgspec.json.Decoder(_Stored).decode


class _Entry(Struct, frozen=True):
    summary: RequestSummary
    data: bytes


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

    def add(self, line: GatewayLine, visits: Sequence[tuple[str, float, float]]) -> None:
        """Keep a completed request. `visits` are stages with milliseconds: since its headers, and taken."""
        if not self.is_on:
            return
        self._number = max(self._number + 1, int(line.ts.timestamp() * 1e6))
        data = _encode((line, visits))
        self._entries.append(_Entry(summary_of(line, self._number), data))
        self.bytes_len += len(data) + SUMMARY_LEN
        while len(self._entries) > self._records_max or self.bytes_len > self._bytes_max:
            self.bytes_len -= len(self._entries.popleft().data) + SUMMARY_LEN

    def newest_first(self, before: int | None = None) -> Iterator[RequestSummary]:
        """The requests in short; with `before` those older than the one of this number."""
        for entry in reversed(self._entries):
            if before is None or entry.summary.number < before:
                yield entry.summary

    def find(self, request_id: str, records_max: int) -> list[RequestRecord]:
        """The records of this id, the newest first."""
        found = []
        for entry in reversed(self._entries):
            if entry.summary.request_id == request_id:
                found.append(_record(entry))
                if len(found) == records_max:
                    break
        return found


def summary_of(line: GatewayLine, number: int) -> RequestSummary:
    """A completed request in short."""
    return RequestSummary(
        request_id=line.request_id,
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
        status=line.status,
        end_reason=line.end_reason,
        error_code=line.error_code,
        replica=line.replica,
        attempts=line.attempts,
        prompt_tokens=line.prompt_tokens or 0,
        completion_tokens=line.completion_tokens,
        events=line.events,
        first_byte_ms=line.first_byte_ms,
    )


def _record(entry: _Entry) -> RequestRecord:
    stored = _decode(entry.data)
    causes = tuple(sentence(cause) for cause in stored.line.causes or ())
    shown = axis(stored.line, (), stored.visits)
    return RequestRecord(
        summary=entry.summary, line=stored.line, visits=stored.visits, axis=shown, causes=causes
    )
