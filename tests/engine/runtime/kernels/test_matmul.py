"""Multiplication by few rows: the kernel in the interpreter, fp8 weights, and the table on a fake timer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from triton import OutOfResources

from engine.runtime.kernels import autotune, matmul
from engine.runtime.kernels.autotune import (
    DeviceLinear,
    FusedMeasured,
    FusedShape,
    MatmulShape,
    MatmulTable,
    Measured,
)
from engine.runtime.kernels.fused import Norm, ResidualStream
from engine.runtime.kernels.matmul import TILES, Tile, Weight, normed_matmul, row_bucket, skinny_matmul
from engine.runtime.kernels.restoring import restored
from engine.runtime.weights.fp8 import FP8_MAX, Fp8Weight, quantise

SMALL = Tile(16, 32, 4, 3)
WIDER = Tile(32, 32, 4, 3)
ALONE = Tile(16, 32, 4, 3, alone=True)
LIBRARY = Measured(None, 1.0, 1.0)


@pytest.mark.parametrize("tile", [SMALL, Tile(32, 64, 4, 3)], ids=str)
@pytest.mark.parametrize(("rows", "height", "width"), [(1, 48, 64), (17, 33, 40), (64, 64, 128)])
def test_equals_the_library(rows: int, height: int, width: int, tile: Tile) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, width), torch.randn(height, width), torch.randn(height)
    torch.testing.assert_close(skinny_matmul(x, weight, tile), linear(x, weight), atol=1e-5, rtol=1e-5)
    found = skinny_matmul(x, weight, tile, bias=bias)
    torch.testing.assert_close(found, linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(48, 64), (33, 40)])
def test_a_row_that_is_alone(height: int, width: int) -> None:
    """In float16 too: it is multiplied and added in float32, and rounded once."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, width), torch.randn(height, width), torch.randn(height)
    expected = linear(x, weight, bias)
    torch.testing.assert_close(skinny_matmul(x, weight, ALONE, bias=bias), expected, atol=1e-5, rtol=1e-5)
    x, weight = x.half(), weight.half()
    rounded = linear(x.double(), weight.double()).half()
    torch.testing.assert_close(skinny_matmul(x, weight, ALONE), rounded, atol=1e-3, rtol=1e-3)
    with pytest.raises(AssertionError):
        skinny_matmul(torch.randn(2, width), torch.randn(height, width), ALONE)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 64), torch.randn(32, 64)
    together = skinny_matmul(x, weight, SMALL)
    assert torch.equal(skinny_matmul(x[7:8], weight, SMALL), together[7:8])


def test_fp8_weights() -> None:
    """Either way of multiplying is exact for what was quantised."""
    torch.manual_seed(0)
    weight = torch.randn(48, 256) * torch.logspace(-3, 2, 48)[:, None]
    weight[5] = 0.0
    quantised = quantise(weight)
    meant = quantised.values.float() * quantised.scales[:, None]
    assert quantised.values.float().abs().amax(dim=1).tolist() == [
        0.0 if i == 5 else FP8_MAX for i in range(48)
    ]
    assert torch.equal(meant[5], weight[5])
    x, bias = torch.randn(3, 256), torch.randn(48)
    expected = linear(x, meant, bias)
    by_kernel = skinny_matmul(x, quantised, SMALL, bias=bias)
    torch.testing.assert_close(by_kernel, expected, atol=1e-4, rtol=1e-5)
    by_library = linear(x, restored(quantised, torch.float32), bias)
    torch.testing.assert_close(by_library, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(48, 256), (40, 200)])
