"""A sink that keeps what it is given, for tests of what is traced."""

from __future__ import annotations

from collections.abc import Sequence

from shared.tracing import Span


class KeptSpans:
    """A `SpanSink`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.is_closed = False

    def put(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        self.is_closed = True
