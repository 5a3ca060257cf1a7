"""Products whose columns several programs share: in the interpreter, and as candidates of the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.runtime.kernels import autotune
from engine.runtime.kernels.autotune import DeviceLinear, MatmulShape, MatmulTable, Measured
from engine.runtime.kernels.matmul import Tile, Weight, skinny_matmul
from engine.runtime.kernels.split_matmul import _counters, split_matmul, split_tiles_for
from engine.runtime.weights.fp8 import Fp8Weight, quantise

CPU = torch.device("cpu")
TWO, THREE = Tile(16, 32, 4, 3, splits=2), Tile(32, 16, 4, 3, splits=3)


@pytest.mark.parametrize("tile", [TWO, THREE], ids=str)
@pytest.mark.parametrize(("rows", "height", "width"), [(17, 48, 64), (40, 33, 72), (130, 32, 16)])
def test_equals_the_library(rows: int, height: int, width: int, tile: Tile) -> None:
    """Also where tiles reach beyond the weight, and where a split has nothing to add."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, width), torch.randn(height, width), torch.randn(height)
    torch.testing.assert_close(split_matmul(x, weight, tile), linear(x, weight), atol=1e-5, rtol=1e-5)
    out = torch.empty(rows, height)
    found = split_matmul(x, weight, tile, bias=bias, out=out)
    assert found is out
    torch.testing.assert_close(found, linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    assert not _counters(CPU).any(), "the counters are not ready for the next product"


def test_sums_are_added_in_the_order_of_the_columns_whoever_arrives_last() -> None:
    """To the bit as if each share of the columns had been multiplied apart."""
    torch.manual_seed(0)
    x, weight = torch.randn(20, 96), torch.randn(32, 96)
    whole = Tile(THREE.n, THREE.k, THREE.warps, THREE.stages)
    total = torch.zeros(20, 32)
    for begin in range(0, 96, 32):
        columns = slice(begin, begin + 32)
        total += skinny_matmul(x[:, columns].contiguous(), weight[:, columns].contiguous(), whole)
    assert torch.equal(split_matmul(x, weight, THREE), total)
    assert torch.equal(split_matmul(x[7:8], weight, THREE), total[7:8]), "a row's bits are its own"


@pytest.mark.parametrize("group", [0, 64])
def test_fp8_weights(group: int) -> None:
    torch.manual_seed(0)
    weight = quantise(torch.randn(48, 128))
    if group:
        weight = Fp8Weight(weight.values, torch.rand(128 // group, 48) * 0.01, group)
    x, bias = torch.randn(33, 128), torch.randn(48)
    expected = linear(x, weight.restored(torch.float32), bias)
    torch.testing.assert_close(split_matmul(x, weight, TWO, bias=bias), expected, atol=1e-3, rtol=1e-5)


def test_what_it_cannot_multiply_is_the_callers_mistake() -> None:
    weight = torch.randn(16, 32)
    for x, tile in (
        (torch.randn(257, 32), TWO),
        (torch.randn(20, 64), TWO),
        (torch.randn(20, 64)[:, ::2], TWO),
    ):
        with pytest.raises(AssertionError):
            split_matmul(x, weight, tile)
    with pytest.raises(AssertionError):
        skinny_matmul(torch.randn(20, 32), weight, TWO)
    with pytest.raises(AssertionError):
        split_matmul(torch.randn(20, 32), torch.randn(16 * 1025, 32), TWO)


@pytest.mark.parametrize(
    ("height", "width", "rows", "splits"),
    [
        (4096, 4096, 16, set()),
        (4096, 4096, 32, {2, 4}),
        (4096, 14_336, 256, {2, 4}),
        (1024, 2048, 64, {2, 4, 8}),
        (28_672, 4096, 64, set()),
        (1024, 1024, 64, set()),
        (4096, 4096, 512, set()),
    ],
)
def test_candidates_are_for_many_rows_of_few_outputs(
    height: int, width: int, rows: int, splits: set[int]
) -> None:
    assert {tile.splits for tile in split_tiles_for(height, width, rows)} == splits


def test_the_table_takes_a_split_where_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 17 rows and more, and for more rows than whole tiles take."""
    weight, multiplied = torch.zeros(64, 2048), list[Tile]()
    took: list[float] = []

    def by_tile(x: Tensor, weight: Weight, tile: Tile, **_: object) -> Tensor:
        multiplied.append(tile)
        took.append({4: 5.0, 2: 7.0}.get(tile.splits, 9.0))
        return x

    def by_library(x: Tensor, *_: object) -> Tensor:
        took.append(8.0)
        return x

    for name, way in (("skinny_matmul", by_tile), ("split_matmul", by_tile), ("_by_library", by_library)):
        monkeypatch.setattr(autotune, name, way)

    def timer(run: object) -> float:
        assert callable(run)
        run()
        return took[-1]

    table = MatmulTable.fill([DeviceLinear(weight)], torch.bfloat16, timer)
    chosen = {shape.rows: found.tile and found.tile.splits for shape, found in table.measured.items()}
    assert chosen == dict.fromkeys((1, 4, 8, 16)) | dict.fromkeys((32, 64, 128, 256), 4)
    table.linear(torch.zeros(200, 2048), weight)
    assert multiplied[-1] == table.measured[MatmulShape(64, 2048, 256, False)].tile
    assert (
        not MatmulTable.fill([DeviceLinear(weight)], torch.float32, timer)
        .measured[MatmulShape(64, 2048, 256, False)]
        .tile
    ), "float32 is the library's"


def test_groups_of_columns_bound_the_tile() -> None:
    values = torch.zeros(64, 2048).to(torch.float8_e4m3fn)
    for group, widths in ((64, {64}), (128, {64, 128})):
        weight = Fp8Weight(values, torch.ones(2048 // group, 64), group)
        assert {tile.k for tile in autotune._split_tiles(weight, torch.bfloat16, 64)} == widths


def test_a_measured_split_multiplies() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(24, 64), torch.randn(32, 64)
    table = MatmulTable({MatmulShape(32, 64, 32, False): Measured(TWO, 1.0, 2.0)})
    torch.testing.assert_close(table.linear(x, weight), linear(x, weight), atol=1e-5, rtol=1e-5)