def test_fp8_weights_with_a_scale_for_each_group_of_columns(height: int, width: int) -> None:
    """Also where the last group is short: by the kernel, by the library, and by the table."""
    torch.manual_seed(0)
    group = 64
    scales = torch.rand(-(-width // group), height) * torch.logspace(-2, 2, height)
    weight = Fp8Weight(torch.randn(height, width).to(torch.float8_e4m3fn), scales, group)
    by_hand = torch.stack([weight.values[:, k].float() * scales[k // group] for k in range(width)], dim=1)
    x, bias = torch.randn(3, width), torch.randn(height)
    expected = linear(x, by_hand, bias)
    close = partial(torch.testing.assert_close, atol=1e-3, rtol=1e-5)
    found = skinny_matmul(x, weight, Tile(16, 32, 4, 3), bias=bias)
    close(found, expected)
    by_library = linear(x, restored(weight, torch.float32), bias)
    close(by_library, expected)
    close(MatmulTable({}).linear(x, weight, bias), expected)
    with pytest.raises(AssertionError):
        skinny_matmul(x, weight, Tile(16, 128, 4, 3))
    parts = [Fp8Weight(weight.values[rows], scales[:, rows], group) for rows in (slice(7), slice(7, None))]
    assert torch.equal(Fp8Weight.stacked(parts).restored(torch.float32), by_hand)


EPS = 1e-5


def expected_of(
    stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:
    """In float64, of a stream whose sum is rounded as it is stored."""
    total = stream.residual if stream.change is None else stream.residual + stream.change
    total = total.double()
    x = total / (total.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    y = linear(x, weight.double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up


def stream_of(rows: int, width: int, dtype: torch.dtype) -> tuple[ResidualStream, Norm]:
    torch.manual_seed(0)
    residual, change = (torch.randn(2, rows, width) * 3).to(dtype)
    return ResidualStream(residual, change), Norm(torch.rand(width) * 2, EPS)


@pytest.mark.parametrize("kind", ["plain", "biased", "fp8", "fp8 groups"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "height", "width", "tile"),
    [
        (1, 48, 128, WIDER),
        (1, 48, 128, ALONE),
        (1, 40, 200, ALONE),
        (3, 40, 200, WIDER),
        (16, 32, 64, WIDER),
    ],
)
def test_a_norm_in_the_head_and_a_gate_in_the_tail(
    rows: int, height: int, width: int, gated: bool, kind: str, tile: Tile
) -> None:
    """Also where tiles reach beyond the weight. The stream that was given stays; the new one is its sum."""
    stream, norm = stream_of(rows, width, torch.float32)
    meant = torch.randn(height, width)
    weight: Weight = meant
    bias = torch.randn(height) if kind == "biased" else None
    if kind.startswith("fp8"):
        fp8 = quantise(meant)
        if kind == "fp8 groups":
            fp8 = Fp8Weight(fp8.values, torch.rand(-(-width // 64), height) * 0.01, 64)
        weight, meant = fp8, fp8.restored(torch.float32)
    assert stream.change is not None
    before = stream.residual.clone(), stream.change.clone()
    found, after = normed_matmul(stream, norm, weight, tile, bias=bias, gated=gated)
    torch.testing.assert_close(
        found.double(), expected_of(stream, norm, meant, bias, gated), atol=2e-4, rtol=1e-5
    )
    assert torch.equal(after.residual, before[0] + before[1])
    assert after.change is None
    assert torch.equal(stream.residual, before[0])
    assert torch.equal(stream.change, before[1])


def test_a_stream_without_a_change_is_normed_as_it_is() -> None:
    stream, norm = stream_of(2, 64, torch.float32)
    begun, weight = ResidualStream(stream.residual), torch.randn(32, 64)
    found, after = normed_matmul(begun, norm, weight, SMALL)
    torch.testing.assert_close(
        found.double(), expected_of(begun, norm, weight, None, False), atol=1e-4, rtol=1e-5
    )
    assert after.residual is begun.residual


def test_a_normed_rows_bits_do_not_depend_on_the_others() -> None:
    stream, norm = stream_of(9, 64, torch.float32)
    weight = torch.randn(32, 64)
    together, _ = normed_matmul(stream, norm, weight, SMALL, gated=True)
    assert stream.change is not None
    alone = ResidualStream(stream.residual[4:5].clone(), stream.change[4:5].clone())
    assert torch.equal(normed_matmul(alone, norm, weight, SMALL, gated=True)[0], together[4:5])


@pytest.mark.parametrize("gated", [False, True])
def test_one_kernel_is_as_near_to_the_truth_as_two_or_three(gated: bool) -> None:
    """In half precision: what is rounded is rounded as often, or less."""
    rows, height, width = 16, 256, 512
    stream, norm = stream_of(rows, width, torch.float16)
    weight = (torch.randn(height, width) / width**0.5).half()
    expected = expected_of(stream, norm, weight, None, gated)

    def error(found: Tensor) -> float:
        return float((found.double() - expected).norm() / expected.norm())

    one, _ = normed_matmul(stream, norm, weight, Tile(32, 64, 4, 3), gated=gated)
    linear_of_it = DeviceLinear(weight, norm=norm, gated=gated)
    apart, _ = MatmulTable({}).of_stream(stream, linear_of_it)
    assert error(one) <= 1.05 * error(apart)
    assert error(one) < 5e-4, "half a unit in the last place, of what is multiplied and of what comes out"


@pytest.mark.parametrize(
    ("library_us", "fused_us", "gated"),
    [
        (10.0, 11.5, (None, 11.5, True)),
        (10.0, 11.7, (None, 11.7, True)),
        (10.0, 11.2, (TILES[1], 11.2, True)),
        (20.0, 12.9, (TILES[1], 12.9, True)),
        (20.0, 13.9, (TILES[0], 13.0, False)),
    ],
)
def test_one_kernel_competes_with_product_norm_and_gate(
    monkeypatch: pytest.MonkeyPatch,
    library_us: float,
    fused_us: float,
    gated: tuple[Tile | None, float, bool],
) -> None:
    """Beside a product of the library a whole has to win by the margin, beside our own it just has to win.
    So has a product with the tail alone, for more rows than a head is worth, too."""
    weight, norm = torch.zeros(64, 32), Norm(torch.ones(32), EPS)
    linears = [
        DeviceLinear(weight),
        DeviceLinear(weight, norm=norm),
        DeviceLinear(weight, norm=norm, gated=True),
    ]
    with monkeypatch.context() as patch:
        timer = FakeTimer(patch, library_us, {TILES[0]: 12.0}, (), {TILES[1]: fused_us}, beside_us=1.0)
        table = MatmulTable.fill(linears, torch.bfloat16, timer)
    few, more = [[MatmulShape(64, 32, n, False) for n in rows] for rows in ((1,), (4, 8, 16, 32, 64))]
    assert table.fused.keys() == {
        FusedShape(shape, gated) for shape in (*few, *more) for gated in (False, True)[shape in more :]
    }
    product_us = min(library_us, 12.0)
    tile, best_us, is_headed = gated
    for shape in few:
        expected = FusedMeasured(tile, best_us, product_us + 2.0, is_headed)
        assert table.fused[FusedShape(shape, True)] == expected
        assert table.fused[FusedShape(shape, False)].apart_us == product_us + 1.0
    tail = None if library_us == 10.0 else TILES[0]
    for shape in more:
        assert table.fused[FusedShape(shape, True)] == FusedMeasured(tail, 13.0, product_us + 2.0, False)


@pytest.mark.parametrize("rows", [3, 20])
def test_a_tail_without_a_head(rows: int) -> None:
    stream, norm = stream_of(rows, 64, torch.float32)
    linear_of_it = DeviceLinear(torch.randn(48, 64), norm=norm, gated=True)
    shape = autotune.shape_of(linear_of_it.weight, autotune.measured_rows(rows))
    tailed = MatmulTable({}, {FusedShape(shape, True): FusedMeasured(SMALL, 1.0, 2.0, is_headed=False)})
    assert stream.change is not None
    given = ResidualStream(stream.residual.clone(), stream.change.clone())
    expected, after = MatmulTable({}).of_stream(stream, linear_of_it)
    found, after_too = tailed.of_stream(given, linear_of_it)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(after_too.residual, after.residual)


def test_a_head_needs_the_range_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, norm = torch.zeros(64, 32), Norm(torch.ones(32), EPS)
    with monkeypatch.context() as patch:
        timer = FakeTimer(patch, 10.0, {}, (), {TILES[1]: 1.0})
        assert not MatmulTable.fill([DeviceLinear(weight, norm=norm)], torch.float16, timer).fused


def test_tiles_lie_within_a_group() -> None:
    for group in (64, 128, 256):
        weight = Fp8Weight(torch.zeros(16, 512).to(torch.float8_e4m3fn), torch.ones(512 // group, 16), group)
        assert {tile.k for tile in autotune._tiles(weight, torch.float32)} == {
            k for k in (64, 128, 256) if k <= group
        }


@pytest.mark.parametrize("spread", ["normal", "uniform", "outliers"])
def test_the_error_of_fp8_is_the_formats(spread: str) -> None:
    """The head of fp8.py: 2.6 % of a weight, and as much of a product."""
    torch.manual_seed(0)
    weight = torch.rand(64, 1024) - 0.5 if spread == "uniform" else torch.randn(64, 1024)
    if spread == "outliers":
        weight[:, 17] *= 50.0
    quantised = quantise(weight)
    restored = quantised.values.float() * quantised.scales[:, None]
    assert (restored - weight).norm() / weight.norm() < 0.03
    x = torch.randn(16, 1024)
    product = linear(x, weight)
    assert (linear(x, restored) - product).norm() / product.norm() < 0.03


class FakeTimer:
    """Knows how long each call takes by what it calls."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        library_us: float,
        tiles_us: dict[Tile, float],
        too_large: Sequence[Tile] = (),
        fused_us: Mapping[Tile, float] = MappingProxyType({}),
        beside_us: float = 0.0,
    ) -> None:
        self.calls = 0
        self._took = 0.0

        def by_tile(x: Tensor, weight: Weight, tile: Tile, **_: object) -> Tensor:
            self._took += tiles_us.get(tile, 100.0)
            if tile in too_large:
                raise OutOfResources(1 << 20, 1 << 10, "shared memory")
            return x

        def by_library(x: Tensor, weight: Weight, *_: object) -> Tensor:
            self._took += library_us
            return x

        def fused(stream: ResidualStream, norm: Norm, weight: Weight, tile: Tile, **_: object) -> None:
            self._took += fused_us.get(tile, 100.0)

        def beside(given: ResidualStream | Tensor, *_: object, **__: object) -> Any:
            self._took += beside_us
            return given if isinstance(given, Tensor) else (given.residual, given)

        monkeypatch.setattr(autotune, "skinny_matmul", by_tile)
        monkeypatch.setattr(autotune, "_by_library", by_library)
        monkeypatch.setattr(autotune, "normed_matmul", fused)
        monkeypatch.setattr(autotune, "norm_stream", beside)
        monkeypatch.setattr(autotune, "silu_mul", beside)

    def __call__(self, run: Callable[[], object]) -> float:
        self.calls += 1
        self._took = 0.0
        run()
        return self._took


@pytest.mark.parametrize(
    ("library_us", "winner"), [(10.0, None), (11.9, None), (12.0, None), (12.7, TILES[2])], ids=str
)
def test_the_library_stays_unless_clearly_beaten(
    monkeypatch: pytest.MonkeyPatch, library_us: float, winner: Tile | None
) -> None:
    with monkeypatch.context() as patch:
        timer = FakeTimer(patch, library_us, {TILES[2]: 12.0, TILES[0]: 13.0})
        weight = torch.zeros(64, 32)
        table = MatmulTable.fill([DeviceLinear(weight)] * 3, torch.float16, timer)
    tried = sum(len(matmul.tiles_for(64, rows)) + 1 for rows in (1, 4, 8, *matmul.ROWS))
    assert timer.calls == tried, "a shape is measured once"
    assert {shape.rows for shape in table.measured} == {1, 4, 8, *matmul.ROWS}
    assert {found.tile for found in table.measured.values()} == {winner}


def test_a_tile_beyond_the_card_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(64, 32)
    for too_large, winner in ((TILES[:1], TILES[2]), ((matmul.NARROW, *TILES, *matmul.TILES_ALONE), None)):
        with monkeypatch.context() as patch:
            timer = FakeTimer(patch, 99.0, {TILES[0]: 1.0, TILES[2]: 12.0}, too_large)
            table = MatmulTable.fill(
                [DeviceLinear(weight), DeviceLinear(quantise(weight))], torch.float16, timer
            )
        few = [found.tile for shape, found in table.measured.items() if shape.rows <= matmul.ROWS_MAX]
        assert set(few) == {winner}


def test_an_fp8_weight_competes_with_its_restored_self_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = matmul.TILES_MANY[1]
    with monkeypatch.context() as patch:
        timer = FakeTimer(patch, 50.0, {wide: 40.0, TILES[0]: 60.0})
        table = MatmulTable.fill([DeviceLinear(quantise(torch.zeros(64, 32)))], torch.bfloat16, timer)
    winners = {shape.rows: found.tile for shape, found in table.measured.items()}
    assert winners == dict.fromkeys((1, 4, 8, 16, 32, 64), TILES[0]) | dict.fromkeys((128, 256), wide)


@pytest.mark.parametrize("tile", matmul.TILES_MANY, ids=str)
def test_an_fp8_weight_may_have_more_rows(tile: Tile) -> None:
    torch.manual_seed(0)
    weight = quantise(torch.randn(80, 128))
    x, bias = torch.randn(150, 128), torch.randn(80)
    expected = linear(x, weight.restored(torch.float32), bias)
    torch.testing.assert_close(skinny_matmul(x, weight, tile, bias=bias), expected, atol=1e-3, rtol=1e-5)
    with pytest.raises(AssertionError):
        skinny_matmul(x, torch.randn(80, 128), tile)
    with pytest.raises(AssertionError):
        skinny_matmul(torch.randn(257, 128), weight, tile)


@pytest.mark.parametrize(
    ("height", "width", "group"), [(40, 200, 0), (16, 256, 64), (33, 400, 128), (20, 600, 192)]
)
def test_restoring_an_fp8_weight(height: int, width: int, group: int) -> None:
    """To the bit what the weight says of itself, in float32 and rounded to half."""
    torch.manual_seed(0)
    scales = torch.rand(*((-(-width // group), height) if group else (height,)))
    weight = Fp8Weight(torch.randn(height, width).to(torch.float8_e4m3fn), scales, group)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(restored(weight, dtype), weight.restored(dtype))


def test_float32_stays_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        table = MatmulTable.fill(
            [DeviceLinear(torch.zeros(64, 32))], torch.float32, FakeTimer(patch, 99.0, {TILES[0]: 1.0})
        )
    assert {found.tile for found in table.measured.values()} == {None}


def test_the_table_multiplies_whatever_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured or not, few rows or many, fp8 or not."""
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    quantised = quantise(weight)
    with monkeypatch.context() as patch:
        timer = FakeTimer(patch, 99.0, {TILES[1]: 1.0})
        filled = MatmulTable.fill([DeviceLinear(weight), DeviceLinear(quantised)], torch.float16, timer)
    assert filled.measured[MatmulShape(32, 64, 16, False)].tile == TILES[1]
    restored = quantised.values.float() * quantised.scales[:, None]
    for table in (filled, MatmulTable({})):
        for rows in (1, 70):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(table.linear(x, weight), linear(x, weight), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(table.linear(x, quantised), linear(x, restored), atol=1e-4, rtol=1e-4)


def test_few_rows_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's way with a vector is not that with a matrix."""
    weight, ways = torch.randn(32, 64), []
    tile = Measured(TILES[1], 1.0, None)
    measured = {1: LIBRARY, 4: tile, 8: LIBRARY, 16: tile}
    table = MatmulTable({MatmulShape(32, 64, rows, False): found for rows, found in measured.items()})
    monkeypatch.setattr(autotune, "skinny_matmul", lambda *_, **__: ways.append("tile"))
    monkeypatch.setattr(autotune, "_by_library", lambda *_: ways.append("library"))
    for rows in (1, 2, 4, 5, 8, 9):
        table.linear(torch.randn(rows, 64), weight)
    assert ways == ["library", "tile", "tile", "library", "library", "tile"]


def test_few_rows_times_a_weight_of_few_rows_may_be_cut_more_finely() -> None:
    narrow = [
        (height, rows)
        for height in (1024, 2048, 4096)
        for rows in (1, 16, 32, 64)
        if matmul.NARROW in matmul.tiles_for(height, rows)
    ]
    assert narrow == [(1024, 1), (1024, 16), (2048, 1), (2048, 16)]
    torch.manual_seed(0)
    x, weight = torch.randn(3, 1024), torch.randn(20, 1024)
    torch.testing.assert_close(
        skinny_matmul(x, weight, matmul.NARROW), linear(x, weight), atol=1e-3, rtol=1e-5
    )


def test_one_row_has_tiles_of_its_own() -> None:
    for rows in (1, *matmul.ROWS):
        assert any(tile.alone for tile in matmul.tiles_for(4096, rows)) == (rows == 1)


def test_row_buckets() -> None:
    buckets = {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128, 129: 256, 256: 256}
    assert {rows: row_bucket(rows) for rows in buckets} == buckets


def test_an_fp8_weight_is_what_it_says() -> None:
    with pytest.raises(AssertionError):
        Fp8Weight(torch.zeros(2, 2), torch.zeros(2))
