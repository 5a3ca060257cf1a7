"""The world in which `python -m tests.bench routing` tries rules of choosing a replica, in virtual time.

Conversations arrive at workers, which choose among replicas by the rule under test, each with its own
knowledge. A replica computes prompts one after the other at a fixed rate, less what its cache has: a
conversation's history, or the prefix that it shares with others. The cache holds a bounded number of tokens
and forgets what was used least recently. A report of the waiting tokens goes to every worker at intervals.
Every turn's prompt is the history of its conversation; the next turn comes when the answer was read and
thought about, or when the tools that it calls have run. Of agents, whose prompts are long, there are sessions
beside all these, with conversations of sub-agents.

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
from dataclasses import dataclass, field
from functools import partial
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
class Style:
    """How the turns of a conversation follow one another."""

    name: str
    turns: int
    question_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    pause_ms: int
    """The mean time from an answer to the next question."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of coding agents: each has a long conversation, whose questions are the results of tools. It
    begins with a request for a title, and now and then the conversation waits for those of sub-agents. All
    sessions have the system prompts of one agent."""

    sessions: int = 16
    """Those that are open at a time."""
    rounds: int = 2
    """The sessions that follow one another."""
    stagger_ms: int = 60_000
    """The time within which the first ones begin."""
    prefix_tokens: int = 12_000
    """The system prompt and the tools."""
    style: Style = Style("agents", 40, (500, 3_500), (100, 400), 5_000)
    """A prompt grows by 2,250 tokens each turn, to 100,000."""
    sub_agents: int = 2
    """Those that a session starts at a time."""
    sub_every: int = 10
    """The turns after which it does."""
    sub_prefix_tokens: int = 8_000
    sub_style: Style = Style("sub-agents", 8, (500, 3_500), (100, 400), 3_000)


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
    restarts_ms: int | None = None
    """When the replicas begin to be restarted one after the other, `RESTART_GAP_MS` apart. Each is away for
    `AWAY_MS`, and has an empty cache then. None: never."""
    agents: Agents | None = None
    """What is there beside the conversations."""

    @property
    def style(self) -> Style:
        """Of the conversations."""
        return Style("chats", self.turns, self.question_tokens, self.answer_tokens, self.think_ms)

    @property
    def change_ms(self) -> int | None:
        """When a replica joins, or the prefix appears."""
        return self.joins_ms if self.hot_ms is None else self.hot_ms


TITLE: Final = Style("titles", 1, (500, 700), (10, 20), 0)
RESTART_GAP_MS: Final = 90_000
AWAY_MS: Final = 30_000
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
    """The key of the conversation."""
    style: Style
    named_key: int = 0
    """The session that the caller names. Chats have one name, as of an application, or where there are agents
    one each."""
    awaited_by: Turn | None = None
    """The conversation that waits for the end of this one."""
    awaits: int = 0
    """The conversations whose ends its next turn waits for."""
    due_ms: float = 0.0
    """When the last of those ends that have been computed."""

    @property
    def number(self) -> int:
        """From 1 on."""
        return self.style.turns - self.left

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

    def stop(self, replica: int) -> None:
        """Take a replica away. What it has queued is computed."""
        self.usable[replica] = False

    def start(self, replica: int) -> None:
        """Bring it back with an empty cache."""
        self.usable[replica] = True
        self.since_ms[replica] = int(self.now_ms)
        for name in list(self.caches[replica]):
            self._forget(replica, name)

    def _forget(self, replica: int, name: int) -> None:
        self.held[replica] -= self.caches[replica].pop(name)[1]
        holders = self.holders[name]
        del holders[replica]
        if not holders:
            del self.holders[name]

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
        if now_ms - max(self.since_ms) >= policy.SLOW_START_MS:
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
        cache = self.caches[replica]
        if name in cache:
            self._forget(replica, name)
        cache[name] = tokens, size
        self.held[replica] += size
        self.holders.setdefault(name, {})[replica] = tokens
        while self.held[replica] > self.cache_tokens:
            self._forget(replica, next(iter(cache)))

    def herd(self) -> float:
        """The longest queue since the change, by the median of all replicas' longest: at the one that has
        joined last, or at the worst where none has."""
        *_, last = self.longest_ms
        worst = last if self.since_ms[-1] > 0 else max(self.longest_ms)
        return worst / median(self.longest_ms)


Rule = Callable[[Turn, Fleet, int], ReplicaChoice]
"""A rule under test. The last argument is the worker that asks."""


@dataclass(slots=True)
class Seen:
    """The requests of one style, or of all. Times in milliseconds."""

    prompt: int = 0
    cached: int = 0
    possible: int = 0
    """The prompt tokens that had been computed before, at whichever replica."""
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def cached_share(self) -> float:
        """The cached prompt tokens by all prompt tokens."""
        return self.cached / self.prompt

    @property
    def possible_share(self) -> float:
        return self.possible / self.prompt

    @property
    def p50_ms(self) -> float:
        return quantile(self.ttft_ms, 0.5)

    @property
    def p99_ms(self) -> float:
        return quantile(self.ttft_ms, 0.99)

    def add(self, other: Seen) -> None:
        self.prompt, self.cached = self.prompt + other.prompt, self.cached + other.cached
        self.possible += other.possible
        self.ttft_ms += other.ttft_ms


@dataclass(frozen=True, slots=True)
class Result:
    """One rule's figures."""

    by_style: dict[str, Seen]
    all: Seen
    herd: float | None
    """`Fleet.herd`, in the time of `WATCH_MS` after the change."""

    @property
    def cached_share(self) -> float:
        return self.all.cached_share

    @property
    def p99_ms(self) -> float:
        return self.all.p99_ms


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
        self._left = 0
        """The turns that are to come, of conversations that have begun."""
        self._computed = set[int]()
        """The prefixes that some replica has computed."""
        first = list(_first_turns(traffic, self._arrivals))
        for at_ms, turn in first:
            self._begin(at_ms, turn)
        self._warm_ms, _ = first[int(WARM_SHARE * traffic.conversations)]
        if reports:
            for i in range(traffic.replicas):
                self._events.append((REPORT_MS * i / traffic.replicas, next(self._numbers), i))
        if traffic.change_ms is not None:
            self._events.append((traffic.change_ms, next(self._numbers), self._change))
            self._events.append((traffic.change_ms + WATCH_MS, next(self._numbers), self._look))
        if traffic.restarts_ms is not None:
            for i in range(traffic.replicas):
                at_ms = traffic.restarts_ms + i * RESTART_GAP_MS
                for when_ms, what in ((at_ms, self._fleet.stop), (at_ms + AWAY_MS, self._fleet.start)):
                    self._events.append((when_ms, next(self._numbers), partial(what, i)))
        if traffic.agents is not None:
            self._sessions = _Sessions(traffic, traffic.agents, self._arrivals)
            for at_ms, turn in self._sessions.first(self._warm_ms):
                self._begin(at_ms, turn)
        heapq.heapify(self._events)

    def _begin(self, at_ms: float, turn: Turn) -> None:
        """Let a conversation begin."""
        self._left += turn.style.turns
        heapq.heappush(self._events, (at_ms, next(self._numbers), turn))

    def result(self) -> Result:
        fleet, events = self._fleet, self._events
        by_style: dict[str, Seen] = {}
        while self._left:
            fleet.now_ms, _, event = heapq.heappop(events)
            if isinstance(event, int):
                fleet.report(event)
                heapq.heappush(events, (fleet.now_ms + REPORT_MS, next(self._numbers), event))
            elif isinstance(event, Turn):
                self._left -= 1
                seen = self._dispatch(event)
                if fleet.now_ms >= self._warm_ms:
                    by_style.setdefault(event.style.name, Seen()).add(seen)
            else:
                event()
        whole = Seen()
        for one in by_style.values():
            whole.add(one)
        return Result(by_style, whole, self._herd)

    def _dispatch(self, turn: Turn) -> Seen:
        """Send a turn from a random worker, and let the next one follow."""
        fleet = self._fleet
        worker = int(fleet.random.random() * len(fleet.known))
        choice = self._rule(turn, fleet, worker)
        fleet.send(worker, choice)
        hit = fleet.take(choice.replica, turn)
        first_ms = fleet.free_ms[choice.replica]
        possible = turn.history if turn.number > 1 or turn.prefix in self._computed else 0
        self._computed.add(turn.prefix)
        seen = Seen(turn.prompt, hit, possible, [first_ms - fleet.now_ms])
        ends_ms = first_ms + self._traffic.decode_ms * turn.answer
        if turn.left:
            self._go_on(turn, ends_ms)
        elif turn.awaited_by is not None:
            self._awaited(turn.awaited_by, ends_ms)
        elif self._traffic.agents is not None and turn.style is self._traffic.agents.style:
            for at_ms, following in self._sessions.next(ends_ms):
                self._begin(at_ms, following)
        return seen

    def _go_on(self, turn: Turn, ends_ms: float) -> None:
        """Let the next turn follow the answer that ends then, or the sub-agents that it waits for."""
        arrivals, style = self._arrivals, turn.style
        at_ms = ends_ms + arrivals.expovariate(1 / style.pause_ms)
        turn.history = turn.prompt + turn.answer
        turn.prompt = turn.history + arrivals.randint(*style.question_tokens)
        turn.answer = arrivals.randint(*style.answer_tokens)
        turn.left -= 1
        if self._traffic.agents is not None:
            for one in self._sessions.sub_agents(turn):
                turn.awaits += 1
                self._begin(at_ms, one)
        if not turn.awaits:
            heapq.heappush(self._events, (at_ms, next(self._numbers), turn))

    def _awaited(self, turn: Turn, ends_ms: float) -> None:
        """Let the turn of a conversation follow that waits for the end of another."""
        turn.awaits -= 1
        turn.due_ms = max(turn.due_ms, ends_ms)
        if not turn.awaits:
            heapq.heappush(self._events, (max(turn.due_ms, self._fleet.now_ms), next(self._numbers), turn))

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
    at_ms, style = 0.0, traffic.style
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
        prompt, left, name = own + question, traffic.turns - 1, keys[1] if traffic.agents else 0
        yield at_ms, Turn(number, prefix, own, own, prompt, answer, left, *keys, style, name)


