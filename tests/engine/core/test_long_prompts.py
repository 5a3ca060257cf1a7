"""A long prompt beside streams, in virtual time: the laws of `engine.core.estimate.pace`, seen from
outside."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from engine.contract.messages import FinishReason, ServiceClass
from engine.core.estimate.cost import StepCost, Work
from tests.bench.engine.virtual import Engine, Outcome, Request, run
from tests.bench.figures import quantile
from tests.effort import some

pytestmark = pytest.mark.slow

STREAMS, CALM_STEPS, PROMPT_LEN = 8, 60, 4000
SEEDS = some((1, 2, 3, 4, 5), usual=2)
RUNNERS = {
    "474M on two cores": StepCost(token_s=1.8e-3, row_s=7e-4, pair_s=7e-7, context_s=6.3e-6, fixed_s=0.068),
    "29M on two cores": StepCost(token_s=7e-5, row_s=1e-4, pair_s=7e-8, context_s=6e-7, fixed_s=4e-3),
    "8B on a GPU": StepCost(token_s=2.5e-5, row_s=1e-5, pair_s=2e-10, context_s=3e-8, fixed_s=6e-3),
}
"""The costs of some runners. The first was measured: eight decodes take 75 to 90 ms, and a short chunk far
into a long prompt adds 25 ms for reading its context."""


def decodes_s(cost: StepCost, context_len: int) -> float:
    return cost.seconds(Work.of([context_len] * STREAMS, [1] * STREAMS))


def beside_streams(
    engine: Engine,
    *prompts: Request,
    service_class: ServiceClass = ServiceClass.DEFAULT,
    to_the_end: bool = False,
) -> tuple[list[Outcome], list[Outcome]]:
    """The outcomes of `prompts`, and of the streams that run when these arrive, until the prompts have been
    answered, or all have."""
    streams = [Request(0.0, 60, 1000, service_class=service_class) for _ in range(STREAMS)]
    outcomes = run([*streams, *prompts], engine, slice(0 if to_the_end else STREAMS, None)).outcomes
    return outcomes[STREAMS:], outcomes[:STREAMS]


def gap_p99_s(streams: list[Outcome], steps: int) -> float:
    """p99 of the gaps that the streams see from the calm on, for `steps` steps."""
    return quantile([g for s in streams for g in s.gaps_s[CALM_STEPS : CALM_STEPS + steps]], 0.99)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("target_s", [0.1, 0.02])
@pytest.mark.parametrize("name", RUNNERS)
def test_gaps_keep_to_the_target_or_twice_the_decodes_and_the_prompt_gets_its_share(
    name: str, target_s: float, noise: float
) -> None:
    cost, calm_s = RUNNERS[name], decodes_s(RUNNERS[name], 100)
    share = max(0.5, 1.0 - calm_s / target_s)
    gaps = []
    for seed in SEEDS if noise else SEEDS[:1]:
        engine = Engine(cost, gap_targets_s=(target_s,) * 3, noise=noise, noise_seed=seed)
        (prompt,), streams = beside_streams(
            engine, Request(CALM_STEPS * calm_s, PROMPT_LEN, 2), to_the_end=True
        )
        steps = round(prompt.first_token_s / calm_s / 2)
        gaps.append(gap_p99_s(streams, steps) / max(target_s, 2 * decodes_s(cost, CALM_STEPS + 60 + steps)))
        alone = run([Request(0.0, 60, 2), Request(100.0, PROMPT_LEN, 2)], engine).outcomes[1]
        assert prompt.first_token_s <= 1.15 * (1.0 + noise) * alone.first_token_s / share
    assert statistics.median(gaps) <= (1.0 + 0.5 * noise) * 1.01


@pytest.mark.parametrize("name", RUNNERS)
def test_a_larger_target_never_makes_a_lone_first_token_later(name: str) -> None:
    cost, before_s = RUNNERS[name], math.inf
    for target_s in sorted(some((0.005, 0.05, 0.2, math.inf, 0.02, 0.1, 0.5, 1.0), usual=4)):
        engine = Engine(cost, gap_targets_s=(target_s,) * 3)
        (prompt,), _ = beside_streams(engine, Request(CALM_STEPS * decodes_s(cost, 100), PROMPT_LEN, 2))
        assert prompt.first_token_s <= before_s * 1.01
        before_s = prompt.first_token_s


@pytest.mark.parametrize("other_len", some([20, 3900, 500, 8000], usual=2))
@pytest.mark.parametrize("name", RUNNERS)
def test_a_second_prompt_never_makes_the_first_faster(name: str, other_len: int) -> None:
    cost = RUNNERS[name]
    first = Request(CALM_STEPS * decodes_s(cost, 100), PROMPT_LEN, 2)
    (alone,), _ = beside_streams(Engine(cost), first)
    second = Request(first.at_s + 0.2 * alone.first_token_s, other_len, 2)
    (beside, _), _ = beside_streams(Engine(cost), first, second)
    assert beside.first_token_s >= 0.98 * alone.first_token_s


@pytest.mark.parametrize("name", RUNNERS)
def test_a_short_prompt_that_passes_a_long_one_pays_only_for_its_own_tokens(name: str) -> None:
    """Its tokens are not priced as if they were far into a long prompt, where a step has time for few."""
    cost = RUNNERS[name]
    at_s = CALM_STEPS * decodes_s(cost, 100)
    long = Request(at_s, PROMPT_LEN, 2)
    (alone,), _ = beside_streams(Engine(cost), long)
    short = Request(at_s + 0.3 * alone.first_token_s, 100, 2)
    (passed, passing), _ = beside_streams(Engine(cost), long, short)
    assert passing.first_token_s < 3.2 * cost.service_s(short.prompt_len) + 0.1
    assert passed.first_token_s < 1.05 * alone.first_token_s + passing.first_token_s


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("prompt_len", [100, 4000])
def test_a_prompt_alone_takes_hardly_longer_than_in_one_step(name: str, prompt_len: int) -> None:
    cost = RUNNERS[name]
    warm = Request(0.0, 500, 20)
    *_, prompt = run([warm, Request(100.0, prompt_len, 2)], Engine(cost)).outcomes
    assert prompt.first_token_s < 1.4 * cost.service_s(prompt_len)


def test_a_flood_of_admissions_keeps_the_gaps_to_the_target() -> None:
    """Prompts of one token take nothing that chunks do; the host admits each of them."""
    cost, target_s = replace(RUNNERS["29M on two cores"], seat_s=2e-3), 0.025
    waves = (Request(at_s, 1, 1) for at_s in (2.0, 4.0, 6.0) for _ in range(40))
    flood, streams = beside_streams(Engine(cost, gap_targets_s=(target_s,) * 3), *waves)
    assert all(request.reason is FinishReason.LENGTH for request in flood)
    learned = [gap_s for stream in streams for gap_s in stream.gaps_s[CALM_STEPS:]]
    assert sum(gap_s > target_s for gap_s in learned) <= 2 * STREAMS, "until the host's time is known"
    assert 40 * cost.seat_s > 3 * target_s


def test_each_class_of_streams_has_its_own_target() -> None:
    cost = RUNNERS["29M on two cores"]
    engine = Engine(cost, gap_targets_s=(math.inf, 0.1, 0.05))
    at_s = CALM_STEPS * decodes_s(cost, 100)
    for service_class, target_s in ((ServiceClass.DEFAULT, 0.1), (ServiceClass.PRIORITY, 0.05)):
        _, streams = beside_streams(engine, Request(at_s, PROMPT_LEN, 2), service_class=service_class)
        longest_s = max(stream.gap_s_max for stream in streams)
        assert 0.8 * target_s < longest_s <= 1.01 * target_s
    priority = Request(0.0, 60, 1000, service_class=ServiceClass.PRIORITY)
    _, mixed = beside_streams(engine, priority, Request(at_s, PROMPT_LEN, 2), service_class=ServiceClass.FLEX)
    assert max(stream.gap_s_max for stream in mixed) <= 1.01 * 0.05, "the least target of all that stream"
    _, streams = beside_streams(engine, Request(at_s, 1900, 2), service_class=ServiceClass.FLEX)
    assert max(stream.gap_s_max for stream in streams) > 0.15, "one step computes the whole prompt"


def test_a_smaller_share_of_the_time_makes_as_long_chunks_more_rarely() -> None:
    """Credit: far into a prompt a chunk that a third of the decodes' time has room for would mostly read its
    context. So every few steps there is one that is worth it, and no step takes more than twice its
    decodes."""
    cost = replace(RUNNERS["474M on two cores"], context_s=1.2e-5)
    engine = Engine(cost, prompt_share=0.2)
    at_s = CALM_STEPS * decodes_s(cost, 100)
    (prompt,), streams = beside_streams(engine, Request(at_s, PROMPT_LEN, 2))
    work_s = cost.service_s(PROMPT_LEN) - cost.fixed_s
    assert 0.1 < work_s / prompt.first_token_s <= 0.2
    far = streams[0].gaps_s[CALM_STEPS + 300 : CALM_STEPS + 400]
    calm_s = decodes_s(cost, CALM_STEPS + 400)
    assert max(far) <= 2.05 * calm_s
    assert 0.6 < sum(gap < 1.1 * calm_s for gap in far) / len(far) < 0.8, "most steps have no chunk"
    assert sum(far) / len(far) == pytest.approx(calm_s / 0.8, rel=0.05)
