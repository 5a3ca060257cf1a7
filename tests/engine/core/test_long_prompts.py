"""A long prompt beside streams, in virtual time: its first token comes in bounded time, and gaps grow
little."""

from __future__ import annotations

import pytest

from engine.bench.virtual import Engine, Outcome, Request, run
from engine.core.cost import StepCost, Work
from shared.bench.figures import quantile

STREAMS, CALM_STEPS, PROMPT_LEN = 8, 60, 4000
RUNNERS = {
    "474M on two cores": StepCost(token_s=1.8e-3, row_s=7e-4, pair_s=7e-7, context_s=6.3e-6, fixed_s=0.068),
    "29M on two cores": StepCost(token_s=7e-5, row_s=1e-4, pair_s=7e-8, context_s=6e-7, fixed_s=4e-3),
    "8B on a GPU": StepCost(token_s=2.5e-5, row_s=1e-5, pair_s=2e-10, context_s=3e-8, fixed_s=6e-3),
}
"""The costs of some runners. The first was measured: eight decodes take 75 to 90 ms, and a short chunk far
into a long prompt adds 25 ms for reading its context."""


def decodes_s(cost: StepCost, context_len: int) -> float:
    return cost.seconds(Work.of([context_len] * STREAMS, [1] * STREAMS))


def beside_streams(engine: Engine, *prompts: Request) -> tuple[list[Outcome], list[Outcome]]:
    """The outcomes of `prompts`, and of the streams that run when these arrive."""
    streams = [Request(0.0, 60, 1000) for _ in range(STREAMS)]
    outcomes = run([*streams, *prompts], engine).outcomes
    return outcomes[STREAMS:], outcomes[:STREAMS]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("target_s", [0.1, 0.02])
@pytest.mark.parametrize("name", RUNNERS)
def test_a_long_prompt_takes_its_share_even_where_decodes_exceed_the_target(
    name: str, target_s: float, noise: float
) -> None:
    """A third of the time goes to the prompt (`pace.LONE`), so it takes three times as long as alone, and up
    to as long again for reading the context of each of its short chunks; more where estimates err."""
    cost = RUNNERS[name]
    engine = Engine(cost, step_time_target_s=target_s, noise=noise)
    at_s = CALM_STEPS * decodes_s(cost, 100)
    (prompt,), streams = beside_streams(engine, Request(at_s, PROMPT_LEN, 2))
    assert prompt.first_token_s < 6.5 * cost.service_s(PROMPT_LEN)
    gaps = [gap for stream in streams for gap in stream.gaps_s[: CALM_STEPS + 400]]
    assert quantile(gaps, 0.99) < 1.8 * (1.0 + noise) * decodes_s(cost, CALM_STEPS + 400)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_short_prompt_that_passes_a_long_one_pays_only_for_its_own_tokens(name: str) -> None:
    """Its tokens are not priced as if they were far into a long prompt, where a step has time for few."""
    cost = RUNNERS[name]
    at_s = CALM_STEPS * decodes_s(cost, 100)
    long = Request(at_s, PROMPT_LEN, 2)
    (alone,), _ = beside_streams(Engine(cost), long)
    short = Request(at_s + 0.3 * alone.first_token_s, 100, 2)
    (passed, passing), _ = beside_streams(Engine(cost), long, short)
    assert passing.first_token_s < 3.2 * cost.service_s(short.prompt_len)
    assert passed.first_token_s < 1.05 * alone.first_token_s


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("prompt_len", [100, 4000])
def test_a_prompt_alone_takes_hardly_longer_than_in_one_step(name: str, prompt_len: int) -> None:
    cost = RUNNERS[name]
    warm = Request(0.0, 500, 20)
    *_, prompt = run([warm, Request(100.0, prompt_len, 2)], Engine(cost)).outcomes
    assert prompt.first_token_s < 1.4 * cost.service_s(prompt_len)
