"""One request, from its head to its completed line, whatever its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from engine.api.answer.table import AnswerApi, api_at
from engine.api.told.attribution import milliseconds
from shared.process import logs
from shared.process.clock import Clock
from shared.process.metrics import Exemplar
from shared.telemetry.stages import Stages
from shared.telemetry.tracing import NO_TRACING, Tracing, has_failed
from shared.wire import sse
from shared.wire.causes import Cause, CauseCode, most_telling
from shared.wire.completed_line import EVENT, UNPARSED
from shared.wire.end_reason import EndReason, end_reason_of
from shared.wire.errors import (
    STATUS_CLIENT_GONE,
    ApiError,
    InvalidRequest,
    NotReady,
    SlowClient,
    error_headers,
    forget_frames,
)
from shared.wire.http import HttpRequest, Responder
from shared.wire.ids import (
    IGNORED_FIELDS_HEADER,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    TOKENIZER_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    RequestId,
    accept_request_id,
    is_id,
    mint_request_id,
)
from shared.wire.load_report import LOAD_HEADER, LoadReport, encode_load

JSON_TYPE: Final = "application/json"
_TOLD_STAGES: Final = ("edge", "body", "validate", "tokenize", "grammar", "handover")
"""The stages that a closing tells, beside the core's."""
SLOW_S: Final = 0.05
"""The time from which on a stage of `_SLOW_STAGES` is a cause to be told, in seconds."""
_SLOW_STAGES: Final = {"tokenize": CauseCode.TOKENIZER, "grammar": CauseCode.GRAMMAR}
WRITE_LEN: Final = 64 * 1024
"""The number of bytes of an answer that are made before they are written and other requests may run, and that
a client must read within its deadline."""
METHOD_LEN_MAX: Final = 16
"""The most characters of a method that are logged."""


@dataclass(frozen=True, slots=True)
class House:
    """The report that is on every answer, and the clock of it."""

    tokenizer_hash: str | None
    """The hash of its tokenizer. None before it is known."""
    load: Callable[[], LoadReport]
    clock: Clock
    tracing: Tracing = NO_TRACING


