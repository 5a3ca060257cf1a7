"""How an API's answers look beside their content: the last event of a stream, errors, and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from shared.process.clock import Clock
from shared.wire import sse
from shared.wire.envelope import ErrorEnvelope, error_envelope
from shared.wire.errors import ApiError, status_of


def duration(ms: int, _clock: Clock | None = None) -> str:
    """A duration as OpenAI writes it: `12ms`, `1.5s`, `6m0s`, `30h0m0s`."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest_ms // 1000}s" if hours else f"{minutes}m{rest_ms // 1000}s"


class LimitHeaders(Struct, frozen=True):
    """The headers that tell a caller's limits: for each the names of the limit, of what is left of it, and of
    when it is whole again."""

    requests: tuple[str, str, str]
    tokens: tuple[str, str, str]
    day: tuple[str, str, str]
    month: tuple[str, str, str]
    reset: Callable[[int, Clock], str] = duration
    """Writes when that is, from milliseconds from now on."""

    @property
    def names(self) -> tuple[str, ...]:
        return *self.requests, *self.tokens, *self.day, *self.month


class Dialect(Struct, frozen=True):
    done: bytes
    """The last event of a whole answer."""
    limits: LimitHeaders
    described: str
    """The events, in words for the API's description."""
    scanner: Callable[[bytes], sse.TailScanner] = sse.TailScanner
    """Makes the scanner of an answer of our engines, from `done`. It tells whether the answer is whole."""

    silent: tuple[bytes, ...] = ()
    """The beginnings of events that tell nothing of the answer: those that open a stream before its first
    token, and keep-alives. Empty where all events but comments tell of it."""

    ends: tuple[str, ...] = ()
    """The names of the events of which one is the last of a whole answer, at engines of other makes. Empty
    where it is `done`."""
    folds_cached: bool = False
    """True if usage tells the part of a prompt that was not cached, in place of all of it."""
    id_header: str = ""
    """The header in which an answer has the request's id once more. Empty for none."""
    envelope: type[Struct] = ErrorEnvelope
    """The shape of an error's body."""

    def error_status(self, kind: type[ApiError]) -> int:
        """The status of an answer with an error of a class."""
        return status_of(kind)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_envelope(error)

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        """The event that ends a stream which fails after its first byte."""
        return sse.error_event(error, request_id)

    def failing(self, error: ApiError, request_id: str, _events: int) -> bytes:
        """What ends a stream that fails behind so many events that told of the answer."""
        return self.error_event(error, request_id)

    def told(self, events: bytes) -> list[bytes]:
        """Of whole events those that tell of the answer."""
        silent = b":", *self.silent
        return [one for one in events.split(b"\n\n") if one and not one.startswith(silent)]


def _names(of: str) -> tuple[str, str, str]:
    return f"x-ratelimit-limit-{of}", f"x-ratelimit-remaining-{of}", f"x-ratelimit-reset-{of}"


CHUNKS: Final = Dialect(
    done=sse.DONE,
    described="With `stream`. Each event is a line `data: ` with JSON (see x-event-schema) and an empty line."
    " The last one is `data: [DONE]`; after an error it is `data: ` with an ErrorEnvelope, and no [DONE]"
    " follows.",
    limits=LimitHeaders(_names("requests"), _names("tokens"), _names("tokens-day"), _names("tokens-month")),
)
"""OpenAI's dialect of chat and completions, and of whatever belongs to no API."""
