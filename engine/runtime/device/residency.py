"""The programs of attention that share a multiprocessor, measured at a start for each number of rows.

More programs hide more of each other's waits, fewer make fewer segments (`kernels/decode_attention.py`).
Which is faster depends on the card, the model and the number of rows. So attention of all layers is captured
for each candidate, as in a step over rows of a typical length, and its replay is timed. All layers together
read more than a cache holds, so that each finds its keys in memory.

A candidate is taken only if it beats the default by a margin. The number of measurements is bounded:
candidates times `DecodeGraphs.timed_buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from triton import OutOfResources

from engine.runtime.attention.triton_paged import TritonDecode
from engine.runtime.device.graphs import GraphDevice
from engine.runtime.kernels.autotune import Timer
from engine.runtime.kernels.decode_attention import RESIDENCIES, Residency

TYPICAL_TOKENS: Final = 2048
"""Keys of each row while candidates are timed."""
MARGIN: Final = 1.02


def measure_residency(
    attention: TritonDecode, buckets: Sequence[int], graphs: GraphDevice, timer: Timer
) -> None:
    """Set `attention.residencies` for ascending numbers of rows."""
    attention.residencies = {rows: _fastest(attention, rows, graphs, timer) for rows in buckets}


def _fastest(attention: TritonDecode, rows: int, graphs: GraphDevice, timer: Timer) -> Residency:
    default, *others = RESIDENCIES
    best, best_us = default, _attention_us(attention, rows, default, graphs, timer) / MARGIN
    for candidate in others:
        try:
            took_us = _attention_us(attention, rows, candidate, graphs, timer)
        except OutOfResources:
            continue
        if took_us < best_us:
            best, best_us = candidate, took_us
    return best


def _attention_us(
    attention: TritonDecode, rows: int, residency: Residency, graphs: GraphDevice, timer: Timer
) -> float:
    """The time of a step's attention, all layers one after another, at a typical length."""
    cache, spec = attention.cache, attention.spec
    device, page_size = cache.keys[0].device, cache.geometry.page_size
    width = max(1, min(TYPICAL_TOKENS, attention.length_max, cache.pages // rows * page_size) // page_size)
    tables = (torch.randperm(max(cache.pages, rows * width), device=device) % cache.pages).int()
    lengths = torch.full((rows,), min(width * page_size, attention.length_max), dtype=torch.int32)
    q = torch.randn(rows, spec.heads, spec.head_dim, device=device).to(attention.dtype)
    attention.residencies = {rows: residency}
    inputs = tables[: rows * width].view(rows, width), lengths.to(device), q
    run = partial(_attend_all, attention, *inputs)
    graphs.warm_up(run)
    return timer(graphs.capture(run).replay)


def _attend_all(attention: TritonDecode, tables: Tensor, lengths: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    step = attention.on_device(tables, lengths)
    return tuple(step(layer, q) for layer in range(len(attention.spec.windows)))
