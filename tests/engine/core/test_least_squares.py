from __future__ import annotations

import random

import pytest

from engine.core.estimate.cost import eliminate, nonnegative

Rows = list[list[float]]


def equations(samples: list[tuple[list[float], float]]) -> Rows:
    """The normal equations of samples, each of which has features and a value."""
    size = len(samples[0][0])
    rows = [[0.0] * (size + 1) for _ in range(size)]
    for features, value in samples:
        for i in range(size):
            for j, side in enumerate((*features, value)):
                rows[i][j] += features[i] * side
    return rows


def sampled(rng: random.Random, weights: list[float], count: int, noise: float = 0.0) -> Rows:
    samples = []
    for _ in range(count):
        features = [rng.uniform(0.0, 10.0 ** (2 * i)) for i in range(len(weights))]
        value = sum(f * w for f, w in zip(features, weights, strict=True))
        samples.append((features, value + rng.gauss(0.0, noise)))
    return equations(samples)


def repeated(rows: Rows, weights: list[float], times: int = 30) -> list[float]:
    for _ in range(times):
        weights = nonnegative(rows, weights)
    return weights


@pytest.mark.parametrize("seed", range(10))
def test_weights_that_the_equations_determine_are_found(seed: int) -> None:
    rng = random.Random(seed)
    truth = [rng.uniform(0.1, 10.0) / 100**i for i in range(5)]
    assert repeated(sampled(rng, truth, 50), [0.0] * 5) == pytest.approx(truth, rel=1e-6)


def test_features_that_hardly_vary_apart_are_told_apart() -> None:
    """Coordinate descent would take thousands of sweeps."""
    rng, truth = random.Random(1), [2.0, 0.5]
    features = [[1.0, 8.0 + rng.uniform(0.0, 0.5)] for _ in range(100)]
    rows = equations([(pair, 2.0 * pair[0] + 0.5 * pair[1]) for pair in features])
    assert repeated(rows, [0.0, 0.0]) == pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize("seed", range(20))
def test_no_weight_is_negative_and_none_could_move_to_fit_better(seed: int) -> None:
    rng = random.Random(seed)
    rows = sampled(rng, [rng.uniform(-1.0, 1.0) / 100**i for i in range(4)], 30, noise=0.1)
    weights = repeated(rows, [0.0] * 4, 200)
    assert min(weights) >= 0.0
    for i, weight in enumerate(weights):
        *row, right = rows[i]
        steepness = (sum(a * w for a, w in zip(row, weights, strict=True)) - right) / row[i]
        assert steepness == pytest.approx(0.0, abs=1e-9) if weight > 0.0 else steepness > -1e-9


def test_a_feature_that_was_never_seen_keeps_its_weight() -> None:
    rows = equations([([1.0, 0.0], 3.0), ([2.0, 0.0], 6.0)])
    assert repeated(rows, [0.0, 7.0]) == pytest.approx([3.0, 7.0])
    assert nonnegative([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [1.0, 2.0]) == [1.0, 2.0]


def test_a_held_weight_counts_for_the_others() -> None:
    """The second feature was seen so long ago that its weight is kept; its part of the values must not move
    to other weights."""
    tiny = 1e-9
    rows = equations([([1.0, tiny], 3.0 + 7.0 * tiny), ([0.0, tiny], 7.0 * tiny)])
    rows[0][1] = rows[1][0] = 1.0
    rows[0][2] = 3.0 + 7.0
    assert repeated(rows, [0.0, 7.0]) == pytest.approx([3.0, 7.0])


def test_only_the_sum_of_twins_is_determined_and_they_stay_where_they_are() -> None:
    rows = equations([([1.0, 1.0], 5.0)] * 20)
    assert repeated(rows, [1.0, 4.0]) == pytest.approx([1.0, 4.0])
    assert repeated(rows, [1.0, 0.0]) == pytest.approx([3.0, 2.0])


def test_elimination_solves_a_linear_system() -> None:
    assert eliminate([[2.0, 1.0, 4.0], [1.0, 3.0, 7.0]]) == pytest.approx([1.0, 2.0])
