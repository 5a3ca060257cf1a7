"""`python -m tests.bench routing --live`: rules of choosing a replica, on three CPU engines behind real
gateways.

One gateway for each rule stands before the same engines, and they are measured in turns of one run. Prompts
of a turn are like those of another in length and in what they share, and differ in their words, so that no
turn finds what another has cached. Two kinds of traffic, each in a closed loop:

*conversations*   some turns each, and a system prompt of several; all are open at once, as those of people
                  who take their time to answer, and an engine's cache holds a part of them alone
*singles*         prompts of very different lengths that share nothing

Cached tokens are the engines' own, from `usage`. A *perfect placement* computes no token twice: what a turn's
prompt repeats of the turn before, and a system prompt that was asked before, would all be cached, as if the
caches had no end. No rule can do better, so the target of our share beside round robin's is bounded by it.

    python -m tests.bench.gateway.routing_live --rule "least load" --config FILE

runs a gateway with another rule than the product's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Unpack

import msgspec

from gateway.__main__ import main as gateway_main
from gateway.directory.development import development_config, development_key
from gateway.routing import policy, replicas
from gateway.routing.maglev import Table
from gateway.routing.policy import Affinity, ReplicaChoice, RouteReason
from shared.apis.chat import ChatChunk
from shared.apis.generation import Usage
from shared.process.setting_values import to_toml
from tests.bench.client import ApiServer, TimedRequest
from tests.bench.figures import Figure, at_least, at_most, figure, quantile
from tests.bench.gateway.unary import checked
from tests.bench.services import demo_model, free_port, service
from tests.bench.streams import BenchFailed

MODEL: Final = "demo"
ENGINES: Final = 3
OWN: Final = "own"
OTHERS: Final = ("round robin", "least load")
WITHIN: Final = 1.2
"""The bound of what a perfect placement may be better, as in virtual time."""
SHARE_MIN: Final = 1.6
"""The target over round robin, where a perfect placement allows so much."""
KV_CACHE: Final = 24 << 20
"""Bytes of one engine's cache, some 16,000 tokens: it holds its part of the conversations, and not all of
them, which are some 27,000."""
PAGE: Final = 16
"""Tokens of a page of it. What is cached is whole pages."""
CALLERS: Final = 8
PREFIXES: Final = 8
CONVERSATIONS: Final = 32
TURNS: Final = 6
SYSTEM_WORDS: Final = 100
QUESTION_WORDS: Final = (60, 180)
ANSWER_TOKENS: Final = 8
SINGLES: Final = 24
SINGLE_WORDS: Final = (20, 400)
WORDS: Final = ("river", "stone", "water", "from", "green", "light", "which", "round", "table", "under")
"""Each is one token of the built-in model."""
ROUNDS_MAX: Final = 4
REQUEST_S: Final = 60.0

Asked = tuple[Table, Sequence[int], Affinity, int | None, Sequence[bool]]
"""The arguments of `policy.choose`."""
Rule = Callable[[Unpack[Asked]], ReplicaChoice | None]


@dataclass(slots=True)
class Seen:
    """The requests of one rule, of one kind of traffic."""

    prompt: int = 0
    cached: int = 0
    perfect: int = 0
    """The tokens that a perfect placement would have cached, or some more."""
    first_ms: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.cached / self.prompt

    @property
    def perfect_share(self) -> float:
        return self.perfect / self.prompt

    @property
    def p99_ms(self) -> float:
        return quantile(self.first_ms, 0.99)

    def add(self, done: TimedRequest, perfect: int) -> None:
        usage = usage_of(done)
        self.prompt += usage.prompt_tokens
        self.cached += usage.prompt_tokens_details.cached_tokens
        self.perfect += min(perfect, usage.prompt_tokens - 1) // PAGE * PAGE
        self.first_ms.append(1e3 * (done.event_times[0] - done.sent_at))


class _WithUsage(msgspec.Struct):
    usage: Usage | None = None


# -- the rules --------------------------------------------------------------------------------------------


def blind(pick: Callable[[Sequence[int], Sequence[int]], int]) -> Rule:
    """A rule that does not look at what a prompt shares. `pick` chooses of the indices that are usable, by
    all loads."""

    def choose(*args: *Asked) -> ReplicaChoice | None:
        _, loads, affinity, _, usable = args
        able = [i for i, is_usable in enumerate(usable) if is_usable]
        return ReplicaChoice(pick(able, loads), RouteReason.LOAD, affinity.prompt_len) if able else None

    return choose


def round_robin() -> Rule:
    turns = itertools.count()
    return blind(lambda able, _: able[next(turns) % len(able)])


def least_load() -> Rule:
    draw = random.Random(0)
    return blind(lambda able, loads: min(able, key=lambda i: (loads[i], draw.random())))


RULES: Final[dict[str, Callable[[], Rule]]] = {
    OWN: lambda: policy.choose,
    "round robin": round_robin,
    "least load": least_load,
}


# -- the services -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _engine() -> AsyncIterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "engine", "serve", "--model", demo_model(), "--port", str(port)]
    argv += ["--served-model-name", MODEL, "--threads", "1", "--dtype", "float32", "--swap-memory", "0"]
    async with service(
        [*argv, "--kv-cache-memory", str(KV_CACHE), "--page-size", str(PAGE)], f"{url}/readyz"
    ):
        yield url


@contextlib.asynccontextmanager
async def gateway_by(rule: str, engines: Sequence[str]) -> AsyncIterator[ApiServer]:
    """A gateway with this rule, before all engines."""
    port, key = free_port(), development_key()
    first, *more = engines
    config = development_config(port=port, key=key, model=MODEL, engine_url=first, more_engine_urls=more)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "gateway.toml"
        path.write_text(to_toml(config))
        argv = [
            sys.executable,
            "-m",
            "tests.bench.gateway.routing_live",
            "--rule",
            rule,
            "--config",
            str(path),
        ]
        async with service(argv, f"http://127.0.0.1:{port}/readyz"):
            yield ApiServer(f"http://127.0.0.1:{port}/v1", key)


# -- the traffic ------------------------------------------------------------------------------------------


class _Conversation:
    """A conversation so far."""

    def __init__(self, system: str, seed: int) -> None:
        self.system, self.draw = system, random.Random(seed)
        self.messages = [{"role": "system", "content": system}]
        self.computed = 0
        """The tokens of its last turn, question and answer: the next turn begins with them. 0 before any."""
        self.turn = asyncio.Lock()


class Callers:
    """The callers of one gateway, and what they saw."""

    def __init__(self, server: ApiServer, rule: str) -> None:
        self.server, self.rule = server, rule
        self.conversations, self.singles = Seen(), Seen()

    async def round(self, number: int) -> None:
        """One turn. Those of the same number differ between rules in a few words alone."""
        draw, name = random.Random(number), f"{self.rule} {number}"
        systems = [_words(draw, SYSTEM_WORDS, f"{name} system {i}") for i in range(PREFIXES)]
        asked: set[str] = set()
        open_ = [_Conversation(draw.choice(systems), draw.randrange(1 << 30)) for _ in range(CONVERSATIONS)]
        turns = [one for one in open_ for _ in range(TURNS)]
        draw.shuffle(turns)
        await _at_once(self._turn(one, asked) for one in turns)
        prompts = [_words(draw, draw.randint(*SINGLE_WORDS), f"{i} single {name}") for i in range(SINGLES)]
        await _at_once(self._single(prompt) for prompt in prompts)

    async def warm_up(self) -> None:
        """Send long prompts, so that each engine has had some."""
        draw = random.Random(0)
        prompts = [_words(draw, SINGLE_WORDS[1], f"{i} warm {self.rule}") for i in range(2 * ENGINES)]
        await _at_once(self._single(prompt) for prompt in prompts)

    async def _turn(self, one: _Conversation, asked: set[str]) -> None:
        """Ask the next question of a conversation. `asked` are the system prompts that were asked before."""
        async with one.turn:
            question_len = one.draw.randint(*QUESTION_WORDS)
            one.messages.append({"role": "user", "content": _words(one.draw, question_len, "Now")})
            done = await self._ask(one.messages)
            usage = usage_of(done)
            if not one.computed and one.system in asked:
                one.computed = usage.prompt_tokens - question_len
            asked.add(one.system)
            self.conversations.add(done, one.computed)
            one.computed = usage.prompt_tokens + usage.completion_tokens
            one.messages.append({"role": "assistant", "content": text_of(done)})

    async def _single(self, prompt: str) -> None:
        self.singles.add(await self._ask([{"role": "user", "content": prompt}]), 0)

    async def _ask(self, messages: Sequence[dict[str, str]]) -> TimedRequest:
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = await self.server.connect()
        try:
            connection.begin(
                self.server.request("/chat/completions", msgspec.json.encode(body)), keeps_events=True
            )
            return checked(await connection.finished(REQUEST_S))
        finally:
            connection.close()


async def _at_once(requests: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all, at most `CALLERS` at a time."""
    room = asyncio.Semaphore(CALLERS)

    async def one(request: Coroutine[None, None, None]) -> None:
        async with room:
            await request

    await asyncio.gather(*map(one, requests))


