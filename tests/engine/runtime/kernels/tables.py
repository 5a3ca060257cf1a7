"""Tables of products that were never measured."""

from __future__ import annotations

from collections.abc import Iterable

from engine.runtime.kernels.autotune import (
    HEADED_ROWS_MAX,
    MEASURED_ROWS,
    DeviceLinear,
    FoldedMeasured,
    FusedMeasured,
    FusedShape,
    MatmulTable,
    Measured,
    Pair,
    folded_shape,
    shape_of,
)
from engine.runtime.kernels.matmul import Tile

SMALL = Tile(32, 32, 4, 3)
SPLIT = Tile(16, 32, 4, 3, splits=2)


def all_by_tiles(linears: Iterable[DeviceLinear], tile: Tile = SMALL) -> MatmulTable:
    """Norms in heads where rows are few, and gates in tails, wherever there are any."""
    shapes = {(shape_of(linear.weight, rows), linear) for linear in linears for rows in MEASURED_ROWS}
    return MatmulTable(
        {shape: Measured(tile, 1.0, None) for shape, _ in shapes},
        {
            FusedShape(shape, own.gated): FusedMeasured(tile, 1.0, 2.0, shape.rows <= HEADED_ROWS_MAX)
            for shape, own in shapes
            if own.norm and (own.gated or shape.rows <= HEADED_ROWS_MAX)
        },
    )


def all_folded(pairs: Iterable[Pair]) -> MatmulTable:
    """Norms shared by the products around them, for 17 to 64 rows."""
    shapes = [folded_shape(pair, rows) for pair in pairs for rows in (32, 64)]
    return MatmulTable(
        {},
        folded={shape: FoldedMeasured(SPLIT, 1.0, 2.0) for shape in shapes},
        scaled={shape.scaled: SMALL if shape.scaled.gated else SPLIT for shape in shapes},
    )
