"""The replicas of every model: the load of each, and which have failed lately. The list is static and comes
from the configuration.

A replica that fails is passed over for a cooling time, which doubles with every failure in a row and ends
with the first answer: a dead one is always the least loaded, and would attract every request. While all
replicas of a model cool, all are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

from gateway.config import HopProtocol, ModelConfig
from gateway.routing.policy import least_loaded
from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import ReplicaId

COOLING_S_MIN: Final = 1.0
COOLING_S_MAX: Final = 30.0


class Outcome(Enum):
    """The outcome of a dispatch, for its replica."""

    WORKED = "worked"
    FAILED = "failed"
    """The replica could not be connected to, was not ready, broke off, or produced nothing in time."""
    NEUTRAL = "neutral"
    """The request ended for reasons of its own: the caller's mistake, a full queue, a disconnect."""


@dataclass(slots=True)
class Replica:
    id: ReplicaId
    """A name for logs and metrics: host and port of its URL, with the path where it has one."""
    url: str
    protocol: HopProtocol
    tokens: int = 0
    """The tokens reserved by requests in flight."""
    requests: int = 0
    failures: int = 0
    """The number of failures in a row."""
    cools_until_s: float = 0.0
    """The end of the cooling time, in seconds on the monotonic clock."""


class Replicas:
    """The replicas by model, with one entry per URL also when several models are served there."""

    def __init__(self, models: Iterable[ModelConfig], clock: Clock = SYSTEM_CLOCK) -> None:
        self._by_url: dict[str, Replica] = {}
        self._pools: Final = {
            model.name: tuple(self._entry(url, model.protocol) for url in model.replicas) for model in models
        }
        self._clock = clock
        self._turn = 0

    def next_turn(self) -> int:
        """The number of a request, by which replicas that are equally loaded take turns. All attempts of a
        request have the same one."""
        self._turn += 1
        return self._turn

    def acquire(
        self, model: str, tokens: int, turn: int, tried: Collection[ReplicaId] = ()
    ) -> Replica | None:
        """Add a request's load to the least loaded replica that was not tried yet and does not cool. None
        when all were tried. `release` removes the load."""
        left = [replica for replica in self._pools[model] if replica.id not in tried]
        if not left:
            return None
        replica = left[0]
        if len(left) > 1:
            now_s = self._clock.monotonic()
            left = [replica for replica in left if replica.cools_until_s <= now_s] or left
            replica = left[least_loaded([replica.tokens for replica in left], turn % len(left))]
        replica.tokens += tokens
        replica.requests += 1
        return replica

    def release(self, replica: Replica, tokens: int, outcome: Outcome) -> None:
        replica.tokens -= tokens
        replica.requests -= 1
        assert replica.tokens >= 0
        assert replica.requests >= 0
        if outcome is Outcome.WORKED:
            replica.failures, replica.cools_until_s = 0, 0.0
        elif outcome is Outcome.FAILED:
            self._cool(replica)

    def _cool(self, replica: Replica) -> None:
        """Begin a cooling time, unless one runs: failures in it are of requests that were sent before it."""
        now_s = self._clock.monotonic()
        if now_s < replica.cools_until_s:
            return
        cooling_s = min(COOLING_S_MAX, COOLING_S_MIN * 2**replica.failures)
        replica.failures += 1
        replica.cools_until_s = now_s + cooling_s

    def _entry(self, url: str, protocol: HopProtocol) -> Replica:
        url = url.rstrip("/")
        parts = urlsplit(url)
        return self._by_url.setdefault(url, Replica(ReplicaId(parts.netloc + parts.path), url, protocol))
