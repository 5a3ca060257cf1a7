"""A tenant whose streams are sent to a second replica when the first is slow: it pays once for each, and what
loses leaves both replicas to others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.bench.gateway.attack import CHATS, Attack, Law, Who, chat
from tests.neighbours.conftest import House, engines, gateway
from tests.services import Service, engine_at_rest, engine_url, until

TOKENS = 24
FLOODS_MAX = 20
"""The first floods tell the gateway how long a first event takes: without that nothing is hedged."""
FLOOD = Attack(
    "streams that are hedged",
    Law.CHARGES,
    chat(max_tokens=TOKENS, stream=True),
    CHATS,
    count=64,
    at_once=64,
    who=(Who.HEDGED,),
)


@pytest.fixture(scope="module")
def two(pair: House) -> Iterator[tuple[House, Service]]:
    """The folder's engine, and another, behind one gateway."""
    with engines(1) as [other], gateway([pair.engine, other]) as front:
        house = House(front, pair.engine)
        asyncio.run(house.warm_up())
        yield house, other


async def test_streams_that_are_hedged_are_charged_once_and_leave_both_replicas_to_others(
    two: tuple[House, Service],
) -> None:
    house, other = two
    for _ in range(FLOODS_MAX):
        outcomes = await house.attacked(FLOOD)
        lines = house.gateway_lines(outcomes)
        assert all(outcome.is_done for outcome in outcomes)
        assert len({line["settled_tokens"] - TOKENS for line in lines.values()}) == 1, (
            "a prompt and an answer"
        )
        await asyncio.to_thread(until, lambda: engine_at_rest(engine_url(other)))
        if any(line["attempts"] > 1 for line in lines.values()):
            return
    pytest.fail("no stream was hedged")
