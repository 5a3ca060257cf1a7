"""Two replicas, of which one fails: its core hangs, or is killed.

Requests that were with it end with an error of their own, the others do not notice, and those that come are
served by the replica that works.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator, Sequence

import httpx
import pytest

from tests.bench.gateway.attack import Attack, Ends, Law, Who, chat
from tests.bench.gateway.attackers import RequestOutcome, send
from tests.bench.gateway.victim import CHATS
from tests.neighbours.conftest import House, engines, gateway
from tests.services import PATIENCE_S, Line, Service, engine_at_rest, engine_url, gauges, until

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


def flood(max_tokens: int) -> Attack:
    """As many requests as reach both replicas; each says in its status or its end what became of it."""
    return Attack(
        "requests at both replicas",
        Law.SEATS,
        chat(max_tokens=max_tokens, stream=True),
        "/v1/chat/completions",
        count=REQUESTS,
        at_once=REQUESTS,
        ends=Ends.ANSWERED,
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


def engine_lines(services: Sequence[Service], outcomes: list[RequestOutcome]) -> dict[str, list[Line]]:
    """The completed lines of these requests at the replicas, by their ids: each replica that was asked has
    one."""
    found: dict[str, list[Line]] = {outcome.request_id: [] for outcome in outcomes}
    for service in services:
        for line in service.completed:
            if line["request_id"] in found:
                found[line["request_id"]].append(line)
    return found


async def charged_what_was_computed(
    house: House, fails: Service, outcomes: list[RequestOutcome]
) -> dict[str, list[Line]]:
    """Each request is settled with what the replicas that were asked say they computed for it. Returns their
    lines."""
    settled = house.gateway_lines(outcomes)
    attempts = {request_id: line["attempts"] for request_id, line in settled.items()}
    services = (fails, house.engine)

    def are_there() -> bool:
        return {name: len(told) for name, told in engine_lines(services, outcomes).items()} == attempts

    await asyncio.to_thread(until, are_there)
    lines = engine_lines(services, outcomes)
    computed = {name: sum(map(tokens_of, told)) for name, told in lines.items()}
    assert {name: line["settled_tokens"] for name, line in settled.items()} == computed
    return lines


def tokens_of(line: Line) -> int:
    return int(line["prompt_tokens"] + line["completion_tokens"])


async def test_a_replica_whose_core_hangs_ends_what_it_holds_and_takes_no_requests_until_it_goes_on(
    houses: tuple[House, Service],
) -> None:
    """What the core had begun has failed; what it was sent and had not begun is served by the other. None of
    them has a deadline of its own."""
    house, fails = houses
    flooding = await flooding_both(house, fails, "hangs")
    os.kill(core_pid(fails), signal.SIGSTOP)
    try:
        unbegun = await send(flood(40), house.url, asyncio.Event(), tag="behind")
        await asyncio.to_thread(until, lambda: status(fails, "readyz") == 503)
        assert status(fails, "livez") == 200
        begun = await flooding
        by_replica = replicas_of(house, begun)
        assert {outcome.code for outcome in by_replica.pop(name_of(fails))} == {"engine_failed"}
        assert all(outcome.is_done for ended in by_replica.values() for outcome in ended)
        assert all(outcome.is_done for outcome in unbegun)
        assert replicas_of(house, unbegun).keys() == {name_of(house.engine)}
        lines = await charged_what_was_computed(house, fails, begun + unbegun)
        refused = [told for outcome in unbegun for told in lines[outcome.request_id][:-1]]
        assert refused, "the core that hangs had no part of it"
        assert {(line["error_code"], tokens_of(line)) for line in refused} == {("not_ready", 0)}
        await served_by_the_other(house)
    finally:
        os.kill(core_pid(fails), signal.SIGCONT)
    await asyncio.to_thread(until, lambda: status(fails, "readyz") == 200)
    await asyncio.to_thread(until, lambda: engine_at_rest(engine_url(fails)))
    assert await charged_what_was_computed(house, fails, begun + unbegun) == lines, "nothing is told twice"
    await until_both_serve(house, fails)


async def test_a_replica_whose_core_was_killed_takes_no_requests(houses: tuple[House, Service]) -> None:
    house, fails = houses
    await until_both_serve(house, fails)
    flooding = await flooding_both(house, fails, "killed")
    os.kill(core_pid(fails), signal.SIGKILL)
    outcomes = await flooding
    by_replica = replicas_of(house, outcomes)
    assert {outcome.code for outcome in by_replica.pop(name_of(fails))} == {"engine_failed"}
    assert all(outcome.is_done for ended in by_replica.values() for outcome in ended)
    lines = await charged_what_was_computed(house, fails, outcomes)
    lost = [line for told in lines.values() for line in told if line["end_reason"] == "engine_failed"]
    assert any(map(tokens_of, lost)), "the core had begun some"
    await asyncio.to_thread(until, lambda: status(fails, "readyz") == 503)
    assert status(fails, "livez") == 500
    await served_by_the_other(house)