class EngineExchange:
    """A request, its responder, and what its completed line will say."""

    id_header = ""
    """The header in which its answer has its id once more. Empty for none, and until its API is known."""
    is_quiet = False
    """True if the completed line is logged at level debug, as those of probes and scrapes are."""
    sequences = 0
    """Those of the generation."""
    has_grammar = False
    """True if they follow a grammar."""

    def __init__(self, request: HttpRequest, responder: Responder, house: House) -> None:
        self.request = request
        self.responder = responder
        self.request_id = accept_request_id(request.headers.get(REQUEST_ID_HEADER))
        self.tenant = request.headers.get(TENANT_HEADER, "")
        """The tenant that the gateway names; empty where no gateway does."""
        self.stages = Stages(
            "engine",
            house.clock,
            traceparent=request.headers.get(TRACEPARENT_HEADER),
            tracestate=request.headers.get(TRACESTATE_HEADER),
            samples=house.tracing.samples,
        )
        self.endpoint = "unknown"
        """The route, once it is found."""
        self.stage = "edge"
        """The stage that the request is in; in the end, the one in which it ended."""
        self.model: str | None = None
        """The model that was asked for. None until the body was read."""
        self.streams = False
        """True if a stream was asked for. False until the body was read."""
        self.ignored_fields = ""
        """The names of the request's unknown fields, for a header. Empty until the body was read."""
        self.is_served = False
        """True if the last byte that means something to the client has been written."""
        self.fate: ApiError | None = None
        """The error that ended the request while its client did not read, and so could not be told."""
        self.is_generation = False
        self.tally: sse.Closing | None = None
        """The core's costs of it, for the closing report and the log. None until its sequences
        are in the core's queue."""
        self.end_reason = EndReason.OK
        self.causes: list[Cause] = []
        """The causes of the request's waits."""
        self.started_at = self.stages.enter("edge")
        """When the request's headers were read, in seconds on `clock`."""
        self._house = house
        self._status = 0
        self._is_event_stream = False
        self.failing: Callable[[ApiError, str], bytes] | None = None
        """Makes the event that ends its stream if it fails, from the error and the request's id. None where
        that is its API's."""
        self.first_byte_at: float | None = None
        """When the first byte was written that tells of the answer, in seconds on `clock`. None before."""
        self._error: ApiError | None = None
        self._cut: asyncio.TimerHandle | None = None
        self._cut_after_s = 0.0
        trace_id = self.stages.trace.trace_id
        structlog.contextvars.bind_contextvars(request_id=self.request_id, trace_id=trace_id)

    def check_tenant(self) -> None:
        """Refuse a name that no tenant has. It is forgotten, and so not logged. Raises InvalidRequest."""
        if self.tenant and not is_id(self.tenant):
            self.tenant = ""
            message = f"{TENANT_HEADER} must be 1 to 64 letters, digits, dots, dashes or underscores."
            raise InvalidRequest(message, param=TENANT_HEADER)

    @contextmanager
    def enter(self, stage: str) -> Iterator[None]:
        """Measure a stage, and make it the one that the request is in. Between stages is the stage `edge`."""
        self.stage = stage
        began_at = self.stages.enter(stage)
        try:
            yield
        finally:
            seconds = self.stages.enter("edge") - began_at
            if seconds >= SLOW_S and (code := _SLOW_STAGES.get(stage)) is not None:
                self.causes.append(Cause(code=code, ms=milliseconds(seconds)))

    # -- answers ----------------------------------------------------------------------------------

    def speak(self) -> AnswerApi:
        """The API of its path, as which it is answered from now on."""
        api = api_at(self.request.path, self.request.headers)
        self.id_header = api.id_header
        return api

    def answers(self) -> None:
        """Note that the first of the answer's body is about to be written. Later calls do nothing."""
        if self.first_byte_at is None:
            self.first_byte_at = self._house.clock.monotonic()

    async def send(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = JSON_TYPE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer."""
        await self._send(status, body, {"content-type": content_type, **(headers or {})})

    async def send_error(self, error: ApiError) -> None:
        """Answer with an error, as the API of the path has it. Before the answer has begun it is the whole
        answer; a stream that has begun ends with an error event, and nothing behind it; any other answer that
        has begun is cut off."""
        self._ended_by(error)
        api = self.speak()
        if self.responder.started and not self._is_event_stream:
            self.responder.abort()
            return
        if self.responder.started:
            event = (self.failing or api.error_event)(error, self.request_id)
            await self.responder.write(event + self.closing_comment())
            await self.responder.finish()
            return
        headers = {"content-type": JSON_TYPE, **error_headers(error)}
        if self.tally is not None:
            headers[sse.CLOSING_HEADER] = sse.encode_closing(self.closing()).decode()
        await self._send(api.error_status(type(error)), api.error_body(error, self.request_id), headers)

    async def start_body(self, headers: Mapping[str, str]) -> None:
        """Begin an answer in JSON whose body is written in pieces."""
        self._status = 200
        await self.responder.start_stream(200, {**self._headers(), "content-type": JSON_TYPE, **headers})

    async def write(self, data: bytes) -> None:
        """Write a part of an answer that has begun, in steps: a client that reads gets on with each, however
        long the whole takes it."""
        for at in range(0, max(1, len(data)), WRITE_LEN):
            await self.responder.write(data[at : at + WRITE_LEN])
            if self._cut is not None and self.fate is None:
                self._cut.cancel()
                self._cut = self._cut_later()

    async def start_stream(self) -> None:
        self._status, self._is_event_stream = 200, True
        streaming = {
            "content-type": sse.CONTENT_TYPE,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self.responder.start_stream(200, {**self._headers(), **streaming})

    async def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._status = status
        await self.responder.send(status, {**self._headers(), **headers}, body)

    def _headers(self) -> dict[str, str]:
        load = encode_load(self._house.load()).decode()
        headers: dict[str, str] = {REQUEST_ID_HEADER: self.request_id, LOAD_HEADER: load}
        if timing := self.stages.server_timing():
            headers["server-timing"] = timing
        if (own := self._house.tokenizer_hash) is not None:
            headers[TOKENIZER_HEADER] = own
        if self.ignored_fields:
            headers[IGNORED_FIELDS_HEADER] = self.ignored_fields
        if self.id_header:
            headers[self.id_header] = self.request_id
        return headers

    def tell_load(self) -> None:
        """Tell the gateway that the load it is told of has this request in it. The headers of a stream say
        so, those of a whole answer come too late."""
        self.responder.tell_load(encode_load(self._house.load()))

    # -- the end ----------------------------------------------------------------------------------

    def end_within(self, seconds: float) -> None:
        """From now on cut the client off where it reads nothing of the rest of its answer for `seconds`. Only
        the first call counts."""
        if self._cut is None:
            self._cut_after_s = seconds
            self._cut = self._cut_later()

    def _cut_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._cut_after_s, self._cut_off)

    def _cut_off(self) -> None:
        self.fate = self.fate or SlowClient("The client did not read the end of its answer.")
        self.responder.abort()

    def client_left(self) -> None:
        if self.is_served:
            return  # the client has its whole answer
        if self.fate is not None:
            self._ended_by(self.fate)
            return
        self.end_reason = EndReason.CLIENT_CANCEL
        self._status = STATUS_CLIENT_GONE

    def _ended_by(self, error: ApiError) -> None:
        self._error = error
        is_drained = type(error) is NotReady and self.tally is not None
        self.end_reason = EndReason.DRAIN if is_drained else end_reason_of(error)

    def closing_comment(self) -> bytes:
        """The last bytes of a stream: what it has cost, and the load without it."""
        return sse.closing_comment(self.closing(), self._house.load())

    def closing(self) -> sse.Closing:
        edge, body, validate, tokenize, grammar, handover = self.stages.milliseconds(_TOLD_STAGES)
        return msgspec.structs.replace(
            self.tally or sse.Closing(end_reason=""),
            end_reason=self.end_reason,
            edge_ms=edge or 0.0,
            body_ms=body or 0.0,
            validate_ms=validate or 0.0,
            tokenize_ms=tokenize or 0.0,
            grammar_ms=grammar or 0.0,
            handover_ms=handover or 0.0,
            first_byte_ms=milliseconds((self.first_byte_at or self.started_at) - self.started_at),
            causes=most_telling(self.causes),
        )

    def complete(self) -> float:
        """Write the completed line, and report to the gateway what the request has cost. Returns how
        long it took, in seconds."""
        if self._cut is not None:
            self._cut.cancel()
        total_s = self.stages.enter(self.stages.now) - self.started_at
        level = "debug" if self.is_quiet else "info"
        line = {**self._line(total_s), **self.stages.log_fields()}
        logs.write(EVENT, line, level)
        self.stages.end(self.exemplar(total_s))
        if not self.is_quiet:
            self._house.tracing.ended(
                self.stages, self.started_at, total_s, failed=self._has_failed, line=lambda: line
            )
        if self.is_generation:
            self.responder.report(sse.encode_closing(self.closing()))
        for error in (self._error, self.fate):
            forget_frames(error)
        return total_s

    @property
    def _has_failed(self) -> bool:
        return has_failed(self._status, self._error is not None)

    def exemplar(self, seconds: float) -> Exemplar | None:
        """The request as an exemplar of metrics, after it has taken so long. None where its trace is not
        kept."""
        return self._house.tracing.exemplar(self.stages, self.request_id, seconds, failed=self._has_failed)

    def _line(self, total_s: float) -> dict[str, object]:
        """The fields of a `shared.wire.completed_line.EngineLine`, without the stages' times."""
        fields: dict[str, object] = {
            **_identity(self.request_id, self.stages),
            "method": self.request.method[:METHOD_LEN_MAX],
            "endpoint": self.endpoint,
            "status": self._status,
            "end_reason": str(self.end_reason),
            "stage": self.stage,
            "stream": self.streams,
            "total_ms": milliseconds(total_s),
            "tenant": self.tenant or None,
            "model": self.model,
        }
        if self._error is not None:
            fields |= _told(self._error)
        if (tally := self.tally) is not None:
            accepted, rejected = tally.accepted_prediction_tokens, tally.rejected_prediction_tokens
            was_tried = bool(accepted or rejected)
            fields |= {
                "sequences": self.sequences,
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
                "cached_tokens": tally.cached_tokens,
                "host_tokens": tally.host_tokens,
                "disk_tokens": tally.disk_tokens,
                "reasoning_tokens": tally.reasoning_tokens,
                "calls": tally.calls,
                "drafted_tokens": tally.drafted_tokens or None,
                "accepted_tokens": tally.accepted_tokens if tally.drafted_tokens else None,
                "accepted_prediction_tokens": accepted if was_tried else None,
                "rejected_prediction_tokens": rejected if was_tried else None,
                "masks_ms": tally.masks_ms if self.has_grammar else None,
                "preemptions": tally.preemptions,
                "swaps": tally.swaps,
            }
        if self.causes:
            fields["causes"] = [msgspec.to_builtins(cause) for cause in most_telling(self.causes)]
        return _known(fields)


def log_unparsed(error: ApiError, clock: Clock) -> RequestId:
    """Write the completed line of what is not well-formed HTTP, and so never became an `EngineExchange`.
    Returns the id that the line and the answer have."""
    request_id, stages = mint_request_id(), Stages("engine", clock)
    fields: dict[str, object] = {
        **_identity(request_id, stages),
        "method": "",
        "endpoint": UNPARSED,
        "status": int(error.status),
        "end_reason": str(end_reason_of(error)),
        "stage": "parse",
        "stream": False,
        "total_ms": 0.0,
        **_told(error),
    }
    logs.write(EVENT, _known(fields))
    stages.end()
    return request_id


def _identity(request_id: RequestId, stages: Stages) -> dict[str, object]:
    return {
        "logger": __name__,
        "request_id": request_id,
        "trace_id": stages.trace.trace_id,
        "span_id": stages.trace.span_id,
        "parent_span_id": stages.parent_span_id,
    }


def _told(error: ApiError) -> dict[str, object]:
    return {"error_code": error.code, "error_param": error.param, "error_detail": error.detail}


def _known(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields that have a value: the others are left out of the line."""
    return {name: value for name, value in fields.items() if value is not None}
