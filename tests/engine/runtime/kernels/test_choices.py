"""How products are timed, and which of torch's libraries multiplies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.runtime.kernels import autotune, matmul
from engine.runtime.kernels.autotune import DeviceLinear, FusedMeasured, MatmulTable
from engine.runtime.kernels.fused import Norm, ResidualStream
from engine.runtime.weights.fp8 import quantise

EPS = 1e-5


def test_products_are_timed_with_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros draw less power, and let a card run faster than it does at work."""
    weight, norm, spreads = torch.randn(64, 32), Norm(torch.ones(32), EPS), []

    def product(x: Tensor, *_: object, **__: object) -> Tensor:
        spreads.append(float(x.float().std()))
        return x

    def normed(stream: ResidualStream, *_: object, **__: object) -> None:
        assert stream.change is not None
        spreads.extend(float(part.float().std()) for part in (stream.residual, stream.change))

    monkeypatch.setattr(autotune, "skinny_matmul", product)
    monkeypatch.setattr(autotune, "_by_library", product)
    monkeypatch.setattr(autotune, "normed_matmul", normed)
    linears = [DeviceLinear(weight, norm=norm, gated=True), DeviceLinear(quantise(weight))]
    MatmulTable.fill(linears, torch.bfloat16, autotune.once)
    assert min(spreads) > 0.5


@pytest.mark.parametrize(("lt_us", "blas"), [(9.6, "cublas"), (9.4, "cublaslt")])
def test_cublaslt_is_taken_where_it_clearly_wins(
    monkeypatch: pytest.MonkeyPatch, lt_us: float, blas: str
) -> None:
    """For more rows than tiles take, too. The process's own choice is put back behind each product."""
    calls: list[str] = []
    now = ["its own"]

    def prefer(which: str | None = None) -> str:
        now[:] = [which or now[0]]
        return now[0]

    def product(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        calls.append(now[0])
        return x

    def timer(run: Callable[[], object]) -> float:
        run()
        return lt_us if calls[-1] == "cublaslt" else 10.0

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(autotune, "_libraries", lambda device: autotune.BLAS)
    monkeypatch.setattr(autotune, "_by_library", product)
    monkeypatch.setattr(autotune, "skinny_matmul", lambda *_, **__: calls.append("tile"))
    weight = torch.zeros(64, 32)
    linears = [DeviceLinear(weight, norm=Norm(torch.ones(32), EPS), gated=True)]
    monkeypatch.setattr(autotune, "_measure_fused", lambda *_: FusedMeasured(None, 1.0, 1.0))
    table = MatmulTable.fill(linears, torch.bfloat16, timer)
    assert {shape.rows: found.blas for shape, found in table.measured.items()} == dict.fromkeys(
        autotune.MEASURED_ROWS, blas
    )
    assert max(shape.product.rows for shape in table.fused) == matmul.ROWS_MAX
    del calls[:]
    for rows in (100, 256, 257):
        table.linear(torch.zeros(rows, 32), weight)
    default = "its own"
    assert calls == ([default] * 3 if blas == "cublas" else ["cublaslt", "cublaslt", default])
    assert now == [default]
