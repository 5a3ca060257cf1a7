"""One load on one server of OpenAI's API: streams side by side, each with one request after another.

Prompts are random token ids, all different, so that no prefix cache helps; answers run to their full
length with `ignore_eos`. Times are taken by a client in another process than the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from shared.apis.models import ModelList
from tests.bench.client import ApiServer, LoadConnection, TimedRequest
from tests.bench.cpu import cpu_s, descendants, proportional_bytes, resident_bytes
from tests.bench.services import get

TOKEN_ID_MIN, TOKEN_ID_MAX = 300, 2000
"""Prompt ids are drawn from here: plain tokens in every vocabulary that we know of."""
CONTEXT_LEN_UNKNOWN: Final = 2048
"""Assumed of a server that does not tell."""


class BenchFailed(Exception):
    """The server under test answered with an error."""


@dataclass(frozen=True, slots=True)
class Server:
    """Who is measured. `pids` are the roots of its processes, none when it runs elsewhere."""

    name: str
    endpoint: ApiServer
    model: str
    pids: tuple[int, ...] = ()

    @property
    def resident_bytes(self) -> int:
        return sum(map(resident_bytes, self.pids))

    @property
    def proportional_bytes(self) -> int:
        return sum(map(proportional_bytes, self.pids))

    @property
    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for root in self.pids for pid in descendants(root))

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        for root in self.pids:
            for pid in descendants(root):
                os.kill(pid, number)

    async def context_len(self) -> int:
        """As `/v1/models` tells it."""
        models = msgspec.json.decode(await get(f"{self.endpoint.url}/models"), type=ModelList)
        lengths = [model.max_model_len for model in models.data if model.id == self.model]
        return next((length for length in lengths if length), CONTEXT_LEN_UNKNOWN)


@contextlib.contextmanager
def alone(server: Server, servers: Iterable[Server]) -> Iterator[None]:
    """The others' processes are stopped meanwhile: an engine that waits may do so by spinning, which takes
    the cores from the one that is measured."""
    others = [other for other in servers if other is not server]
    try:
        for other in others:
            other.signal(signal.SIGSTOP)
        yield
    finally:
        for other in others:
            other.signal(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    rounds: int
    prompt_len: int
    output_len: int

    def prompts(self, rng: random.Random) -> list[list[list[int]]]:
        """For each stream its rounds' prompts."""
        return [
            [random_prompt(rng, self.prompt_len) for _ in range(self.rounds)] for _ in range(self.streams)
        ]


@dataclass(slots=True)
class Sample:
    """A server's figures under a load, in as many pieces as it was measured in. Times in ms."""

    tokens: int = 0
    elapsed_s: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s

    def add(self, exchanges: Iterable[TimedRequest], elapsed_s: float) -> None:
        self.elapsed_s += elapsed_s
        for exchange in exchanges:
            self.tokens += completion_tokens(exchange)
            times = token_times(exchange)
            self.first_ms.append(1e3 * (times[0] - exchange.sent_at))
            self.gaps_ms += (1e3 * (later - earlier) for earlier, later in itertools.pairwise(times))


async def measure(server: Server, load: Load, rng: random.Random, into: Sample) -> None:
    """Run a load to its end. Raises `BenchFailed` when any request fails."""
    prompts = load.prompts(rng)
    start = time.perf_counter()
    done = await asyncio.gather(*(_stream(server, mine, load.output_len) for mine in prompts))
    into.add([exchange for mine in done for exchange in mine], time.perf_counter() - start)


async def warm_up(server: Server, prompt_len: int) -> None:
    """A short answer, so that nothing is done for the first time while it is measured."""
    await measure(server, Load(2, 1, prompt_len, 8), random.Random(), Sample())


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(TOKEN_ID_MIN, TOKEN_ID_MAX) for _ in range(length)]


def request(
    server: Server, prompt: list[int], output_len: int, headers: Mapping[str, str] | None = None
) -> bytes:
    body = completion_body(server, prompt, output_len)
    return server.endpoint.request("/completions", msgspec.json.encode(body), headers)


def completion_body(server: Server, prompt: list[int], output_len: int) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def finished(connection: LoadConnection) -> TimedRequest:
    exchange = await connection.finished()
    if exchange.error is not None:
        raise BenchFailed(exchange.error)
    return exchange


def token_times(exchange: TimedRequest) -> list[float]:
    """When tokens came: of the events, those at the end bring none, but a reason or the usage."""
    return exchange.event_times[: max(1, completion_tokens(exchange))]


def completion_tokens(exchange: TimedRequest) -> int:
    """The number that the server states; where it states none, one token an event."""
    usage = exchange.usage
    return usage.completion_tokens if usage is not None else len(exchange.event_times)


async def _stream(server: Server, prompts: list[list[int]], output_len: int) -> list[TimedRequest]:
    """One request after another on a kept connection, or on another where the server keeps none: llama.cpp's
    closes it after a stream, at times when the next request is on its way."""
    connection = await server.endpoint.connect()
    try:
        done: list[TimedRequest] = []
        for prompt in prompts:
            message = request(server, prompt, output_len)
            if not connection.is_open:
                connection = await server.endpoint.connect()
            exchange = await connection.exchange(message)
            if exchange.error is not None and not exchange.status and done:
                connection.close()
                connection = await server.endpoint.connect()
                exchange = await connection.exchange(message)
            if exchange.error is not None:
                raise BenchFailed(exchange.error)
            done.append(exchange)
        return done
    finally:
        connection.close()
