"""What ends leaves nothing behind: gauges go back to zero, and memory does not climb with repetition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.gateway.attack import MIB, Attack, Ends, chat
from tests.bench.gateway.attackers import named
from tests.bench.gateway.neighbourhood import rest_bytes
from tests.neighbours.conftest import House
from tests.services import gauges

MIX = (
    "heads of 440 KB without a key",
    "700,000 fields",
    "texts of digits",
    "long texts to tokenize whose callers leave",
    "prompts of 200,000 ids",
    "300 streams that leave at once",
    "left before it answers",
)
"""Of each way to be refused, to leave and to be answered, one that once left something behind."""
CLIMB_MAX = 24 * MIB
"""Bytes of a process from one time to the next, beside the pages that the core caches. A body of 8 MiB that
is kept with what was made of it takes more, and each time sends a dozen."""
TIMES = 4
"""What lies between freed memory lets it grow a few times; what is kept lets it grow each time."""
ENGINE_GAUGES = (
    *("held_bytes", "http2_streams", "open_sequences", "running_sequences", "stalled_sequences"),
    *("queue_depth", "waiting_tokens", "kv_pages:owned", "host_pages:used"),
)
RUNNING = 64
"""The engine's sequences that run at a time."""
GATEWAY_GAUGES = ("held_bytes", "http2_streams", "requests_in_flight")


async def test_memory_does_not_grow_over_refused_cancelled_and_served_requests(house: House) -> None:
    attacks: list[Attack] = [named(name) for name in MIX]
    for attack in attacks:  # what is allocated once is allocated now
        await house.attacked(attack)
    climbs: list[dict[str, int]] = []
    for _ in range(TIMES):
        before = kept_bytes(house)
        for attack in attacks:
            await house.attacked(attack)
        climbs.append({name: now - before[name] for name, now in kept_bytes(house).items()})
        if max(climbs[-1].values()) <= CLIMB_MAX:
            break
    else:
        pytest.fail(f"it grows each time: {climbs}")
    assert_nothing_is_held(house)


def kept_bytes(house: House) -> dict[str, int]:
    """The memory of each process, without the pages of the KV cache that hold prefixes: the core takes that
    cache as it uses it, keeps what was cached until the room is needed, and owns no page at rest."""
    cached = int(gauges(house.engine_url)["kv_pages:cached"])
    pages_bytes = cached * house.engine.line("core.ready")["page_bytes"]
    held = {process.name: rest_bytes(process.pid) for process in house.processes}
    return held | {"core": held["core"] - pages_bytes}


async def test_500_streams_that_are_cut_at_the_same_moment_leave_nothing(house: House) -> None:
    """Of two tenants, so that they get all that there is. Those beyond it are refused."""
    flood = named("a flood of 128 requests of 8 choices")
    body = chat(max_tokens=1900, stream=True)
    storm = replace(flood, body=body, count=500, at_once=500, ends=Ends.ON_CUE)
    outcomes = await house.attacked(storm)
    assert sum(outcome.status == 200 for outcome in outcomes) >= RUNNING
    assert not any(outcome.is_done for outcome in outcomes), "all were cut"
    assert_nothing_is_held(house)


async def test_150_streams_that_nobody_reads_hold_no_more_than_their_bytes(house: House) -> None:
    unread = replace(
        named("a reader that does not read"), count=150, at_once=150, statuses=frozenset({200, 503})
    )
    await house.attacked(unread)
    assert_nothing_is_held(house)


def assert_nothing_is_held(house: House) -> None:
    engine, gateway = gauges(house.engine_url), gauges(house.admin_url)
    assert {name: engine[name] for name in ENGINE_GAUGES} == dict.fromkeys(ENGINE_GAUGES, 0.0)
    assert {name: gateway[name] for name in GATEWAY_GAUGES} == dict.fromkeys(GATEWAY_GAUGES, 0.0)
