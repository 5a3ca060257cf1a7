"""Which kernel multiplies a weight with so many rows: measured once, at warm-up, on the device at hand.

The library stays unless one of our tiles beats it by `MARGIN`: a difference below that is noise, and the
library's kernel is the better-known one. An fp8 weight has no rival in the library at these sizes, so there
the best tile wins. Rows beyond `matmul.ROWS_MAX` always go to the library, and so does float32, for which the
tensor cores that our tiles are made for do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import OutOfResources

from engine.runtime.fp8 import Fp8Weight
from engine.runtime.kernels.matmul import ROWS, ROWS_MAX, TILES, Tile, row_bucket, skinny_matmul

MEASURED_ROWS: Final = (1, *ROWS)
"""One row alone is a matrix times a vector, for which the library has kernels of its own."""
MARGIN: Final = 1.05
Weight = Tensor | Fp8Weight
Timer = Callable[[Callable[[], object]], float]
"""Runs it several times, weights not in the cache, and returns the best time in us."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    height: int
    """N: rows of the weight."""
    width: int
    """K"""
    rows: int
    """One of `MEASURED_ROWS`."""
    fp8: bool
    group: int = 0
    """Of an fp8 weight."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A shape's winner; `tile` None is the library."""

    tile: Tile | None
    best_us: float
    library_us: float | None


class MatmulTable:
    """Multiplies by the fastest way known. Shapes that were never measured go the way that always works."""

    def __init__(self, measured: Mapping[MatmulShape, Measured]) -> None:
        self.measured: Final = measured

    @staticmethod
    def fill(weights: Iterable[Weight], activations: torch.dtype, timer: Timer) -> MatmulTable:
        """Measure every distinct shape among `weights` at every row count."""
        measured: dict[MatmulShape, Measured] = {}
        for weight in weights:
            for rows in MEASURED_ROWS:
                shape = _shape(weight, rows)
                if shape not in measured:
                    measured[shape] = _measure(weight, rows, activations, timer)
        return MatmulTable(measured)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x [M, K] -> [M, N]; in `out`, if there is a place for it."""
        if len(x) <= ROWS_MAX:
            found = self.measured.get(_shape(weight, 1 if len(x) == 1 else row_bucket(len(x))))
            if found is not None and found.tile is not None:
                return _by_tile(x, weight, found.tile, bias, out)
            if found is None and isinstance(weight, Fp8Weight):
                return _by_tile(x, weight, _tiles(weight, x.dtype)[-1], bias, out)
        return _by_library(x, weight, bias, out)


def _measure(weight: Weight, rows: int, activations: torch.dtype, timer: Timer) -> Measured:
    values = weight.values if isinstance(weight, Fp8Weight) else weight
    x = torch.zeros(rows, values.shape[1], dtype=activations, device=values.device)
    times = {tile: _tile_us(x, weight, tile, timer) for tile in _tiles(weight, activations)}
    tile = min(times, key=lambda tile: times[tile], default=None)
    best_us = math.inf if tile is None else times[tile]
    if isinstance(weight, Fp8Weight) and best_us < math.inf:
        return Measured(tile, best_us, None)
    library_us = timer(partial(_by_library, x, weight, None))
    if best_us * MARGIN < library_us:
        return Measured(tile, best_us, library_us)
    return Measured(None, library_us, library_us)


def _tile_us(x: Tensor, weight: Weight, tile: Tile, timer: Timer) -> float:
    """Infinite where a multiprocessor has too little shared memory for the tile."""
    try:
        return timer(partial(_by_tile, x, weight, tile, None))
    except OutOfResources:
        return math.inf


def _tiles(weight: Weight, activations: torch.dtype) -> Sequence[Tile]:
    """Those that lie within a group of columns, where groups have scales of their own."""
    if not isinstance(weight, Fp8Weight):
        return () if activations == torch.float32 else TILES
    return [tile for tile in TILES if weight.group % tile.k == 0]


def _by_library(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if isinstance(weight, Fp8Weight):
        return weight.linear(x, bias) if out is None else out.copy_(weight.linear(x, bias))
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _by_tile(x: Tensor, weight: Weight, tile: Tile, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if isinstance(weight, Fp8Weight):
        return skinny_matmul(
            x, weight.values, tile, scales=weight.scales, bias=bias, group=weight.group, out=out
        )
    return skinny_matmul(x, weight, tile, bias=bias, out=out)


def _shape(weight: Weight, rows: int) -> MatmulShape:
    values = weight.values if isinstance(weight, Fp8Weight) else weight
    group = weight.group if isinstance(weight, Fp8Weight) else 0
    return MatmulShape(values.shape[0], values.shape[1], rows, isinstance(weight, Fp8Weight), group)
