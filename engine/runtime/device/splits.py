"""The size of attention's splits for each number of rows, measured at a start that asks for it.

Few rows want narrow splits, many rows want wide ones (`kernels/decode_attention.py`); where the change lies
depends on the card and on the model. So attention of all layers is captured for each candidate, as in a step
over rows of a typical length, and its replay is timed. All layers together read more than a cache holds, so
that each finds its keys in memory.

A candidate is taken only if it beats `SPLIT_TOKENS` by a margin and if its partial sums fit, at the longest
lengths. The number of measurements is bounded: candidates times `DecodeGraphs.timed_buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.runtime.attention.triton_paged import SPLITS_MEASURED, TritonDecode
from engine.runtime.device.graphs import GraphDevice
from engine.runtime.kernels.autotune import Timer
from engine.runtime.kernels.decode_attention import SPLIT_TOKENS

TYPICAL_TOKENS: Final = 2048
"""Keys of each row while splits are timed."""
MARGIN: Final = 1.02


def measure_splits(attention: TritonDecode, buckets: Sequence[int], graphs: GraphDevice) -> None:
    """Set `attention.split_tokens` for ascending numbers of rows. Does nothing where time cannot be
    measured."""
    if graphs.timer is None:
        return
    found = {rows: _fastest(attention, rows, graphs, graphs.timer) for rows in buckets}
    attention.split_tokens = found


def _fastest(attention: TritonDecode, rows: int, graphs: GraphDevice, timer: Timer) -> int:
    candidates = [tokens for tokens in SPLITS_MEASURED if attention.fits(rows, tokens)]
    us = {tokens: _attention_us(attention, rows, tokens, graphs, timer) for tokens in candidates}
    best = min(us, key=us.__getitem__)
    return best if us[best] * MARGIN < us[SPLIT_TOKENS] else SPLIT_TOKENS


def _attention_us(
    attention: TritonDecode, rows: int, split_tokens: int, graphs: GraphDevice, timer: Timer
) -> float:
    """The time of a step's attention, all layers one after another, at a typical length."""
    cache, spec = attention.cache, attention.spec
    device, page_size = cache.keys[0].device, cache.geometry.page_size
    width = max(1, min(TYPICAL_TOKENS, attention.length_max, cache.pages // rows * page_size) // page_size)
    tables = (torch.randperm(max(cache.pages, rows * width), device=device) % cache.pages).int()
    lengths = torch.full((rows,), min(width * page_size, attention.length_max), dtype=torch.int32)
    q = torch.randn(rows, spec.heads, spec.head_dim, device=device).to(attention.dtype)
    attention.split_tokens = {rows: split_tokens}
    inputs = tables[: rows * width].view(rows, width), lengths.to(device), q
    run = partial(_attend_all, attention, *inputs)
    graphs.warm_up(run)
    return timer(graphs.capture(run).replay)


def _attend_all(attention: TritonDecode, tables: Tensor, lengths: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    step = attention.on_device(tables, lengths)
    return tuple(step(layer, q) for layer in range(len(attention.spec.windows)))
