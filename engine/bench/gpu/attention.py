"""Paged decode attention alone, at the shape of an 8B model's layer, as a share of the read bandwidth: our
kernel at several shapes, and every back end that is installed at one of them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from engine.bench.gpu.measuring import check, graph_ms
from engine.bench.gpu.results import floors, write
from engine.runtime.attention import AttentionSpec
from engine.runtime.attention.device import Bounds, build_backends
from engine.runtime.backends import NAMES, Choice, Need, choose
from engine.runtime.errors import BadRunnerConfig
from engine.runtime.kv_cache import KVCache, KVGeometry

CUDA: Final = torch.device("cuda")
HEADS, KV_HEADS, DIM = 32, 8, 128
LAYERS: Final = 4
"""That take turns, so that none is found in the cache."""
PAGES: Final = {"flash-attn": 256}
"""Where 64 tokens will not do: flash-attn 2."""
FP8: Final = torch.float8_e4m3fn


def chosen(name: str, kv_dtype: torch.dtype) -> tuple[Choice, int]:
    """A back end for decode, and the page size it takes. Raises BadRunnerConfig where it cannot be had."""
    properties = torch.cuda.get_device_properties(0)
    stored, problem = str(kv_dtype).removeprefix("torch."), None
    for page_size in (64, PAGES.get(name, 64)):
        capability = (properties.major, properties.minor)
        need = Need(HEADS, KV_HEADS, DIM, page_size, "bfloat16", stored, capability)
        try:
            return choose(f"decode={name}", need), page_size
        except BadRunnerConfig as error:
            problem = error
    assert problem is not None
    raise problem


def decode(
    batch: int, context: int, kv_dtype: torch.dtype = torch.bfloat16, name: str = "triton"
) -> dict[str, Any]:
    choice, page_size = chosen(name, kv_dtype)
    width = -(-context // page_size)
    pages = batch * width
    cache = KVCache(KVGeometry(LAYERS, KV_HEADS, page_size, DIM, kv_dtype), pages, device=CUDA)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=CUDA))
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, [None] * LAYERS)
    bounds = Bounds(batch, context, torch.cuda.get_device_properties(0).multi_processor_count)
    back_end, _ = build_backends(choice, cache, spec, torch.bfloat16, bounds)
    tables = torch.randperm(pages, device=CUDA).int().view(batch, width)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=CUDA)
    q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device=CUDA)
    back_end.plan([context] * batch)
    step = back_end.on_device(tables, lengths)
    assert torch.isfinite(step(0, q)).all(), "not finite"

    def run() -> None:
        for layer in range(LAYERS):
            step(layer, q)

    us = graph_ms(run) / LAYERS * 1e3
    read = 2 * batch * context * KV_HEADS * DIM * kv_dtype.itemsize
    return {
        "back_end": str(choice.decode),
        "batch": batch,
        "context": context,
        "kv": str(kv_dtype),
        "us": us,
        "bytes_per_s": read / us * 1e6,
        "share": read / floors()[0] / us * 1e6,
    }


def main() -> int:
    ok = True
    for batch, context in ((1, 2048), (1, 32_768), (32, 2048), (32, 4096), (256, 2048)):
        row = f"decode attention batch {batch} context {context}"
        ok &= check("attention", row, partial(decode, batch, context))
    for kv_dtype, suffix in ((torch.bfloat16, ""), (FP8, " fp8")):
        for name in NAMES:
            row = f"decode attention batch 32 context 4096{suffix} by {name}"
            try:
                chosen(name, kv_dtype)
            except BadRunnerConfig as error:
                write("attention", row, absent=str(error))
                continue
            ok &= check("attention", row, partial(decode, 32, 4096, kv_dtype, name))
            torch.cuda.empty_cache()
    return 0 if ok else 1
