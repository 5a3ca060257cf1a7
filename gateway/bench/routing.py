"""`penstock bench routing`: policies of choosing a replica, simulated in virtual time.

Conversations arrive at workers, which choose among replicas by the policy under test, each with its own
knowledge. A replica computes prompts one after the other at a fixed rate, less what its cache has: a
conversation's history, or the prefix that it shares with others. The cache holds a bounded number of tokens
and forgets what was used least recently. A report of the waiting tokens goes to every worker at intervals.
Every turn's prompt is the history of its conversation; the next turn comes when the answer was read and
thought about.

The policies see the same conversations. What they are compared by: the share of prompt tokens that were
cached, and the time to the first token.

*index*: an exact index with perfect knowledge, which no deployment has: each request goes where it is served
first.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import mean
from typing import Final

from gateway.routing import policy
from gateway.routing.policy import Affinity, Choice, Route, View
from gateway.routing.table import Table, key_of
from shared.bench.figures import Figure, Target, at_least, at_most, figure, quantile
from shared.bench.streams import BenchFailed
from shared.load_report import DEFAULT, LoadReport

__all__ = ["BenchFailed", "add_arguments", "run"]

PREFILL_RATE: Final = 8_000
"""Prompt tokens per second of one replica."""
ZIPF: Final = 1.1
DECODE_MS: Final = 20
"""Between two tokens of an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy, whose mean is taken")
    parser.add_argument("--workers", type=int, default=16, help="gateway processes, which do not talk")


async def run(options: argparse.Namespace) -> list[Figure]:
    seeds, workers = range(options.seeds), options.workers
    figures: list[Figure] = []
    for traffic, judged in JUDGED.items():
        own = [simulate(traffic, affinity(), workers, seed=seed) for seed in seeds]
        figures.append(figure(f"{traffic.name}: cached share", mean(r.cached_share for r in own), "of 1"))
        for peer, cached_target, p99_target in judged:
            others = [simulate(traffic, PEERS[peer](), workers, seed=seed) for seed in seeds]
            p99 = mean(r.p99_ms for r in own) / mean(r.p99_ms for r in others)
            if cached := mean(r.cached_share for r in others):
                cached = mean(r.cached_share for r in own) / cached
                figures.append(figure(f"{traffic.name}: cached share / {peer}", cached, "x", cached_target))
            figures.append(figure(f"{traffic.name}: p99 to first token / {peer}", p99, "x", p99_target))
    return figures


@dataclass(frozen=True, slots=True)
class Traffic:
    """A population of conversations."""

    name: str
    replicas: int = 8
    cache_tokens: int = 500_000
    """The tokens that one replica's cache holds."""
    prefixes: int = 40
    """System prompts, of which some are used far more than others (Zipf 1.1)."""
    prefix_tokens: tuple[int, int] = (200, 2_000)
    turns: int = 6
    question_tokens: tuple[int, int] = (50, 800)
    answer_tokens: tuple[int, int] = (50, 400)
    think_ms: int = 8_000
    utilization: float = 0.8
    """The prompt tokens that arrive, less all that can be cached, by what all replicas can compute."""
    conversations: int = 2_000


CHAT: Final = Traffic("chat")
MANY: Final = replace(CHAT, name="long prefixes", prefixes=400, prefix_tokens=(2_000, 6_000), utilization=0.6)
LARGE: Final = replace(CHAT, name="64 replicas", replicas=64, utilization=0.85, conversations=12_000)
_ONE_TURN: Final = Traffic("", turns=1, conversations=10_000)
SINGLE: Final = replace(_ONE_TURN, name="single", prefixes=0, question_tokens=(50, 4_000), utilization=0.9)
HOT: Final = replace(_ONE_TURN, name="hot prefix", prefixes=1, prefix_tokens=(6_000, 6_000))
FEW_SHOT: Final = replace(
    _ONE_TURN, name="few-shot", prefixes=16, prefix_tokens=(2_000, 4_000), utilization=0.7
)


@dataclass(slots=True)
class Turn:
    """One request: the next turn of a conversation."""

    conversation: int
    prefix: int
    prefix_tokens: int
    history: int
    """Tokens of the conversation before this question, the prefix included."""
    prompt: int
    answer: int
    arrived_ms: float
    left: int
    """The turns after this one."""

    @property
    def affinity(self) -> Affinity:
        prefix = key_of(b"prefix %d" % self.prefix)
        session = key_of(b"session %d" % self.conversation)
        return Affinity(prefix, session, self.prefix_tokens, self.history, self.prompt)


