"""The likeliest tokens in one order, however they are found."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.step.logprobs import distinct_topk, stable_topk

VALUES = st.sampled_from([0.0, -0.0, -1e-40, -0.5, -3.0, -1e30, float("-inf")])


@given(st.lists(st.lists(VALUES, min_size=7, max_size=7), min_size=1, max_size=3), st.integers(0, 7))
def test_what_needs_no_look_at_the_values_finds_the_same(rows: list[list[float]], k: int) -> None:
    """Equals and minus infinities cut through, zeros of both signs."""
    logprobs = torch.tensor(rows, dtype=torch.float32)
    for found, expected in zip(distinct_topk(logprobs, k), stable_topk(logprobs, k), strict=True):
        assert torch.equal(found, expected)


@given(st.lists(st.lists(VALUES, min_size=40, max_size=40), min_size=1, max_size=3), st.integers(1, 4))
def test_a_few_of_many_are_found_as_by_sorting_all(rows: list[list[float]], k: int) -> None:
    logprobs = torch.tensor(rows, dtype=torch.float32)
    best, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    found, found_ids = stable_topk(logprobs, k)
    assert torch.equal(found_ids, ids[:, :k])
    assert torch.equal(found, best[:, :k])


def test_over_a_vocabulary() -> None:
    torch.manual_seed(0)
    logprobs = torch.randint(40, (3, 5000)).float().log_softmax(-1)
    assert torch.equal(distinct_topk(logprobs, 20)[1], stable_topk(logprobs, 20)[1])
