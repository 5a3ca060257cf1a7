"""A long prompt beside streams that run: their gaps without it and while it is read, its own first token
beside them and alone, and what becomes of it when its first token is of use for a limited time only.

The gaps without it are those before it and those after it. The streams' contexts grow while a long one is
read, and so do their gaps: 8 streams of a model of 474M went from 41 ms to 65 ms in the half minute that a
prompt of 4,000 tokens took.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from shared.wire.errors import FirstTokenDeadline
from shared.wire.ids import FIRST_TOKEN_TIMEOUT_HEADER
from tests.bench.client import TimedRequest
from tests.bench.engine.load import BenchFailed, Server, finished, random_prompt, request
from tests.bench.figures import quantile

STREAMS: Final = 8
PROMPT_LEN: Final = 4000
REPEATED_S: Final = 1.0
"""Prompts are repeated until they took so long together: a single one of some milliseconds tells little."""
PAUSE_S: Final = 0.1
"""Between two of them, and between the last and gaps that count as those without it."""
SETTLE_S: Final = 1.0
"""From the end of the streams to the prompt that is alone."""
OWN_PROMPT_LEN: Final = 50
"""The prompt tokens of each stream that runs."""
UNDISTURBED_S: Final = 2.0
"""For so long the streams run without the prompt before it, and as long after it."""
SETTLE_TOKENS: Final = 8
"""Tokens of every stream that are not counted: until all of them run."""
POLL_S: Final = 0.01
DEADLINE_FACTORS: Final = (0.5, 0.8, 1.3)
"""The deadlines of a long prompt, as multiples of the time that it takes beside streams without one."""
REFUSED_AT_ONCE_S: Final = 1.0
"""The time within which a request counts as refused at once: a step, and the way to the engine and back."""


@dataclass(frozen=True, slots=True)
class Beside:
    prompt_len: int
    usual_ms: float
    """The median of the streams' gaps without the prompt."""
    without_ms: float
    """p99 of these gaps."""
    during_ms: float
    first_ms: float
    """The long prompt's own first token; the median where it was repeated."""
    alone_ms: float
    """The first token of one as long with nothing beside it, likewise."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a prompt with a deadline ended."""

    deadline_s: float
    took_s: float
    """The time until its first token came, or until it was refused."""
    is_refused: bool

    @property
    def limit_s(self) -> float:
        """The time that it might take: the deadline, or what counts as refused at once."""
        return REFUSED_AT_ONCE_S if self.is_refused else self.deadline_s


async def beside(server: Server, rng: random.Random) -> Beside:
    """Measure it. A server whose context is short gets a shorter prompt. Raises `BenchFailed`."""
    context_len = await server.context_len()
    prompt_len = min(PROMPT_LEN, context_len // 2)
    async with _running(server, rng, context_len - OWN_PROMPT_LEN) as streams:
        start = time.perf_counter()
        await asyncio.sleep(UNDISTURBED_S)
        long = await _prompts(server, rng, prompt_len, streams)
        await asyncio.sleep(UNDISTURBED_S)
        end = time.perf_counter()
    await asyncio.sleep(SETTLE_S)
    alone = await _prompts(server, rng, prompt_len, [])
    without_ms = [
        *_gaps_ms(streams, start, long[0].sent_at),
        *_gaps_ms(streams, long[-1].event_times[0] + PAUSE_S, end),
    ]
    during_ms = [gap for one in long for gap in _gaps_ms(streams, one.sent_at, one.event_times[0])]
    return Beside(
        prompt_len,
        quantile(without_ms, 0.5),
        quantile(without_ms, 0.99),
        quantile(during_ms, 0.99),
        _first_ms(long),
        _first_ms(alone),
    )


async def with_deadlines(server: Server, rng: random.Random) -> list[Ending]:
    """The endings of long prompts beside streams, one after another. The first has no deadline and tells how
    long one takes. Raises `BenchFailed`."""
    context_len = await server.context_len()
    prompt_len = context_len - OWN_PROMPT_LEN
    endings = []
    async with _running(server, rng, context_len - OWN_PROMPT_LEN):
        first = await _prompt(server, rng, prompt_len)
        usual_s = first.event_times[0] - first.sent_at
        for factor in DEADLINE_FACTORS:
            deadline_s = factor * usual_s
            headers = {FIRST_TOKEN_TIMEOUT_HEADER: str(round(1e3 * deadline_s))}
            connection = await server.endpoint.connect()
            try:
                done = await connection.exchange(request(server, random_prompt(rng, prompt_len), 1, headers))
            finally:
                connection.close()
            endings.append(ending(done, deadline_s))
    return endings


def ending(done: TimedRequest, deadline_s: float) -> Ending:
    """How this request ended. Raises `BenchFailed` when it failed for another reason than its deadline."""
    if done.error is None:
        return Ending(deadline_s, done.event_times[0] - done.sent_at, is_refused=False)
    if FirstTokenDeadline.code.encode() not in done.last_event + done.body:
        raise BenchFailed(done.error)
    return Ending(deadline_s, done.ended_at - done.sent_at, is_refused=True)


async def _prompt(server: Server, rng: random.Random, prompt_len: int) -> TimedRequest:
    """The request of one long prompt, when its first token has come."""
    connection = await server.endpoint.connect()
    try:
        connection.begin(request(server, random_prompt(rng, prompt_len), 1))
        return await finished(connection)
    finally:
        connection.close()


async def _prompts(
    server: Server, rng: random.Random, prompt_len: int, streams: list[TimedRequest]
) -> list[TimedRequest]:
    """Prompts one after another, at least one, and others while all these streams run."""
    done = [await _prompt(server, rng, prompt_len)]
    while sum(_first_ms([one]) for one in done) < 1e3 * REPEATED_S:
        await asyncio.sleep(PAUSE_S)
        if any(stream.ended_at for stream in streams):
            break
        last = await _prompt(server, rng, prompt_len)
        if any(stream.ended_at for stream in streams):
            break  # not all of them were beside it
        done.append(last)
    return done


def _first_ms(requests: list[TimedRequest]) -> float:
    return quantile([1e3 * (one.event_times[0] - one.sent_at) for one in requests], 0.5)


@contextlib.asynccontextmanager
async def _running(server: Server, rng: random.Random, output_len: int) -> AsyncIterator[list[TimedRequest]]:
    """Streams in the midst of their answers, cut off on the way out."""
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(STREAMS):
            connection = await server.endpoint.connect()
            stack.callback(connection.close)
            streams.append(connection.begin(request(server, random_prompt(rng, OWN_PROMPT_LEN), output_len)))
        while any(  # noqa: ASYNC110 -- the client keeps times, and tells nobody
            len(stream.event_times) < SETTLE_TOKENS for stream in streams
        ):
            await asyncio.sleep(POLL_S)
        yield streams


def _gaps_ms(streams: list[TimedRequest], start: float, end: float) -> list[float]:
    """Gaps that ended in a span of time."""
    return [
        1e3 * (later - earlier)
        for stream in streams
        for earlier, later in itertools.pairwise(stream.event_times)
        if start <= later < end
    ]
