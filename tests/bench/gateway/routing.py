"""`python -m tests.bench routing`: rules of choosing a replica, simulated in virtual time.

All rules see the same conversations in the same world (`tests.bench.gateway.routing_world`). What they are
compared by: the share of prompt tokens that were cached, and the time to the first token. The mean of several
seeds decides; rules that have no target beside a large fleet run with the first seed alone.

Where a replica joins, or half of all conversations come to have a new prefix, the *herd* is looked for: the
longest queue of the replica that has joined, or of the worst one, in the 15 s after that, by the median of
all replicas' longest queues.

With `--live`, rules are compared on real engines instead (`tests.bench.gateway.routing_live`), and with
`--agents` for agents' sessions (`tests.bench.gateway.agents_live`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Final

from tests.bench.figures import Figure, Target, at_least, at_most, figure
from tests.bench.gateway.agents_live import TURNS, run_agents
from tests.bench.gateway.routing_live import run_live
from tests.bench.gateway.routing_rules import BLIND, RULES
from tests.bench.gateway.routing_world import Result, Traffic, simulate
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

HERD_MAX: Final = 4.0

CHAT: Final = Traffic("chat")
MANY: Final = replace(CHAT, name="long prefixes", prefixes=400, prefix_tokens=(2_000, 6_000), utilization=0.6)
_QUICK: Final = replace(CHAT, decode_ms=5, think_ms=1_000, cache_tokens=200_000)
"""The same with quicker turns, so that fewer conversations fill as large a part of the caches."""
FLEET: Final = replace(_QUICK, name="256 replicas", replicas=256, prefixes=16, conversations=16_000)
_SMALLER: Final = replace(_QUICK, replicas=64, prefixes=16, conversations=4_000)
JOIN: Final = replace(_SMALLER, name="one joins 64", joins_ms=18_000)
HOT: Final = replace(_SMALLER, name="a hot prefix appears", hot_ms=18_000, utilization=0.7)
_ONE_TURN: Final = Traffic("", turns=1, conversations=10_000)
SINGLE: Final = replace(_ONE_TURN, name="single", prefixes=0, question_tokens=(50, 4_000), utilization=0.9)
ONE_PREFIX: Final = replace(_ONE_TURN, name="hot prefix", prefixes=1, prefix_tokens=(6_000, 6_000))
FEW_SHOT: Final = replace(
    _ONE_TURN, name="few-shot", prefixes=16, prefix_tokens=(2_000, 4_000), utilization=0.7
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule beside ours, and the targets of our figures over its own."""

    rule: str
    cached: Target | None = None
    p99: Target | None = None
    is_once: bool = False
    """True if the first seed is enough."""


_WITHIN: Final = (at_least(1 / 1.2), at_most(1.2))
_ASIDE: Final = tuple(Judged(rule, is_once=True) for rule in ("round robin", "least load", "random of two"))
JUDGED: Final[dict[Traffic, tuple[Judged, ...]]] = {
    CHAT: (
        Judged("index", *_WITHIN),
        Judged("round robin", at_least(1.6)),
        Judged("least load"),
        Judged("two owners"),
    ),
    FLEET: (Judged("index", *_WITHIN), *_ASIDE),
    JOIN: (Judged("index"), Judged("last report")),
    HOT: (Judged("index"), Judged("last report")),
    SINGLE: (Judged("least load", None, at_most(1.0)), Judged("random of two")),
    ONE_PREFIX: (Judged("least load", None, at_most(1.0)), Judged("random of two"), Judged("two owners")),
    FEW_SHOT: (Judged("least load", None, at_most(1.05)), Judged("two owners")),
    MANY: (Judged("round robin"), Judged("two owners")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="runs of each rule, whose mean is taken")
    parser.add_argument("--workers", type=int, default=16, help="gateway processes, which do not talk")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--live", action="store_true", help="three CPU engines, in place of virtual time")
    instead.add_argument("--agents", action="store_true", help="agents' sessions on two CPU engines instead")
    parser.add_argument("--turns", type=int, default=TURNS, help="with --agents: of each session")
    parser.add_argument("--limit-s", type=float, default=120.0, help="with --live: no round is begun later")


async def run(options: argparse.Namespace) -> list[Figure]:
    if options.seeds < 1 or options.workers < 1:
        raise BenchFailed("--seeds and --workers must be at least 1")
    if options.agents:
        return await run_agents(options.turns)
    if options.live:
        return await run_live(options.limit_s)
    return [
        one
        for traffic, judged in JUDGED.items()
        for one in figures(traffic, judged, options.seeds, options.workers)
    ]


def figures(traffic: Traffic, judged: Sequence[Judged], seeds: int, workers: int) -> list[Figure]:
    """Ours beside the others, in one world."""

    def results(rule: str, count: int) -> list[Result]:
        reports = rule not in BLIND
        return [simulate(traffic, RULES[rule](), workers, seed, reports=reports) for seed in range(count)]

    name, own = traffic.name, results("own", seeds)
    found = [figure(f"{name}: cached share", mean(r.cached_share for r in own), "of 1")]
    if traffic.change_ms is not None:
        found.append(figure(f"{name}: herd", _herd(own), "x the median", at_most(HERD_MAX)))
    for one in judged:
        others = results(one.rule, 1 if one.is_once else seeds)
        ours = own[: len(others)]
        if cached := mean(r.cached_share for r in others):
            cached = mean(r.cached_share for r in ours) / cached
            found.append(figure(f"{name}: cached share / {one.rule}", cached, "x", one.cached))
        p99 = mean(r.p99_ms for r in ours) / mean(r.p99_ms for r in others)
        found.append(figure(f"{name}: p99 to first token / {one.rule}", p99, "x", one.p99))
        if traffic.change_ms is not None:
            found.append(figure(f"{name}: herd by {one.rule}", _herd(others), "x the median"))
    return found


def _herd(results: Sequence[Result]) -> float:
    return mean(result.herd for result in results if result.herd is not None)
