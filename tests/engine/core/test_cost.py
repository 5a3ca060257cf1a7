from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.contract.messages import TimedStep
from engine.core.estimate.cost import ERROR_AT_FIRST, ERROR_MAX, ERROR_MIN, CostLearner, StepCost, Work
from tests.bench.engine.virtual import timed_steps

RUNNERS = {
    "a large GPU": StepCost(token_s=5e-5, row_s=1e-4, pair_s=2e-9, context_s=5e-8, fixed_s=6e-3),
    "two CPU cores": StepCost(token_s=2e-3, row_s=1e-3, pair_s=7e-7, context_s=6e-6, fixed_s=7e-2),
    "no attention to speak of": StepCost(token_s=1e-4, row_s=1e-5, pair_s=0.0, fixed_s=1e-2),
}


def random_work(rng: random.Random) -> Work:
    decodes = rng.randint(1, 40)
    positions, lengths = [rng.randint(1, 4000) for _ in range(decodes)], [1] * decodes
    if rng.random() < 0.6:
        positions.append(rng.choice([0, 0, 2000]))
        lengths.append(rng.randint(2, 2048))
    return Work.of(positions, lengths)


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cost_of_any_runner_is_learned_from_its_steps(name: str) -> None:
    truth, learner, rng = RUNNERS[name], CostLearner(), random.Random(1)
    for _ in range(200):
        work = random_work(rng)
        learner.observe(work, truth.seconds(work) * rng.uniform(0.95, 1.05))
    for prompt_len in (200, 4000):
        assert learner.cost.service_s(prompt_len) == pytest.approx(truth.service_s(prompt_len), rel=0.1)
    for _ in range(20):
        work = random_work(rng)
        assert learner.cost.seconds(work) == pytest.approx(truth.seconds(work), rel=0.1)


def test_a_coefficient_that_no_step_shows_any_more_is_kept() -> None:
    truth, learner, rng = RUNNERS["a large GPU"], CostLearner(), random.Random(1)
    for _ in range(200):
        work = random_work(rng)
        learner.observe(work, truth.seconds(work))
    before = learner.cost.service_s(4000)
    for _ in range(5000):
        work = Work.of([rng.randint(1, 4000)], [1])
        learner.observe(work, truth.seconds(work))
    assert learner.cost.service_s(4000) == pytest.approx(before, rel=0.25)


def test_an_outlier_hardly_changes_the_learned_cost() -> None:
    truth, learner, rng = RUNNERS["a large GPU"], CostLearner(), random.Random(1)
    for _ in range(200):
        work = random_work(rng)
        learner.observe(work, truth.seconds(work))
    learner.observe(random_work(rng), 60.0)
    learner.observe(random_work(rng), 0.0)
    assert learner.cost.service_s(1000) == pytest.approx(truth.service_s(1000), rel=0.5)


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("position", [0, 3000])
def test_tokens_within_a_time_is_the_longest_chunk_that_fits(name: str, position: int) -> None:
    cost = RUNNERS[name]
    room_s = 0.05

    def chunk_s(length: int) -> float:
        return cost.seconds(Work.of([position], [length])) - cost.fixed_s

    length = cost.tokens_within(room_s, position)
    assert length > 2
    assert chunk_s(length) <= room_s * (1 + 1e-9) < chunk_s(length + 1) * (1 + 1e-9)
    assert cost.tokens_within(0.0, position) == cost.tokens_within(-1.0, position) == 0


