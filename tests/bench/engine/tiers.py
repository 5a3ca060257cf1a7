"""A chat history whose pages were evicted: the time to the first token of its next turn, by where they are.

Each case is an engine of its own, with a device pool that a few prompts fill. A history of `TURNS` turns is
computed turn by turn, other prompts take its pages, and then its next turn is asked for, with `HISTORIES`
different ones. In the case `after a restart` the engine ends before that question. Ratios are to the engine
without tiers, which computes the history again. Pass `-- --max-model-len 4096` for a long context:
the pool is as large as two sequences need.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Final

from tests.bench.client import ApiServer
from tests.bench.engine.load import BenchFailed, Server, finished, random_prompt, request, warm_up
from tests.bench.figures import Figure, at_most, figure
from tests.bench.services import free_port, get, service

TURNS: Final = 20
HISTORIES: Final = 3
HISTORY_LEN: Final = 2000
"""Tokens of a whole history; half of the context where that is less."""
PAGE_SIZE: Final = 16
FILLERS: Final = 6
"""Prompts of half of the context that take the pages of a history."""
WRITTEN_TRIES: Final = 300
POLL_S: Final = 0.1
HOST_TARGET: Final = at_most(0.5)
RESTART_TARGET: Final = at_most(0.7)


async def tier_figures(model: str, rng: random.Random, options: Sequence[str]) -> list[Figure]:
    """The figures of all cases, with `options` for the engines. Raises `BenchFailed`."""
    small = ["--page-size", str(PAGE_SIZE), "--max-num-seqs", "2", *options]
    host = ["--swap-memory", "1GiB"]
    without_ms = await _evicted(model, rng, [*small, "--swap-memory", "0"])
    host_ms = await _evicted(model, rng, [*small, *host])
    with tempfile.TemporaryDirectory() as directory:
        restart_ms = await _restarted(model, rng, [*small, *host, "--kv-disk-dir", directory])
    name = f"history of {TURNS} turns, evicted: TTFT"
    return [
        figure(f"{name} without tiers", without_ms, "ms"),
        figure(f"{name} with the host tier", host_ms, "ms"),
        figure(f"{name} with the disk tier, after a restart", restart_ms, "ms"),
        figure(f"{name}, host tier / without", host_ms / without_ms, "x", HOST_TARGET),
        figure(f"{name}, restart with the disk tier / without", restart_ms / without_ms, "x", RESTART_TARGET),
    ]


@contextlib.asynccontextmanager
async def engine(model: str, options: Sequence[str]) -> AsyncIterator[Server]:
    """An engine of its own, with these options, until the block is left."""
    port = free_port()
    argv = [sys.executable, "-m", "engine", "serve", "--model", model, "--served-model-name", "bench"]
    async with service([*argv, "--port", str(port), *options], f"http://127.0.0.1:{port}/readyz") as process:
        server = Server("", ApiServer(f"http://127.0.0.1:{port}/v1"), "bench", (process.pid,))
        await warm_up(server, PAGE_SIZE)
        yield server


async def _evicted(model: str, rng: random.Random, options: Sequence[str]) -> float:
    async with engine(model, options) as server:
        histories = await _histories(server, rng)
        return await _asked(server, histories)


async def _restarted(model: str, rng: random.Random, options: Sequence[str]) -> float:
    async with engine(model, options) as server:
        histories = await _histories(server, rng)
        pages = sum(len(history) // PAGE_SIZE for history in histories)
        await _until_on_disk(server, pages)
    async with engine(model, options) as server:
        await _until_on_disk(server, pages)
        return await _asked(server, histories)


async def _histories(server: Server, rng: random.Random) -> list[list[int]]:
    """Histories whose pages were evicted from the device."""
    half = await server.context_len() // 2
    histories = []
    for _ in range(HISTORIES):
        history: list[int] = []
        for _ in range(TURNS):
            history += random_prompt(rng, min(HISTORY_LEN, half) // TURNS)
            await first_token_ms(server, history)
        histories.append(history)
    for _ in range(FILLERS):
        await first_token_ms(server, random_prompt(rng, half))
    return histories


async def _asked(server: Server, histories: Sequence[list[int]]) -> float:
    """The median time to the first token of these histories' next turns, in milliseconds."""
    return statistics.median([await first_token_ms(server, [*each, *each[:PAGE_SIZE]]) for each in histories])


async def first_token_ms(server: Server, prompt: list[int]) -> float:
    """The time to the first token of a prompt, in milliseconds. Raises `BenchFailed`."""
    connection = await server.endpoint.connect()
    try:
        connection.begin(request(server, prompt, 1))
        done = await finished(connection)
    finally:
        connection.close()
    return 1e3 * (done.event_times[0] - done.sent_at)


async def _until_on_disk(server: Server, pages: int) -> None:
    """Wait until the engine knows of so many pages on disk."""
    url = server.endpoint.url.removesuffix("/v1") + "/metrics"
    for _ in range(WRITTEN_TRIES):
        if pages_on_disk((await get(url)).decode()) >= pages:
            return
        await asyncio.sleep(POLL_S)
        await warm_up(server, PAGE_SIZE // 2)  # the core tells its counts with steps
    raise BenchFailed(f"after {WRITTEN_TRIES} looks there were not {pages} pages on disk")


def pages_on_disk(metrics: str) -> float:
    """The gauge of pages on disk; 0 where it is not there yet."""
    found = re.search(r"^penstock_engine_disk_pages (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0
