"""Answers of engines that are not ours: vLLM, SGLang, anything that speaks OpenAI's API.

They have no closing comment. They are asked for usage (`stream_options.include_usage`), which is looked for
in the last events before `[DONE]`, or in a unary answer's body; a client that did not ask for it does not see
it. Their streams may end lines with CRLF, which is read as LF, so that the relay knows one kind of boundary.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from typing import Final

import msgspec

from shared.sse import DONE, Closing

TAIL_LEN: Final = 4096
"""How far from a stream's end its usage is looked for: an event with it takes a few hundred bytes."""

_BOUNDARY: Final = b"\n\n"
_DATA: Final = b"data:"
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\]')


class Source(typing.Protocol):
    """What an answer is read from."""

    async def read(self) -> bytes: ...

    async def pass_on(self, accept: Callable[[bytes], bool]) -> bool: ...


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_decode_body: Final = msgspec.json.Decoder(_Body).decode


def usage_of(body: bytes) -> Closing | None:
    """What a unary answer, or one event of a stream, says about usage."""
    try:
        usage = _decode_body(body).usage
    except msgspec.DecodeError:
        return None
    if usage is None or min(usage.prompt_tokens, usage.completion_tokens) < 0:
        return None
    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    return Closing(
        end_reason="",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=cached or 0,
    )


class ForeignStream:
    """An event stream's bytes as the relay wants them, the last of them remembered."""

    __slots__ = ("_done", "_held", "_hides_usage", "_partial", "_source", "_tail")

    def __init__(self, source: Source, done: bytes = DONE, *, hides_usage: bool = False) -> None:
        """`done`: the last event of a whole answer. `hides_usage`: the gateway asked for usage and the client
        did not, so it is not shown the event with it."""
        self._done = done
        self._source = source
        self._hides_usage = hides_usage
        self._held = b""
        """A CR at the end of what was read: LF may follow."""
        self._partial = b""
        """The beginning of an event that may be the one to hide."""
        self._tail = b""

    async def read(self) -> bytes:
        """At least one byte; none at the end."""
        while chunk := await self._source.read():
            if data := self._taken(chunk):
                return data
        return self._rest()

    async def pass_on(self, accept: Callable[[bytes], bool]) -> bool:
        """Hand all bytes to `accept` as they come; returns as `Source.pass_on` does."""

        def take(chunk: bytes) -> bool:
            data = self._taken(chunk)
            return not data or accept(data)

        if await self._source.pass_on(take):
            return True
        rest = self._rest()
        return bool(rest) and not accept(rest)

    @property
    def usage(self) -> Closing | None:
        """What the last event that has a usage says; None until the answer is whole."""
        if not self._tail.endswith(self._done):
            return None
        events = reversed(self._tail.split(_BOUNDARY))
        found = (usage_of(event.removeprefix(_DATA)) for event in events if b'"usage"' in event)
        return next((usage for usage in found if usage is not None), None)

    def _taken(self, chunk: bytes) -> bytes:
        if b"\r" not in chunk and not self._held:
            data = chunk
        else:
            data = self._held + chunk
            self._held = b"\r" if data.endswith(b"\r") else b""
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n")
        self._tail = (self._tail + data)[-TAIL_LEN:]
        return self._shown(data) if self._hides_usage else data

    def _rest(self) -> bytes:
        """What is left at the end of the source."""
        rest, self._held = self._held, b""
        self._tail = (self._tail + rest)[-TAIL_LEN:]
        shown, self._partial = self._partial + rest, b""
        return shown

    def _shown(self, data: bytes) -> bytes:
        """Whole events, but the one to hide; what is too long for that one at once."""
        data = self._partial + data
        end = data.rfind(_BOUNDARY) + len(_BOUNDARY) if _BOUNDARY in data else 0
        if len(data) - end > TAIL_LEN:
            end = len(data)
        whole, self._partial = data[:end], data[end:]
        if _NO_CHOICES.search(whole) is None:
            return whole
        events = whole.split(_BOUNDARY)
        return _BOUNDARY.join(event for event in events if not _tells_usage_alone(event))


def _tells_usage_alone(event: bytes) -> bool:
    data = event.removeprefix(_DATA)
    return _NO_CHOICES.search(data) is not None and usage_of(data) is not None
