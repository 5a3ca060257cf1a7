"""Connections that say nothing take all file descriptors of a process, by whichever of its listeners. The
oldest of them make room for those that are served. Where none may be closed the process says so, serves the
connections that are there, and those that waited as soon as there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.bench.gateway.attack import MODEL, Who
from tests.neighbours.conftest import House
from tests.services import PATIENCE_S, until

SPARE = 24
"""The descriptors that the process may still open, of which twice as many are asked for."""
FAILURES = 3
FAILED = "penstock_accepts_failed_total"
DISPLACED = "penstock_connections_displaced_total"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
KEY = {"authorization": f"Bearer {Who.VICTIM}"}


@contextmanager
def few_descriptors(pid: int, spare: int) -> Iterator[None]:
    """The process may open so many more files, but for its operators' sake."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    now = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (now + spare, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@asynccontextmanager
async def held(url: str, said: bytes) -> AsyncIterator[None]:
    """More connections than there are descriptors, each of which says this and no more."""
    address, writers = urlsplit(url), []
    for _ in range(2 * SPARE):
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(said)
        writers.append(writer)
    yield
    for writer in writers:
        writer.transport.abort()


def counted(metrics: httpx.Client, name: str) -> int:
    lines = [line for line in metrics.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return int(float(lines[0].split()[1]))


async def asked_anew(url: str, path: str = "/v1/chat/completions") -> int:
    """The status of a request on a connection of its own."""
    async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=PATIENCE_S, trust_env=False) as client:
        answer = await (client.get(path) if path == "/livez" else client.post(path, json=CHAT))
        return answer.status_code


@pytest.mark.parametrize(("listener", "said"), [("url", b""), ("url", b"GET / HT"), ("engine_url", b"")])
async def test_the_oldest_that_say_nothing_make_room(house: House, listener: str, said: bytes) -> None:
    """Callers and operators who come anew are served while they hang."""
    is_engines = listener == "engine_url"
    attacked, metrics_url = (
        (house.engine, house.engine_url) if is_engines else (house.gateway, house.admin_url)
    )
    with httpx.Client(base_url=metrics_url, timeout=PATIENCE_S, trust_env=False) as metrics:
        failed, displaced = counted(metrics, FAILED), counted(metrics, DISPLACED)
        assert await asked_anew(house.url) == 200  # the hop has its connection
        with few_descriptors(attacked.process.pid, SPARE):
            async with held(getattr(house, listener), said):
                for _ in range(3):
                    assert await asked_anew(house.engine_url if is_engines else house.url) == 200
                    assert await asked_anew(metrics_url, "/livez") == 200
        assert counted(metrics, FAILED) == failed
        assert counted(metrics, DISPLACED) > displaced


async def test_where_none_may_be_closed_it_is_told_and_costs_nobody_a_connection_that_is_there(
    house: House,
) -> None:
    pid, port = house.engine.process.pid, urlsplit(house.engine_url).port
    told = len(house.engine.logged("listener.accept_failed"))
    async with httpx.AsyncClient(
        base_url=house.url, headers=KEY, timeout=PATIENCE_S, trust_env=False
    ) as victim:
        with httpx.Client(base_url=house.engine_url, timeout=PATIENCE_S, trust_env=False) as metrics:
            before = counted(metrics, FAILED)
            assert (await victim.post("/v1/chat/completions", json=CHAT)).status_code == 200
            with few_descriptors(pid, SPARE):
                async with held(house.engine_url, b"GET / HT"):
                    await asyncio.to_thread(until, lambda: counted(metrics, FAILED) >= before + FAILURES)
                    assert (await victim.post("/v1/chat/completions", json=CHAT)).status_code == 200
                await house.victim.alone(1)
            lines = house.engine.logged("listener.accept_failed")[told:]
            assert 1 <= len(lines) < counted(metrics, FAILED) - before, "it is told now and then"
            assert {(line["error"], line["port"]) for line in lines} == {(os.strerror(errno.EMFILE), port)}
