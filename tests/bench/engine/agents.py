"""`python -m tests.bench scheduler --agents`: agents' sessions beside chats, in virtual time, where their
pages are kept while their tools run, and where they are not.

A session has `TURNS` turns: each has the whole history as its prompt, is answered in a few words, and comes
some seconds after the answer before, when a tool has run. Chats come at random, and most go on at least once,
when people have read what they were answered. All share one prefix cache, of several sizes; nothing is copied
to host memory. What a turn repeats of the one before could be found there: the figures are shares of that. In
the last mix the chats' tenant keeps all its pages, too.

Tokens mean nothing, so a prompt is the system prompt's, two that name the conversation, and zeros.
"""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from engine.contract.messages import (
    FinishReason,
    RunnerInfo,
    RunResult,
    SamplingParams,
    ServiceClass,
    StepOutput,
)
from engine.contract.packing import TOKENS
from engine.core.estimate.cost import StepCost, Work
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from tests.bench.engine.virtual import UNBOUNDED, VOCAB_SIZE, timed_steps
from tests.bench.engine.workloads import TRACE_OUTPUT_LENS, TRACE_PROMPT_LENS, drawn_from
from tests.bench.figures import Figure, at_least, figure
from tests.bench.found_share import Seen

COST: Final = StepCost(
    token_s=2.5e-5, row_s=2.5e-5, pair_s=5e-10, context_s=5e-10, fixed_s=15e-3, page_s=1e-4
)
"""The cost of a model of 70B parameters on eight GPUs of today: 40,000 prompt tokens/s."""
PAGE: Final = 64
SLOTS: Final = 256
GAP_S: Final = 0.1
CACHES: Final = (250_000, 400_000)
"""Tokens. Eight sessions have histories of 270,000 on average."""
ROOMY: Final = 400_000
SESSIONS_TARGET: Final = at_least(0.95)
"""For a cache with room for all sessions, of which half is kept at most."""
TURNS: Final = 40
STARTS_S: Final = 20.0
"""The time within which the sessions begin."""
AGENT_SYSTEM_LEN: Final = 5_120
SYSTEM_LEN: Final = 512
"""Tokens of the system prompts that each tenant's sessions, and its chats, have in common."""
FIRST_LEN: Final = 8_000
RESULT_LEN: Final = 900
"""Tokens that come with each turn, on average; with the answers a prompt has 53,000 in the end."""
ANSWER_LEN: Final = 60
"""The median length of a session's answers."""
TOOL_S: Final = 4.0
"""The median time that a tool runs; a tenth run for 14 s or more, one in a hundred for 41 s."""
TOOL_S_MAX: Final = 120.0
PROMPT_LEN: Final = drawn_from(TRACE_PROMPT_LENS)
OUTPUT_LEN: Final = drawn_from(TRACE_OUTPUT_LENS)
"""Of which chats are answered with a third, so that few steps are simulated."""
CHAT_GOES_ON: Final = 0.6
READING_S: Final = (15.0, 60.0)
"""The time after which a chat goes on."""

Then = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Mix:
    """Who sends what beside each other."""

    name: str
    chat_tenants: tuple[str, ...] = ("chats",)
    sessions: int = 8
    chats_per_s: float = 12.0
    keeps_chats: bool = False