@pytest.mark.parametrize("measured", [1.0, 0.5, 1.5])
def test_copies_are_told_from_the_rest_of_their_steps(measured: float) -> None:
    """By the time that was measured, which is kept; where it is wrong, the rest is learned a little worse."""
    truth = StepCost(token_s=5e-5, row_s=1e-4, pair_s=2e-9, fixed_s=6e-3, page_s=4e-4)
    learner, rng = CostLearner(page_s=measured * truth.page_s), random.Random(1)
    most = 600 if measured == 1.0 else 60
    for step in range(300):
        work = random_work(rng)
        if step % 5 == 0:
            work = replace(work, copied_pages=rng.randint(20, most), seats=1)
        learner.observe(work, truth.seconds(work) * rng.uniform(0.98, 1.02))
    assert learner.cost.page_s == measured * truth.page_s
    error = 0.1 if measured == 1.0 else 0.25
    assert learner.cost.service_s(4000) == pytest.approx(truth.service_s(4000), rel=error)
    assert measured != 1.0 or learner.cost.seat_s < 1e-2 * truth.fixed_s, "they are no time of admissions"


def test_the_cost_of_scored_tokens_is_learned_from_a_few_steps_and_kept() -> None:
    truth = replace(RUNNERS["two CPU cores"], score_s=8e-3)
    learner, rng = CostLearner(), random.Random(1)
    for _ in range(200):
        work = random_work(rng)
        learner.observe(work, truth.seconds(work))
    assert learner.cost.score_s == 0.0
    scored = Work.of([0] * 3, [1, 1, 500], scored_tokens=500)
    for _ in range(5):
        learner.observe(scored, truth.seconds(scored))
    assert learner.cost.seconds(scored) == pytest.approx(truth.seconds(scored), rel=0.1)
    for _ in range(100):
        work = random_work(rng)
        learner.observe(work, truth.seconds(work))
    assert learner.cost.score_s == pytest.approx(truth.score_s, rel=0.1)
    assert learner.cost.service_s(500) == pytest.approx(truth.service_s(500), rel=0.1)


def test_the_hosts_time_for_an_admission_is_learned() -> None:
    """Choices of one request are admitted with one token each, which counts as a decode."""
    truth = replace(RUNNERS["a large GPU"], row_s=2e-4, seat_s=5e-4)
    learner, rng = CostLearner(), random.Random(1)
    for _ in range(300):
        work = replace(random_work(rng), seats=rng.choice([0, 0, 1, rng.randint(2, 24)]))
        learner.observe(work, truth.seconds(work) * rng.uniform(0.95, 1.05))
    assert learner.cost.seat_s == pytest.approx(truth.seat_s, rel=0.2)
    assert learner.cost.row_s == pytest.approx(truth.row_s, rel=0.2)


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_chunk_costs_what_it_adds_to_a_step(name: str, length: int) -> None:
    cost, others = RUNNERS[name], Work.of([50], [1], copied_pages=7)
    both = Work.of([50, 300], [1, length], copied_pages=7)
    assert cost.chunk_s(300, length) == pytest.approx(cost.seconds(both) - cost.seconds(others))


def test_there_is_time_for_a_single_token_where_there_is_time_for_a_decode() -> None:
    """Far into a prompt a decode and a token of a chunk cost differently: world 209 of `tests.pace_worlds`
    gave prompts a tenth of their share, since it priced single tokens as chunks."""
    cheaper = StepCost(token_s=2e-4, row_s=9e-5, pair_s=1.5e-7, context_s=1e-8)
    dearer = StepCost(token_s=1e-4, row_s=5e-4, pair_s=0.0, context_s=1e-8)
    for cost in (cheaper, dearer):
        single_s = cost.chunk_s(3000, 1)
        assert single_s == cost.row_s + cost.context_s * 3001
        assert cost.tokens_within(1.001 * single_s, 3000) >= 1
    assert cheaper.tokens_within(0.999 * cheaper.chunk_s(3000, 1), 3000) == 0
    assert dearer.tokens_within(dearer.token_s + dearer.context_s * 3001, 3000) == 0


def test_a_free_runner_has_no_bound_and_a_service_above_zero() -> None:
    free = StepCost(0.0, 0.0, 0.0, 0.0)
    assert free.tokens_within(1.0, 0) > 10**6
    assert free.service_s(1) > 0.0


