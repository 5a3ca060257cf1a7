from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from shared.fairness.fair_turns import BEGIN_MAX, FairTurns

FLOOD = 5 * BEGIN_MAX
TURNS_MAX = 100


async def take(turns: FairTurns, tenant: str) -> None:
    """Wait for a turn of this tenant's."""
    if (turn := turns.ask(tenant)) is not None:
        await turn


class Bench:
    """Requests that note in which turn of the loop they begin."""

    def __init__(self) -> None:
        self.turns = FairTurns()
        self.turn = 0
        self.begun: list[tuple[int, str]] = []

    async def request(self, tenant: str) -> None:
        await take(self.turns, tenant)
        self.begun.append((self.turn, tenant))

    async def run(self, tenants: Sequence[str], then: Sequence[str] = ()) -> list[asyncio.Task[None]]:
        """Run requests that come in one turn, and others that come in the next, until all have begun."""
        tasks = [asyncio.create_task(self.request(tenant)) for tenant in tenants]
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            self.turn += 1
            tasks += [asyncio.create_task(self.request(tenant)) for tenant in then]
            then = ()
            if all(task.done() for task in tasks):
                break
        return tasks


async def test_no_turn_begins_more_than_its_part_of_a_flood() -> None:
    bench = Bench()
    await bench.run(["a"] * FLOOD)
    counts = Counter(turn for turn, _ in bench.begun)
    assert sum(counts.values()) == FLOOD
    assert max(counts.values()) == BEGIN_MAX


async def test_a_few_requests_begin_in_the_turn_in_which_they_come() -> None:
    bench = Bench()
    await bench.run(["a"] * BEGIN_MAX)
    assert {turn for turn, _ in bench.begun} == {0}


async def test_a_tenant_that_comes_behind_a_flood_goes_next() -> None:
    bench = Bench()
    await bench.run(["a"] * FLOOD, then=["b"])
    order = [tenant for _, tenant in bench.begun]
    assert order.index("b") <= 3 * BEGIN_MAX < FLOOD
    assert order.count("a") == FLOOD


async def test_tenants_that_wait_take_turns_and_keep_the_order_of_their_own() -> None:
    turns, begun = FairTurns(), list[str]()

    async def request(tenant: str, number: int) -> None:
        await take(turns, tenant)
        begun.append(f"{tenant}{number}")

    first = [asyncio.create_task(request("a", number)) for number in range(BEGIN_MAX + 4)]
    second = [asyncio.create_task(request("b", number)) for number in range(3)]
    await asyncio.gather(*first, *second)
    waited = begun[BEGIN_MAX:]
    assert waited == ["a8", "b0", "a9", "b1", "a10", "b2", "a11"]


async def test_a_request_that_was_cancelled_takes_no_turn() -> None:
    turns = FairTurns()
    for _ in range(BEGIN_MAX):
        assert turns.ask("first") is None
    gone = [turns.ask(f"gone {number}") for number in range(BEGIN_MAX)]  # each goes before the last tenant
    late = turns.ask("late")
    for turn in gone:
        assert turn is not None
        turn.cancel()
    await asyncio.sleep(0)
    assert late is not None
    assert late.done()
