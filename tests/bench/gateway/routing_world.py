"""The world in which `python -m tests.bench routing` tries rules of choosing a replica, in virtual time.

Conversations arrive at workers, which choose among replicas by the rule under test, each with its own
knowledge. A replica computes prompts one after the other at a fixed rate, less what its cache has: a
conversation's history, or the prefix that it shares with others. The cache holds a bounded number of tokens
and forgets what was used least recently. A report of the waiting tokens goes to every worker at intervals.
Every turn's prompt is the history of its conversation; the next turn comes when the answer was read and
thought about.

Hundreds of replicas report to many workers twenty times a second, so what each step does is kept small. What
a worker knows of loads is a list of numbers, which are those that `policy.View` would have: here no report is
late, and a request counts only while it waits. The exact index finds a replica by who holds what.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from statistics import median
from typing import Final

from gateway.routing import policy
from gateway.routing.maglev import Table, key_of
from gateway.routing.policy import Affinity, ReplicaChoice, View
from shared.wire.load_report import PUSH_CHANGED_S
from tests.bench.figures import quantile

PREFILL_RATE: Final = 8_000
"""Prompt tokens per second of one replica."""
TOKEN_MS: Final = 1000 / PREFILL_RATE
REPORT_MS: Final = round(1000 * PUSH_CHANGED_S)
ZIPF: Final = 1.1
WARM_SHARE: Final = 0.25
"""The part of the conversations that fills the caches."""
WARM_PACE: Final = 0.4
"""The rate at which these arrive, by that of the others."""
WATCH_MS: Final = 15_000
"""The time after a change in which the longest queues are looked at."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A population of conversations, and the replicas that serve it."""

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
    decode_ms: int = 20
    """The time between two tokens of an answer."""
    think_ms: int = 8_000
    utilization: float = 0.8
    """The prompt tokens that arrive, less all that can be cached, by what all replicas can compute."""
    conversations: int = 2_000
    joins_ms: int | None = None
    """When one more replica joins. None: never."""
    hot_ms: int | None = None
    """When a new prefix of 6,000 tokens appears, which half of all conversations have from then on."""

    @property
    def change_ms(self) -> int | None:
        """When a replica joins, or the prefix appears."""
        return self.joins_ms if self.hot_ms is None else self.hot_ms


HOT_TOKENS: Final = 6_000
HOT_SHARE: Final = 0.5


@dataclass(slots=True)
class Turn:
    """A conversation's current request."""

    conversation: int
    prefix: int
    prefix_tokens: int
    history: int
    """Tokens of the conversation before this question, the prefix included."""
    prompt: int
    answer: int
    left: int
    """The turns after this one."""
    prefix_key: int
    session_key: int

    @property
    def affinity(self) -> Affinity:
        return Affinity(self.prefix_key, self.session_key, self.prefix_tokens, self.history, self.prompt)

    @property
    def cached_as(self) -> tuple[int, int]:
        """The names of its prefix and of its session in caches."""
        return -self.prefix - 1, self.conversation


