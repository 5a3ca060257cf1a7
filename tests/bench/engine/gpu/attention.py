"""Attention alone, at the shape of an 8B model's layer. Paged decode as a share of the read bandwidth: the
Triton kernel at several shapes, and every installed back end at one of them. Whole prompts as a share of the
matrix rate, by the Triton kernel and by torch's kernels. And delta nets alone, at Qwen3.5-0.8B's shape."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engine.runtime.attention.build import Bounds, build_backends
from engine.runtime.attention.triton_paged import TritonPrefill
from engine.runtime.kernels.delta_net import Cells, DeltaLayer, DeltaRows, delta_chunks, delta_step
from engine.runtime.setup.backends import NAMES, BackendChoice, Need, choose
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import Ahead, AttentionSpec
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.parameters import DeltaWeights
from tests.bench.engine.gpu.measuring import check, graph_ms
from tests.bench.engine.gpu.results import floors
from tests.bench.engine.gpu.shapes import QWEN3_5_08B

CUDA: Final = torch.device("cuda")
HEADS, KV_HEADS, DIM = 32, 8, 128
LAYERS_MIN: Final = 4
TURN_BYTES: Final = 512 << 20
"""Bytes of the keys and values of the layers that take turns: several times the largest cache."""
PAGES: Final = {"flash-attn": 256}
"""The page size of back ends that do not take 64 tokens: flash-attn 2."""
FP8: Final = torch.float8_e4m3fn
LIBRARIES: Final = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-attn 2": SDPBackend.FLASH_ATTENTION}
"""The attention kernels that are part of torch."""


def chosen(name: str, kv_dtype: torch.dtype) -> tuple[BackendChoice, int]:
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
    batch: int, context: int, kv_dtype: torch.dtype = torch.bfloat16, name: str = "triton", drafts: int = 0
) -> dict[str, Any]:
    """`drafts`: those that each row verifies, whose tokens read its keys together where a back end can."""
    choice, page_size = chosen(name, kv_dtype)
    width = -(-context // page_size)
    pages = batch * width
    read = 2 * batch * context * KV_HEADS * DIM * kv_dtype.itemsize
    layers = max(LAYERS_MIN, -(-TURN_BYTES // read))
    cache = KVCache(KVGeometry(layers, KV_HEADS, page_size, DIM, kv_dtype), pages, device=CUDA)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=CUDA))
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, [None] * layers)
    tokens, processors = drafts + 1, torch.cuda.get_device_properties(0).multi_processor_count
    bounds = Bounds(batch * tokens, context, processors, tokens)
    back_end, _ = build_backends(choice, cache, spec, torch.bfloat16, bounds)
    tables = torch.randperm(pages, device=CUDA).int().view(batch, width).repeat_interleave(tokens, 0)
    before = torch.arange(tokens, dtype=torch.int32, device=CUDA).repeat(batch)
    lengths = before + (context - drafts)
    q = torch.randn(batch * tokens, HEADS, DIM, dtype=torch.bfloat16, device=CUDA)
    back_end.plan(lengths.tolist())
    ahead = Ahead(before, drafts - before, before, tokens, before) if drafts else None

    def run() -> None:
        step = back_end.on_device(tables, lengths, ahead)
        for layer in range(layers):
            step(layer, q)

    assert torch.isfinite(back_end.on_device(tables, lengths, ahead)(0, q)).all(), "not finite"
    us = graph_ms(run) / layers * 1e3
    return {
        "back_end": str(choice.decode),
        "batch": batch,
        "context": context,
        "kv": str(kv_dtype),
        "us": us,
        "bytes_per_s": read / us * 1e6,
        "share": read / floors()[0] / us * 1e6,
    }


def prefill(length: int, name: str) -> dict[str, Any]:
    """Measure one prompt without a cached past, by one of torch's kernels or by Triton's. cuDNN may decline
    groups of heads; the engine would not notice, as FlashAttention 2 then takes its place."""
    q = torch.randn(length, HEADS, DIM, dtype=torch.bfloat16, device=CUDA)
    k, v = torch.randn(2, KV_HEADS, length, DIM, dtype=torch.bfloat16, device=CUDA)
    cache = KVCache(KVGeometry(1, KV_HEADS, 64, DIM, torch.bfloat16), -(-length // 64), device=CUDA)
    cache.pool.normal_()
    tables = torch.arange(cache.pages, dtype=torch.int32, device=CUDA)[None]
    ours = TritonPrefill(cache, AttentionSpec(HEADS, KV_HEADS, DIM, [None])).of_chunks(
        [Row(0, 0, length, 0)], tables
    )

    def library() -> Tensor:
        with sdpa_kernel([LIBRARIES[name]]):
            heads = q.transpose(0, 1)[None]
            return scaled_dot_product_attention(heads, k[None], v[None], is_causal=True, enable_gqa=True)

    ms = graph_ms(partial(ours, 0, q) if name == "triton" else library)
    flops = 2 * length**2 * HEADS * DIM
    return {"tokens": length, "ms": ms, "flops": flops / ms * 1e3, "share": flops / floors()[1] / ms * 1e3}


def delta_net(batch: int, length: int = 0, drafts: int = 0) -> dict[str, Any]:
    """Measure a step of so many rows, or prompts of `length` tokens: each layer reads and writes its states,
    and a prompt's floor is that of its own tensors, read and written once. `drafts`: those that each row of a
    step verifies, each of which writes a state more."""
    own, rows = QWEN3_5_08B.deltas[0], batch * max(1, length, drafts + 1)
    size = own.value_heads * own.key_dim * own.value_dim * 4
    layers = max(LAYERS_MIN, -(-TURN_BYTES // (2 * batch * size)))
    states = States(StateGeometry((own,) * layers, torch.bfloat16), batch, CUDA, batch * drafts)
    of_heads = torch.rand(own.value_heads, device=CUDA)
    conv, norm = torch.randn(own.kernel, own.channels, device=CUDA), torch.ones(own.value_dim, device=CUDA)
    layer = DeltaLayer(own, DeltaWeights(conv, of_heads, of_heads, norm), 1e-6)
    x = torch.randn(rows, own.channels + own.values + 2 * own.value_heads, device=CUDA).to(torch.bfloat16)
    out = x.new_empty(rows, own.values)
    slots = torch.arange(batch, dtype=torch.int32, device=CUDA).repeat_interleave(drafts + 1)
    lengths = torch.full_like(slots, 2048)
    before = torch.arange(drafts + 1, dtype=torch.int32, device=CUDA).repeat(batch)
    windows = torch.arange(len(before), dtype=torch.int32, device=CUDA) - slots - (before > 0).int()
    ahead = Ahead(before, drafts - before, before, drafts + 1, windows) if drafts else None
    cells = None if states.order is None else Cells(states.order, batch)
    tables = DeltaRows.of([Row(slot, 0, length, slot * length) for slot in range(batch)], CUDA)

    def run() -> None:
        for place in range(layers):
            kept = states.inputs[place], states.heads[place]
            if length:
                delta_chunks(x, tables, layer, *kept, out)
            else:
                delta_step(x, slots, lengths, layer, *kept, out, cells, ahead)

    run()
    assert torch.isfinite(out).all(), "not finite"
    us = graph_ms(run) / layers * 1e3
    moved = (2 + drafts) * batch * size + (x.numel() + out.numel()) * 2
    fields = {"batch": batch, "tokens": length, "drafts": drafts, "us": us, "bytes_per_s": moved / us * 1e6}
    return fields | {"share": moved / floors()[0] / us * 1e6}


def main() -> int:
    ok = True
    for batch in (1, 32, 256):
        ok &= check("attention", f"delta net step batch {batch}", partial(delta_net, batch))
    for drafts in (1, 3, 7):
        row = f"delta net step batch 32 with {drafts} drafts"
        ok &= check("attention", row, partial(delta_net, 32, drafts=drafts))
    for batch, length in ((1, 2048), (1, 8192), (8, 1024)):
        row = f"delta net prompts {batch} of {length}"
        ok &= check("attention", row, partial(delta_net, batch, length))
    for batch, context in ((1, 2048), (1, 32_768), (32, 2048), (32, 4096), (256, 2048)):
        row = f"decode attention batch {batch} context {context}"
        ok &= check("attention", row, partial(decode, batch, context))
    for drafts in (1, 3, 7, 15):
        row = f"decode attention batch 32 context 4096 with {drafts} drafts"
        ok &= check("attention", row, partial(decode, 32, 4096, drafts=drafts))
    for kv_dtype, suffix in ((torch.bfloat16, ""), (FP8, " fp8")):
        for name in NAMES:
            row = f"decode attention batch 32 context 4096{suffix} by {name}"
            run = partial(decode, 32, 4096, kv_dtype, name)
            ok &= check("attention", row, run, absent=BadRunnerConfig)
            torch.cuda.empty_cache()
    for length, name in product((2048, 8192), (*LIBRARIES, "triton")):
        ok &= check("attention", f"prefill attention {length} by {name}", partial(prefill, length, name))
    return 0 if ok else 1
