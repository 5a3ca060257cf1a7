"""Calls of `quota.lua` as Redis reads them.

Those of one caller's requests differ in their last words alone, a name and a few numbers. What is before them
is put together once: to pack each call word by word took most of its time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.admission.redis_link import Word, packed
from gateway.admission.usage import Used

SCRIPT: Final = (Path(__file__).parent / "quota.lua").read_text()
SCRIPT_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Its name among the scripts that a server has cached."""
_NAME: Final = b"$%d\r\n%b\r\n"
_NUMBER: Final = b"$16\r\n%016d\r\n"
"""As long as the script's largest numbers are, so that the length need not be found out."""
_FIRST: Final = _NAME + 2 * _NUMBER
"""The reservation, now_ms, not_after_ms."""
_ENTER: Final = _FIRST + _NUMBER
_RESERVE: Final = _FIRST + 2 * _NUMBER
_SETTLE: Final = _FIRST + 4 * _NUMBER


def part(*words: Word) -> bytes:
    """Words of a command, without their number."""
    return packed(words).partition(b"\r\n")[2]


def in_full(command: bytes) -> bytes:
    """The same call, for a server that does not know the script by its name."""
    return command.replace(part("EVALSHA", SCRIPT_SHA), part("EVAL", SCRIPT), 1)


def call(keys: Sequence[str], operation: str, settings: bytes, now_ms: int, *words: Word) -> bytes:
    """A call that concerns no single reservation, at any time."""
    first: tuple[Word, ...] = "EVALSHA", SCRIPT_SHA, len(keys), *keys, operation, settings
    return packed((*first, "", now_ms, 0, *words))


class Calls(Struct, frozen=True):
    """The calls for the same subjects: what each begins with."""

    enters: bytes
    reserves: bytes
    settles: bytes

    @classmethod
    def of(cls, keys: Sequence[str], settings: bytes) -> Calls:
        """`settings`: with the limits of the subjects, as the script wants them."""

        def opening(operation: str, words: int) -> bytes:
            first = part("EVALSHA", SCRIPT_SHA, len(keys), *keys, operation, settings)
            return b"*%d\r\n%b" % (5 + len(keys) + 3 + words, first)

        return cls(opening("enter", 1), opening("reserve", 4), opening("settle", 4))

    def enter(self, reservation: str, now_ms: int, not_after_ms: int, least: int) -> bytes:
        name = reservation.encode()
        return self.enters + _ENTER % (len(name), name, now_ms, not_after_ms, least)

    def reserve(
        self, reservation: str, now_ms: int, not_after_ms: int, least: int, most: int, row: bytes
    ) -> bytes:
        """`row`: the words USAGE and ROW."""
        name = reservation.encode()
        return self.reserves + _RESERVE % (len(name), name, now_ms, not_after_ms, least, most) + row

    def settle(self, reservation: str, now_ms: int, used: Used, *, is_counted: bool) -> bytes:
        name, prompt = reservation.encode(), used.prompt if is_counted else -1
        tokens = used.tokens, prompt, used.cached, used.completion
        return self.settles + _SETTLE % (len(name), name, now_ms, 0, *tokens)
