"""The console's sessions: what a cookie stands for, and how often a log-in may be tried. No I/O.

Rules:

1. A session's id has 256 random bits. Only its SHA-256 is kept, so that what is in memory opens nothing.
2. A session ends by logout, after `IDLE_S` without a request, and `LIFE_S` after its log-in. One operator's
   key has at most `SESSIONS_PER_KEY_MAX`, all together `SESSIONS_MAX`: the oldest makes room.
3. Failed log-ins are counted per network that they come from (`gateway.identity.caller`), and in all, within
   a window. A network above its bound is not looked at, so that guessing costs time. Above the bound in all,
   one failure is each network's bound: who guesses from many has one guess in each, and a network from which
   nobody guessed is looked at whatever others do. The networks that are remembered are bounded, too.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

IDLE_S: Final = 30 * 60.0
LIFE_S: Final = 8 * 3600.0
SESSIONS_MAX: Final = 256
SESSIONS_PER_KEY_MAX: Final = 16
ID_LEN: Final = 32
"""Random bytes in a session's id."""
TEXT_LEN_MAX: Final = 64
"""Characters of a cookie that are looked at."""

WINDOW_S: Final = 60.0
FAILURES_PER_NETWORK_MAX: Final = 10
FAILURES_MAX: Final = 100
NETWORKS_MAX: Final = 8192


@dataclass(slots=True)
class _Session:
    digest: bytes
    """SHA-256 of the operator's key."""
    began_s: float
    used_s: float

    def is_over(self, now_s: float) -> bool:
        return now_s - self.used_s > IDLE_S or now_s - self.began_s > LIFE_S


class Sessions:
    """The open sessions. Times are seconds on the monotonic clock."""

    def __init__(self) -> None:
        self._by_hash: Final[OrderedDict[bytes, _Session]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_hash)

    def begin(self, digest: bytes, now_s: float) -> str:
        """Open a session for the key with this digest. Returns its id."""
        self._drop_ended(now_s)
        own = [id_ for id_, session in self._by_hash.items() if session.digest == digest]
        if len(own) >= SESSIONS_PER_KEY_MAX:
            del self._by_hash[own[0]]
        if len(self._by_hash) >= SESSIONS_MAX:
            self._by_hash.popitem(last=False)
        text = secrets.token_urlsafe(ID_LEN)
        self._by_hash[_hash(text)] = _Session(digest, now_s, now_s)
        return text

    def find(self, text: str, now_s: float) -> bytes | None:
        """The digest of the key whose session this is. None where there is none, or none any more."""
        session = self._by_hash.get(_hash(text))
        if session is None:
            return None
        if session.is_over(now_s):
            self.end(text)
            return None
        session.used_s = now_s
        return session.digest

    def end(self, text: str) -> bool:
        """End a session. Returns whether there was one."""
        return self._by_hash.pop(_hash(text), None) is not None

    def _drop_ended(self, now_s: float) -> None:
        for id_ in [id_ for id_, session in self._by_hash.items() if session.is_over(now_s)]:
            del self._by_hash[id_]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text[:TEXT_LEN_MAX].encode(errors="replace")).digest()


@dataclass(slots=True)
class _Count:
    began_s: float
    failures: int = 0

    def at(self, now_s: float) -> int:
        """The failures of the window that this moment is in."""
        return self.failures if now_s - self.began_s < WINDOW_S else 0


class Attempts:
    """The failed log-ins of the current window."""

    def __init__(self) -> None:
        self._all = _Count(-math.inf)
        self._by_network: Final[OrderedDict[str, _Count]] = OrderedDict()

    def wait_s(self, network: str, now_s: float) -> float:
        """How long no log-in from this network is looked at, in seconds; 0.0 if one is."""
        own = self._by_network.get(network)
        is_flood = self._all.at(now_s) >= FAILURES_MAX
        if own is None or own.at(now_s) < (1 if is_flood else FAILURES_PER_NETWORK_MAX):
            return 0.0
        return own.began_s + WINDOW_S - now_s

    def failed(self, network: str, now_s: float) -> None:
        """Count a log-in that failed."""
        own = self._by_network.pop(network, None) or _Count(now_s)
        self._by_network[network] = own
        while len(self._by_network) > NETWORKS_MAX:
            self._by_network.popitem(last=False)
        for count in (own, self._all):
            if now_s - count.began_s >= WINDOW_S:
                count.began_s, count.failures = now_s, 0
            count.failures += 1

    def succeeded(self, network: str) -> None:
        """Take back that a log-in was counted: it did not fail."""
        for count in (self._by_network.get(network), self._all):
            if count is not None:
                count.failures = max(0, count.failures - 1)
