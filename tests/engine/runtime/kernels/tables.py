"""Tables of products that were never measured."""

from __future__ import annotations

from collections.abc import Iterable

from engine.runtime.kernels.autotune import (
    HEADED_ROWS_MAX,
    MEASURED_ROWS,
    DeviceLinear,
    FusedMeasured,
    FusedShape,
    MatmulTable,
    Measured,
    shape_of,
)
from engine.runtime.kernels.matmul import Tile

SMALL = Tile(32, 32, 4, 3)


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
