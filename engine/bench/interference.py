"""The effect of a long prompt on streams that run: their gaps before it, and while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from engine.bench.load import Server, finished, random_prompt, request
from shared.bench.client import TimedRequest
from shared.bench.figures import quantile

STREAMS: Final = 8
PROMPT_LEN: Final = 4000
OWN_PROMPT_LEN: Final = 50
"""The prompt tokens of each stream that runs."""
BEFORE_S: Final = 3.0
"""For so long the streams run undisturbed."""
SETTLE_TOKENS: Final = 8
"""Tokens of every stream that are not counted: until all of them run."""
POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Beside:
    prompt_len: int
    before_ms: float
    """p99 of the streams' gaps."""
    during_ms: float
    first_ms: float
    """The long prompt's own first token."""


async def beside(server: Server, rng: random.Random) -> Beside:
    """Measure it. A server whose context is short gets a shorter prompt. Raises `BenchFailed`."""
    context_len = await server.context_len()
    prompt_len = min(PROMPT_LEN, context_len // 2)
    async with _running(server, rng, context_len - OWN_PROMPT_LEN) as streams:
        start = time.perf_counter()
        await asyncio.sleep(BEFORE_S)
        late = await server.endpoint.connect()
        try:
            long = late.begin(request(server, random_prompt(rng, prompt_len), 1))
            await finished(late)
        finally:
            late.close()
    return Beside(
        prompt_len,
        quantile(_gaps_ms(streams, start, long.sent_at), 0.99),
        quantile(_gaps_ms(streams, long.sent_at, long.event_times[0]), 0.99),
        1e3 * (long.event_times[0] - long.sent_at),
    )


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
