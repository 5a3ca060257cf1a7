"""No tenant finds what another's prompts left in the KV cache, in whichever tier: in the cache itself, in
host memory, or on disk. A tenant whose pages were pushed out gets its own back, and the answers of before."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.bench.gateway.attack import MIB, PLAIN_ID, Who, completion
from tests.bench.gateway.attackers import named, send
from tests.neighbours.conftest import House, engines, gateway
from tests.services import until

KV_CACHE = 12 * MIB
HOST_TIER = 64 * MIB
FLOOD = replace(
    named("prompts that fill the KV cache"),
    body=completion(prompt=[[PLAIN_ID + i] * 1980 for i in range(4)], max_tokens=1),
)
"""Its prompts take all of the cache, so that other pages go to host memory, and from there to disk."""


@pytest.fixture(scope="module")
def tiers() -> Iterator[House]:
    """An engine with a small cache and two tiers below it."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        sizes = "--kv-cache-memory", str(KV_CACHE), "--swap-memory", str(HOST_TIER)
        with engines(1, *sizes, "--kv-disk-dir", directory) as [served], gateway([served]) as front:
            house = House(front, served)
            asyncio.run(house.warm_up())
            yield house


async def finds_nothing(house: House) -> None:
    """Tenants who send another's prompt for the first time compute all of it."""
    outcomes = await house.attacked(named("another tenant's prompt"))
    lines = house.engine_lines([outcome.request_id for outcome in outcomes])
    assert {line["cached_tokens"] for line in lines.values()} == {0}
    assert all(line["prompt_tokens"] > 100 for line in lines.values())


async def test_another_tenants_prompt_is_not_found_in_the_cache(house: House) -> None:
    await finds_nothing(house)


async def test_pages_that_were_pushed_out_come_back_to_their_tenant_alone(tiers: House) -> None:
    def restored() -> int:
        lines = [line for line in tiers.engine.completed if line.get("tenant") == Who.VICTIM]
        return sum(line["host_tokens"] + line["disk_tokens"] for line in lines)

    # Without the victim beside, who would keep its pages in use.
    [flood] = await send(FLOOD, tiers.url, asyncio.Event(), tag="flood")
    assert flood.status == 200
    await tiers.victim.alone(1)
    await asyncio.to_thread(until, lambda: restored() > 0)
    await tiers.attacked(FLOOD)
    await finds_nothing(tiers)
