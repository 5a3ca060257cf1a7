"""Each option against the document order, written naively in float64; then whole distributions."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.contract.messages import NUMERIC_FAILURE, Plan, SamplingParams, SlotAssignment
from engine.contract.packing import Biases
from engine.runtime.host import sampler
from engine.runtime.host.philox import uniforms
from engine.runtime.host.sampler import inverse_cdf
from engine.runtime.step.seats import HostSlots, SamplingColumns
from tests.effort import drawn

VOCAB = 40
SEED = 0x9E3779B97F4A7C15


class Seats:
    """Slots without a model: what the sampler needs to know about each row."""

    def __init__(self, vocab: int = VOCAB, slots: int = 64) -> None:
        self.slots = HostSlots(slots, 64, 16, vocab)
        self.taken: list[int] = []

    def add(self, sampling: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> None:
        slot = len(self.slots.tokens) - 1 - len(self.taken)  # slots are not rows
        start = SlotAssignment.of(slot, [*prompt, *output], len(prompt), sampling)
        self.slots.apply(Plan(0, [], [start], [], [], [], [], []))
        self.taken.append(slot)

    def sample(
        self, logits: Tensor, draw: sampler.Draw | None = None, masks: Sequence[bytes] = ()
    ) -> list[int]:
        seats = [self.slots.seat(slot) for slot in self.taken]
        tokens: list[int]
        tokens = sampler.sample(logits, self.taken, seats, self.slots.columns, draw, masks).tolist()
        return tokens


def mask_of(allowed: Collection[int] | None, vocab: int = VOCAB) -> bytes:
    """The mask that allows these tokens; of a row that follows no grammar for None."""
    if allowed is None:
        return b""
    words = [0] * (-(-vocab // 32))
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return struct.pack(f"<{len(words)}I", *words)


def sample_one(
    logits: Tensor, sampling: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()
) -> int:
    seats = Seats(len(logits))
    seats.add(sampling, prompt, output)
    return seats.sample(logits[None])[0]


def reference(
    logits: Sequence[float],
    p: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    allowed: Collection[int] | None = None,
) -> dict[int, float]:
    """The distribution that sampler.py documents, token -> probability, likeliest first."""
    x = list(logits)
    for token in {*prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in p.logit_bias:
        x[token] += bias
    if len(output) < p.min_tokens:
        for token in p.stop_token_ids:
            x[token] = -math.inf
    if allowed is not None:
        x = [max(own, -1e300) if token in allowed else -math.inf for token, own in enumerate(x)]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if p.temperature == 0:
        return {order[0]: 1.0}
    weights = {token: math.exp((x[token] - x[order[0]]) / p.temperature) for token in order}
    kept = order[: p.top_k or None]
    mass, before = sum(weights[token] for token in kept), 0.0
    nucleus: list[int] = []
    for token in kept:
        if nucleus and p.top_p < 1 and before >= p.top_p * mass:
            break
        nucleus.append(token)
        before += weights[token]
    final = [token for token in nucleus if weights[token] >= p.min_p]
    total = sum(weights[token] for token in final)
    return {token: weights[token] / total for token in final if weights[token] > 0}


def expected_token(distribution: dict[int, float], truncated: bool, u: float) -> tuple[int, float]:
    """The token at u, and how far u is from the nearest border between two tokens."""
    order = list(distribution) if truncated else sorted(distribution)
    cumulative, border, chosen = 0.0, 1.0, order[-1]
    found = False
    for token in order:
        cumulative += distribution[token]
        border = min(border, abs(cumulative - u)) if cumulative < 1 - 1e-9 else border
        if not found and u < cumulative:
            chosen, found = token, True
    return chosen, border


def truncates(params: SamplingParams, vocab: int) -> bool:
    """True if tokens are drawn likeliest first, and not in the order of their ids."""
    return 0 < params.top_k < vocab or params.top_p < 1


PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.05, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    logit_bias=st.sampled_from([Biases(), Biases.of([(3, 5.0)]), Biases.of([(0, -100.0), (39, 2.5)])]),
    stop_token_ids=st.sampled_from([(), (2,), (2, 5, 10_000)]),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
)
ROW = st.tuples(
    PARAMS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(0, 2**32),
    st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
)
Row = tuple[SamplingParams, list[int], list[int], int, set[int] | None]


@settings(max_examples=drawn(37, whole=750), deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6))
@example([(SamplingParams(seed=1, max_tokens=8, temperature=1.0, top_p=0.0), [1], [], 0, None)])
@example(
    [(SamplingParams(seed=1, max_tokens=8, temperature=0.0, presence_penalty=1.5), [*range(6)], [], 0, None)]
)
def test_every_row_is_drawn_from_its_own_reference_distribution(rows: list[Row]) -> None:
    check_draws(rows)


def check_draws(rows: list[Row], draw: sampler.Draw | None = None) -> None:
    """The very token, not just the distribution, since u is known; at a border, rounding decides."""
    seats, logits = Seats(), []
    for params, prompt, output, noise, _ in rows:
        seats.add(params, prompt, output)
        # Thirds make ties, of bases and after penalties, that order alone decides.
        logits.append([round(random.Random(noise + i).gauss(0, 6)) / 2 for i in range(VOCAB)])
    masks = [mask_of(allowed) for *_, allowed in rows]
    tokens = seats.sample(torch.tensor(logits), draw, masks if any(masks) else ())
    for token, x, (params, prompt, output, _, allowed) in zip(tokens, logits, rows, strict=True):
        distribution = reference(x, _without_unknown(params), prompt, output, allowed)
        u = float(uniforms([params.seed], [len(prompt) + len(output)])[0])
        expected, border = expected_token(distribution, truncates(params, VOCAB), u)
        assert token in distribution
        assert token == expected or border < 1e-6


def _without_unknown(params: SamplingParams) -> SamplingParams:
    known = tuple(token for token in params.stop_token_ids if token < VOCAB)
    top_k = min(params.top_k, VOCAB)
    return msgspec.structs.replace(params, stop_token_ids=known, top_k=top_k)


CHI_SQUARE_999 = {5: 20.5, 9: 27.9, 39: 72.1}
"""The 99.9 % points, by degrees of freedom."""


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 40), ({"top_k": 10}, 10), ({"temperature": 0.5, "top_k": 6}, 6)],
)
def test_distribution_over_many_positions(options: dict[str, Any], kept: int) -> None:
    """Chi-square of 8,192 draws with fixed seeds."""
    n, per_batch = 8192, 64
    params = SamplingParams(**({"seed": 0, "max_tokens": 1} | options))
    torch.manual_seed(1)
    logits = torch.randn(VOCAB)
    counts = dict.fromkeys(range(VOCAB), 0)
    for first in range(0, n, per_batch):
        seats = Seats()
        for seed in range(first, first + per_batch):
            seats.add(SamplingParams(**({"seed": seed, "max_tokens": 1} | options)))
        for token in seats.sample(logits.expand(per_batch, -1)):
            counts[token] += 1
    distribution = reference(logits.tolist(), params, [1], [])
    assert len(distribution) == kept
    assert sum(counts[token] for token in distribution) == n
    chi_square = sum((counts[token] - n * p) ** 2 / (n * p) for token, p in distribution.items())
    assert chi_square < CHI_SQUARE_999[kept - 1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 9, 30]] = 2.0
    assert sample_one(logits, SamplingParams(seed=SEED, max_tokens=1, temperature=0.0)) == 7


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0, "top_k": 1}])
def test_the_narrowest_choice_is_the_greedy_one_even_among_equals(options: dict[str, Any]) -> None:
    logits = torch.zeros(VOCAB)
    for seed in range(20):
        assert sample_one(logits, SamplingParams(**({"seed": seed, "max_tokens": 1} | options))) == 0


def test_top_k_cuts_through_equals_by_id() -> None:
    logits = torch.zeros(1000)
    tokens = {sample_one(logits, SamplingParams(seed=seed, max_tokens=1, top_k=3)) for seed in range(50)}
    assert tokens == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.5, 0.99, 0.999999])
def test_top_p_over_a_large_flat_vocabulary(top_p: float) -> None:
    """Candidates do not suffice, the row is sorted whole: the same token as with everything a candidate."""
    torch.manual_seed(0)
    logits = torch.randn(5000) * 0.1
    for seed in range(5):
        params = SamplingParams(seed=seed, max_tokens=1, top_p=top_p)
        expected, border = expected_token(
            reference(logits.tolist(), params, [1], []), True, float(uniforms([seed], [1])[0])
        )
        assert border > 1e-9
        assert sample_one(logits, params) == expected


def test_a_token_does_not_depend_on_who_shares_the_batch() -> None:
    """Alone, and among rows of all kinds, one of them broken."""
    torch.manual_seed(3)
    logits = torch.randn(64, 3000) * 3
    kinds: list[dict[str, Any]]
    kinds = [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_p": 0.999}, {"temperature": 0.0}, {"min_p": 0.1}]
    kinds += [{"presence_penalty": 2.0}, {"logit_bias": Biases.of(((5, 3.0),))}]
    params = [SamplingParams(**({"seed": i, "max_tokens": 1} | kinds[i % len(kinds)])) for i in range(64)]
    alone = [sample_one(logits[i], params[i]) for i in range(64)]
    logits[10] = torch.nan
    seats = Seats(3000)
    for p in params:
        seats.add(p)
    together = seats.sample(logits)
    assert together[10] == NUMERIC_FAILURE
    assert [t for i, t in enumerate(together) if i != 10] == [t for i, t in enumerate(alone) if i != 10]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_logit_that_is_not_finite_fails_its_row_alone(value: float, options: dict[str, Any]) -> None:
    seats = Seats()
    for _ in range(3):
        seats.add(SamplingParams(**({"seed": 1, "max_tokens": 1} | options)))
    logits = torch.randn(3, VOCAB)
    logits[1, 4] = value
    tokens = seats.sample(logits)
    assert tokens[1] == NUMERIC_FAILURE
    assert tokens[0] >= 0
    assert tokens[2] >= 0


def test_a_networks_own_draw_is_asked_for_every_row() -> None:
    """Of rows that truncate, too, and of those that edit, on copies: torch puts nothing in order."""
    asked: list[tuple[int, list[int], list[int], list[int]]] = []

    def draw(
        logits: Tensor,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        columns: SamplingColumns,
        masks: Sequence[bytes] = (),
    ) -> Tensor:
        asked.append((len(logits), list(rows), list(slots), list(positions)))
        return sampler.draw_by_torch(logits, rows, slots, positions, columns, masks)

    kinds: list[dict[str, Any]]
    kinds = [
        {},
        {"top_k": 7},
        {"top_k": 7, "min_tokens": 3},
        {"top_p": 0.5},
        {"logit_bias": Biases.of(((5, 3.0),))},
    ]
    seats = Seats()
    for length, kind in enumerate(kinds, 1):
        seats.add(SamplingParams(**({"seed": 1, "max_tokens": 4} | kind)), [1] * length)
    logits = torch.randn(len(kinds), VOCAB)
    assert seats.sample(logits, draw) == seats.sample(logits)
    slots = seats.taken
    assert asked == [
        (5, [0, 1, 3], [slots[0], slots[1], slots[3]], [1, 2, 4]),
        (2, [0, 1], [slots[2], slots[4]], [3, 5]),
    ]


def test_logits_are_left_as_they_were() -> None:
    """Log-probabilities are of the raw distribution, so nothing may edit it in place."""
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    seats = Seats()
    params = SamplingParams(
        seed=0, max_tokens=1, repetition_penalty=2.0, logit_bias=Biases.of(((1, 1.0),)), top_p=0.5
    )
    seats.add(params, [1, 2], [3])
    seats.sample(logits)
    assert torch.equal(logits, before)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.linspace(-300, 300, VOCAB)
    assert sample_one(logits, SamplingParams(seed=1, max_tokens=1, temperature=1e-30)) == VOCAB - 1


EXTREMES: tuple[dict[str, Any], ...] = (
    *({"temperature": t} for t in (5e-324, 1e-46, 7e-46, 1.4e-45, 1e-38, 1.2e-38, 1e-30, 1e30, 1e39, 1e308)),
    *({"repetition_penalty": p} for p in (5e-324, 1e-300, 1e-46, 1e-39, 1e-38, 1e-37, 1e38, 1e39, 1e308)),
    {"temperature": 0.0},
    {"min_p": 1.0},
    {"temperature": 7e-46, "min_p": 0.5},
    {"temperature": 1e-46, "repetition_penalty": 1e-39},
    {"temperature": 1e308, "repetition_penalty": 1e308, "min_tokens": 1, "stop_token_ids": (0, 3)},
    {"logit_bias": Biases.of(((0, 100.0), (5, -100.0))), "repetition_penalty": 1e-39},
    {"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))},
)
"""Beyond what float32 can hold, and at its ends."""
CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_p": 0.5},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
)


def extreme_logits() -> dict[str, Tensor]:
    """With zeros of both signs, and finite."""
    steps = torch.linspace(-30, 30, VOCAB)
    steps[[3, 17]] = torch.tensor([0.0, -0.0])
    largest = torch.finfo(torch.float32).max
    huge = torch.linspace(-1, 1, VOCAB) * largest
    return {
        "steps": steps,
        "huge": huge,
        "tiny": torch.linspace(-1e-45, 1e-44, VOCAB),
        "below zero": steps - 31,
    }


def extreme_params(changes: dict[str, Any], seed: int = 7) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "max_tokens": 2, "temperature": 0.8} | changes))


@pytest.mark.parametrize("name", extreme_logits())
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_extreme_parameters_draw_a_token_that_can_be_had(name: str, cut: dict[str, Any]) -> None:
    """One that has weight: where all weights are NaN, it would be the last of the vocabulary."""
    for extreme in EXTREMES:
        check_extreme(extreme_logits()[name], extreme_params(extreme | cut))


def check_extreme(logits: Tensor, params: SamplingParams) -> None:
    prompt = [3, 20, 25, 30]
    token = sample_one(logits, params, prompt)
    edited, largest = logits.double(), torch.finfo(torch.float32).max
    penalty = min(max(params.repetition_penalty, 2.0**-126), 2.0**126)
    seen = edited[prompt]
    edited[prompt] = torch.where(seen > 0, seen / penalty, seen * penalty)
    for biased, value in params.logit_bias:
        edited[biased] += value
    edited.clamp_(-largest, largest)
    if params.min_tokens:
        edited[list(params.stop_token_ids)] = -largest
    if params.temperature < 2.0**-126:
        assert token == int(edited.argmax())
        return
    weights = ((edited - edited.max()) / min(params.temperature, 1e30)).exp()
    assert weights[token] > 1e-7
    if params.top_k:
        assert (weights > weights[token]).sum() < params.top_k


@pytest.mark.parametrize("n", [1, 127, 128, 129, 5000])
def test_inverse_cdf_at_its_ends_and_over_gaps(n: int) -> None:
    """u = 0 and u just below 1 hit the first and the last token that has weight."""
    weights = torch.zeros(1, n)
    weights[0, [n // 3, n // 2]] = 0.1
    below_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(weights, torch.zeros(1, dtype=torch.float64)).tolist() == [n // 3]
    assert inverse_cdf(weights, below_one).tolist() == [n // 2]


def test_inverse_cdf_stays_inside_when_two_ways_of_adding_differ() -> None:
    """Added one by one, the small weights vanish beside the large one; as a block's sum they do not."""
    weights = torch.full((1, 200), 1e-17)
    weights[0, 0] = 1.0
    weights[0, 100:] = 0.0
    below_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert 0 <= int(inverse_cdf(weights, below_one)) < 100


