"""One request in progress."""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web
from msgspec import Struct, field

from gateway.admission.quota import Decision, ReservationId, Windows
from gateway.config import TimeoutsConfig
from gateway.directory import Directory
from gateway.identity.keys import Principal
from gateway.record import RequestRecord
from gateway.relay.client import Client
from gateway.relay.stream import Progress
from gateway.relay.watch import Watch
from shared.clock import Clock
from shared.ids import IGNORED_FIELDS_HEADER, REQUEST_ID_HEADER, RequestId
from shared.telemetry import Stages

ENGINE_TIMING_LEN_MAX: Final = 1024
_TIMING: Final = re.compile(r"\s*[\w-]+(;[\w-]+=[\w.-]+)*\s*")


class Exchange(Struct, eq=False):
    """What the stages of one request share."""

    request: web.BaseRequest
    path: str
    """As it was sent, without the query."""
    request_id: RequestId
    record: RequestRecord
    """Only written here: nothing that happens depends on it."""
    stages: Stages
    watch: Watch
    client: Client
    directory: Directory
    """Keys and tenants as they were when the request came: a reload does not change it midway."""
    timeouts: TimeoutsConfig
    """Everybody's, until model and tenant are known."""
    clock: Clock
    reservation: ReservationId
    arrived_s: float
    progress: Progress = field(default_factory=Progress)
    principal: Principal | None = None
    is_seated: bool = False
    """Whether its seat was asked for: a lease that is to be renewed."""
    streams: bool = False
    """Whether a stream was asked for."""
    reserved: int = 0
    """Tokens."""
    decision: Decision | None = None
    """The last of the quotas."""
    windows: Windows | None = None
    """How its quotas stand, as far as it was asked."""
    ignored_fields: str = ""
    engine_timing: str = ""
    """The engine's `server-timing`, its names marked as the engine's."""

    def bound_by(self, timeouts: TimeoutsConfig) -> None:
        self.timeouts = timeouts
        self.watch.bound(timeouts.total_s)
        self.client.slow_client_s = timeouts.slow_client_s

    def take_engine_timing(self, value: str) -> None:
        if not value:  # of a stream, whose head comes before there is anything to tell
            return
        entries = value[:ENGINE_TIMING_LEN_MAX].split(",")
        named = (entry.strip() for entry in entries if _TIMING.fullmatch(entry))
        self.engine_timing = ", ".join(f"engine-{entry}" for entry in named)

    def headers(self) -> dict[str, str]:
        """What every answer carries beside its content."""
        timing = self.stages.server_timing()
        headers = {
            REQUEST_ID_HEADER: self.request_id,
            "server-timing": f"{timing}, {self.engine_timing}" if self.engine_timing else timing,
        }
        if self.ignored_fields:
            headers[IGNORED_FIELDS_HEADER] = self.ignored_fields
        if self.windows is not None:
            headers |= ratelimit_headers(self.windows)
        return headers


def ratelimit_headers(windows: Windows) -> dict[str, str]:
    """OpenAI's."""
    headers = {}
    if (window := windows.requests) is not None:
        headers["x-ratelimit-limit-requests"] = str(window.limit)
        headers["x-ratelimit-remaining-requests"] = str(window.remaining)
        headers["x-ratelimit-reset-requests"] = duration(window.reset_ms)
    if (window := windows.tokens) is not None:
        headers["x-ratelimit-limit-tokens"] = str(window.limit)
        headers["x-ratelimit-remaining-tokens"] = str(window.remaining)
        headers["x-ratelimit-reset-tokens"] = duration(window.reset_ms)
    return headers


def duration(ms: int) -> str:
    """As OpenAI writes them: `12ms`, `1.5s`, `6m0s`."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest_ms = divmod(ms, 60_000)
    return f"{minutes}m{rest_ms // 1000}s"
