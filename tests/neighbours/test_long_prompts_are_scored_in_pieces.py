"""Prompts of many thousand tokens whose log-probabilities are asked for: an answer of megabytes, of which the
engine makes one piece after another, or a refusal where it would be too large."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.gateway.attack import MIB, PLAIN_ID, Attack, Law, completion
from tests.neighbours.conftest import House, engines, gateway
from tests.services import MODEL_DIR

CONTEXT_LEN = 40_960


def scored(name: str, prompt_len: int, status: int = 200, count: int = 1, **fields: object) -> Attack:
    body = completion(prompt=[PLAIN_ID] * prompt_len, echo=True, logprobs=20, **fields)
    return Attack(name, Law.LOOPS, body, count=count, at_once=count, statuses=frozenset({status}))


ATTACKS = (
    scored("8,000 ids, scored for two choices", 8_000, n=2, max_tokens=1),
    scored("8,000 ids, scored and streamed", 8_000, max_tokens=1, stream=True),
    scored("8,000 ids, scored for 16 choices", 8_000, 400, n=16, max_tokens=1, count=8),
    scored("32,000 ids, scored", 32_000, 400, max_tokens=0, count=8),
)
GAP_TARGET_MS = "400"
"""The engine takes large parts of the prompt at a time: its steps are not what this is about."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An engine of the built-in model that is told to have a long context."""
    model: Path = tmp_path_factory.mktemp("long") / "demo"
    shutil.copytree(MODEL_DIR, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_LEN}))
    with engines(1, "--gap-target-ms", GAP_TARGET_MS, model=model) as [served], gateway([served]) as front:
        house = House(front, served)
        asyncio.run(house.warm_up())
        yield house


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_a_long_prompt_that_is_scored_lets_others_run(long: House, attack: Attack) -> None:
    outcomes = await long.attacked(attack)
    assert {outcome.status for outcome in outcomes} == set(attack.statuses)
    if attack.statuses == {200}:
        assert all(outcome.answer_len > 3 * MIB for outcome in outcomes), [o.answer_len for o in outcomes]