@given(st.lists(st.integers(0, 5), min_size=1, max_size=1300).filter(any), st.integers(0, 2**53 - 1))
@settings(max_examples=60, deadline=None)
def test_inverse_cdf_is_exact_where_sums_are(weights: list[int], numerator: int) -> None:
    """Small integers add up without rounding, so there is one right answer, computed in fractions."""
    u = numerator / 2**53
    cumulative, expected = 0, None
    for index, weight in enumerate(weights):
        cumulative += weight
        if expected is None and cumulative * 2**53 > numerator * sum(weights):
            expected = index
    found = inverse_cdf(torch.tensor([weights], dtype=torch.float32), torch.tensor([u], dtype=torch.float64))
    borders = (abs(sum(weights[: i + 1]) - u * sum(weights)) for i in range(len(weights) - 1))
    assert found.tolist() == [expected] or min(borders) < 1e-12


def test_edits_take_no_new_memory_of_the_vocabularys_size() -> None:
    """To map a copy of all rows anew in every step would take longer than the edits."""
    seats = Seats(slots=3)
    for seed in range(3):
        seats.add(
            SamplingParams(seed=seed, max_tokens=8, temperature=0.0, logit_bias=Biases.of([(seed, 1e9)]))
        )
    before = seats.slots.columns.edited.data_ptr()
    assert seats.sample(torch.randn(3, VOCAB)) == [0, 1, 2]
    assert seats.slots.columns.edited.data_ptr() == before
    assert (seats.slots.columns.edited.amax(dim=1) == 1e9).all()


