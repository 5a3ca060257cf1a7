"""A norm that two products share: in the interpreter, and as a candidate of the table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.runtime.kernels import autotune, folding
from engine.runtime.kernels.autotune import (
    DeviceLinear,
    FoldedMeasured,
    MatmulTable,
    Pair,
    begin_norm,
    end_norm,
    folded_shape,
)
from engine.runtime.kernels.folding import fold_norms
from engine.runtime.kernels.fused import Norm, ResidualStream, Unscaled
from engine.runtime.kernels.matmul import Tile, Weight
from engine.runtime.kernels.split_matmul import _counters
from engine.runtime.weights.fp8 import Fp8Weight, quantise
from tests.engine.runtime.kernels.test_matmul import expected_of

WHOLE = Tile(32, 32, 4, 3)
TWO, THREE = Tile(16, 32, 4, 3, splits=2), Tile(32, 16, 4, 3, splits=3)
EPS = 1e-5


def pair_of(inner: int, hidden: int, outer: int, kind: str = "plain", *, gated: bool = False) -> Pair:
    """[hidden, inner] is added, [outer, hidden] multiplies the norm."""
    shapes = ((hidden, inner), (outer, hidden))
    bias = [torch.randn(height) if kind == "biased" else None for height, _ in shapes]
    weights: list[Weight] = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    if kind.startswith("fp8"):
        weights = [quantise(weight) for weight in weights if isinstance(weight, Tensor)]
    if kind == "fp8 groups":
        weights = [
            Fp8Weight(fp8.values, torch.rand(-(-fp8.values.shape[1] // 64), len(fp8.values)) * 0.01, 64)
            for fp8 in weights
            if isinstance(fp8, Fp8Weight)
        ]
    norm = Norm(torch.rand(hidden) * 2, EPS)
    return DeviceLinear(weights[0], bias[0]), DeviceLinear(weights[1], bias[1], norm, gated)


def meant(weight: Weight) -> Tensor:
    return weight.restored(torch.float32) if isinstance(weight, Fp8Weight) else weight


def truth(stream: ResidualStream, x: Tensor, pair: Pair) -> Tensor:
    adding, scaled = pair
    change = linear(x, meant(adding.weight), adding.bias)
    assert scaled.norm is not None
    after = ResidualStream(stream.residual, change)
    return expected_of(after, scaled.norm, meant(scaled.weight), scaled.bias, scaled.gated)


@pytest.mark.parametrize("kind", ["plain", "biased", "fp8", "fp8 groups"])
@pytest.mark.parametrize(
    ("rows", "inner", "hidden", "outer", "adding", "scaled"),
    [
        (17, 64, 48, 32, TWO, WHOLE),
        (40, 72, 40, 36, THREE, WHOLE),
        (33, 64, 96, 64, TWO, THREE),
        (130, 64, 32, 48, THREE, TWO),
    ],
)
def test_two_products_and_the_norm_between_them(
    rows: int, inner: int, hidden: int, outer: int, adding: Tile, scaled: Tile, kind: str
) -> None:
    """Also where tiles reach beyond the weights. The stream is added to in place."""
    torch.manual_seed(0)
    for gated in (False, True) if scaled.splits == 1 else (False,):
        pair = pair_of(inner, hidden, outer, kind, gated=gated)
        x, residual = torch.randn(rows, inner), torch.randn(rows, hidden) * 3
        stream = ResidualStream(residual.clone())
        expected = truth(stream, x, pair)
        total = residual + linear(x, meant(pair[0].weight), pair[0].bias)
        begun = begin_norm(stream, x, pair, adding)
        assert begun.residual is stream.residual
        torch.testing.assert_close(begun.residual, total, atol=1e-4, rtol=1e-5)
        found, after = end_norm(begun, pair[1], scaled)
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)
        assert after.residual is begun.residual
        assert not _counters(x.device).any(), "the counters are not ready for the next product"


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    pair = pair_of(64, 96, 32, gated=True)
    x, residual = torch.randn(40, 64), torch.randn(40, 96)
    together, _ = end_norm(begin_norm(ResidualStream(residual.clone()), x, pair, TWO), pair[1], WHOLE)
    some = slice(7, 25)
    alone, _ = end_norm(
        begin_norm(ResidualStream(residual[some].clone()), x[some], pair, TWO), pair[1], WHOLE
    )
    assert torch.equal(alone, together[some])


@pytest.mark.parametrize("gated", [False, True])
def test_it_is_as_near_to_the_truth_as_with_a_norm_of_its_own(gated: bool) -> None:
    """In half precision: what is rounded is rounded as often, or less."""
    torch.manual_seed(0)
    adding, scaled = pair_of(256, 128, 128, gated=gated)
    pair = (
        DeviceLinear(meant(adding.weight).half()),
        DeviceLinear(meant(scaled.weight).half(), None, scaled.norm, gated),
    )
    x, residual = torch.randn(24, 256).half(), (torch.randn(24, 128) * 3).half()
    exact = tuple(DeviceLinear(meant(own.weight).double(), None, own.norm, own.gated) for own in pair)
    assert len(exact) == 2
    expected = truth(ResidualStream(residual.double()), x.double(), exact)

    def error(found: Tensor) -> float:
        return float((found.double() - expected).norm() / expected.norm())

    folded, _ = end_norm(begin_norm(ResidualStream(residual.clone()), x, pair, TWO), pair[1], WHOLE)
    table = MatmulTable({})
    apart, _ = table.of_stream(
        ResidualStream(residual.clone()).plus(table.linear(x, pair[0].weight)), pair[1]
    )
    assert error(folded) <= 1.05 * error(apart)
    assert error(folded) < 1e-3


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split tiles for weights of test sizes."""
    monkeypatch.setattr("engine.runtime.kernels.split_matmul.WIDTH_MIN", 16)


