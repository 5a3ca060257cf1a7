"""Connections that say nothing take all file descriptors of a process, by whichever of its listeners. It says
so, serves the connections that are there, and those that waited as soon as there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.bench.attack import MODEL, Who
from tests.neighbours.conftest import House
from tests.services import PATIENCE_S, until

SPARE = 24
"""The descriptors that the process may still open, of which half as many again are asked for."""
FAILURES = 3
NAME = "penstock_accepts_failed_total"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}


@contextmanager
def few_descriptors(pid: int, spare: int) -> Iterator[None]:
    """The process may open so many more files."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    now = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (now + spare, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("listener", ["url", "admin_url", "engine_url"])
async def test_descriptors_that_run_out_are_told_and_cost_nobody_a_connection_that_is_there(
    house: House, listener: str
) -> None:
    url: str = getattr(house, listener)
    attacked, metrics_url = (
        (house.engine, house.engine_url) if listener == "engine_url" else (house.gateway, house.admin_url)
    )

    def failures() -> int:
        text = metrics.get("/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith(f"{NAME} ")]
        return int(float(line.split()[1]))

    address = urlsplit(url)
    key = {"authorization": f"Bearer {Who.VICTIM}"}
    told = len(attacked.logged("listener.accept_failed"))
    async with httpx.AsyncClient(
        base_url=house.url, headers=key, timeout=PATIENCE_S, trust_env=False
    ) as victim:
        with httpx.Client(base_url=metrics_url, timeout=PATIENCE_S, trust_env=False) as metrics:
            before = failures()
            assert (await victim.post("/v1/chat/completions", json=CHAT)).status_code == 200
            with few_descriptors(attacked.process.pid, SPARE):
                held = [
                    await asyncio.open_connection(address.hostname, address.port)
                    for _ in range(SPARE + SPARE // 2)
                ]
                await asyncio.to_thread(until, lambda: failures() >= before + FAILURES)
                assert (await victim.post("/v1/chat/completions", json=CHAT)).status_code == 200
                for _, writer in held:
                    writer.close()
                await house.victim.alone(1)
            lines = attacked.logged("listener.accept_failed")[told:]
            assert 1 <= len(lines) < failures() - before, "it is told now and then"
            assert {(line["error"], line["port"]) for line in lines} == {
                (os.strerror(errno.EMFILE), address.port)
            }