def _computed_tokens(traffic: Traffic) -> float:
    """The mean tokens of a conversation that are computed where nothing cached is computed again."""
    question, answer = sum(traffic.question_tokens) / 2, sum(traffic.answer_tokens) / 2
    return traffic.turns * question + (traffic.turns - 1) * answer


class _Sessions:
    """The sessions of a traffic's agents, one after the other. Their conversations and prefixes have numbers
    behind all others'."""

    def __init__(self, traffic: Traffic, agents: Agents, arrivals: random.Random) -> None:
        self._agents, self._arrivals = agents, arrivals
        self._numbers = count(traffic.prefixes + traffic.conversations)
        self._main, self._side = next(self._numbers), next(self._numbers)
        """The prefixes of the sessions' own conversations, and of their sub-agents."""
        self._left = agents.sessions * agents.rounds

    def first(self, from_ms: float) -> Iterator[tuple[float, Turn]]:
        """The first turns of those that are open from the start, and when they arrive."""
        for _ in range(self._agents.sessions):
            yield from self.next(from_ms + self._arrivals.uniform(0, self._agents.stagger_ms))

    def next(self, at_ms: float) -> Iterator[tuple[float, Turn]]:
        """The first turn of another session, and its request for a title. None where no session is left."""
        if self._left:
            self._left -= 1
            name, agents = self._arrivals.getrandbits(64), self._agents
            yield at_ms, self._turn(name, self._main, agents.prefix_tokens, agents.style)
            yield at_ms, self._turn(name, next(self._numbers), 0, TITLE)

    def sub_agents(self, turn: Turn) -> Iterator[Turn]:
        """The first turns of the sub-agents that the next turn waits for. None where it waits for none."""
        agents = self._agents
        if turn.style is agents.style and not (turn.number - 1) % agents.sub_every:
            for _ in range(agents.sub_agents):
                one = self._turn(turn.named_key, self._side, agents.sub_prefix_tokens, agents.sub_style)
                one.awaited_by = turn
                yield one

    def _turn(self, name: int, prefix: int, own: int, style: Style) -> Turn:
        draw = self._arrivals
        prompt, answer = own + draw.randint(*style.question_tokens), draw.randint(*style.answer_tokens)
        keys, left = (key_of(b"prefix %d" % prefix), draw.getrandbits(64)), style.turns - 1
        return Turn(next(self._numbers), prefix, own, own, prompt, answer, left, *keys, style, name)
