"""The reading of a chat's answer: its text, and when its pieces came. No I/O."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from shared.wire.undecodable import UNDECODABLE

TEXT_LEN_MAX: Final = 256 * 1024
"""Characters of an answer that are kept."""
TICKS_MAX: Final = 8192
"""Pieces whose times are kept."""
LINE_LEN_MAX: Final = 256 * 1024
"""Bytes of a line that is read."""
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Error(Struct):
    message: str = "It says nothing more."


class _Event(Struct):
    """The fields of an event that are read; those of a refusal, too."""

    choices: list[_Choice] = []
    error: _Error | None = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class ChatReading:
    """An answer as far as it has come."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.text_len = 0
        self.ticks_ms: list[float] = []
        self.problem: str | None = "The answer broke off."
        """Why the answer is not whole. None once its end has come."""

    def take(self, line: bytes, at_ms: float) -> None:
        """Take one line of the stream."""
        if not line.startswith(_DATA):
            return
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            self.problem = None
            return
        try:
            event = _decode(data)
        except UNDECODABLE:
            return
        if event.error is not None:
            self.problem = event.error.message
        text = "".join(choice.delta.content or "" for choice in event.choices)
        if text:
            self._pieces.append(text)
            self.text_len += len(text)
            if len(self.ticks_ms) < TICKS_MAX:
                self.ticks_ms.append(round(at_ms, 3))

    def text_after(self, known_len: int) -> str:
        """The text after so many characters."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0][known_len:] if self._pieces else ""


def error_text(body: bytes) -> str:
    """The message in a refusal."""
    try:
        error = _decode(body).error
    except UNDECODABLE:
        error = None
    return "It was refused." if error is None else error.message
