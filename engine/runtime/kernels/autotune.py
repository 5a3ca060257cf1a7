"""The fastest kernel for each product of a weight and a number of rows, measured once on the device at a
start.

The library's kernel stays unless a tile of `matmul.py` beats it by `MARGIN`: a smaller difference is noise.
The library has no kernel for an fp8 weight, so for up to `ROWS_MAX` rows the best tile wins; for more rows
the tile competes with the library's product and the kernel that restores the weight before it. Rows beyond
`matmul.rows_max` go to the library, and so does float32, for which the tiles' tensor cores do nothing.
Weights of few rows and many columns have further candidates from 17 to 256 rows: tiles whose columns several
programs share (`split_matmul.py`).

torch has two libraries on a GPU, cuBLAS and cuBLASLt, whose choices of kernels differ. cuBLASLt is taken
where it beats cuBLAS by the margin, for up to `MEASURED_ROWS[-1]` rows. Which of them torch calls is a switch
of the process: it is set around the call and put back. A graph keeps what was called when it was captured.

The norm before a product, and SiLU and the multiplication behind it, are kernels of their own, or the
product's head and tail (`matmul.py`). Which is faster is measured too. The head is tried for a single row:
each program norms all rows for itself, which on an H200 took three times as long as a kernel of its own for 4
rows. The tail costs nothing and is tried for all rows, with the head and without it. The best fused product
competes with the best plain product and the kernels beside it, measured together; where the plain product is
the library's, the fused one has to win by the margin.

Activations are random numbers while products are timed: zeros let a card run faster than it does at work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import OutOfResources

from engine.runtime.kernels.fused import Norm, ResidualStream, norm_stream, silu_mul
from engine.runtime.kernels.matmul import (
    ROWS_FP8,
    ROWS_MAX,
    Tile,
    Weight,
    normed_matmul,
    row_bucket,
    rows_max,
    skinny_matmul,
    tiles_for,
)
from engine.runtime.kernels.restoring import restored
from engine.runtime.kernels.split_matmul import split_matmul, split_tiles_for
from engine.runtime.weights.fp8 import Fp8Weight

FEW_ROWS: Final = (1, 4, 8)
"""Fewer rows than kernels are compiled for, measured apart. One row is a matrix times a vector, for which the
library has kernels of its own; a norm in the head costs as many reads as there are rows."""
MEASURED_ROWS: Final = (*FEW_ROWS, *ROWS_FP8)
"""The numbers of rows that are measured."""
HEADED_ROWS_MAX: Final = 1
MARGIN: Final = 1.05
Blas = Literal["cublas", "cublaslt"]
BLAS: Final[Sequence[Blas]] = get_args(Blas)
"""torch's libraries on a GPU: the one that it calls by default, then the other."""
Timer = Callable[[Callable[[], object]], float]
"""Runs a function several times, weights not in the cache, and returns the shortest time in us."""


def once(run: Callable[[], object]) -> float:
    """A Timer that runs a function once, to have its kernels compiled, and measures nothing."""
    run()
    return 1.0


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """A product with a weight, and what a model computes before and behind it."""

    weight: Weight
    bias: Tensor | None = None
    norm: Norm | None = None
    """The norm before the product; None where there is none, or it does not multiply the residual stream."""
    gated: bool = False
    """True if silu(first half) * second half is computed behind the product."""
    gelu: bool = False
    """True if that is GELU by tanh, in the place of SiLU."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    height: int
    """N, the rows of the weight."""
    width: int
    """K, the columns of the weight."""
    rows: int
    """Rows of activations: one of `MEASURED_ROWS`."""
    fp8: bool
    group: int = 0
    """Columns of an fp8 weight that share a scale; 0: all of them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest kernel for a shape: a tile, or the library where `tile` is None."""

    tile: Tile | None
    best_us: float
    library_us: float | None
    blas: Blas = BLAS[0]
    """The faster of torch's libraries."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    product: MatmulShape
    gated: bool


@dataclass(frozen=True, slots=True)
class FusedMeasured:
    """The fastest tile with a head, a tail or both; None where kernels beside the product are faster."""

    tile: Tile | None
    best_us: float
    apart_us: float
    is_headed: bool = True
    """False if the norm is a kernel of its own, and the product has a tail alone."""


