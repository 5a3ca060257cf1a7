"""Two workers under attack: neither is so busy that it counts as hung, for then it would be killed, and
everybody's streams with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.bench.gateway.attackers import named
from tests.effort import some
from tests.neighbours.conftest import House, gateway

WORKERS = 2
BUSIEST = (
    "emoji of 8 MiB",
    "24 conversations of 2,048 messages",
    "heads of 440 KB without a key",
    "300 streams that leave at once",
)


@pytest.fixture(scope="module")
def workers(pair: House) -> Iterator[House]:
    """A gateway of two workers before the folder's engine."""
    with gateway([pair.engine], workers=WORKERS) as front:
        house = House(front, pair.engine)
        asyncio.run(house.warm_up())
        yield house


@pytest.mark.parametrize("name", some(BUSIEST, usual=2))
async def test_no_attack_makes_a_worker_miss_its_heartbeats(workers: House, name: str) -> None:
    await workers.attacked(named(name))
    assert len(workers.gateway.logged("worker.serving")) == WORKERS
    assert not workers.gateway.logged("worker.died")