def test_a_mask_is_the_last_edit_and_beats_held_stops_and_biases() -> None:
    """A token that is allowed is drawn even if an edit before made its logit as small as a forbidden
    one's."""
    bias = Biases.of([(0, 100.0), (5, -100.0)])
    held = SamplingParams(
        seed=1, max_tokens=9, temperature=0.0, min_tokens=5, stop_token_ids=(7,), logit_bias=bias
    )
    seats = Seats()
    for temperature in (0.0, 1.0, 1e30):
        seats.add(msgspec.structs.replace(held, temperature=temperature))
    logits = torch.zeros(3, VOCAB)
    before = logits.clone()
    assert seats.sample(logits, masks=[mask_of({7})] * 3) == [7, 7, 7]
    assert set(seats.sample(logits, masks=[mask_of({5, 7})] * 3)) <= {5, 7}
    assert torch.equal(logits, before), "log-probabilities are those of the model's own logits"


def test_tokens_beyond_a_mask_are_forbidden_and_a_failed_row_stays_failed() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 39] = 5.0
    logits[1, 2] = torch.nan
    seats = Seats()
    for temperature in (0.0, 0.0, 0.5):
        seats.add(SamplingParams(seed=3, max_tokens=1, temperature=temperature))
    tokens = seats.sample(logits, masks=[b"\xff" * 4] * 3)
    assert tokens[:2] == [0, NUMERIC_FAILURE]
    assert tokens[2] < 32
