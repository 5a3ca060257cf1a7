"""The victim of an attack: a tenant that asks for one stream after another, and for short chats, in equal
rounds.

Its answers must be the same alone and beside any attack. The engine's sums do not depend on the rest of the
batch, so its greedy answers are equal to the letter.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from shared.apis.chat import ChatChunk, ChatCompletion
from tests.bench.client import ApiServer, TimedRequest
from tests.bench.gateway.attack import MODEL, Who

T = TypeVar("T")

STREAM_TOKENS: Final = 48
CHAT_TOKENS: Final = 1
"""The tokens of a chat's answer: with one, it is its first token. Gaps are the streams' to tell."""
CUE_ROUNDS: Final = 3
"""The rounds after which attacks that end on cue are ended: in the last of them they were at their height."""
LONG: Final = "Tell me what a penstock is, in a few words. " * 26
"""A prompt longer than those that the gateway counts on its event loop, so that it waits its turn for a
thread."""
CHATS: Final = ("Hello!", "What is the capital of France?", LONG)


class VictimFailed(Exception):
    """A request of the victim did not get what it gets alone."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that requests were charged, and those that steps computed for them."""

    settled: float = 0.0
    computed: float = 0.0
    """Prompts without what was cached, and all generated tokens but each last one."""

    def plus(self, other: Cost) -> Cost:
        return Cost(self.settled + other.settled, self.computed + other.computed)

    def less(self, other: Cost) -> Cost:
        return Cost(self.settled - other.settled, self.computed - other.computed)


@dataclass(slots=True)
class Account:
    """The times that the victim saw, in milliseconds, and the cost of its requests."""

    rounds: int = 0
    cost: Cost = Cost()
    """The cost of its requests, by the usage that its answers tell."""
    gaps_ms: list[float] = field(default_factory=list)
    """The times between two events of a stream."""
    first_ms: list[float] = field(default_factory=list)
    """The times from a request to its first token: a stream's, and a chat's, which is its whole answer."""

    def add(self, stream: TimedRequest, chats: Sequence[TimedRequest]) -> None:
        self.rounds += 1
        self.gaps_ms += (1e3 * (b - a) for a, b in itertools.pairwise(stream.event_times))
        self.first_ms.append(1e3 * (stream.event_times[0] - stream.sent_at))
        self.first_ms += (1e3 * (chat.ended_at - chat.sent_at) for chat in chats)
        for answer in (stream, *chats):
            usage = answer.usage
            assert usage is not None
            settled = usage.prompt_tokens + usage.completion_tokens
            self.cost = self.cost.plus(Cost(settled, usage.computed))

    def merge(self, other: Account) -> None:
        self.rounds += other.rounds
        self.cost = self.cost.plus(other.cost)
        self.gaps_ms += other.gaps_ms
        self.first_ms += other.first_ms


class Victim:
    """A client of the gateway at `url`, which is without `/v1`."""

    def __init__(self, url: str) -> None:
        self._endpoint = ApiServer(f"{url}/v1", Who.VICTIM.value)
        self._stream = self._request("Tell me a story.", STREAM_TOKENS, stream=True)
        self._chats = [self._request(text, CHAT_TOKENS, stream=False) for text in CHATS]
        self._expected: tuple[str, list[str]] | None = None

    def _request(self, text: str, max_tokens: int, *, stream: bool) -> bytes:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return self._endpoint.request("/chat/completions", msgspec.json.encode({**body, **options}))

    async def alone(self, rounds: int) -> Account:
        """Run so many rounds. The answers of the very first round are what every later round must repeat."""
        account = Account()
        for _ in range(rounds):
            await self._round(account)
        return account

    async def beside(self, attack: Awaitable[T], cue: asyncio.Event) -> tuple[Account, T]:
        """Run rounds for as long as an attack runs, and set its cue after `CUE_ROUNDS`. Raises VictimFailed,
        and what the attack raises."""
        account = Account()
        attacking = asyncio.ensure_future(attack)
        try:
            while not attacking.done() or not account.rounds:
                await self._round(account)
                if account.rounds >= CUE_ROUNDS:
                    cue.set()
            return account, attacking.result()
        finally:
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)

    async def _round(self, account: Account) -> None:
        stream, chats = await asyncio.gather(self._streamed(), self._chatted())
        answers = _streamed_text(stream), [_answered_text(chat) for chat in chats]
        if self._expected is None:
            self._expected = answers
        if answers != self._expected:
            raise VictimFailed(f"it got {answers}, and alone {self._expected}")
        account.add(stream, chats)

    async def _streamed(self) -> TimedRequest:
        connection = await self._endpoint.connect()
        try:
            connection.begin(self._stream, keeps_events=True)
            return _whole(await connection.finished())
        finally:
            connection.close()

    async def _chatted(self) -> list[TimedRequest]:
        """The chats, one after another on one connection."""
        connection = await self._endpoint.connect()
        try:
            return [_whole(await connection.exchange(request)) for request in self._chats]
        finally:
            connection.close()


def _whole(exchange: TimedRequest) -> TimedRequest:
    if exchange.error is not None:
        raise VictimFailed(exchange.error)
    return exchange


def _streamed_text(exchange: TimedRequest) -> str:
    assert exchange.events is not None
    chunks = [msgspec.json.decode(event.removeprefix(b"data: "), type=ChatChunk) for event in exchange.events]
    if exchange.usage is None or exchange.usage.completion_tokens != STREAM_TOKENS:
        raise VictimFailed(f"the stream's usage is {exchange.usage}")
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def _answered_text(exchange: TimedRequest) -> str:
    return msgspec.json.decode(exchange.body, type=ChatCompletion).choices[0].message.content or ""
