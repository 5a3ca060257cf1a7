"""Two replicas, of which one fails: its core hangs, or is killed.

Requests that were with it end with an error of their own, the others do not notice, and those that come are
served by the replica that works.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from gateway.bench.attack import Attack, Ends, Law, Who, chat
from gateway.bench.attackers import RequestOutcome, send
from gateway.bench.victim import CHATS
from tests.neighbours.conftest import House, engines, gateway
from tests.services import PATIENCE_S, Line, Service, engine_url, gauges, until

REQUESTS = 12
ROUNDS = 6
REQUESTS_A_ROUND = 1 + len(CHATS)


@pytest.fixture(scope="module")
def houses() -> Iterator[tuple[House, Service]]:
    """Two replicas behind one gateway, and the one that will fail."""
    with engines(2, "--core-timeout-s", "1") as [fails, works], gateway([fails, works]) as front:
        house = House(front, works)
        asyncio.run(house.warm_up())
        yield house, fails


def flood(max_tokens: int, **headers: str) -> Attack:
    """As many requests as reach both replicas; each says in its status or its end what became of it."""
    return Attack(
        "requests at both replicas",
        Law.SEATS,
        chat(max_tokens=max_tokens, stream=True),
        "/v1/chat/completions",
        count=REQUESTS,
        at_once=REQUESTS,
        ends=Ends.ANSWERED,
        headers=headers,
    )


def status(service: Service, probe: str) -> int:
    return httpx.get(f"{engine_url(service)}/{probe}", timeout=PATIENCE_S, trust_env=False).status_code


def core_pid(service: Service) -> int:
    return int(service.line("core.started")["pid"])


async def served(house: House, rounds: int) -> list[Line]:
    """The gateway's lines of so many rounds of the victim, who gets what it gets alone."""

    def lines() -> list[Line]:
        return [line for line in house.gateway.completed if line["tenant"] == Who.VICTIM]

    seen = len(lines())
    await house.victim.alone(rounds)
    await asyncio.to_thread(until, lambda: len(lines()) >= seen + rounds * REQUESTS_A_ROUND)
    return lines()[seen:]


async def served_by_the_other(house: House) -> None:
    """The other replica serves the victim, and few requests try the one that failed before."""
    lines = await served(house, ROUNDS)
    assert {line["replica"] for line in lines} == {name_of(house.engine)}
    assert sum(line["attempts"] > 1 for line in lines) <= len(lines) // 3


async def until_both_serve(house: House, fails: Service) -> None:
    """Rounds of the victim until the replica that failed has cooled down and is asked again."""
    async with asyncio.timeout(PATIENCE_S):
        while name_of(fails) not in {line["replica"] for line in await served(house, 1)}:
            pass


async def flooding_both(house: House, fails: Service, tag: str) -> asyncio.Task[list[RequestOutcome]]:
    """A flood in progress, of which the replica that will fail has a part. On a busy machine all of it may go
    to the other, as the gateway trusts a slow one with little."""
    async with asyncio.timeout(PATIENCE_S):
        for number in itertools.count():
            flooding = asyncio.create_task(send(flood(400), house.url, asyncio.Event(), tag=f"{tag}{number}"))

            def is_with_it(flooding: asyncio.Task[list[RequestOutcome]] = flooding) -> bool:
                return flooding.done() or gauges(engine_url(fails))["running_sequences"] > 0

            await asyncio.to_thread(until, is_with_it)
            if not flooding.done():
                break
    return flooding


def name_of(service: Service) -> str:
    return engine_url(service).removeprefix("http://")


def replicas_of(house: House, outcomes: list[RequestOutcome]) -> dict[str, list[RequestOutcome]]:
    lines = house.gateway_lines(outcomes)
    found: dict[str, list[RequestOutcome]] = {}
    for outcome in outcomes:
        found.setdefault(lines[outcome.request_id]["replica"], []).append(outcome)
    return found


async def test_a_replica_whose_core_hangs_takes_no_requests_until_it_goes_on(
    houses: tuple[House, Service],
) -> None:
    house, fails = houses
    os.kill(core_pid(fails), signal.SIGSTOP)
    try:
        outcomes = await send(
            flood(40, **{"x-request-timeout": "3"}), house.url, asyncio.Event(), tag="hangs"
        )
        await asyncio.to_thread(until, lambda: status(fails, "readyz") == 503)
        assert status(fails, "livez") == 200
        await served_by_the_other(house)
    finally:
        os.kill(core_pid(fails), signal.SIGCONT)
    by_replica = replicas_of(house, outcomes)
    assert {outcome.code for outcome in by_replica.pop(name_of(fails))} == {"request_timeout"}
    assert all(outcome.is_done for ended in by_replica.values() for outcome in ended)
    await asyncio.to_thread(until, lambda: status(fails, "readyz") == 200)
    await until_both_serve(house, fails)


async def test_a_replica_whose_core_was_killed_takes_no_requests(houses: tuple[House, Service]) -> None:
    house, fails = houses
    await until_both_serve(house, fails)
    flooding = await flooding_both(house, fails, "killed")
    os.kill(core_pid(fails), signal.SIGKILL)
    by_replica = replicas_of(house, await flooding)
    assert {outcome.code for outcome in by_replica.pop(name_of(fails))} == {"engine_failed"}
    assert all(outcome.is_done for ended in by_replica.values() for outcome in ended)
    await asyncio.to_thread(until, lambda: status(fails, "readyz") == 503)
    assert status(fails, "livez") == 500
    await served_by_the_other(house)
