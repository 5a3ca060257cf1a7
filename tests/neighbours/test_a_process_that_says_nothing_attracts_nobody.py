"""Two replicas, of which one says nothing: its process is stopped or killed, or it never was an engine.

Who was with it learns it within seconds, nobody who comes is lost, and what comes is served by the other.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator

import pytest

from tests.effort import some
from tests.neighbours.conftest import House, engines, gateway
from tests.neighbours.test_a_failed_replica_attracts_nobody import (
    flooding_both,
    name_of,
    replicas_of,
    served_by_the_other,
    until_both_serve,
)
from tests.services import Service


@pytest.fixture(scope="module")
def houses(pair: House) -> Iterator[tuple[House, Service]]:
    """The folder's engine and another one, which will fail, behind one gateway."""
    with engines(1) as [fails], gateway([fails, pair.engine]) as front:
        house = House(front, pair.engine)
        asyncio.run(house.warm_up())
        yield house, fails


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a socket to which the kernel connects callers, and from which nothing comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("number", some([signal.SIGSTOP, signal.SIGKILL], usual=1))
async def test_a_replica_whose_process_says_nothing_costs_the_streams_it_had_and_no_other(
    houses: tuple[House, Service], number: signal.Signals
) -> None:
    house, fails = houses
    await until_both_serve(house, fails)
    flooding = await flooding_both(house, fails, number.name)
    fails.signal(number)
    try:
        await house.victim.alone(1)
        by_replica = replicas_of(house, await flooding)
        lost = by_replica.pop(name_of(fails))
        assert {outcome.code for outcome in lost} == {"upstream_failed"}
        assert not any(outcome.is_done for outcome in lost)
        assert all(outcome.is_done for ended in by_replica.values() for outcome in ended)
        await served_by_the_other(house)
    finally:
        fails.signal(signal.SIGCONT)


async def test_a_replica_that_takes_connections_and_says_nothing_costs_nobody_a_request(
    pair: House, nobody: str
) -> None:
    with gateway([pair.engine], others=[nobody], PENSTOCK_GATEWAY_TIMEOUTS__CONNECT_S="1") as front:
        house = House(front, pair.engine)
        await served_by_the_other(house)
