"""The layers' own promises; the models as a whole are the oracle's business."""

from __future__ import annotations

import pytest
import torch

from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import Llama3, Rope
from engine.runtime.reference import layers
from engine.runtime.reference.layers import PackedLinear, rotate


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_linear_packed_or_not(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, bias: bool, packed: bool
) -> None:
    if not packed:
        monkeypatch.setattr(layers, "packs", lambda dtype: False)
    torch.manual_seed(0)
    weight, x = torch.randn(24, 40, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
    b = torch.randn(24, dtype=dtype) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    found = PackedLinear(weight, b)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-2
    )


def test_a_weight_that_is_only_inspected_is_not_packed() -> None:
    weight = torch.empty(2, 2, device="meta")
    assert PackedLinear(weight)._weight is weight


@pytest.mark.parametrize("broken", ["_packed", "_product"])
def test_without_torchs_private_products_weights_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def gone(*_: object) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(layers, broken, gone)
    monkeypatch.setattr(layers, "packs", layers.packs.__wrapped__)  # which forgets its answer
    weight, x = torch.randn(24, 40), torch.randn(3, 40)
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.T)


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    rotary = Rotary(Rope(10_000.0), 16, 1)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, rotary.angles(torch.tensor([position]), torch.float32))

    assert torch.equal(at(q, 0), q)
    torch.testing.assert_close(at(q, 77).norm(), q.norm())
    torch.testing.assert_close(
        (at(q, 9) * at(k, 4)).sum(), (at(q, 105) * at(k, 100)).sum(), atol=1e-4, rtol=0
    )


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = Rotary(Rope(500_000.0), 64, 1).frequencies
    scaled = Rotary(Rope(500_000.0, Llama3(8.0, 1.0, 4.0, 8192)), 64, 1).frequencies
    ratio = plain / scaled
    waves = 2 * torch.pi / plain
    assert (ratio[waves < 8192 / 4] == 1.0).all()
    assert torch.allclose(ratio[waves > 8192], torch.tensor(8.0))
    assert (ratio.diff() >= -1e-6).all()
