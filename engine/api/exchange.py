"""One request from its head to its one completed line, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from engine.api.outputs import Timing
from shared import logs, sse
from shared.clock import Clock
from shared.errors import (
    ApiError,
    EngineFailed,
    InternalError,
    NotReady,
    QueueTimeout,
    RequestAborted,
    RequestTimeout,
    SlowClient,
    forget_frames,
)
from shared.http import Request, Responder
from shared.ids import (
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    TOKENIZER_HEADER,
    TRACEPARENT_HEADER,
    accept_request_id,
)
from shared.openai import error_envelope
from shared.telemetry import Stages

JSON_TYPE: Final = "application/json"
STATUS_CLIENT_GONE: Final = 499

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a generation came to, for the closing report and the log."""

    model: str = ""
    streams: bool = False
    choices: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Timing = field(default_factory=Timing)
    """Of the choice that took longest in each; preemptions of all."""


class Exchange:
    """A request, the way to answer it, and what the log will say about both."""

    def __init__(
        self, request: Request, responder: Responder, tokenizer_hash: str | None, clock: Clock
    ) -> None:
        self.request = request
        self.responder = responder
        self.request_id = accept_request_id(request.headers.get(REQUEST_ID_HEADER))
        self.tenant = request.headers.get(TENANT_HEADER, "")
        """Empty without one."""
        self.stages = Stages("engine", clock, traceparent=request.headers.get(TRACEPARENT_HEADER))
        self.route = "unknown"
        self.stage = "accept"
        """Where the request is; when the client leaves, where it left."""
        self.is_quiet = False
        """Probes and scrapes are logged at debug level."""
        self.is_served = False
        """The last byte that means something to the client has been written."""
        self.fate: ApiError | None = None
        """What ended the request while its client did not read, and could not be told."""
        self.is_generation = False
        self.tally: Tally | None = None
        self.end_reason = "ok"
        self.started_at = clock.monotonic()
        self._clock = clock
        self._tokenizer_hash = tokenizer_hash
        self._status = 0
        self._is_stream = False
        self._error: ApiError | None = None
        self._cut: asyncio.TimerHandle | None = None
        trace_id = self.stages.trace.trace_id
        structlog.contextvars.bind_contextvars(request_id=self.request_id, trace_id=trace_id)

    @contextmanager
    def enter(self, stage: str) -> Iterator[None]:
        """Measure a stage, and remember it as the place where the request is."""
        self.stage = stage
        with self.stages(stage):
            yield

    # -- answers ----------------------------------------------------------------------------------

    async def send(
        self, body: bytes, *, content_type: str = JSON_TYPE, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._send(200, body, {"content-type": content_type, **(headers or {})})

    async def send_error(self, error: ApiError) -> None:
        """As a whole answer, or at the end of a stream that had begun: its error event, no `[DONE]`. Any
        other answer that had begun is cut off."""
        self._error = error
        self.end_reason = end_reason_of(error, was_admitted=self.tally is not None)
        if self.responder.started and not self._is_stream:
            self.responder.abort()
            return
        if self.responder.started:
            await self.responder.write(sse.error_event(error) + sse.closing_comment(self.closing()))
            await self.responder.finish()
            return
        headers = {"content-type": JSON_TYPE, "x-should-retry": "true" if error.retryable else "false"}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after_s)))
            headers["retry-after-ms"] = str(round(error.retry_after_s * 1e3))
        if self.tally is not None:
            headers[sse.CLOSING_HEADER] = sse.encode_closing(self.closing()).decode()
        await self._send(int(error.status), error_envelope(error), headers)

    async def start_body(self, headers: Mapping[str, str]) -> None:
        """Begin an answer in JSON that is written in pieces."""
        self._status = 200
        await self.responder.start_stream(200, {**self._headers(), "content-type": JSON_TYPE, **headers})

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        self._status, self._is_stream = 200, True
        streaming = {
            "content-type": sse.CONTENT_TYPE,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self.responder.start_stream(200, {**self._headers(), **streaming, **headers})

    async def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._status = status
        await self.responder.send(status, {**self._headers(), **headers}, body)

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {REQUEST_ID_HEADER: self.request_id}
        if timing := self.stages.server_timing():
            headers["server-timing"] = timing
        if self._tokenizer_hash is not None:
            headers[TOKENIZER_HEADER] = self._tokenizer_hash
        return headers

    # -- the end ----------------------------------------------------------------------------------

    def end_within(self, seconds: float) -> None:
        """Nothing more will come: the client has so long to read what there is."""
        if self._cut is None:
            self._cut = asyncio.get_running_loop().call_later(seconds, self._cut_off)

    def _cut_off(self) -> None:
        self.fate = self.fate or SlowClient("The client did not read the end of its answer.")
        self.responder.abort()

    def client_left(self) -> None:
        if self.is_served:
            return  # with everything it asked for
        if self.fate is not None:
            self._error = self.fate
            self.end_reason = end_reason_of(self.fate, was_admitted=self.tally is not None)
            return
        self.end_reason = "client_gone"
        self._status = STATUS_CLIENT_GONE

    def closing(self) -> sse.Closing:
        tally = self.tally or Tally()
        timing = tally.timing
        return sse.Closing(
            end_reason=self.end_reason,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
            queue_ms=_ms(timing.queue_s),
            prefill_ms=_ms(timing.prefill_s),
            decode_ms=_ms(timing.decode_s),
            preempted_ms=_ms(timing.preempted_s),
            preemptions=timing.preemptions,
            stalled_ms=_ms(timing.stalled_s),
        )

    def complete(self) -> float:
        """Write the completed line, and report what the request has cost. Returns how long it took, in
        seconds."""
        if self._cut is not None:
            self._cut.cancel()
        duration_s = self._clock.monotonic() - self.started_at
        fields: dict[str, object] = {
            "method": self.request.method,
            "route": self.route,
            "status": self._status,
            "end_reason": self.end_reason,
            "duration_ms": _ms(duration_s),
        }
        if self.tenant:
            fields["tenant"] = self.tenant
        if self._error is not None:
            fields |= {"code": self._error.code, "param": self._error.param, "detail": self._error.detail}
        if self.end_reason == "client_gone":
            fields["left_in"] = self.stage
        if (tally := self.tally) is not None:
            fields |= {
                "model": tally.model,
                "streams": tally.streams,
                "n": tally.choices,
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
                "cached_tokens": tally.cached_tokens,
                "preemptions": tally.timing.preemptions,
            }
        write = log.debug if self.is_quiet else log.info
        write("request.completed", **fields, **self.stages.log_fields())
        self.stages.end(route=self.route, status=self._status, end_reason=self.end_reason)
        if self.is_generation:
            self.responder.report(sse.encode_closing(self.closing()))
        for error in (self._error, self.fate):
            forget_frames(error)
        return duration_s


def end_reason_of(error: ApiError, *, was_admitted: bool) -> str:
    match error:
        case RequestAborted():
            return "aborted"
        case SlowClient():
            return "stalled"
        case QueueTimeout() | RequestTimeout():
            return error.code
        case EngineFailed():
            return "engine_failed"
        case InternalError():
            return "internal_error"
        case NotReady() if was_admitted:
            return "drained"
        case _:
            return "refused"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