class FakeTimer:
    """Knows how long a launch takes by what it launches: a pair together, or its kernels apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, together_us: float) -> None:
        self.took = 0.0

        def counts(us: Callable[..., float], answer: Callable[..., object]) -> Callable[..., object]:
            def run(*args: object, **_: object) -> object:
                self.took += us(*args)
                return answer(*args)

            return run

        def of_tile(*args: object) -> float:
            [tile] = [arg for arg in args if isinstance(arg, Tile)]
            return together_us / 2 + (tile.splits != 4) * (tile.n != 128)

        def begun(
            x: Tensor, weight: Weight, tile: Tile, stream: ResidualStream, norm: Norm
        ) -> ResidualStream:
            return ResidualStream(stream.residual, unscaled=Unscaled(x, x, 0.0))

        apart = counts(lambda *_: 10.0, lambda x, *_: x)
        for name, way in {
            "adding_matmul": counts(of_tile, begun),
            "scaled_matmul": counts(of_tile, lambda x, *_: x.values),
            "_by_library": apart,
            "silu_mul": apart,
            "norm_stream": counts(lambda *_: 10.0, lambda stream, norm: (stream.residual, stream)),
        }.items():
            monkeypatch.setattr(autotune, name, way)

    def __call__(self, run: Callable[[], object]) -> float:
        self.took = 0.0
        run()
        return self.took


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("together_us", "is_folded"), [(38.0, True), (38.2, False), (45.0, False)])
def test_a_pair_together_competes_with_its_kernels_apart(
    monkeypatch: pytest.MonkeyPatch, together_us: float, is_folded: bool
) -> None:
    """At 17 rows and more, where both products have tiles. A twentieth is noise."""
    adding, scaled = pair_of(32, 64, 64, gated=True)
    pairs = [(adding, scaled)] * 2
    with monkeypatch.context() as patch:
        timer = FakeTimer(patch, together_us)
        table = fold_norms(MatmulTable({}), pairs, torch.bfloat16, timer)
        other_types = [
            fold_norms(MatmulTable({}), pairs, dtype, timer) for dtype in (torch.float16, torch.float32)
        ]
    assert {shape.adding.rows for shape in table.folded} == {32, 64}, "no tile multiplies more rows"
    for found in table.folded.values():
        assert (found.best_us, found.apart_us) == (together_us, 40.0)
        assert (found.tile is not None) == is_folded
        assert found.tile is None or found.tile.splits == 4
    assert {tile.n for tile in table.scaled.values()} == {128}
    assert not any(other.folded for other in other_types)


def test_candidates_of_the_second_product_are_wide() -> None:
    """A weight of few rows and many columns is split; a gate's halves are not."""
    few, many = (torch.empty(height, 4096, device="meta") for height in (4096, 28_672))
    eight_bits = many.to(torch.float8_e4m3fn)
    tiles = folding.scaled_tiles
    for rows, gated in product((32, 64), (False, True)):
        assert {tile.splits for tile in tiles(DeviceLinear(few, gated=gated), torch.bfloat16, rows)} == (
            {1} if gated else {2, 4}
        )
        assert {tile.n for tile in tiles(DeviceLinear(many, gated=gated), torch.bfloat16, rows)} == {
            32,
            64,
            128,
        }
    assert not tiles(DeviceLinear(many), torch.bfloat16, 128)
    whole = Fp8Weight(eight_bits, torch.ones(28_672))
    for rows, widths in ((128, {64, 128}), (256, {64})):
        assert {tile.n for tile in tiles(DeviceLinear(whole), torch.bfloat16, rows)} == widths
    fp8 = Fp8Weight(eight_bits, torch.ones(4096 // 64, 28_672), 64)
    assert {tile.k for tile in tiles(DeviceLinear(fp8, gated=True), torch.bfloat16, 128)} == {64}


@pytest.mark.parametrize("rows", [16, 17, 64, 65, 257])
def test_a_table_folds_where_that_was_faster(rows: int) -> None:
    torch.manual_seed(0)
    adding, scaled = pair = pair_of(64, 48, 32, gated=True)
    shapes = [folded_shape(pair, measured) for measured in (32, 64)]
    table = MatmulTable(
        {},
        {},
        dict.fromkeys(shapes, FoldedMeasured(TWO, 1.0, 2.0)),
        {shape.scaled: WHOLE for shape in shapes},
    )
    x, residual = torch.randn(rows, 64), torch.randn(rows, 48)
    begun = table.added(ResidualStream(residual.clone()), x, adding, scaled)
    assert (begun is not None) == (17 <= rows <= 64)
    if begun is not None:
        found, after = table.of_stream(begun, scaled)
        assert after.unscaled is None
        expected = truth(ResidualStream(residual), x, pair)
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)
    slower = MatmulTable({}, {}, dict.fromkeys(shapes, FoldedMeasured(None, 2.0, 1.0)))
    assert slower.added(ResidualStream(residual), x, adding, scaled) is None