@pytest.mark.parametrize("name", RUNNERS)
def test_the_steps_of_the_warm_up_tell_every_coefficient(name: str) -> None:
    learner, truth = CostLearner(timed=timed_steps(RUNNERS[name])), RUNNERS[name]
    for work in (Work.of([0], [100]), Work.of([4000], [20]), Work.of([200] * 8, [1] * 8)):
        assert learner.cost.seconds(work) == pytest.approx(truth.seconds(work), rel=0.05)
    assert learner.cost.service_s(4000) == pytest.approx(truth.service_s(4000), rel=0.1)


def test_steps_that_took_no_time_teach_nothing() -> None:
    assert CostLearner(timed=[TimedStep([0], [8], 0.0)]).cost == StepCost()


CHUNKS: dict[str, Callable[[random.Random], int]] = {
    "of one length": lambda _: 25,
    "of hardly different lengths": lambda rng: rng.randint(24, 26),
}


@pytest.mark.parametrize("slowdown", [1.0, 1.7, 0.6])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", RUNNERS)
def test_steps_that_are_all_alike_do_not_confuse_the_coefficients(
    name: str, chunks: str, noise: float, slowdown: float
) -> None:
    """Three hundred chunks of about one length beside eight decodes: their steps do not tell the price of a
    token from that of a chunk or of the decodes. Steps of other shapes are predicted all the same, on a
    machine that is slower than it was at the warm-up, too."""
    truth, rng = RUNNERS[name], random.Random(3)
    learner = CostLearner(timed=timed_steps(truth))
    position, contexts = 0, [100] * 8
    for _ in range(300):
        length = CHUNKS[chunks](rng)
        work = Work.of([*contexts, position], [1] * 8 + [length])
        learner.observe(work, slowdown * truth.seconds(work) * (1.0 + noise * rng.uniform(-1.0, 1.0)))
        position, contexts = (position + length) % 4000, [context + 1 for context in contexts]
    others = (
        Work.of([0], [500]),
        Work.of([200] * 8, [1] * 8),
        Work.of([200, 0], [1, 400]),
        Work.of([100], [1]),
    )
    for work in others:
        assert learner.cost.seconds(work) == pytest.approx(slowdown * truth.seconds(work), rel=0.1 + noise)


def test_the_model_knows_its_error() -> None:
    truth, rng = RUNNERS["two CPU cores"], random.Random(1)
    learner = CostLearner(timed=timed_steps(truth))
    assert learner.error == ERROR_AT_FIRST
    for _ in range(300):
        learner.observe(Work.of([rng.randint(0, 999)], [1]), 1.0)
    assert learner.error == ERROR_AT_FIRST, "steps without prompts say nothing about prompts"
    learner = CostLearner(timed=timed_steps(truth))
    for noise, least, most in ((0.0, ERROR_MIN, ERROR_MIN), (0.2, 0.12, 0.3), (0.0, ERROR_MIN, 0.05)):
        for _ in range(300):
            work = Work.of([500] * 8 + [rng.randint(0, 3000)], [1] * 8 + [rng.randint(10, 60)])
            learner.observe(work, truth.seconds(work) * (1.0 + noise * rng.uniform(-1.0, 1.0)))
        assert least <= learner.error <= most


def test_a_single_step_that_the_host_held_up_does_not_halve_the_chunks() -> None:
    learner, truth = CostLearner(timed=timed_steps(RUNNERS["two CPU cores"])), RUNNERS["two CPU cores"]
    work = Work.of([500] * 8 + [1000], [1] * 8 + [50])
    for i in range(40):
        learner.observe(work, truth.seconds(work) * (2.0 if i == 30 else 1.0))
        assert learner.error <= 0.2
    assert learner.error > ERROR_MIN, "it counts"


def test_the_error_is_bounded() -> None:
    learner, truth = CostLearner(timed=timed_steps(RUNNERS["two CPU cores"])), RUNNERS["two CPU cores"]
    for i in range(100):
        work = Work.of([0], [50])
        learner.observe(work, truth.seconds(work) * (100.0 if i % 2 else 0.01))
    assert learner.error <= ERROR_MAX
