"""A source of members, and what is kept of its work: when it last succeeded, how often it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gateway.routing.members import Listed
from shared.process import logs
from shared.process.clock import Clock
from shared.process.metrics import Counter, GaugeFamily

FAILURES: Final = Counter(
    "penstock_gateway_discovery_failures", "Failed attempts to learn a pool's members.", ("model",)
)
AGE: Final = GaugeFamily(
    "penstock_gateway_discovery_age_seconds", "Since a pool's members were last confirmed.", ("model",)
)
DETAIL_LEN_MAX: Final = 500

log = logs.get(__name__)


class SourceProgress:
    """A source's state, for the log and the metrics. The log tells of the first failure in a row, and of its
    end."""

    def __init__(self, model: str, take: Callable[[Sequence[Listed]], None], clock: Clock) -> None:
        self.model: Final = model
        self.first: Final = asyncio.Event()
        """Set after the first success."""
        self.well_at_s: float | None = None
        self._take: Final = take
        self._clock: Final = clock
        self._is_down = False

    def listed(self, members: Sequence[Listed]) -> None:
        """Take over what the source lists now."""
        self._take(members)
        self.confirmed()

    def kept(self, members: Sequence[Listed]) -> None:
        """Take over what is known in part, after a failure of the rest."""
        self._take(members)
        self.first.set()

    def confirmed(self) -> None:
        """Note that what was listed before is still so."""
        self.well_at_s = self._clock.monotonic()
        self.first.set()
        if self._is_down:
            self._is_down = False
            log.info("discovery.up", model=self.model)

    def failed(self, problem: str) -> None:
        """Note a failure. The members stay as they are."""
        FAILURES.inc(self.model)
        if not self._is_down:
            self._is_down = True
            log.warning("discovery.down", model=self.model, problem=problem[:DETAIL_LEN_MAX])


class Source(Protocol):
    """Somebody who knows a pool's members."""

    async def watch(self, progress: SourceProgress) -> None:
        """Report them whenever they change, until cancelled."""
        ...
