"""However a request ends, its tenant is charged what the engine computed for it, and no more than it had."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.bench.gateway.attack import POOR_TOKEN_BUDGET, Attack, Ends, Law, Who
from tests.neighbours.conftest import House, attacks


@pytest.mark.parametrize("attack", attacks(Law.CHARGES), ids=lambda attack: attack.name)
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
