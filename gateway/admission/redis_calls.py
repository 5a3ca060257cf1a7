"""Calls of `quota.lua` as Redis reads them.

Those of one caller's requests differ in their last words alone, a name and a few numbers. What is before them
is put together once: to pack each call word by word took most of its time.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.admission.usage import Used
from gateway.redis.link import Word, packed

SCRIPT: Final = (Path(__file__).parent / "quota.lua").read_text()
SCRIPT_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Its name among the scripts that a server has cached."""
_TIMES: Final = struct.Struct(">2d")
"""Numbers as the script wants them. In a command their length, in bytes, is before them."""
_ENTER: Final = struct.Struct(">3d")
_RESERVE: Final = struct.Struct(">5d")
_SETTLE: Final = struct.Struct(">6d")


def part(*words: Word) -> bytes:
    """Words of a command, without their number."""
    return packed(words).partition(b"\r\n")[2]


def in_full(command: bytes) -> bytes:
    """The same call, for a server that does not know the script by its name."""
    return command.replace(part("EVALSHA", SCRIPT_SHA), part("EVAL", SCRIPT), 1)


def call(
    keys: Sequence[str],
    operation: str,
    settings: bytes,
    now_ms: float,
    *words: Word,
    not_after_ms: float = 0,
) -> bytes:
    """A call that concerns no single reservation. A `not_after_ms` of 0: at any time."""
    first: tuple[Word, ...] = "EVALSHA", SCRIPT_SHA, len(keys), *keys, operation, settings
    return packed((*first, "", times(now_ms, not_after_ms), *words))


def times(now_ms: float, not_after_ms: float = 0) -> bytes:
    """The numbers of a call that has no others."""
    return _TIMES.pack(now_ms, not_after_ms)


class Calls(Struct, frozen=True):
    """The calls for the same subjects: what each begins with. A now_ms of 0 is the server's time."""

    enters: bytes
    reserves: bytes
    settles: bytes

    @classmethod
    def of(cls, keys: Sequence[str], settings: bytes) -> Calls:
        """`settings`: with the limits of the subjects, as the script wants them."""

        def opening(operation: str, words: int) -> bytes:
            first = part("EVALSHA", SCRIPT_SHA, len(keys), *keys, operation, settings)
            return b"*%d\r\n%b" % (7 + len(keys) + words, first)

        return cls(opening("enter", 0), opening("reserve", 2), opening("settle", 0))

    def enter(self, reservation: str, now_ms: float, not_after_ms: float, least: int) -> bytes:
        name, numbers = reservation.encode(), _ENTER.pack(now_ms, not_after_ms, least)
        return b"%b$%d\r\n%b\r\n$24\r\n%b\r\n" % (self.enters, len(name), name, numbers)

    def reserve(
        self,
        reservation: str,
        now_ms: float,
        not_after_ms: float,
        least: int,
        most: int,
        wanted: int,
        row: bytes,
    ) -> bytes:
        """`row`: the words USAGE and ROW."""
        name, numbers = reservation.encode(), _RESERVE.pack(now_ms, not_after_ms, least, most, wanted)
        return b"%b$%d\r\n%b\r\n$40\r\n%b\r\n%b" % (self.reserves, len(name), name, numbers, row)

    def settle(self, reservation: str, now_ms: float, used: Used, *, is_counted: bool) -> bytes:
        name, prompt = reservation.encode(), used.prompt if is_counted else -1
        numbers = _SETTLE.pack(now_ms, 0, used.tokens, prompt, used.cached, used.completion)
        return b"%b$%d\r\n%b\r\n$48\r\n%b\r\n" % (self.settles, len(name), name, numbers)
