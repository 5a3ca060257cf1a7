"""What engines of other makes show of their queues counts as load, and what they do to it harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.config.edge import HopConfig
from gateway.config.whole import ModelConfig
from gateway.discovery.foreign_loads import INTERVAL_S, RETRY_S, ForeignLoads
from gateway.relay.engines import Engines
from gateway.relay.upstream import Credentials, Upstream
from gateway.routing.exposition import EXPOSITION_LEN_MAX, REQUESTS_MAX, WAITING_LEN, parse_exposition
from gateway.routing.policy import NEVER_MS
from gateway.routing.replicas import Replicas
from shared.wire.load_report import DEFAULT, LoadReport
from tests.fakes import VirtualClock
from tests.gateway.conftest import PATIENCE_S

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} c"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0"} 77.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
"""
SGLANG = b'sglang:num_queue_reqs{model_name="m"} 4.0\r\nsglang:num_running_reqs{model_name="m"} 6.0\r\n'
LLAMACPP = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2 1700000000000\n"


@pytest.mark.parametrize(
    ("text", "waiting", "running"),
    [(VLLM, 3, 7), (SGLANG, 4, 6), (LLAMACPP, 2, 1), (b"vllm:num_requests_running 2e0", 0, 2)],
)
def test_the_queue_is_read_from_the_metrics(text: bytes, waiting: int, running: int) -> None:
    assert parse_exposition(text) == LoadReport((0, waiting * WAITING_LEN, 0), waiting + running)


def test_requests_that_are_counted_here_are_not_counted_twice() -> None:
    assert parse_exposition(VLLM, own=2) == LoadReport((0, WAITING_LEN, 0), 10)
    assert parse_exposition(VLLM, own=9) == LoadReport((0, 0, 0), 10)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"\xff" * 1000,
        b"up 1\n",
        b"vllm:num_requests_waiting NaN\n",
        b"vllm:num_requests_waiting 1e999\n",
        b"vllm:num_requests_waiting -1\n",
        b"vllm:num_requests_waiting 1.2.3\n",
        b"vllm:num_requests_waiting %d\n" % (REQUESTS_MAX + 1),
        b'vllm:num_requests_waiting{a="' + b"}" * EXPOSITION_LEN_MAX,
        b"# vllm:num_requests_waiting 5\n",
    ],
    ids=range(11),
)
def test_what_tells_no_load_is_none(text: bytes) -> None:
    assert parse_exposition(text) is None


def test_many_series_are_no_more_than_the_most() -> None:
    report = parse_exposition(b"vllm:num_requests_waiting 900000\n" * 5)
    assert report is not None
    assert report.waiting[DEFAULT] == REQUESTS_MAX * WAITING_LEN


# -- asking ---------------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answering(body: bytes, status: bytes = b"200 OK") -> Serve:
    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    return serve


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def slow(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm:")
    await asyncio.Event().wait()


async def endless(writer: asyncio.StreamWriter) -> None:
    """100 MB, as far as they are read."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
    for _ in range(1000):
        writer.write(b"vllm:num_requests_waiting 1\n" * 3500)
        await writer.drain()


class World:
    """Engines of other makes, and the one that asks them."""

    def __init__(self, urls: list[str]) -> None:
        self.clock = VirtualClock()
        model = ModelConfig(name="m", replicas=tuple(urls), protocol="http1", api_key="env:THEIR_KEY")
        self.replicas = Replicas([model], self.clock)
        self.upstream = Upstream(HopConfig(), [model])
        self.known = SimpleNamespace(is_foreign=True)
        engines = cast(Engines, SimpleNamespace(of=lambda _: self.known))
        known = engines, self.replicas, self.upstream, Credentials([model], {"THEIR_KEY": "their-key"})
        self.loads = ForeignLoads((model,), *known, self.clock)
        self.views = [next(one for one in self.replicas.members() if one.url == url).view for url in urls]

    @property
    def told(self) -> list[int | None]:
        return [view.told[DEFAULT] // 1000 if view.reports else None for view in self.views]


@asynccontextmanager
async def world(*serves: Serve) -> AsyncIterator[tuple[World, list[int]]]:
    """And how often each was asked."""
    asked, servers, tasks = [0] * len(serves), list[asyncio.Server](), set[asyncio.Task[Any]]()

    def started(i: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while b"/metrics " in (head := await reader.readuntil(b"\r\n\r\n")):
                    assert b"authorization: Bearer their-key\r\n" in head, "some have a key for these as well"
                    asked[i] += 1
                    await serves[i](writer)
            writer.close()

        return run

    for i in range(len(serves)):
        servers.append(await asyncio.start_server(started(i), "127.0.0.1", 0))
    made = World([f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers])
    try:
        yield made, asked
    finally:
        await made.upstream.aclose()
        for task in tasks:
            task.cancel()
        for server in servers:
            server.close()


async def ask(made: World) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await made.loads.ask()


async def test_a_queue_is_load_and_bad_neighbours_cost_their_own_reports_alone() -> None:
    long = VLLM + b"#\n" * (EXPOSITION_LEN_MAX // 2)
    bad: list[Serve] = [silent, slow, endless, answering(b"\xff" * 5000), answering(VLLM, b"404 Not Found")]
    async with world(answering(VLLM), *bad, answering(long)) as (made, asked):
        await ask(made)
        assert made.told == [3 * WAITING_LEN, *[None] * 6]
        assert made.views[0].sequences == 10
        await ask(made)
        assert asked == [2, *[1] * 6], "those that tell nothing are left alone for a time"
        made.clock.advance(RETRY_S)
        await ask(made)
        assert asked == [3, *[2] * 6]


async def test_a_report_is_believed_for_its_interval_and_fades() -> None:
    async with world(answering(SGLANG)) as (made, _):
        await ask(made)
        assert made.views[0].fresh_until_ms == 1_000_000 + 3_000


async def test_engines_of_ours_are_not_asked() -> None:
    async with world(answering(VLLM)) as (made, asked):
        made.known.is_foreign = False
        await ask(made)
        assert asked == [0]
        assert made.views[0].fresh_until_ms == NEVER_MS


async def test_they_are_asked_at_every_interval() -> None:
    async with world(answering(VLLM)) as (made, asked):
        watching = asyncio.create_task(made.loads.watch())
        async with asyncio.timeout(PATIENCE_S):
            for times in (1, 2):
                while not made.clock.sleeping:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                made.clock.advance(INTERVAL_S)
                while asked != [times]:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        watching.cancel()
