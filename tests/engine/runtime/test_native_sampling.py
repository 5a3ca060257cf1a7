"""Tokens drawn in C++ beside torch's, which test_sampler.py holds against the document."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.contract.messages import NUMERIC_FAILURE, SamplingParams
from engine.contract.packing import Biases
from engine.runtime.host.philox import uniforms
from engine.runtime.host.sampler import Draw
from engine.runtime.native.decoder import built_isas
from tests.engine.runtime.host.test_sampler import (
    CUTS,
    EXTREMES,
    ROW,
    Row,
    Seats,
    check_draws,
    extreme_logits,
    extreme_params,
    mask_of,
)
from tests.engine.runtime.test_native import PLAIN, Stage

ISAS = built_isas()
assert ISAS
SEEDS = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def drawer(isa: str) -> Draw:
    draw: Draw = Stage.of(PLAIN, isa=isa).model.draw  # type: ignore[attr-defined]
    return draw


DRAWERS = {isa: drawer(isa) for isa in ISAS}


def seated(params: list[SamplingParams], vocab: int, prompt: Sequence[int] = (0,)) -> Seats:
    seats = Seats(vocab, slots=len(params))
    for own in params:
        seats.add(own, prompt)
    return seats


def plain(seed: int, temperature: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=1, temperature=temperature, min_p=min_p)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6))
def test_rows_are_drawn_from_the_reference_distribution(isa: str, rows: list[Row]) -> None:
    check_draws(rows, DRAWERS[isa])


@pytest.mark.parametrize("vocab", [33, 129, 1000, 8192])
def test_masked_rows_equal_torchs(vocab: int) -> None:
    """Of few tokens, of half of them, of all but one, and of none, which is nobody's token to take."""
    rng, generator = random.Random(vocab), torch.Generator().manual_seed(vocab)
    masks = [
        mask_of(allowed, vocab)
        for allowed in ({vocab - 1}, rng.sample(range(vocab), vocab // 2), set(range(vocab)) - {3}, None)
    ]
    params = [
        SamplingParams(seed=seed, max_tokens=1, **limits)
        for seed in SEEDS
        for limits in ({"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.8, "min_p": 0.01})
        for _ in masks
    ]
    logits = torch.randn(len(params), vocab, generator=generator) * 3
    seats, own = seated(params, vocab, [0] * 33), masks * (len(params) // len(masks))
    nothing, expected = [mask_of((), vocab)] * len(params), seats.sample(logits, masks=own)
    for isa, draw in DRAWERS.items():
        assert seats.sample(logits, draw, own) == expected, isa
        assert set(seats.sample(logits, draw, nothing)) == {0}, isa


@pytest.mark.parametrize("vocab", [1, 3, 15, 16, 17, 127, 128, 129, 1000, 8192, 50_257])
def test_equals_torch_token_for_token(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    params = [
        plain(seed, temperature, min_p)
        for seed in SEEDS
        for temperature, min_p in ((0.0, 0.0), (1.0, 0.0), (0.7, 0.0), (2.0, 0.0), (1.0, 0.02))
    ]
    logits = torch.randn(len(params), vocab, generator=generator) * 3
    seats = seated(params, vocab, [0] * 33)
    expected = seats.sample(logits)
    assert {isa: seats.sample(logits, draw) for isa, draw in DRAWERS.items()} == dict.fromkeys(ISAS, expected)


TRUNCATIONS: tuple[dict[str, Any], ...] = (
    *({"top_k": k} for k in (1, 2, 20, 255, 256, 257, 5000, 40_000)),
    *({"top_p": p} for p in (0.0, 0.1, 0.9, 0.999, 0.9999999)),
    {"top_k": 300, "top_p": 0.95},
    {"top_k": 40_000, "top_p": 0.999, "min_p": 0.01},
    {"top_k": 2000, "min_p": 0.3},
)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 12.0])
@pytest.mark.parametrize("vocab", [2, 17, 257, 1000, 50_257])
def test_truncated_rows_equal_torchs(vocab: int, spread: float) -> None:
    """Logits all equal, zeros of both signs; nearly so; as a model's; most of them without weight. They are
    rounded, so that there are equals."""
    generator = torch.Generator().manual_seed(vocab)
    params = [
        SamplingParams(**({"seed": seed, "max_tokens": 1, "temperature": temperature} | cut))
        for seed, cut in enumerate(TRUNCATIONS)
        for temperature in (0.6, 1.0, 2.0)
    ]
    logits = (torch.randn(len(params), vocab, generator=generator) * spread * 64).round() / 64
    seats = seated(params, vocab, [0] * 33)
    expected = seats.sample(logits)
    assert {isa: seats.sample(logits, draw) for isa, draw in DRAWERS.items()} == dict.fromkeys(ISAS, expected)


@pytest.mark.parametrize("isa", ISAS)
@given(seed=st.integers(0, 2**63), top_k=st.integers(1, 300), top_p=st.sampled_from([1.0, 0.99, 0.5]))
def test_no_token_is_drawn_that_was_cut(isa: str, seed: int, top_k: int, top_p: float) -> None:
    """Though the kept tokens weigh next to nothing beside the best."""
    logits = torch.full((1, 400), -29.0)
    logits[0, 7] = 0.0
    own = SamplingParams(seed=seed, max_tokens=1, top_k=top_k, top_p=top_p, temperature=1.0)
    (token,) = seated([own], 400).sample(logits, DRAWERS[isa])
    assert token == 7 or token < top_k


@pytest.mark.parametrize("isa", ISAS)
def test_the_same_random_numbers(isa: str) -> None:
    """Of a flat distribution over a power of two, the token is the number's first bits."""
    vocab, positions = 1 << 13, range(1, 60, 7)
    for position in positions:
        seats = seated([plain(seed) for seed in SEEDS], vocab, [0] * position)
        u = uniforms(SEEDS, [position] * len(SEEDS))
        assert seats.sample(torch.zeros(len(SEEDS), vocab), DRAWERS[isa]) == [int(x * vocab) for x in u]


@pytest.mark.parametrize("isa", ISAS)
def test_the_lowest_id_among_equals(isa: str) -> None:
    logits = torch.full((2, 40), -1.0)
    logits[0, [7, 9, 39]] = 2.0
    logits[1, [33, 39]] = 0.0
    assert seated([plain(5, 0.0)] * 2, 40).sample(logits, DRAWERS[isa]) == [7, 33]


@pytest.mark.parametrize("place", [0, 4, 31, 39])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("isa", ISAS)
def test_a_logit_that_is_not_finite_fails_its_row_alone(isa: str, value: float, place: int) -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    logits[1:3, place] = value
    tokens = seated([plain(1), plain(1), plain(1, 0.0), plain(1, 0.0)], 40).sample(logits, DRAWERS[isa])
    assert tokens[1:3] == [NUMERIC_FAILURE] * 2
    assert min(tokens[0], tokens[3]) >= 0


@pytest.mark.parametrize("name", extreme_logits())
def test_extreme_parameters_draw_what_torch_draws(name: str) -> None:
    params = [extreme_params(extreme | cut, seed) for seed, extreme in enumerate(EXTREMES) for cut in CUTS]
    logits = extreme_logits()[name].expand(len(params), -1).contiguous()
    prompt = [3, 20, 25, 30]
    expected = seated(params, 40, prompt).sample(logits)
    assert min(expected) >= 0
    for isa, draw in DRAWERS.items():
        assert seated(params, 40, prompt).sample(logits, draw) == expected, isa


def test_a_token_does_not_depend_on_who_shares_the_batch() -> None:
    """Rows of all kinds; each alone gives the same."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 3000, generator=generator) * 3
    kinds: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 0.0}, {"min_p": 0.1}]
    kinds += [{"presence_penalty": 2.0}, {"logit_bias": Biases.of(((5, 3.0),))}, {"min_tokens": 3}]
    params = [SamplingParams(**({"seed": i, "max_tokens": 4} | kinds[i % len(kinds)])) for i in range(64)]
    draw = DRAWERS[ISAS[0]]
    together = seated(params, 3000).sample(logits, draw)
    alone = [seated([own], 3000).sample(row[None], draw)[0] for row, own in zip(logits, params, strict=True)]
    assert together == alone == seated(params, 3000).sample(logits)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 40)
    before: Tensor = logits.clone()
    seated([plain(0), plain(1, 0.0)], 40).sample(logits, DRAWERS[ISAS[0]])
    assert torch.equal(logits, before)
