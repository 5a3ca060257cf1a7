"""The library against the engine's tiles for the weights of both models, alone and with the norm before and
the gate behind: the choices that a start would make."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from engine.runtime.device.kernel_timing import DeviceTimer
from engine.runtime.kernels.autotune import DeviceLinear
from engine.runtime.kernels.fused import Norm
from engine.runtime.kernels.matmul import Weight
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.weights.fp8 import quantise
from tests.bench.engine.gpu.measuring import check
from tests.bench.engine.gpu.results import floors
from tests.bench.engine.gpu.shapes import LLAMA_8B, QWEN3_06B
from tests.bench.engine.gpu.tuning import tuned

CUDA: Final = torch.device("cuda")
NORMED: Final = ("qkv", "gate_up", "head")
GATED: Final = ("gate_up",)
ROW_LIMIT_S: Final = 120.0
"""The longest time of a row: some thirty kernels are compiled for it, unless they were before."""


def shapes(config: DecoderSpec) -> dict[str, tuple[int, int]]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, config.hidden_size),
        "output": (config.hidden_size, q),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }


def measure(
    height: int, width: int, timer: DeviceTimer, fp8: bool, normed: bool, gated: bool
) -> dict[str, Any]:
    """Measure a product. `normed`, `gated`: with the norm before it and the gate behind it."""
    weight: Weight = torch.empty(height, width, dtype=torch.bfloat16, device=CUDA).normal_()
    if fp8:
        assert isinstance(weight, torch.Tensor)
        weight = quantise(weight)
    norm = Norm(torch.ones(width, device=CUDA), 1e-6) if normed else None
    table = tuned([DeviceLinear(weight, None, norm, gated)], timer, CUDA)
    floor_us = height * width * (1 if fp8 else 2) / floors()[0] * 1e6
    found = {}
    for shape, measured in table.measured.items():
        found[f"rows {shape.rows}"] = {
            "tile": str(measured.tile),
            "us": measured.best_us,
            "library_us": measured.library_us,
            "library": measured.blas,
            "share": floor_us / measured.best_us,
        }
    for whole, fused in table.fused.items():
        found[f"rows {whole.product.rows} with norm{' and gate' if gated else ''}"] = {
            "tile": str(fused.tile),
            "norm_in_head": fused.is_headed,
            "us": fused.best_us,
            "apart_us": fused.apart_us,
            "share": floor_us / fused.best_us,
        }
    return found


def main() -> int:
    ok, timer = True, DeviceTimer()
    for name, config in (("8B", LLAMA_8B), ("0.6B", QWEN3_06B)):
        for what, (height, width) in shapes(config).items():
            for fp8 in (False, True) if what != "head" else (False,):
                row = f"{name} {what}{' fp8' if fp8 else ''}"
                run = partial(measure, height, width, timer, fp8, what in NORMED, what in GATED)
                ok &= check("matmul", row, run, limit_s=ROW_LIMIT_S)
    return 0 if ok else 1
