"""The answers of a gateway's admin API about single requests: `GET /admin/v1/requests` and the record of one.

They hold no text of prompts or answers.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from shared.trace.axis import Axis, Visit
from shared.wire.completed_line import GatewayLine
from shared.wire.silence import Silent


class RequestSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request in one row. What is not known yet is left out."""

    request_id: str
    is_live: bool
    number: int = 0
    """Orders completed requests by their ends, those of several workers, too: microseconds since 1970, each
    once in a worker. 0 for a live one."""
    began_at: datetime
    total_ms: float
    """Until its end, or until now."""
    stage: str
    """The stage in which it ended, or is."""
    method: str
    endpoint: str
    stream: bool = False
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    session: str | None = None
    status: int | None = None
    end_reason: str | None = None
    error_code: str | None = None
    replica: str | None = None
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    events: int = 0
    """Events that were passed on to the client: about the tokens that it was sent."""
    first_byte_ms: float | None = None
    gateway: str | None = None
    """The other gateway that has it. None: the one that was asked."""
    worker: int | None = None
    """The gateway's worker that has it, where there are several."""


class RequestPage(Silent, frozen=True):
    """Requests, the newest first: the live ones, then the completed ones."""

    data: tuple[RequestSummary, ...]
    before: int | None = None
    """Ask again with this `before` for older ones. None: there are none."""


class Tick(Struct, frozen=True, array_like=True):
    """A moment at which events of a stream were passed on to the client."""

    at_ms: float
    """Milliseconds from the request's headers."""
    events: int
    """The events that were passed on by then."""


class RequestRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a gateway knows of one request."""

    summary: RequestSummary
    line: GatewayLine | None = None
    """Its completed line. None while it is live."""
    visits: tuple[Visit, ...] = ()
    """The gateway's stages, each visit by itself."""
    axis: Axis
    """The stages of both services."""
    causes: tuple[str, ...] = ()
    """The causes of its waits, in words."""
    ticks: tuple[Tick, ...] = ()
    """The times at which a stream's events were passed on, evenly thinned out for a long one."""
    gateway: str | None = None
    """The other gateway that has it. None: the one that was asked."""
    worker: int | None = None
    """The gateway's worker that has it, where there are several."""


class RequestRecords(Silent, frozen=True):
    """The requests of one id, the newest first: callers choose the ids."""

    data: tuple[RequestRecord, ...]
