"""The times in which a client was behind in reading its answer.

A client that reads slowly holds up every write, thousands of times. Times that follow each other within
`JOINED_S` are one, and there are at most `BLOCKED_SHOWN_MAX`: what comes later counts to the last.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from shared.wire.completed_line import BLOCKED_SHOWN_MAX

JOINED_S: Final = 0.5


class BlockedSpan(Struct, eq=False):
    """One such time, on the monotonic clock, in seconds."""

    began_s: float
    ended_s: float
    waited_s: float
    """All that was waited in it."""


def note_blocked(blocked: list[BlockedSpan], began_s: float, ended_s: float) -> None:
    """Note that nothing could be written from one moment to another."""
    last = blocked[-1] if blocked else None
    if last is None or (began_s - last.ended_s > JOINED_S and len(blocked) < BLOCKED_SHOWN_MAX):
        blocked.append(BlockedSpan(began_s, ended_s, ended_s - began_s))
    else:
        last.ended_s, last.waited_s = ended_s, last.waited_s + ended_s - began_s
