"""Comparing what a GPU found with what it should have, in words from which a kernel can be mended: one run on
a card is all there may be."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_SHOWN = 8


def near(found: Tensor, expected: Tensor, error_max: float) -> float:
    """The error, as a share of the reference's norm."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    assert found.shape == expected.shape, f"{list(found.shape)} for {list(expected.shape)}"
    infinite = ~torch.isfinite(found)
    assert not infinite.any(), f"not finite: {_where(infinite)}"
    error = float((found - expected).norm() / expected.norm())
    assert error <= error_max, f"relative error {error:.2e}, at most {error_max:.0e}; {_off(found, expected)}"
    return error


def same(found: Tensor, expected: Tensor, what: str) -> None:
    """To the bit; NaN is like NaN."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    assert found.shape == expected.shape, f"{what}: {list(found.shape)} for {list(expected.shape)}"
    differs = (found != expected) & ~((found != found) & (expected != expected))
    assert not differs.any(), f"{what}: {_where(differs)}; {_off(found.double(), expected.double())}"


def _where(bad: Tensor) -> str:
    places = bad.nonzero()
    return f"{len(places)} of {bad.numel()}, from {places[0].tolist()} to {places[-1].tolist()}"


def _off(found: Tensor, expected: Tensor) -> str:
    """The worst place, and how far off each row is: of attention a row is a token, of a product one too."""
    apart = (found - expected).abs().nan_to_num(torch.inf)
    worst = list(torch.unravel_index(apart.argmax(), apart.shape))
    text = f"worst at {[int(i) for i in worst]}: {float(found[*worst]):.6g} for {float(expected[*worst]):.6g}"
    scale = expected.abs().max()
    rows = apart.flatten(1).amax(1) / scale if apart.dim() > 1 else apart / scale
    order = rows.argsort(descending=True)[:ROWS_SHOWN]
    shown = ", ".join(f"{int(row)}: {float(rows[row]):.1e}" for row in order)
    return f"{text}; of {list(found.shape)} rows are off by, of the largest expected, {shown}"