TENANTS: Final = tuple(f"chats {number}" for number in range(10))
MIXES: Final = (
    Mix("one tenant", ("agents",)),
    Mix("two tenants"),
    Mix("eleven tenants", TENANTS),
    Mix("a tenant that keeps all", keeps_chats=True),
)


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one mix."""

    sessions: Seen
    chats: Seen


@dataclass(slots=True)
class _Conversation:
    tenant: str
    number: int
    is_session: bool
    has_next_turn: bool
    length: int
    """The tokens of the next prompt."""
    computed_len: int = 0
    """Those that its last turn computed. 0: there was none."""

    @property
    def system_len(self) -> int:
        return AGENT_SYSTEM_LEN if self.is_session else SYSTEM_LEN

    def prompt(self) -> array[int]:
        named = [self.is_session] * self.system_len + [*divmod(self.number, VOCAB_SIZE)]
        return array(TOKENS, named[: self.length]) + array(TOKENS, [0]) * (self.length - len(named))


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    conversation: _Conversation
    came_at: float
    answer_len: int
    possible: int
    """The tokens of its prompt that were computed before, in whole pages."""
    then: Then
    """Called with the time of its end."""
    has_token: bool = False


class _World:
    """One mix on the real scheduler."""

    def __init__(self, mix: Mix, cache: int, keep_s: float, turns: int, seed: int) -> None:
        info = RunnerInfo(
            cache // PAGE, PAGE, SLOTS, cache, VOCAB_SIZE, "virtual", 0.0, 0.0, timed_steps=timed_steps(COST)
        )
        config = SchedulerConfig(
            queue_len_max=UNBOUNDED, gap_targets_s=(GAP_S,) * len(ServiceClass), session_keep_s=keep_s
        )
        self._scheduler = Scheduler(config, info)
        self._mix, self._turns, self._seed = mix, turns, seed
        self._now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._order, self._handles, self._numbers = itertools.count(), itertools.count(1), itertools.count()
        self._open: dict[int, _Open] = {}
        self._asked: set[tuple[str, bool]] = set()
        """The system prompts that were asked before, as tenants and whether they are an agent's."""
        self._sessions_left = mix.sessions
        self._seen = {True: Seen(), False: Seen()}
        """By whether it is a session's."""

    def run(self) -> Served:
        for number in range(self._mix.sessions):
            self._open_session(random.Random(f"{self._seed} session {number}"))
        for tenant in self._mix.chat_tenants:
            self._open_chats(tenant, random.Random(f"{self._seed} {tenant}"))
        while self._sessions_left:
            if not self._scheduler.has_work:
                self._now = max(self._now, self._events[0][0])
            while self._events and self._events[0][0] <= self._now:
                at, _, then = heappop(self._events)
                then(at)
            self._step()
        return Served(self._seen[True], self._seen[False])

    def _at(self, at: float, then: Then) -> None:
        heappush(self._events, (at, next(self._order), then))

    # -- the traffic ------------------------------------------------------------------------------

    def _open_session(self, draw: random.Random) -> None:
        length = AGENT_SYSTEM_LEN + round(FIRST_LEN * draw.uniform(0.7, 1.3))
        session = _Conversation("agents", next(self._numbers), True, True, length)
        turns = itertools.count(1)

        def turn(at: float) -> None:
            self._ask(at, session, max(8, round(draw.lognormvariate(math.log(ANSWER_LEN), 0.7))), ended)

        def ended(at: float) -> None:
            session.length += round(draw.uniform(0.2, 1.8) * RESULT_LEN)
            if next(turns) == self._turns:
                self._sessions_left -= 1
            else:
                self._at(at + min(TOOL_S_MAX, draw.lognormvariate(math.log(TOOL_S), 1.0)), turn)

        self._at(draw.uniform(0.0, STARTS_S), turn)

    def _open_chats(self, tenant: str, draw: random.Random) -> None:
        opened_per_s = self._mix.chats_per_s * (1.0 - CHAT_GOES_ON) / len(self._mix.chat_tenants)

        def come(at: float) -> None:
            length = SYSTEM_LEN + PROMPT_LEN(draw)
            ask(at, _Conversation(tenant, next(self._numbers), False, self._mix.keeps_chats, length))
            self._at(at + draw.expovariate(opened_per_s), come)

        def ask(at: float, chat: _Conversation) -> None:
            self._ask(at, chat, OUTPUT_LEN(draw) // 3, lambda at: ended(at, chat))

        def ended(at: float, chat: _Conversation) -> None:
            chat.length += PROMPT_LEN(draw) // 4
            if draw.random() < CHAT_GOES_ON:
                self._at(at + draw.uniform(*READING_S), lambda at: ask(at, chat))

        self._at(0.0, come)

    def _ask(self, at: float, conversation: _Conversation, answer_len: int, then: Then) -> None:
        handle, tenant = next(self._handles), conversation.tenant
        system, known_len = (tenant, conversation.is_session), conversation.computed_len
        if not known_len and system in self._asked:
            known_len = conversation.system_len
        self._asked.add(system)
        possible = min(known_len, conversation.length - 1) // PAGE * PAGE
        self._open[handle] = _Open(conversation, at, answer_len, possible, then)
        added = AddSequence(
            handle,
            f"req_{handle}",
            conversation.prompt(),
            SamplingParams(seed=1, max_tokens=answer_len),
            tenant.encode(),
            tenant,
            has_next_turn=conversation.has_next_turn,
        )
        self._scheduler.add(added, at)

    # -- one step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        plan = self._scheduler.plan(self._now)
        if plan is not None:
            work = Work.of(plan.positions, plan.lengths, seats=len(plan.seated))
            self._now += COST.seconds(work)
            self._scheduler.commit(plan, RunResult([0] * plan.sampled, [], []), self._now)
        output = self._scheduler.report()
        if output is not None:
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        for started in output.started:
            request = self._open[started.handle]
            seen = self._seen[request.conversation.is_session]
            seen.possible += request.possible
            seen.found += min(started.cached_len, request.possible)
        for handle in output.handles:
            request = self._open[handle]
            if not request.has_token:
                request.has_token = True
                seen = self._seen[request.conversation.is_session]
                seen.first_s.append(self._now - request.came_at)
        for finished in output.finished:
            assert finished.reason is FinishReason.LENGTH
            request = self._open.pop(finished.handle)
            conversation = request.conversation
            conversation.length += request.answer_len
            conversation.computed_len = conversation.length - 1
            request.then(self._now)


def serve(mix: Mix, cache: int, keep_s: float, turns: int = TURNS, seed: int = 1) -> Served:
    """Serve a mix with a cache of so many tokens until all its sessions have ended."""
    return _World(mix, cache, keep_s, turns, seed).run()


def run(seed: int) -> list[Figure]:
    """The figures of all mixes and caches."""
    return [one for mix in MIXES for cache in CACHES for one in figures(mix, cache, seed)]


def figures(mix: Mix, cache: int, seed: int, turns: int = TURNS) -> list[Figure]:
    """What is found in a cache of so many tokens, and how long first tokens take, without keeping and
    with."""
    keep_s = SchedulerConfig().session_keep_s
    without, kept = (serve(mix, cache, each, turns, seed) for each in (0.0, keep_s))
    name = f"agents, {mix.name}, cache {cache // 1000}k"
    target = SESSIONS_TARGET if cache >= ROOMY else None
    return [
        figure(f"{name}: sessions' hits of the possible, not kept", without.sessions.share, "of 1"),
        figure(f"{name}: the same, kept {keep_s:g} s", kept.sessions.share, "of 1", target),
        figure(f"{name}: chats' hits of the possible, not kept", without.chats.share, "of 1"),
        figure(f"{name}: the same, kept {keep_s:g} s", kept.chats.share, "of 1"),
        figure(
            f"{name}: sessions' TTFT p50 / not kept",
            kept.sessions.ttft(0.5) / without.sessions.ttft(0.5),
            "x",
        ),
        figure(
            f"{name}: sessions' TTFT p99 / not kept",
            kept.sessions.ttft(0.99) / without.sessions.ttft(0.99),
            "x",
        ),
        figure(f"{name}: chats' TTFT p99 / not kept", kept.chats.ttft(0.99) / without.chats.ttft(0.99), "x"),
    ]