@dataclass(slots=True)
class Server:
    """A replica's queue and cache."""

    cache_tokens: int
    free_at_ms: float = 0.0
    """When it has computed all that it has."""
    held: int = 0
    cached: OrderedDict[tuple[str, int], tuple[int, int]] = field(default_factory=OrderedDict)
    """Prompt tokens and size by conversation, and by prefix; first what was used longest ago."""

    def waiting(self, now_ms: float) -> int:
        """The prompt tokens that wait."""
        return int(max(0.0, self.free_at_ms - now_ms) * PREFILL_RATE / 1000)

    def hit(self, turn: Turn) -> int:
        """The tokens of a prompt that are cached."""
        prefix, _ = self.cached.get(("prefix", turn.prefix), (0, 0))
        session, _ = self.cached.get(("session", turn.conversation), (0, 0))
        return max(prefix, min(session, turn.history))

    def take(self, turn: Turn, now_ms: float) -> int:
        """Queue a prompt. Returns its tokens that were cached."""
        hit = self.hit(turn)
        self.free_at_ms = max(self.free_at_ms, now_ms) + 1000 * (turn.prompt - hit) / PREFILL_RATE
        whole = turn.prompt + turn.answer
        if turn.prefix_tokens:
            self._keep(("prefix", turn.prefix), turn.prefix_tokens, turn.prefix_tokens)
        self._keep(("session", turn.conversation), whole, whole - turn.prefix_tokens)
        return hit

    def _keep(self, key: tuple[str, int], tokens: int, size: int) -> None:
        self.held += size - self.cached.pop(key, (0, 0))[1]
        self.cached[key] = tokens, size
        while self.held > self.cache_tokens:
            self.held -= self.cached.popitem(last=False)[1][1]


