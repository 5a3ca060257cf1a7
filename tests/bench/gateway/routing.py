"""`python -m tests.bench routing`: rules of choosing a replica, simulated in virtual time.

All rules see the same conversations in the same world (`tests.bench.gateway.routing_world`). What they are
compared by: the share of prompt tokens that were cached, and the time to the first token. The mean of several
seeds decides; rules that have no target beside a large fleet run with the first seed alone.

Where a replica joins, or half of all conversations come to have a new prefix, the *herd* is looked for: the
longest queue of the replica that has joined, or of the worst one, in the 15 s after that, by the median of
all replicas' longest queues.

In *agents*, 16 sessions of coding agents (`routing_world.Agents`) are open beside chats, at three replicas:
prompts grow to 100,000 tokens in 40 turns, of which 95 % repeat the turn before, with seconds between them
while tools run, and sub-agents now and then. Its figures are of the sessions' own conversations, and of
`chats` beside them:

*cached / possible*    the cached tokens, by those that some replica had computed before
*p50*, *p99*           to the first token, in milliseconds of virtual time; *p50 / RULE* is ours by RULE's

*agents, restarts* is the same with fewer chats, which two replicas can serve, while the three are restarted
one after the other, each with an empty cache.

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
from tests.bench.gateway.routing_world import Agents, Result, Traffic, simulate
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
AGENTS: Final = Traffic(
    "agents", replicas=3, cache_tokens=1_000_000, utilization=0.5, conversations=3_600, agents=Agents()
)
RESTARTS: Final = replace(
    AGENTS, name="agents, restarts", utilization=0.3, conversations=2_200, restarts_ms=900_000
)
POSSIBLE_MIN: Final = 0.95
"""Of the tokens that may be cached, the part that our rule finds cached in sessions of agents."""


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
        Judged("home by name"),
    ),
    FLEET: (Judged("index", *_WITHIN), *_ASIDE),
    JOIN: (Judged("index"), Judged("last report")),
    HOT: (Judged("index"), Judged("last report")),
    SINGLE: (Judged("least load", None, at_most(1.0)), Judged("random of two")),
    ONE_PREFIX: (Judged("least load", None, at_most(1.0)), Judged("random of two"), Judged("two owners")),
    FEW_SHOT: (Judged("least load", None, at_most(1.05)), Judged("two owners")),
    MANY: (Judged("round robin"), Judged("two owners")),
}
BESIDE: Final[dict[Traffic, tuple[str, ...]]] = {
    AGENTS: ("round robin", "least load", "home by name", "index"),
    RESTARTS: ("index",),
}
"""The rules beside ours in the worlds with agents."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="runs of each rule, whose mean is taken")
    parser.add_argument("--workers", type=int, default=16, help="gateway processes, which do not talk")
    parser.add_argument("--only", nargs="+", metavar="WORLD", help="these worlds alone, such as agents chat")
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
    names = [traffic.name for traffic in (*JUDGED, *BESIDE)]
    wanted = options.only or names
    if unknown := set(wanted).difference(names):
        raise BenchFailed(f"there is no world {', '.join(sorted(unknown))}; there are: {'; '.join(names)}")
    counts, found = (options.seeds, options.workers), list[Figure]()
    for traffic, judged in JUDGED.items():
        found += figures(traffic, judged, *counts) if traffic.name in wanted else ()
    for traffic, rules in BESIDE.items():
        found += agent_figures(traffic, rules, *counts) if traffic.name in wanted else ()
    return found


def figures(traffic: Traffic, judged: Sequence[Judged], seeds: int, workers: int) -> list[Figure]:
    """Ours beside the others, in one world."""
    name, own = traffic.name, _results(traffic, "own", seeds, workers)
    found = [figure(f"{name}: cached share", mean(r.cached_share for r in own), "of 1")]
    if traffic.change_ms is not None:
        found.append(figure(f"{name}: herd", _herd(own), "x the median", at_most(HERD_MAX)))
    for one in judged:
        others = _results(traffic, one.rule, 1 if one.is_once else seeds, workers)
        ours = own[: len(others)]
        if cached := mean(r.cached_share for r in others):
            cached = mean(r.cached_share for r in ours) / cached
            found.append(figure(f"{name}: cached share / {one.rule}", cached, "x", one.cached))
        p99 = mean(r.p99_ms for r in ours) / mean(r.p99_ms for r in others)
        found.append(figure(f"{name}: p99 to first token / {one.rule}", p99, "x", one.p99))
        if traffic.change_ms is not None:
            found.append(figure(f"{name}: herd by {one.rule}", _herd(others), "x the median"))
    return found


def agent_figures(traffic: Traffic, rules: Sequence[str], seeds: int, workers: int) -> list[Figure]:
    """Ours beside the others, in a world with agents."""
    name, own = traffic.name, _results(traffic, "own", seeds, workers)
    found = [figure(f"{name}: cached / possible", _of_possible(own), "of 1", at_least(POSSIBLE_MIN))]
    found += [
        figure(f"{label}: {quantile} to first token", ours, "ms")
        for label, style in ((name, "agents"), (f"{name}, chats", "chats"))
        for quantile, ours in (("p50", _p50_ms(own, style)), ("p99", _p99_ms(own, style)))
    ]
    for rule in rules:
        others = _results(traffic, rule, seeds, workers)
        found.append(figure(f"{name}: cached / possible, {rule}", _of_possible(others), "of 1"))
        target = at_most(1.0) if rule in ("round robin", "least load") else None
        for label, style in ((name, "agents"), (f"{name}, chats", "chats")):
            p50 = _p50_ms(own, style) / _p50_ms(others, style)
            p99 = _p99_ms(own, style) / _p99_ms(others, style)
            found.append(figure(f"{label}: p50 to first token / {rule}", p50, "x", target))
            found.append(figure(f"{label}: p99 to first token / {rule}", p99, "x", target))
    return found


def _results(traffic: Traffic, rule: str, seeds: int, workers: int) -> list[Result]:
    reports = rule not in BLIND
    return [simulate(traffic, RULES[rule](), workers, seed, reports=reports) for seed in range(seeds)]


def _of_possible(results: Sequence[Result]) -> float:
    seen = [result.by_style["agents"] for result in results]
    return mean(one.cached / one.possible for one in seen)


def _p50_ms(results: Sequence[Result], style: str) -> float:
    return mean(result.by_style[style].p50_ms for result in results)


def _p99_ms(results: Sequence[Result], style: str) -> float:
    return mean(result.by_style[style].p99_ms for result in results)


def _herd(results: Sequence[Result]) -> float:
    return mean(result.herd for result in results if result.herd is not None)
