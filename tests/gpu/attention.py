"""Paged decode attention alone, at the shape of an 8B model's layer, as a share of the read bandwidth."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from engine.runtime.kernels import decode_attention as kernels
from tests.gpu.results import check, floors, graph_ms

CUDA = torch.device("cuda")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
CACHES = 4
"""Layers that take turns, so that none is found in the cache."""


def decode(batch: int, context: int, kv_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    width = -(-context // PAGE)
    pages = batch * width
    shape = (pages, KV_HEADS, PAGE, DIM)
    caches = [
        tuple(torch.randn(shape, dtype=torch.bfloat16, device=CUDA).to(kv_dtype) for _ in "kv")
        for _ in range(CACHES)
    ]
    tables = torch.randperm(pages, device=CUDA).int().view(batch, width)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=CUDA)
    work = kernels.DecodeWork.empty(batch, CUDA)
    splits = kernels.split_count(context, None, PAGE)
    scratch = kernels.DecodeScratch.empty(batch, HEADS, KV_HEADS, DIM, splits, CUDA)
    kernels.list_work(lengths, None, PAGE, work)
    q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device=CUDA)
    out = torch.empty_like(q)

    def run() -> None:
        for keys, values in caches:
            kernels.paged_decode(
                q,
                keys,
                values,
                tables,
                lengths,
                work,
                scratch,
                scale=DIM**-0.5,
                programs=kernels.PROGRAMS_PER_SM * processors,
                out=out,
            )

    us = graph_ms(run) / CACHES * 1e3
    read = 2 * batch * context * KV_HEADS * DIM * kv_dtype.itemsize
    bandwidth = floors()[0]
    return {
        "batch": batch,
        "context": context,
        "kv": str(kv_dtype),
        "us": us,
        "bytes_per_s": read / us * 1e6,
        "share": read / bandwidth / us * 1e6,
    }


def main() -> int:
    ok = True
    for batch, context in ((1, 2048), (1, 32_768), (32, 2048), (32, 4096), (256, 2048)):
        ok &= check(
            "attention", f"decode attention batch {batch} context {context}", partial(decode, batch, context)
        )
    fp8 = partial(decode, 32, 4096, torch.float8_e4m3fn)
    ok &= check("attention", "decode attention batch 32 context 4096 fp8", fp8)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
