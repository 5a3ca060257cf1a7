"""A norm between two products, shared by them: measured at a start against a kernel for the norm.

The first product adds to the residual stream and begins the norm, the second scales it (`split_matmul.py`).
That is tried for more than 16 rows, wherever both products have tiles for it. A pair
competes with the same pair and the kernels between and behind it, measured together.

It saves the norm's launch and a reading of the stream. It costs the library's products, as both are by tiles.
It has to win by the same margin as a tile alone: launches follow each other more closely in a graph than
where they are timed, so that fewer of them look better than they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import torch

from engine.runtime.kernels.autotune import (
    MARGIN,
    MEASURED_ROWS,
    DeviceLinear,
    FoldedMeasured,
    FoldedShape,
    FusedShape,
    MatmulTable,
    Pair,
    Timer,
    _best,
    _split_tiles,
    _tiles,
    _values,
    begin_norm,
    end_norm,
    folded_shape,
)
from engine.runtime.kernels.fused import ResidualStream, Unscaled
from engine.runtime.kernels.matmul import Tile, row_bucket, rows_max

SUMS_MAX: Final = 1 << 14
"""The most sums of a second product's program: with more, and groups of scales, registers spill."""


def fold_norms(
    table: MatmulTable, pairs: Iterable[Pair], activations: torch.dtype, timer: Timer
) -> MatmulTable:
    """The table, and what is fastest for each distinct pair at every number of rows."""
    folded: dict[FoldedShape, FoldedMeasured] = {}
    scaled: dict[FusedShape, Tile] = {}
    table = MatmulTable(table.measured, table.fused, folded, scaled)
    for pair in pairs:
        for rows in (rows for rows in MEASURED_ROWS if _can_fold(pair, rows, activations)):
            shape = folded_shape(pair, rows)
            if shape.scaled not in scaled:
                tile = _measure_scaled(pair[1], rows, activations, timer)
                if tile is None:
                    continue
                scaled[shape.scaled] = tile
            if shape not in folded:
                folded[shape] = _measure_pair(table, pair, rows, activations, timer)
    return table


def _measure_scaled(linear: DeviceLinear, rows: int, activations: torch.dtype, timer: Timer) -> Tile | None:
    """The fastest tile of a pair's second product."""
    values = _values(linear.weight)
    width, each = values.shape[1], min(values.shape[1], 64)
    x = torch.randn(rows, width, dtype=activations, device=values.device)
    squares = torch.full((width // each, row_bucket(rows)), float(each), device=values.device)
    stream = ResidualStream(x, unscaled=Unscaled(x, squares, 0.0))
    return _best(scaled_tiles(linear, activations, rows), partial(end_norm, stream, linear), timer)[0]


def _measure_pair(
    table: MatmulTable, pair: Pair, rows: int, activations: torch.dtype, timer: Timer
) -> FoldedMeasured:
    """The fastest tile of a pair's first product, and the pair's time beside the kernels apart."""
    weight, following = pair[0].weight, pair[1]
    height, width = _values(weight).shape
    x, residual = (
        torch.randn(rows, columns, dtype=activations, device=_values(weight).device)
        for columns in (width, height)
    )
    stream = ResidualStream(residual)

    def apart() -> None:
        table.of_stream(stream.plus(table.linear(x, weight, pair[0].bias)), following)

    def together() -> None:
        assert tile is not None
        table.of_stream(begin_norm(stream, x, pair, tile), following)

    tile, _ = _best(_split_tiles(weight, activations, rows), partial(begin_norm, stream, x, pair), timer)
    apart_us = timer(apart)
    best_us = math.inf if tile is None else timer(together)
    return FoldedMeasured(tile if best_us * MARGIN < apart_us else None, best_us, apart_us)


def _can_fold(pair: Pair, rows: int, activations: torch.dtype) -> bool:
    """True if both products have tiles for a shared norm. In float16 its first half may overflow."""
    return (
        activations == torch.bfloat16
        and bool(_split_tiles(pair[0].weight, activations, rows))
        and bool(scaled_tiles(pair[1], activations, rows))
    )


def scaled_tiles(linear: DeviceLinear, activations: torch.dtype, rows: int) -> Sequence[Tile]:
    """The tiles to try for the second product of a pair: wide ones, as each program reads all activations."""
    weight = linear.weight
    if not linear.gated and (split := _split_tiles(weight, activations, rows)):
        return split
    if rows > rows_max(weight):
        return []
    widest = SUMS_MAX // row_bucket(rows)
    return [tile for tile in _tiles(weight, activations, rows) if 32 <= tile.n <= widest and tile.k <= 128]
