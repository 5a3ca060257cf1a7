"""A bounded queue of spans, which a thread of its own sends in batches.

Rules:

1. `put` never waits: where the queue is full, spans are dropped and counted.
2. One batch is sent at a time. A receiver that is slow or away costs the queue's length and nothing else.
3. At the end, what is queued is sent within `CLOSE_S`; the rest is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from shared.process import logs
from shared.process.metrics import Counter
from shared.telemetry.tracing import Span

QUEUE_MAX: Final = 4096
"""Spans that wait, some 300 requests."""
BATCH_MAX: Final = 512
INTERVAL_S: Final = 1.0
"""The longest time that a span waits for others to be sent with."""
CLOSE_S: Final = 3.0

log = logs.get(__name__)

SPANS: Final = Counter(
    "penstock_spans",
    "Spans of requests, by what became of them: sent, dropped (queue full), failed.",
    ["outcome"],
)
for _outcome in ("sent", "dropped", "failed"):
    SPANS.inc(_outcome, by=0)  # so that the thread below never adds a label while the loop is scraped

Send = Callable[[Sequence[Span]], bool]
"""Sends a batch, bounded in time -> whether it was taken."""


class SpanQueue:
    """A `SpanSink`. `put` is called by one thread; `send` is called by another."""

    def __init__(self, send: Send, *, queue_max: int = QUEUE_MAX, interval_s: float = INTERVAL_S) -> None:
        self._send: Final = send
        self._queue: Final[deque[Span]] = deque()
        self._queue_max: Final = queue_max
        self._interval_s: Final = interval_s
        self._wake: Final = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self._thread: Final = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """Queue spans without waiting, or drop and count them (rule 1). The spans of a request are taken all,
        or none."""
        if self._is_closing or len(self._queue) + len(spans) > self._queue_max:
            SPANS.inc("dropped", by=len(spans))
            return
        self._queue.extend(spans)
        if len(self._queue) >= BATCH_MAX:
            self._wake.set()

    def close(self) -> None:
        """Send what is queued within `CLOSE_S`, and drop the rest (rule 3)."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if left := len(self._queue):
            SPANS.inc("dropped", by=left)
            log.warning("spans.dropped", spans=left)

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            while self._queue:
                self._send_batch()

    def _send_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MAX))]
        problem = "they were refused, or nobody answered: the exporter's own line says which"
        try:
            is_taken = self._send(batch)
        except Exception as error:  # a library's: the requests that the spans tell of are over
            is_taken, problem = False, f"{type(error).__name__}: {error}"[:200]
        SPANS.inc("sent" if is_taken else "failed", by=len(batch))
        if self._is_failing is is_taken:  # said once, each time that it changes
            self._is_failing = not is_taken
            if is_taken:
                log.info("spans.sent_again")
            else:
                log.warning("spans.not_taken", problem=problem)
