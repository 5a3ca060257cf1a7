"""The delta net's kernels in the interpreter, against torch, which goes token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.runtime.models.spec import DeltaNet
from engine.runtime.step.batch import Row
from tests.effort import some
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


@pytest.mark.parametrize(
    ("net", "dtype"), some([(SMALL, torch.float32), (DeltaNet(2, 2, 16, 16, 2), torch.float16)], usual=1)
)
def test_rows_that_verify_leave_a_state_behind_each_token(net: DeltaNet, dtype: torch.dtype) -> None:
    """One from the start, one with more drafts than the convolution has taps, one with fewer; beside rows of
    one token and of many, whose states are not under their slots' numbers either. No token's sums are other
    than those of a decode."""
    case = delta_case(net, [(7, 1), (0, 2), (9, 5), (37, 5)], dtype=dtype, verifying=2)
    found, last = case.found(CPU, 16), case.rows[2]
    assert_near(found, case.expected(), dtype)
    heads, inputs, at = case.heads, case.inputs, case.order[last.slot]
    for token in range(last.length):
        one = Row(last.slot, last.start + token, 1, 0)
        x = case.x[last.offset + token : last.offset + token + 1]
        alone = replace(case, rows=[one], decode_rows=1, verifying=0, x=x, heads=heads, inputs=inputs)
        decoded = alone.found(CPU)
        assert torch.equal(decoded.out[0], found.out[last.offset + token])
        heads, inputs = decoded.heads, decoded.inputs
    left = case.order[-1]
    assert torch.equal(heads[at], found.heads[left])
    assert torch.equal(inputs[at], found.inputs[left])


@pytest.mark.parametrize("right", [(0, 0, 0), (2, 5, 1), (1, 3, 0), (0, 4, 1)])
def test_a_slot_goes_on_behind_its_last_right_draft(right: tuple[int, ...]) -> None:
    """And what it has passed stays in its windows, the newest first."""
    case = delta_case(SMALL, [(7, 1), (4, 3), (9, 6), (30, 2)], verifying=3)
    found, expected = case.turned(right, CPU)
    assert found == expected
    assert sorted(found) == sorted(case.order)
    assert (found == case.order) == (not any(right))