class Fleet:
    """The replicas, and every worker's knowledge of them."""

    def __init__(self, traffic: Traffic, workers: int, seed: int) -> None:
        self.random: Final = random.Random(seed)
        self.cache_tokens: Final = traffic.cache_tokens
        self.now_ms = 0.0
        self.free_ms: Final[list[float]] = []
        """When each replica has computed all that it has."""
        self.caches: Final[list[OrderedDict[int, tuple[int, int]]]] = []
        """Prompt tokens and size of what each has cached; first what was used longest ago."""
        self.held: Final[list[int]] = []
        self.holders: Final[dict[int, dict[int, int]]] = {}
        """The prompt tokens that replicas have cached of each prefix and session."""
        self.longest_ms: Final[list[float]] = []
        """Each replica's longest queue since the last change."""
        self.known: Final[list[list[int]]] = [[] for _ in range(workers)]
        """For each worker, the tokens that each replica has reported, and that it has sent there since."""
        self.told: Final[list[int]] = []
        """The tokens that each replica reported last."""
        self.since_ms: Final[list[int]] = []
        """When each replica was added."""
        for _ in range(traffic.replicas):
            self._add(since_ms=-policy.SLOW_START_MS)
        self._build()

    def join(self) -> None:
        """Add a replica."""
        self._add(int(self.now_ms))
        self._build()

    def _add(self, since_ms: int) -> None:
        self.free_ms.append(0.0)
        self.caches.append(OrderedDict())
        self.held.append(0)
        self.longest_ms.append(0.0)
        self.told.append(0)
        self.since_ms.append(since_ms)
        for known in self.known:
            known.append(0)

    def _build(self) -> None:
        self.table = Table([f"engine-{i}" for i in range(len(self.free_ms))])
        self.usable = [True] * len(self.free_ms)

    def report(self, replica: int) -> None:
        """Tell every worker what waits at a replica. What it has sent there is counted by that."""
        waiting = int(max(0.0, self.free_ms[replica] - self.now_ms) / TOKEN_MS)
        self.told[replica] = waiting
        for known in self.known:
            known[replica] = waiting

    def send(self, worker: int, choice: ReplicaChoice) -> None:
        """Count what a worker sends to a replica."""
        self.known[worker][choice.replica] += choice.computed_len

    def loads(self, worker: int) -> list[int]:
        known, now_ms = self.known[worker], int(self.now_ms)
        if now_ms - self.since_ms[-1] >= policy.SLOW_START_MS:
            return known
        pairs = zip(self.since_ms, known, strict=True)
        return policy.loads([View(since_ms, loads=[load] * 3) for since_ms, load in pairs], now_ms)

    def hit(self, replica: int, turn: Turn) -> int:
        """The tokens of a prompt that are cached."""
        prefix, session = turn.cached_as
        cache = self.caches[replica]
        cached = cache.get(session)
        if cached is not None:
            return min(cached[0], turn.history)
        return cache[prefix][0] if prefix in cache else 0

    def take(self, replica: int, turn: Turn) -> int:
        """Queue a prompt. Returns its tokens that were cached."""
        hit = self.hit(replica, turn)
        free_ms = max(self.free_ms[replica], self.now_ms) + TOKEN_MS * (turn.prompt - hit)
        self.free_ms[replica] = free_ms
        self.longest_ms[replica] = max(self.longest_ms[replica], free_ms - self.now_ms)
        prefix, session = turn.cached_as
        whole = turn.prompt + turn.answer
        if turn.prefix_tokens:
            self._keep(replica, prefix, turn.prefix_tokens, turn.prefix_tokens)
        self._keep(replica, session, whole, whole - turn.prefix_tokens)
        return hit

    def _keep(self, replica: int, name: int, tokens: int, size: int) -> None:
        cache, held = self.caches[replica], self.held[replica]
        if name in cache:
            held -= cache.pop(name)[1]
        cache[name] = tokens, size
        held += size
        self.holders.setdefault(name, {})[replica] = tokens
        while held > self.cache_tokens:
            gone, (_, freed) = cache.popitem(last=False)
            held -= freed
            holders = self.holders[gone]
            del holders[replica]
            if not holders:
                del self.holders[gone]
        self.held[replica] = held

    def herd(self) -> float:
        """The longest queue since the change, by the median of all replicas' longest: at the one that has
        joined last, or at the worst where none has."""
        *_, last = self.longest_ms
        worst = last if self.since_ms[-1] > 0 else max(self.longest_ms)
        return worst / median(self.longest_ms)


Rule = Callable[[Turn, Fleet, int], ReplicaChoice]
"""A rule under test. The last argument is the worker that asks."""


@dataclass(frozen=True, slots=True)
class Result:
    """One rule's figures. Times in milliseconds."""

    cached_share: float
    """The cached prompt tokens by all prompt tokens."""
    ttft_ms: list[float]
    herd: float | None
    """`Fleet.herd`, in the time of `WATCH_MS` after the change."""

    @property
    def p99_ms(self) -> float:
        return quantile(self.ttft_ms, 0.99)


def simulate(traffic: Traffic, rule: Rule, workers: int, seed: int = 0, *, reports: bool = True) -> Result:
    """Run all conversations to their ends. The first of them fill the caches, and what is asked meanwhile is
    not counted. `reports` is false for a rule that does not look at loads."""
    return _Run(traffic, rule, workers, seed, reports=reports).result()


_Event = tuple[float, int, Turn | int | Callable[[], None]]
"""A turn that arrives, the replica that reports, or a change; by their time and number."""