class MatmulTable:
    """Multiplies by the fastest kernel that was measured, and a shape that was not measured by a safe
    default."""

    def __init__(
        self,
        measured: Mapping[MatmulShape, Measured],
        fused: Mapping[FusedShape, FusedMeasured] = MappingProxyType({}),
    ) -> None:
        self.measured: Final = measured
        self.fused: Final = fused

    @staticmethod
    def fill(linears: Iterable[DeviceLinear], activations: torch.dtype, timer: Timer) -> MatmulTable:
        """Measure every distinct shape among `linears` at every row count."""
        measured: dict[MatmulShape, Measured] = {}
        fused: dict[FusedShape, FusedMeasured] = {}
        table = MatmulTable(measured, fused)
        for linear in linears:
            for rows in (rows for rows in MEASURED_ROWS if _has_choice(linear.weight, rows)):
                shape = shape_of(linear.weight, rows)
                if shape not in measured:
                    measured[shape] = _measure(linear.weight, rows, activations, timer)
                whole = FusedShape(shape, linear.gated)
                if whole not in fused and _ways(linear, rows, activations):
                    fused[whole] = _measure_fused(table, linear, rows, activations, timer)
        return table

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x [M, K] -> [M, N], in `out` where that is given."""
        if len(x) <= MEASURED_ROWS[-1]:
            found = self.measured.get(shape_of(weight, measured_rows(len(x))))
            if found is not None and found.tile is not None:
                return _by_tile(x, weight, found.tile, bias=bias, out=out)
            if found is not None and found.blas != BLAS[0]:
                with _preferred(found.blas):
                    return _by_library(x, weight, bias, out)
            if found is None and isinstance(weight, Fp8Weight) and len(x) <= ROWS_MAX:
                return skinny_matmul(x, weight, _tiles(weight, x.dtype)[-1], bias=bias, out=out)
        return _by_library(x, weight, bias, out)

    def of_stream(
        self, stream: ResidualStream, linear: DeviceLinear, *, out: Tensor | None = None
    ) -> tuple[Tensor, ResidualStream]:
        """The product of the stream's norm, [M, N], or [M, N / 2] where it is gated; and the stream with its
        change added. The given stream must not be used again."""
        rows = len(stream.residual)
        if linear.norm is not None and rows <= rows_max(linear.weight):
            found = self.fused.get(fused_shape(linear, rows))
            if found is not None and found.tile is not None:
                way = _headed if found.is_headed else _tailed
                return way(stream, linear, found.tile, out)
        return _apart(self, stream, linear, out)


def _apart(
    table: MatmulTable, stream: ResidualStream, linear: DeviceLinear, out: Tensor | None = None
) -> tuple[Tensor, ResidualStream]:
    """The norm, the product and SiLU, each by a kernel of its own."""
    x, stream = norm_stream(stream, linear.norm)
    product = table.linear(x, linear.weight, linear.bias, out=None if linear.gated else out)
    return silu_mul(product, gelu=linear.gelu) if linear.gated else product, stream


def _headed(
    stream: ResidualStream, linear: DeviceLinear, tile: Tile, out: Tensor | None = None
) -> tuple[Tensor, ResidualStream]:
    """One kernel for all, SiLU included where the product is gated."""
    assert linear.norm is not None
    return normed_matmul(stream, linear.norm, linear.weight, tile, **_tail(linear), out=out)


def _tailed(
    stream: ResidualStream, linear: DeviceLinear, tile: Tile, out: Tensor | None = None
) -> tuple[Tensor, ResidualStream]:
    """The norm by a kernel of its own, then the product with SiLU in its tail."""
    assert linear.norm is not None
    x, stream = norm_stream(stream, linear.norm)
    return skinny_matmul(x, linear.weight, tile, **_tail(linear), out=out), stream


def _tail(linear: DeviceLinear) -> dict[str, Any]:
    return {"bias": linear.bias, "gated": linear.gated, "gelu": linear.gelu}


Way = Callable[[ResidualStream, DeviceLinear, Tile], tuple[Tensor, ResidualStream]]


def measured_rows(rows: int) -> int:
    return next((few for few in FEW_ROWS if rows <= few), row_bucket(rows))


def _measure(weight: Weight, rows: int, activations: torch.dtype, timer: Timer) -> Measured:
    values = _values(weight)
    x = torch.randn(rows, values.shape[1], dtype=activations, device=values.device)
    whole = _tiles(weight, activations, rows) if rows <= rows_max(weight) else ()
    tiles = (*whole, *_split_tiles(weight, activations, rows))
    tile, best_us = _best(tiles, partial(_by_tile, x, weight), timer)
    if isinstance(weight, Fp8Weight) and rows <= ROWS_MAX and best_us < math.inf:
        return Measured(tile, best_us, None)
    library_us, blas = _best_library(partial(_by_library, x, weight, None), values.device, timer)
    if best_us * MARGIN < library_us:
        return Measured(tile, best_us, library_us, blas)
    return Measured(None, library_us, library_us, blas)


def _best_library(run: Callable[[], object], device: torch.device, timer: Timer) -> tuple[float, Blas]:
    """The time of the faster library in us, and which it is."""
    found = (timer(run), BLAS[0])
    for blas in _libraries(device)[1:]:
        with _preferred(blas):
            took_us = timer(run)
        if took_us * MARGIN < found[0]:
            found = (took_us, blas)
    return found


def _libraries(device: torch.device) -> Sequence[Blas]:
    return BLAS if device.type == "cuda" else BLAS[:1]


def _has_choice(weight: Weight, rows: int) -> bool:
    """True if more than one kernel multiplies so many rows."""
    if rows <= rows_max(weight) or len(_libraries(_values(weight).device)) > 1:
        return True
    height, width = _values(weight).shape
    return bool(split_tiles_for(height, width, rows))


@contextmanager
def _preferred(blas: Blas) -> Iterator[None]:
    """Have torch call this library within."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(blas)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _ways(linear: DeviceLinear, rows: int, activations: torch.dtype) -> Sequence[Way]:
    """The fused products to try. In float16 the unfinished norm of a head may overflow (`matmul.py`)."""
    ways: list[Way] = []
    if rows > rows_max(linear.weight):
        return ways
    if linear.norm is not None and rows <= HEADED_ROWS_MAX and activations == torch.bfloat16:
        ways.append(_headed)
    if linear.norm is not None and linear.gated and _tiles(linear.weight, activations, rows):
        ways.append(_tailed)
    return ways


