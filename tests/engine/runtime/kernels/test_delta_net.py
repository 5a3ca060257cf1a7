"""The delta net's kernels in the interpreter, against torch, which goes token by token."""

from __future__ import annotations

import pytest
import torch

from engine.runtime.models.spec import DeltaNet
from tests.engine.runtime.kernels.deltas import SMALL, DeltaCase, Found, delta_case

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2}


def assert_near(found: Found, expected: Found, dtype: torch.dtype = torch.float32) -> None:
    """NaN where there was NaN: in the slots of nobody."""
    for own, other in zip(
        (found.out, found.heads, found.inputs), (expected.out, expected.heads, expected.inputs), strict=True
    ):
        own = own.float()
        assert torch.equal(own.isnan(), other.isnan())
        torch.testing.assert_close(
            own.nan_to_num(), other.nan_to_num(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def assert_as_torch(case: DeltaCase, size: int = 32) -> None:
    assert_near(case.found(CPU, size), case.expected(), case.x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "net", [SMALL, DeltaNet(2, 2, 32, 16, 2)], ids=["shared keys, four taps", "own keys, two taps"]
)
def test_rows_of_one_token(net: DeltaNet, dtype: torch.dtype) -> None:
    """The first of its sequence, the second, and later ones."""
    assert_as_torch(delta_case(net, [(7, 1), (0, 1), (1, 1), (300, 1)], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_many_tokens(dtype: torch.dtype) -> None:
    """From the start and from within a chunk; one that ends with a chunk, one that is shorter than the
    convolution; beside rows of one token, and one of one token behind."""
    rows = [(5, 1), (0, 70), (37, 20), (30, 34), (0, 2), (64, 1)]
    assert_as_torch(delta_case(SMALL, rows, dtype=dtype))


def test_chunks_of_the_size_on_a_card() -> None:
    assert_as_torch(delta_case(SMALL, [(60, 70)]), 64)


def test_keys_that_are_alike() -> None:
    """Each token then takes back nearly all that the one before has added."""
    assert_as_torch(delta_case(DeltaNet(1, 1, 16, 16, 4), [(0, 64)], alike=0.98), 64)


def test_a_prompt_that_is_cut_where_chunks_begin_has_the_same_bits() -> None:
    case = delta_case(SMALL, [(0, 80)])
    whole, parts = case.found(CPU, 32), case.in_two(32, CPU, 32)
    for own, other in ((parts.out, whole.out), (parts.heads, whole.heads), (parts.inputs, whole.inputs)):
        assert torch.equal(own.nan_to_num(-7.0), other.nan_to_num(-7.0))