class _Run:
    def __init__(self, traffic: Traffic, rule: Rule, workers: int, seed: int, *, reports: bool) -> None:
        self._traffic, self._rule = traffic, rule
        self._fleet = Fleet(traffic, workers, seed)
        self._arrivals = random.Random(seed)
        self._numbers = count()
        self._events: list[_Event] = []
        self._reports = reports
        self._herd: float | None = None
        for at_ms, turn in _first_turns(traffic, self._arrivals):
            self._events.append((at_ms, next(self._numbers), turn))
        self._warm_ms = self._events[int(WARM_SHARE * traffic.conversations)][0]
        if reports:
            for i in range(traffic.replicas):
                self._events.append((REPORT_MS * i / traffic.replicas, next(self._numbers), i))
        if traffic.change_ms is not None:
            self._events.append((traffic.change_ms, next(self._numbers), self._change))
            self._events.append((traffic.change_ms + WATCH_MS, next(self._numbers), self._look))
        heapq.heapify(self._events)

    def result(self) -> Result:
        fleet, events, dispatch = self._fleet, self._events, self._dispatch
        warm_ms, left = self._warm_ms, self._traffic.conversations * self._traffic.turns
        prompt, cached, ttft_ms = 0, 0, list[float]()
        while left:
            fleet.now_ms, _, event = heapq.heappop(events)
            if isinstance(event, int):
                fleet.report(event)
                heapq.heappush(events, (fleet.now_ms + REPORT_MS, next(self._numbers), event))
            elif isinstance(event, Turn):
                left -= 1
                length = event.prompt
                hit, first_ms = dispatch(event)
                if fleet.now_ms >= warm_ms:
                    prompt, cached = prompt + length, cached + hit
                    ttft_ms.append(first_ms - fleet.now_ms)
            else:
                event()
        return Result(cached / prompt, ttft_ms, self._herd)

    def _dispatch(self, turn: Turn) -> tuple[int, float]:
        """Send a turn from a random worker, and let the next one follow. Returns the cached tokens, and the
        time of the first token."""
        fleet = self._fleet
        worker = int(fleet.random.random() * len(fleet.known))
        choice = self._rule(turn, fleet, worker)
        fleet.send(worker, choice)
        hit = fleet.take(choice.replica, turn)
        first_ms = fleet.free_ms[choice.replica]
        if turn.left:
            traffic, arrivals = self._traffic, self._arrivals
            at_ms = first_ms + traffic.decode_ms * turn.answer + arrivals.expovariate(1 / traffic.think_ms)
            turn.history = turn.prompt + turn.answer
            turn.prompt = turn.history + arrivals.randint(*traffic.question_tokens)
            turn.answer = arrivals.randint(*traffic.answer_tokens)
            turn.left -= 1
            heapq.heappush(self._events, (at_ms, next(self._numbers), turn))
        return hit, first_ms

    def _change(self) -> None:
        fleet = self._fleet
        if self._traffic.joins_ms is not None:
            fleet.join()
            if self._reports:
                new = len(fleet.free_ms) - 1
                heapq.heappush(self._events, (fleet.now_ms + REPORT_MS, next(self._numbers), new))
        fleet.longest_ms[:] = [0.0] * len(fleet.longest_ms)

    def _look(self) -> None:
        self._herd = self._fleet.herd()


def _first_turns(traffic: Traffic, arrivals: random.Random) -> Iterator[tuple[float, Turn]]:
    """The conversations' first turns, and when they arrive."""
    lengths = [arrivals.randint(*traffic.prefix_tokens) for _ in range(traffic.prefixes)]
    weights = list(accumulate(1 / (rank + 1) ** ZIPF for rank in range(traffic.prefixes)))
    gap_ms = 1000 * _computed_tokens(traffic) / (traffic.utilization * traffic.replicas * PREFILL_RATE)
    at_ms = 0.0
    for number in range(traffic.conversations):
        pace = WARM_PACE if number < WARM_SHARE * traffic.conversations else 1.0
        at_ms += arrivals.expovariate(pace / gap_ms)
        prefix, own = number + traffic.prefixes, 0
        if traffic.hot_ms is not None and at_ms >= traffic.hot_ms and arrivals.random() < HOT_SHARE:
            prefix, own = traffic.prefixes, HOT_TOKENS
        elif traffic.prefixes:
            prefix = bisect(weights, arrivals.random() * weights[-1])
            own = lengths[prefix]
        question, answer = (
            arrivals.randint(*traffic.question_tokens),
            arrivals.randint(*traffic.answer_tokens),
        )
        keys = key_of(b"prefix %d" % prefix), key_of(b"session %d" % number)
        yield at_ms, Turn(number, prefix, own, own, own + question, answer, traffic.turns - 1, *keys)


def _computed_tokens(traffic: Traffic) -> float:
    """The mean tokens of a conversation that are computed where nothing cached is computed again."""
    question, answer = sum(traffic.question_tokens) / 2, sum(traffic.answer_tokens) / 2
    return traffic.turns * question + (traffic.turns - 1) * answer
