"""Attacks on what tenants share, law by law, beside a tenant who must not notice them.

- What bodies and answers take of either service's memory is bounded, and no tenant's fill leaves no room.
- Threads are shared: others' texts do not wait for one's long ones; a caller that leaves frees them.
- No event loop is held long by what is small or legal, and long to decode, to compute or to encode.
- A mask that is late, or a grammar that is long to compile, delays its own row.
- One tenant's sequences fill every slot and its part of the queue; another is admitted all the same.
- First tokens that are of use for a moment only hurry their own tenant's prompts, not others' streams.
- A key without requests, seats or tokens is refused by the heads of its requests, whatever their bodies.
- However a request ends, its tenant is charged what the engine computed for it, and no more than it had.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from tests.bench.gateway.attack import MODEL, POOR_TOKEN_BUDGET, Attack, Ends, Law, Who, completion, padded
from tests.bench.gateway.attackers import named
from tests.bench.gateway.neighbourhood import LIVE_MAX
from tests.neighbours.conftest import House, attacks

TOO_LATE = {"first_token_deadline", "first_token_timeout", "queue_full"}
FRAMED_LEN = len(b"1\r\n7\r\n")


def each(*laws: Law) -> pytest.MarkDecorator:
    """A test for each attack on these laws."""
    kinds = [attack for law in laws for attack in attacks(law)]
    return pytest.mark.parametrize("attack", kinds, ids=lambda attack: attack.name)


@each(Law.BYTES, Law.THREADS, Law.LOOPS, Law.GRAMMARS)
async def test_who_takes_much_leaves_memory_threads_and_turns_to_others(house: House, attack: Attack) -> None:
    await house.attacked(attack)


async def test_a_text_of_8_mib_that_is_tokenized_whole_leaves_the_threads_to_others(house: House) -> None:
    whole = padded(f'{{"model": "{MODEL}", "prompt": "', "penstock ", '"}', between="")
    outcomes = await house.attacked(replace(named("long texts to tokenize"), body=whole))
    assert {outcome.status for outcome in outcomes} == {200}


async def test_two_million_chunks_of_one_byte_are_not_read_to_their_end(house: House) -> None:
    count = 2_000_000
    body = completion(prompt="7" * count, max_tokens=1)
    outcomes = await house.attacked(replace(named("chunks of one byte"), body=body, count=2))
    assert {outcome.status for outcome in outcomes} <= {400, None}, "a reset may come before the answer"
    assert all(outcome.sent_len < FRAMED_LEN * count // 2 for outcome in outcomes)


@each(Law.SEATS)
async def test_a_flood_on_all_slots_yields_to_another_tenant(house: House, attack: Attack) -> None:
    outcomes = await house.attacked(attack)
    if attack.ends is Ends.ON_CUE:
        has_ended = [
            outcome.is_done or (outcome.status == 200 and not outcome.is_stream) for outcome in outcomes
        ]
        assert not any(has_ended), "the other tenant was served after the flood, and not beside it"


@each(Law.HASTE)
async def test_a_tenant_in_haste_is_served_in_time_or_told_that_it_is_too_late(
    house: House, attack: Attack
) -> None:
    outcomes = await house.attacked(attack)
    assert all(outcome.is_done or outcome.code in TOO_LATE for outcome in outcomes), outcomes


@each(Law.RESERVATION)
async def test_a_key_without_quota_is_refused_before_its_body_is_read(house: House, attack: Attack) -> None:
    outcomes = await house.attacked(attack)
    assert not house.has_reached_engine(outcomes)
    if attack.statuses == {429}:
        lines = house.gateway_lines(outcomes)
        assert {line["stage"] for line in lines.values()} == {"seat"}


async def test_heads_without_bodies_take_no_seat_however_many_there_are(house: House) -> None:
    """4,100 of a key without requests once left every other tenant none for 30 seconds."""
    heads = replace(named("900 heads without a body"), count=4_100, at_once=4 * LIVE_MAX)
    outcomes = await house.attacked(heads)
    assert {outcome.status for outcome in outcomes} == {429}
    assert not house.has_reached_engine(outcomes)


@each(Law.CHARGES)
async def test_a_request_is_charged_what_was_computed_however_it_ends(house: House, attack: Attack) -> None:
    outcomes = await house.attacked(attack)
    settled = {name: line["settled_tokens"] for name, line in house.gateway_lines(outcomes).items()}
    charged = {name: tokens for name, tokens in settled.items() if tokens}
    computed = {
        name: line["prompt_tokens"] + line["completion_tokens"]
        for name, line in house.engine_lines(charged).items()
    }
    assert charged == computed
    assert charged or attack.ends is Ends.AT_ONCE
    assert computed_for(house, settled) == sum(computed.values())
    if Who.POOR in attack.who:
        assert sum(charged.values()) <= POOR_TOKEN_BUDGET


def computed_for(house: House, request_ids: Collection[str]) -> int:
    """Tokens that the engine says it has computed for these requests, so far as they have reached it."""
    lines = [line for line in house.engine.completed if line["request_id"] in request_ids]
    return sum(line.get("prompt_tokens", 0) + line.get("completion_tokens", 0) for line in lines)