def _words(draw: random.Random, count: int, name: str) -> str:
    return f"{name} {' '.join(draw.choices(WORDS, k=count))}"


def usage_of(done: TimedRequest) -> Usage:
    """Read what the answer says of its tokens. Raises BenchFailed."""
    if not done.event_times:
        raise BenchFailed(f"an answer of {done.status} without events: {done.body[:200]!r}")
    usage = msgspec.json.decode(done.last_event.removeprefix(b"data: "), type=_WithUsage).usage
    if usage is None:
        raise BenchFailed("a stream without its usage")
    return usage


def text_of(done: TimedRequest) -> str:
    chunks = [msgspec.json.decode(one.removeprefix(b"data: "), type=ChatChunk) for one in done.events or ()]
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# -- the bench --------------------------------------------------------------------------------------------


async def run_live(limit_s: float) -> list[Figure]:
    """Figures of as many rounds as end in time, and of one at least."""
    until_s = time.perf_counter() + limit_s
    async with contextlib.AsyncExitStack() as stack:
        engines = await asyncio.gather(*(stack.enter_async_context(_engine()) for _ in range(ENGINES)))
        servers = await asyncio.gather(
            *(stack.enter_async_context(gateway_by(rule, engines)) for rule in RULES)
        )
        all_callers = {rule: Callers(server, rule) for rule, server in zip(RULES, servers, strict=True)}
        for callers in all_callers.values():
            await Callers(callers.server, f"{callers.rule} warm-up").warm_up()
        took_s = 0.0
        for number in range(ROUNDS_MAX):
            began_s = time.perf_counter()
            if number and began_s + took_s > until_s:
                sys.stderr.write(f"stopped after {number} rounds of {ROUNDS_MAX}: --limit-s {limit_s:g}\n")
                break
            first = number % len(RULES)  # each rule is the first at times
            for rule in (*list(RULES)[first:], *list(RULES)[:first]):
                await all_callers[rule].round(number)
            took_s = time.perf_counter() - began_s
    return figures_of(
        {rule: callers.conversations for rule, callers in all_callers.items()},
        {rule: callers.singles for rule, callers in all_callers.items()},
    )


