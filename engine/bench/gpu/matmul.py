"""The library against our tiles for the weights of both models: what the table of warm-up would choose."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engine.bench.gpu.measuring import check
from engine.bench.gpu.results import floors
from engine.bench.gpu.shapes import LLAMA_8B, QWEN3_06B
from engine.runtime.fp8 import quantise
from engine.runtime.kernels.autotune import MatmulTable, Weight
from engine.runtime.kernels.timing import DeviceTimer
from engine.runtime.models.config import ModelConfig


def shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, config.hidden_size),
        "output": (config.hidden_size, q),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }


def measure(height: int, width: int, timer: DeviceTimer, fp8: bool) -> dict[str, Any]:
    weight: Weight = torch.empty(height, width, dtype=torch.bfloat16, device="cuda").normal_()
    if fp8:
        assert isinstance(weight, torch.Tensor)
        weight = quantise(weight)
    table = MatmulTable.fill([weight], torch.bfloat16, timer)
    floor_us = height * width * (1 if fp8 else 2) / floors()[0] * 1e6
    found = {}
    for shape, measured in table.measured.items():
        found[f"rows {shape.rows}"] = {
            "tile": str(measured.tile),
            "us": measured.best_us,
            "library_us": measured.library_us,
            "share": floor_us / measured.best_us,
        }
    return found


def main() -> int:
    ok, timer = True, DeviceTimer()
    for name, config in (("8B", LLAMA_8B), ("0.6B", QWEN3_06B)):
        for what, (height, width) in shapes(config).items():
            for fp8 in (False, True) if what != "head" else (False,):
                row = f"{name} {what}{' fp8' if fp8 else ''}"
                ok &= check("matmul", row, partial(measure, height, width, timer, fp8))
    return 0 if ok else 1
