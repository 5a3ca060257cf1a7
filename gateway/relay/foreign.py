"""Answers of engines that are not ours: vLLM, SGLang, anything that speaks OpenAI's API.

They have no closing comment. What they say about usage is looked for in the last events before
`[DONE]`, or in a unary answer's body; and their streams may end lines with CRLF, which is read as LF,
so that the relay knows one kind of boundary.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Final

import msgspec

from shared.sse import DONE, Closing

TAIL_LEN: Final = 4096
"""How far from a stream's end its usage is looked for: an event with it takes a few hundred bytes."""

_BOUNDARY: Final = b"\n\n"
_DATA: Final = b"data:"


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

    __slots__ = ("_held", "_source", "_tail")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._held = b""
        """A CR at the end of what was read: LF may follow."""
        self._tail = b""

    async def read(self) -> bytes:
        """At least one byte; none at the end."""
        while chunk := await self._source.read():
            if data := self._with_lf(chunk):
                return self._remembered(data)
        data, self._held = self._held, b""
        return self._remembered(data)

    async def pass_on(self, accept: Callable[[bytes], bool]) -> bool:
        """As an answer's."""

        def take(chunk: bytes) -> bool:
            data = self._with_lf(chunk)
            return not data or accept(self._remembered(data))

        if await self._source.pass_on(take):
            return True
        rest, self._held = self._held, b""
        return bool(rest) and not accept(self._remembered(rest))

    @property
    def usage(self) -> Closing | None:
        """Once `[DONE]` was read: what the last event that has it says."""
        if not self._tail.endswith(DONE):
            return None
        events = reversed(self._tail.split(_BOUNDARY))
        found = (usage_of(event.removeprefix(_DATA)) for event in events if b'"usage"' in event)
        return next((usage for usage in found if usage is not None), None)

    def _with_lf(self, chunk: bytes) -> bytes:
        if b"\r" not in chunk and not self._held:
            return chunk
        data = self._held + chunk
        self._held = b"\r" if data.endswith(b"\r") else b""
        return data.removesuffix(b"\r").replace(b"\r\n", b"\n")

    def _remembered(self, data: bytes) -> bytes:
        self._tail = (self._tail + data)[-TAIL_LEN:]
        return data