def figures_of(conversations: Mapping[str, Seen], singles: Mapping[str, Seen]) -> list[Figure]:
    """Ours beside the others."""
    own, name = conversations[OWN], "live conversations"
    found = [
        figure(f"{name}: cached share / perfect", own.share / own.perfect_share, "x"),
        *(figure(f"{name}: cached share, {rule}", one.share, "of 1") for rule, one in conversations.items()),
        figure(f"{name}: cached share, perfect", own.perfect_share, "of 1"),
    ]
    robin = conversations["round robin"]
    most = own.perfect_share / robin.share if robin.share else float("inf")
    found.append(figure(f"{name}: perfect / round robin, which bounds ours", most, "x"))
    for rule in OTHERS:
        other = conversations[rule]
        share = own.share / other.share if other.share else float("inf")
        target = at_least(round(min(SHARE_MIN, most / WITHIN), 3)) if other is robin else None
        found.append(figure(f"{name}: cached share / {rule}", share, "x", target))
        p99 = own.p99_ms / other.p99_ms
        found.append(figure(f"{name}: p99 to first token / {rule}", p99, "x", at_most(1.0)))
    for rule in OTHERS:
        p99 = singles[OWN].p99_ms / singles[rule].p99_ms
        found.append(figure(f"live singles: p99 to first token / {rule}", p99, "x", at_most(WITHIN)))
    return found


def main() -> int:
    """Run a gateway with one of the rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", choices=sorted(RULES), required=True)
    options, rest = parser.parse_known_args()
    vars(replicas)["choose"] = RULES[options.rule]()
    return gateway_main(rest)


if __name__ == "__main__":
    sys.exit(main())