def _measure_fused(
    table: MatmulTable, linear: DeviceLinear, rows: int, activations: torch.dtype, timer: Timer
) -> FusedMeasured:
    """The fastest tile with a head, a tail or both, beside the product of `table` and the kernels around
    it."""
    shape = shape_of(linear.weight, rows)
    residual, change = torch.randn(
        2, rows, shape.width, dtype=activations, device=_values(linear.weight).device
    )
    stream = ResidualStream(residual, change)
    apart_us = timer(partial(_apart, table, stream, linear))
    tiles = _tiles(linear.weight, activations, rows)
    found = [
        (*_best(tiles, partial(way, stream, linear), timer), way is _headed)
        for way in _ways(linear, rows, activations)
    ]
    tile, best_us, is_headed = min(found, key=itemgetter(1))
    margin = MARGIN if table.measured[shape].tile is None else 1.0
    return FusedMeasured(tile if best_us * margin < apart_us else None, best_us, apart_us, is_headed)


def _best(tiles: Sequence[Tile], run: Callable[[Tile], object], timer: Timer) -> tuple[Tile | None, float]:
    """The fastest tile and its time in us; None and infinity where no tile fits into shared memory."""
    best, best_us = None, math.inf
    for tile in tiles:
        try:
            took_us = timer(partial(run, tile))
        except OutOfResources:
            continue
        if took_us < best_us:
            best, best_us = tile, took_us
    return best, best_us


def _tiles(weight: Weight, activations: torch.dtype, rows: int = ROWS_MAX) -> Sequence[Tile]:
    """The tiles to try for a weight."""
    return _within_groups(weight, activations, tiles_for(_values(weight).shape[0], rows))


def _split_tiles(weight: Weight, activations: torch.dtype, rows: int) -> Sequence[Tile]:
    """The tiles to try whose columns are shared."""
    height, width = _values(weight).shape
    return _within_groups(weight, activations, split_tiles_for(height, width, rows))


def _within_groups(weight: Weight, activations: torch.dtype, tiles: Sequence[Tile]) -> Sequence[Tile]:
    """Those of the tiles that a weight takes: where groups of columns have scales, each within one group."""
    if not isinstance(weight, Fp8Weight):
        return () if activations == torch.float32 else tiles
    return [tile for tile in tiles if weight.group % tile.k == 0]


def _by_tile(
    x: Tensor, weight: Weight, tile: Tile, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    multiply = skinny_matmul if tile.splits == 1 else split_matmul
    return multiply(x, weight, tile, bias=bias, out=out)


def _by_library(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if isinstance(weight, Fp8Weight):
        weight = restored(weight, x.dtype)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _values(weight: Weight) -> Tensor:
    return weight.values if isinstance(weight, Fp8Weight) else weight


def shape_of(weight: Weight, rows: int) -> MatmulShape:
    """The measured shape of a product. `rows`: one of `MEASURED_ROWS`."""
    values = _values(weight)
    group = weight.group if isinstance(weight, Fp8Weight) else 0
    return MatmulShape(values.shape[0], values.shape[1], rows, isinstance(weight, Fp8Weight), group)


def fused_shape(linear: DeviceLinear, rows: int) -> FusedShape:
    return FusedShape(shape_of(linear.weight, measured_rows(rows)), linear.gated)
