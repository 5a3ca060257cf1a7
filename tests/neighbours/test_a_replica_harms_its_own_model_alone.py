"""Replicas that were broken into, each of a model of its own, beside the callers of another model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.bench.gateway.attack import Attack, Law, Rogue, Who
from tests.bench.services import free_port
from tests.neighbours.conftest import House, attacks, gateway
from tests.services import MODEL_DIR, PATIENCE_S, service, until


@pytest.fixture(scope="module")
def beside_rogues(pair: House) -> Iterator[House]:
    """A gateway before the folder's engine, and before a rogue for each kind of harm."""
    port = free_port()
    argv = ["tests.bench.gateway.rogue_engine", "--port", str(port), "--tokenizer", str(MODEL_DIR)]
    with service(argv), gateway([pair.engine], rogue_url=f"http://127.0.0.1:{port}") as front:
        house = House(front, pair.engine)
        asyncio.run(house.warm_up())
        until(
            lambda: (
                {Rogue.LOOPS, Rogue.LENGTH} <= {line["model"] for line in front.logged("tokenizer.loaded")}
            )
        )
        yield house


@pytest.mark.parametrize("attack", attacks(Law.REPLICAS), ids=lambda attack: attack.name)
async def test_a_rogue_replica_is_not_noticed_by_the_callers_of_another_model(
    beside_rogues: House, attack: Attack
) -> None:
    await beside_rogues.attacked(attack)


async def test_what_a_rogue_says_of_itself_is_told_once(beside_rogues: House) -> None:
    def told() -> list[str]:
        return [line["model"] for line in beside_rogues.gateway.logged("tokenizer.unusable")]

    asked = {"model": Rogue.MISTAKE, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
    url, key = beside_rogues.url, {"authorization": f"Bearer {Who.ATTACKER}"}
    async with httpx.AsyncClient(base_url=url, headers=key, timeout=PATIENCE_S, trust_env=False) as client:
        for _ in range(4):
            await client.post("/v1/chat/completions", json=asked)
    await asyncio.to_thread(until, lambda: Rogue.MISTAKE in told())
    assert told() == [Rogue.MISTAKE]
    assert not beside_rogues.gateway.logged("gateway.background_failed")
