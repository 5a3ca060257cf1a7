"""The limits of the hop, and the relations between them.

Buffered bytes: a stream holds at most STREAM_WINDOW_LEN unread bytes, because its window is credited
only when its bytes are consumed; a connection therefore holds at most STREAMS_MAX x STREAM_WINDOW_LEN.
The connection window is credited on arrival and bounds only what is on its way.

Floods: frames that cause work though they carry no message are paid for from token buckets. Each bucket is
far above what a well-behaved peer needs and far below what hurts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shared.http2.connection_errors import ErrorCode, ProtocolViolation

KIB: Final = 1024
MIB: Final = 1024 * KIB

FRAME_LEN_MAX: Final = 16 * KIB
HEADER_LIST_LEN_MAX: Final = 64 * KIB
SENT_HEADER_LIST_LEN_MAX: Final = 16 * KIB
CONTINUATION_COUNT_MAX: Final = 16
STREAM_WINDOW_LEN: Final = 64 * KIB
CONNECTION_WINDOW_LEN: Final = 16 * MIB
STREAMS_MAX: Final = 1024
INITIAL_WINDOW_LEN: Final = 65_535  # RFC 9113, 6.9.2: what either end assumes before SETTINGS arrive
WINDOW_LEN_MAX: Final = 2**31 - 1

OUT_LEN_SOFT: Final = 64 * KIB  # DATA waits above this many bytes that are not yet with the transport
OUT_LEN_MAX: Final = 1 * MIB  # a peer that causes answers and does not read is cut off above this
RESET_IDS_MAX: Final = 4 * STREAMS_MAX  # closed by a reset; frames for them may still be on their way

assert FRAME_LEN_MAX <= STREAM_WINDOW_LEN <= CONNECTION_WINDOW_LEN <= WINDOW_LEN_MAX
assert STREAM_WINDOW_LEN >= INITIAL_WINDOW_LEN, "a peer may use the initial window before it knows ours"
assert (CONTINUATION_COUNT_MAX + 1) * FRAME_LEN_MAX >= HEADER_LIST_LEN_MAX
assert SENT_HEADER_LIST_LEN_MAX <= HEADER_LIST_LEN_MAX
assert OUT_LEN_SOFT + FRAME_LEN_MAX < OUT_LEN_MAX


@dataclass(frozen=True, slots=True)
class Allowance:
    """A token bucket: `burst` at once, `rate_s` per second for ever."""

    burst: int
    rate_s: float


RESETS: Final = Allowance(4 * STREAMS_MAX, 4 * STREAMS_MAX)
"""Every client of a full gateway may leave at once, and clients that do nothing but leave may keep a
gateway's whole core busy (2,700 resets a second): the resets come from the gateway, and must not end the
streams of its other clients."""
PINGS: Final = Allowance(256, 32)
SETTINGS_FRAMES: Final = Allowance(32, 2)
PRIORITIES: Final = Allowance(2 * STREAMS_MAX, STREAMS_MAX)
REPORTS: Final = Allowance(8 * STREAMS_MAX, 8 * STREAMS_MAX)
"""At a client: two for each request, which may be as many in a second as a gateway can send."""
EMPTY_FRAMES: Final = Allowance(2 * STREAMS_MAX, STREAMS_MAX)

assert RESETS.burst >= 2 * STREAMS_MAX, "a full connection that loses every client twice is no attack"


class Budget:
    """The rest of an allowance. `spend` raises ProtocolViolation when nothing is left."""

    __slots__ = ("_allowance", "_at_s", "_left", "_name", "_now")

    def __init__(self, name: str, allowance: Allowance, now: Callable[[], float]) -> None:
        self._name = name
        self._allowance = allowance
        self._now = now
        self._left = float(allowance.burst)
        self._at_s = now()

    def spend(self) -> None:
        if self._left < 1:
            now_s = self._now()
            earned = (now_s - self._at_s) * self._allowance.rate_s
            self._left = min(self._allowance.burst, self._left + earned)
            self._at_s = now_s
            if self._left < 1:
                raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._name}")
        self._left -= 1
