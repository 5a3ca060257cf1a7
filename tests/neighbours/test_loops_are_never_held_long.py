"""Requests that are small or legal, and long to decode, to compute or to encode, beside a stream."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.gateway.attack import Attack, Law, completion
from tests.bench.gateway.attackers import named
from tests.neighbours.conftest import House, attacks

FRAMED_LEN = len(b"1\r\n7\r\n")


@pytest.mark.parametrize("attack", attacks(Law.LOOPS), ids=lambda attack: attack.name)
async def test_a_request_that_is_long_to_handle_lets_others_run(house: House, attack: Attack) -> None:
    await house.attacked(attack)


async def test_two_million_chunks_of_one_byte_are_not_read_to_their_end(house: House) -> None:
    count = 2_000_000
    body = completion(prompt="7" * count, max_tokens=1)
    outcomes = await house.attacked(replace(named("chunks of one byte"), body=body, count=2))
    assert {outcome.status for outcome in outcomes} <= {400, None}, "a reset may come before the answer"
    assert all(outcome.sent_len < FRAMED_LEN * count // 2 for outcome in outcomes)
