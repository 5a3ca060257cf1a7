"""Seeded traffic to compare schedulers on.

The trace's shape follows BurstGPT, requests to GPT-4 conversations on Azure (Wang et al., "BurstGPT",
arXiv:2401.17644). Lengths are drawn independently from the percentiles that Sun et al. publish of them
("Llumnix", OSDI 2024, table 1), joined by straight lines over the logarithm of the length:

                  mean   P50   P80   P95   P99
    prompt         830   582  1427  2345  3549
    answer         271   243   434   669   964

The ends of the range, which are not published, are chosen such that the means are right. Gaps between
arrivals are Gamma with shape 0.5, as BurstGPT's own generator draws them: bursts, and silence between.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.contract.messages import ServiceClass
from tests.bench.engine.virtual import Request

Length = Callable[[random.Random], int]
Percentiles = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of a workload's requests."""

    share: float
    """The share of the workload's requests that are of this kind."""
    prompt_len: Length
    output_len: Length
    tenant: Callable[[random.Random], str] = lambda _: ""
    service_class: ServiceClass = ServiceClass.DEFAULT


@dataclass(frozen=True, slots=True)
class Workload:
    """Seeded traffic of several kinds of requests."""

    name: str
    kinds: tuple[Kind, ...]
    short_len_max: int
    """Prompts of up to so many tokens are reported as short."""
    long_len_min: int
    """Prompts of at least so many tokens are reported as long."""
    gap_shape: float = 1.0
    """The shape of the Gamma distribution of gaps between arrivals; 1.0 is a Poisson process, less is
    burstier."""
    has_exact_shares: bool = False
    """True if the kinds' shares are exact. Otherwise each request's kind is drawn by itself, and one short
    run may have far more work than another."""

    def is_short(self, request: Request) -> bool:
        return request.prompt_len <= self.short_len_max

    def is_long(self, request: Request) -> bool:
        return request.prompt_len >= self.long_len_min

    def traffic(self, seed: int, count: int, per_s: float) -> list[Request]:
        """Requests in the order of their arrival: `count`, with `per_s` of them a second on average."""
        rng, now, requests = random.Random(seed), 0.0, []
        for kind in self._kinds_of(count, rng):
            now += rng.gammavariate(self.gap_shape, 1 / (self.gap_shape * per_s))
            lens = kind.prompt_len(rng), kind.output_len(rng)
            requests.append(Request(now, *lens, kind.tenant(rng), kind.service_class))
        return requests

    def _kinds_of(self, count: int, rng: random.Random) -> list[Kind]:
        if not self.has_exact_shares:
            return rng.choices(self.kinds, [kind.share for kind in self.kinds], k=count)
        kinds = [kind for kind in self.kinds for _ in range(math.ceil(kind.share * count))]
        rng.shuffle(kinds)
        return kinds[:count]


def always(length: int) -> Length:
    return lambda _: length


def heavy_tailed(rng: random.Random) -> int:
    """A length with a median of 500 tokens; one in a hundred is above 8,000."""
    return max(16, min(16_000, round(500 * math.exp(1.2 * rng.gauss(0.0, 1.0)))))


def drawn_from(percentiles: Percentiles) -> Length:
    """A draw of lengths with these percentiles, the first of which is at 0 and the last at 1."""
    assert percentiles[0][0] == 0.0
    assert percentiles[-1][0] == 1.0

    def draw(rng: random.Random) -> int:
        at = rng.random()
        for (below, low), (above, high) in itertools.pairwise(percentiles):
            if at <= above:
                return round(low * math.exp(math.log(high / low) * (at - below) / (above - below)))
        raise AssertionError("nothing is above 1")

    return draw


TRACE_PROMPT_LENS: Final = ((0.0, 32), (0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549), (1.0, 8192))
TRACE_OUTPUT_LENS: Final = ((0.0, 20), (0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964), (1.0, 2000))
TENANTS: Final = 10

CHAT: Final = Workload(
    "chat", (Kind(0.85, always(200), always(32)), Kind(0.15, always(4000), always(64))), 200, 4000
)
TRACE: Final = Workload(
    "trace",
    (Kind(1.0, drawn_from(TRACE_PROMPT_LENS), drawn_from(TRACE_OUTPUT_LENS)),),
    short_len_max=582,
    long_len_min=2345,
    gap_shape=0.5,
)
LONG_IN_SHORT: Final = Workload(
    "long in short",
    (Kind(0.98, always(200), always(32)), Kind(0.02, always(30_000), always(32))),
    200,
    30_000,
)
TENANTS_CHAT: Final = Workload(
    "flood",
    (Kind(1.0, always(400), always(32), lambda rng: f"tenant-{rng.randrange(TENANTS)}"),),
    400,
    400,
)
PRESSED: Final = Workload(
    "KV at 1.2x need", (Kind(1.0, lambda rng: rng.randint(100, 1500), always(400)),), 800, 800
)
HEAVY_TAIL: Final = Workload(
    "heavy tail",
    (
        Kind(0.2, heavy_tailed, always(64), service_class=ServiceClass.PRIORITY),
        Kind(0.6, heavy_tailed, always(64)),
        Kind(0.2, heavy_tailed, always(64), service_class=ServiceClass.FLEX),
    ),
    short_len_max=500,
    long_len_min=2000,
)