class Fleet:
    """The replicas, and every worker's knowledge of them."""

    def __init__(self, traffic: Traffic, workers: int, report_ms: int, seed: int) -> None:
        self.random: Final = random.Random(seed)
        self.report_ms: Final = report_ms
        self.now_ms = 0.0
        self.servers: list[Server] = []
        self.views: Final[list[list[View]]] = [[] for _ in range(workers)]
        """The views of each worker."""
        for _ in range(traffic.replicas):
            self.add(traffic, since_ms=-policy.SLOW_START_MS)

    def add(self, traffic: Traffic, since_ms: int) -> None:
        """Add a replica."""
        self.servers.append(Server(traffic.cache_tokens))
        for views in self.views:
            views.append(View(since_ms))
        self.table = Table([f"engine-{i}" for i in range(len(self.servers))])
        self.usable = [True] * len(self.servers)

    def report(self, replica: int) -> None:
        """Tell every worker what waits at a replica."""
        report = LoadReport((0, self.servers[replica].waiting(self.now_ms), 0))
        for views in self.views:
            view = views[replica]
            view.report(report, int(self.now_ms))
            view.count(DEFAULT, view.sent[DEFAULT] // 1000)

    def loads(self, worker: int) -> list[int]:
        return policy.loads(self.views[worker], int(self.now_ms))


# -- policies -------------------------------------------------------------------------------------

Choose = Callable[[Turn, Fleet, int], Choice]
"""A policy under test. The last argument is the worker that asks."""


def affinity(owners: int | None = None) -> Choose:
    """The product's own."""

    def choose(turn: Turn, fleet: Fleet, worker: int) -> Choice:
        choice = policy.choose(fleet.table, fleet.loads(worker), turn.affinity, owners, fleet.usable)
        assert choice is not None
        return choice

    return choose


def round_robin() -> Choose:
    turns = count()
    return lambda turn, fleet, _: Choice(next(turns) % len(fleet.servers), Route.LOAD, turn.prompt)


def least_load() -> Choose:
    def choose(turn: Turn, fleet: Fleet, worker: int) -> Choice:
        loads = fleet.loads(worker)
        least = min(loads)
        replica = fleet.random.choice([i for i, load in enumerate(loads) if load == least])
        return Choice(replica, Route.LOAD, turn.prompt)

    return choose


def random_of_two() -> Choose:
    def choose(turn: Turn, fleet: Fleet, worker: int) -> Choice:
        loads = fleet.loads(worker)
        replica = min(fleet.random.sample(range(len(loads)), 2), key=loads.__getitem__)
        return Choice(replica, Route.LOAD, turn.prompt)

    return choose


def exact_index() -> Choose:
    def choose(turn: Turn, fleet: Fleet, _: int) -> Choice:
        def first_token_ms(replica: int) -> float:
            server = fleet.servers[replica]
            uncached = turn.prompt - server.hit(turn)
            return max(server.free_at_ms, fleet.now_ms) + 1000 * uncached / PREFILL_RATE

        return Choice(min(range(len(fleet.servers)), key=first_token_ms), Route.AFFINITY, turn.prompt)

    return choose


PEERS: Final[dict[str, Callable[[], Choose]]] = {
    "index": exact_index,
    "round robin": round_robin,
    "least load": least_load,
    "random of two": random_of_two,
    "two owners": lambda: affinity(2),
}
_Judged = tuple[str, Target | None, Target | None]
_WITHIN: Final = (at_least(1 / 1.2), at_most(1.2))
JUDGED: Final[dict[Traffic, tuple[_Judged, ...]]] = {
    CHAT: (("index", *_WITHIN), ("round robin", at_least(1.6), None), ("two owners", None, None)),
    LARGE: (("index", *_WITHIN), ("two owners", None, None)),
    SINGLE: (("least load", None, at_most(1.0)), ("random of two", None, None)),
    HOT: (("least load", None, at_most(1.0)), ("random of two", None, None), ("two owners", None, None)),
    FEW_SHOT: (("least load", None, at_most(1.05)), ("two owners", None, None)),
    MANY: (("round robin", None, None), ("two owners", None, None)),
}
"""The peers of each traffic, with the targets of our cached share and p99 time to the first token over
theirs."""


# -- the simulation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's figures. Times in milliseconds."""

    cached_share: float
    """The cached prompt tokens by all prompt tokens."""
    ttft_ms: list[float]

    @property
    def p99_ms(self) -> float:
        return quantile(self.ttft_ms, 0.99)


def simulate(traffic: Traffic, choose: Choose, workers: int, report_ms: int = 100, seed: int = 0) -> Result:
    """Run all conversations to their ends. The first tenth of the turns fills the caches, and is not
    counted."""
    fleet, arrivals = Fleet(traffic, workers, report_ms, seed), random.Random(seed)
    numbers = count()
    events: list[tuple[float, int, Turn | int]] = []  # a turn that arrives, or the replica that reports
    events += [(turn.arrived_ms, next(numbers), turn) for turn in _first_turns(traffic, arrivals)]
    events += [(report_ms * i / traffic.replicas, next(numbers), i) for i in range(traffic.replicas)]
    heapq.heapify(events)
    turns = traffic.conversations * traffic.turns
    warm, left = turns - turns // 10, turns
    prompt, cached, ttft_ms = 0, 0, list[float]()
    while left:
        fleet.now_ms, _, event = heapq.heappop(events)
        if isinstance(event, int):
            fleet.report(event)
            heapq.heappush(events, (fleet.now_ms + report_ms, next(numbers), event))
            continue
        left -= 1
        hit, first_token_ms = _dispatch(event, fleet, choose)
        if left < warm:
            prompt, cached = prompt + event.prompt, cached + hit
            ttft_ms.append(first_token_ms - fleet.now_ms)
        if event.left:
            follower = _next_turn(traffic, event, first_token_ms, arrivals)
            heapq.heappush(events, (follower.arrived_ms, next(numbers), follower))
    return Result(cached / prompt, ttft_ms)


def _dispatch(turn: Turn, fleet: Fleet, choose: Choose) -> tuple[int, float]:
    """Send a turn from a random worker. Returns the cached tokens, and the time of the first token."""
    worker = fleet.random.randrange(len(fleet.views))
    choice = choose(turn, fleet, worker)
    view = fleet.views[worker][choice.replica]
    view.enter(DEFAULT, choice.computed_len)
    view.leave()  # only what waits counts in this simulation
    server = fleet.servers[choice.replica]
    return server.take(turn, fleet.now_ms), server.free_at_ms


def _first_turns(traffic: Traffic, arrivals: random.Random) -> Iterator[Turn]:
    lengths = [arrivals.randint(*traffic.prefix_tokens) for _ in range(traffic.prefixes)]
    weights = [1 / (rank + 1) ** ZIPF for rank in range(traffic.prefixes)]
    gap_ms = 1000 * _computed_tokens(traffic) / (traffic.utilization * traffic.replicas * PREFILL_RATE)
    at_ms = 0.0
    for conversation in range(traffic.conversations):
        at_ms += arrivals.expovariate(1 / gap_ms)
        prefix = arrivals.choices(range(traffic.prefixes), weights)[0] if traffic.prefixes else -conversation
        own = lengths[prefix] if traffic.prefixes else 0
        question = arrivals.randint(*traffic.question_tokens)
        answer = arrivals.randint(*traffic.answer_tokens)
        yield Turn(conversation, prefix, own, own, own + question, answer, at_ms, traffic.turns - 1)


def _computed_tokens(traffic: Traffic) -> float:
    """The mean tokens of a conversation that are computed where nothing cached is computed again."""
    question, answer = sum(traffic.question_tokens) / 2, sum(traffic.answer_tokens) / 2
    return traffic.turns * question + (traffic.turns - 1) * answer


def _next_turn(traffic: Traffic, turn: Turn, first_token_ms: float, arrivals: random.Random) -> Turn:
    history = turn.prompt + turn.answer
    question, answer = arrivals.randint(*traffic.question_tokens), arrivals.randint(*traffic.answer_tokens)
    at_ms = first_token_ms + DECODE_MS * turn.answer + arrivals.expovariate(1 / traffic.think_ms)
    return replace(
        turn, history=history, prompt=history + question, answer=answer, arrived_ms=at_ms, left=turn.left - 1
    )
