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
"""The number of bytes at a stream's end in which its usage is looked for. An event with it takes a few
hundred."""

_BOUNDARY: Final = b"\n\n"
_DATA: Final = b"data:"
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\]')


class Source(typing.Protocol):
    """A stream of an answer's bytes."""

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
    """The usage in a unary answer, or in one event of a stream. None without one."""
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
    """The event stream of an engine of another make, as the relay wants it: lines end with LF, and the last
    bytes are kept for the usage."""

    __slots__ = ("_done", "_held", "_hides_usage", "_partial", "_source", "_tail")

    def __init__(self, source: Source, done: bytes = DONE, *, hides_usage: bool = False) -> None:
        """`done` is the last event of a whole answer. `hides_usage`: the gateway asked for usage and the
        client did not, so the event with it is not passed on."""
        self._done = done
        self._source = source
        self._hides_usage = hides_usage
        self._held = b""
        """A CR at the end of what was read, which an LF may follow; else empty."""
        self._partial = b""
        """The beginning of an event that may be the one to hide."""
        self._tail = b""

    async def read(self) -> bytes:
        """The next bytes, at least one; empty at the end."""
        while chunk := await self._source.read():
            if data := self._taken(chunk):
                return data
        return self._rest()

    async def pass_on(self, accept: Callable[[bytes], bool]) -> bool:
        """Call `accept` with all bytes as they come. Returns as `Source.pass_on` does."""

        def take(chunk: bytes) -> bool:
            data = self._taken(chunk)
            return not data or accept(data)

        if await self._source.pass_on(take):
            return True
        rest = self._rest()
        return bool(rest) and not accept(rest)

    @property
    def usage(self) -> Closing | None:
        """The last usage in the tail. None until the answer is whole, and where it has none."""
        if not self._tail.endswith(self._done):
            return None
        events = reversed(self._tail.split(_BOUNDARY))
        found = (usage_of(event.removeprefix(_DATA)) for event in events if b'"usage"' in event)
        return next((usage for usage in found if usage is not None), None)

    def _taken(self, chunk: bytes) -> bytes:
        if not self._held and b"\r" not in chunk:
            data = chunk
        else:
            data = self._held + chunk
            self._held = b"\r" if data.endswith(b"\r") else b""
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n")
        self._tail = (self._tail + data)[-TAIL_LEN:]
        return self._shown(data) if self._hides_usage else data

    def _rest(self) -> bytes:
        """The bytes that are still held at the end of the source."""
        rest, self._held = self._held, b""
        self._tail = (self._tail + rest)[-TAIL_LEN:]
        shown, self._partial = self._partial + rest, b""
        return shown

    def _shown(self, data: bytes) -> bytes:
        """The whole events in `data`, without the one to hide. What is too long to be that one is passed on
        unfinished."""
        if not self._partial and data.endswith(_BOUNDARY) and b"[]" not in data:  # as nearly always
            return data
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
