"""Each kernel against its reference, on the GPU: the cases of the CPU's tests, larger, in every precision."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from engine.contract.messages import SamplingParams, agreed
from engine.runtime.kernels import fused
from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable
from engine.runtime.kernels.begin import begin_step
from engine.runtime.kernels.decode_attention import query_counts
from engine.runtime.kernels.delta_net import CHUNK
from engine.runtime.kernels.fused import Norm, ResidualStream
from engine.runtime.kernels.matmul import (
    ROWS,
    ROWS_FP8,
    TILES,
    Tile,
    Weight,
    normed_matmul,
    skinny_matmul,
    tiles_for,
)
from engine.runtime.kernels.restoring import restored
from engine.runtime.kernels.split_matmul import split_matmul, split_tiles_for
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import DeltaNet, Rope
from engine.runtime.reference.layers import rms_norm, rotate
from engine.runtime.weights.fp8 import Fp8Weight, quantise
from tests.bench.engine.gpu.measuring import check
from tests.engine.runtime.kernels import test_decode_attention as decode
from tests.engine.runtime.kernels import test_prefill_attention as prefill
from tests.engine.runtime.kernels import test_sampling as sampling
from tests.engine.runtime.kernels.cases import Shape, paged_case
from tests.engine.runtime.kernels.deltas import DeltaCase, delta_case
from tests.gpu.near import near, same

CUDA = torch.device("cuda")
ERROR_MAX = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the reference's norm; a bf16 result is itself rounded by up to 4e-3."""
SHAPES = (
    Shape(2, 2, 64),
    Shape(8, 4, 128),
    Shape(8, 2, 128),
    Shape(4, 7, 128),
    Shape(2, 1, 64),
    Shape(2, 4, 256),
    Shape(2, 2, 64, 16),
    Shape(2, 4, 128, 256),
)
FLOAT32_SHAPES = (Shape(4, 2, 16, 16), Shape(1, 7, 16, 16), Shape(4, 1, 32, 16))
LENGTHS = (3000, 1, 64, 65, 300, 0, 512, 513, 9000)
VERIFIED, VERIFIED_CONTEXTS = (1, 2, 4, 3, 1, 4, 2), (3000, 65, 4, 513, 0, 9000, 128)
"""Tokens of rows that verify drafts, and their keys: tiles have room for four tokens and more."""
CHUNKS, CONTEXTS = (700, 1, 200, 64, 5, 129), (700, 100, 1200, 192, 4133, 129)


DELTA_NETS = (DeltaNet(16, 16, 128, 128, 4), DeltaNet(4, 12, 128, 128, 4), DeltaNet(2, 4, 64, 32, 4))
DELTA_FLOAT32 = (DeltaNet(2, 4, 16, 32, 4),)
DELTA_VERIFIED = ((7, 1), (0, 1), (0, 3), (4000, 16), (30, 2), (37, 700), (64, 1))
"""Rows of one token, three that verify drafts, and others."""
DELTA_ROWS = ((7, 1), (0, 1), (4000, 1), (0, 700), (37, 20), (30, 34), (0, 2), (64, 1), (0, 129))

REPEATS = 20
PRODUCTS = (
    (1, 4096, 4096),
    (1, 1024, 3072),
    (16, 2048, 4096),
    (17, 1000, 1000),
    (64, 6144, 4096),
    (100, 1000, 1000),
    (256, 4096, 4096),
)
"""Rows, and the weight's."""
SPLIT_PRODUCTS = ((17, 1000, 3000), (64, 4096, 4096), (200, 2048, 4096))
RESTORED = ((1000, 1000), (4096, 4096))
NORMED_PRODUCTS = ((1, 6144, 1024), (16, 2048, 4096), (7, 1000, 1000))


def found_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    return {"error": near(found, expected, ERROR_MAX[dtype])}


def decode_attention(shape: Shape, dtype: torch.dtype, window: int | None) -> dict[str, Any]:
    case = paged_case(shape, [1] * len(LENGTHS), LENGTHS, dtype=dtype)
    expected, errors = case.expected(window), []
    for programs, least in ((264, 256), (100, 256), (528, 64), (7, 256)):
        run = partial(decode.run, case, window, programs, device=CUDA, piece_tokens_min=least)
        found = run()
        errors.append(near(found, expected, ERROR_MAX[dtype]))
        for _ in range(REPEATS):  # the last to arrive differs from run to run; what it adds up must not
            same(run(), found, f"run again by {programs} programs")
    return {"error": max(errors)}


def decode_attention_of_drafts(shape: Shape, dtype: torch.dtype, window: int | None) -> dict[str, Any]:
    """Rows of some tokens that share what they read, in tiles of every size."""
    case = paged_case(shape, VERIFIED, VERIFIED_CONTEXTS, dtype=dtype)
    expected, errors = case.expected(window), []
    for queries in query_counts(shape.group, shape.head_dim, max(VERIFIED)):
        if queries < max(VERIFIED):
            continue
        for programs, least in ((264, 256), (528, 64), (7, 256)):
            run = partial(
                decode.run, case, window, programs, device=CUDA, piece_tokens_min=least, queries=queries
            )
            found = run()
            errors.append(near(found, expected, ERROR_MAX[dtype]))
            for _ in range(REPEATS):
                same(run(), found, f"run again by {programs} programs")
    assert errors, "no tile has room"
    return {"error": max(errors)}


def sampling_of_drafts(right: float, masked: bool) -> dict[str, Any]:
    """The tokens behind drafts are the CPU's, and those that stay are counted."""
    own = sampling.verified(right, masked=masked)
    found, columns, _ = own.on_device(CUDA)
    assert found == own.on_cpu(), "tokens differ from the CPU's"
    stays = [agreed(drafts, tokens) + 1 for drafts, tokens in zip(own.drafts, found, strict=True)]
    counted = columns.counts[:, 0].sum(1).tolist()
    expected = [
        (len(output) + stay) * asked.needs_history
        for asked, (_, output), stay in zip(own.asked, own.past, stays, strict=True)
    ]
    assert counted == expected, f"counted {counted}, not {expected}"
    return {"stay": stays}


def prefill_attention(shape: Shape, dtype: torch.dtype, window: int | None) -> dict[str, Any]:
    case = paged_case(shape, CHUNKS, CONTEXTS, dtype=dtype)
    return found_near(prefill.run(case, window, device=CUDA), case.expected(window), dtype)


def delta_nets(net: DeltaNet, dtype: torch.dtype) -> dict[str, Any]:
    """Rows of one token and of many, over states of which those of nobody are NaN; twice the same."""
    return found_as_torch(delta_case(net, DELTA_ROWS, dtype=dtype), dtype)


def found_as_torch(case: DeltaCase, dtype: torch.dtype) -> dict[str, Any]:
    found, again, expected, errors = case.found(CUDA), case.found(CUDA), case.expected(), []
    for name in ("out", "heads", "inputs"):
        own, other = getattr(found, name), getattr(expected, name)
        same(own, getattr(again, name), f"{name} run again")
        taken = ~other.isnan()
        assert torch.equal(own.isnan().cpu(), ~taken), f"{name}: NaN elsewhere"
        errors.append(near(own[taken.to(own.device)], other[taken], ERROR_MAX[dtype]))
    return {"error": max(errors)}


def delta_nets_of_drafts(net: DeltaNet, dtype: torch.dtype) -> dict[str, Any]:
    """A state behind each token, in cells that are turned round where drafts are right: as torch leaves
    them."""
    case = delta_case(net, DELTA_VERIFIED, dtype=dtype, verifying=3)
    for right in ((0, 0, 0), (2, 15, 1), (1, 7, 0), (0, 14, 1)):
        found, expected = case.turned(right, CUDA)
        assert found == expected, f"{right} right: states lie in {found}, not in {expected}"
    return found_as_torch(case, dtype)


def delta_chunks_cut(dtype: torch.dtype) -> dict[str, Any]:
    """A prompt in two steps, cut at a chunk's begin, has the bits of one."""
    case = delta_case(DELTA_FLOAT32[0], [(0, 3 * CHUNK - 5)], dtype=dtype)
    parts, whole = case.in_two(CHUNK, CUDA), case.found(CUDA)
    for name in ("out", "heads", "inputs"):
        same(getattr(parts, name), getattr(whole, name), name)
    return {}


def fp8_cache(dtype: torch.dtype) -> dict[str, Any]:
    kv = torch.float8_e4m3fn
    case = paged_case(Shape(8, 4, 128), [1] * len(LENGTHS), LENGTHS, dtype=dtype, kv_dtype=kv)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    found = found_near(decode.run(case, scales=(0.5, 3.0), device=CUDA), case.expected(None), dtype)
    case = paged_case(Shape(8, 4, 128), CHUNKS, CONTEXTS, dtype=dtype, kv_dtype=kv)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    return found | found_near(prefill.run(case, scales=(0.5, 3.0), device=CUDA), case.expected(None), dtype)


def beginning(dtype: torch.dtype) -> dict[str, Any]:
    """Positions beyond 100,000 too, where cosines are computed in another way."""
    slots = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=CUDA)
    lengths = torch.tensor([1, 65, 4096, 131_072], dtype=torch.int32, device=CUDA)
    known = torch.randint(1000, (4, 131_073), dtype=torch.int32, device=CUDA)
    table = torch.randint(1 << 30, (4, 2048), dtype=torch.int32, device=CUDA)
    embedding = torch.randn(1000, 1024, device=CUDA).to(dtype)
    rotary = Rotary(Rope(500_000.0), 128, 1)
    frequencies = rotary.table[None].to(CUDA)
    step, tables = begin_step(slots, lengths, known, table, embedding, frequencies, 64)
    at = lengths.long() - 1
    same(step.residual, embedding[known[slots, at]], "embeddings")
    same(tables, table[slots], "page tables")
    same(step.pages, table[slots, at // 64].long(), "pages")
    same(step.offsets, at % 64, "offsets")
    expected = torch.cat(rotary.angles(at.cpu(), torch.float32), dim=-1)[:, 0]
    return found_near(torch.cat(step.angles[0], dim=-1), expected, torch.float32)


def norms(dtype: torch.dtype) -> dict[str, Any]:
    x, residual = torch.randn(2, 37, 4096, device=CUDA).to(dtype)
    weight = torch.rand(4096, device=CUDA).to(dtype)
    total = x + residual
    found = fused.rms_norm(x, weight, 1e-6, residual)
    same(residual, total, "the stream")
    return found_near(found, rms_norm(total.cpu().float(), weight.cpu().float(), 1e-6), dtype)


def store(dtype: torch.dtype) -> dict[str, Any]:
    tokens, heads, kv_heads, dim = 50, 32, 8, 128
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    cos, sin = Rotary(Rope(10_000.0), dim, 1).angles(torch.arange(tokens) * 77, torch.float32)
    weights = torch.rand(2, dim).to(dtype)
    cache = torch.full((2, 9, kv_heads, 16, dim), torch.nan, dtype=dtype, device=CUDA)
    places = torch.randperm(9 * 16)[:tokens]
    page, offset = (places // 16).to(CUDA), (places % 16).to(CUDA)
    norm = fused.QKNorm(weights[0].to(CUDA), weights[1].to(CUDA), 1e-6)
    angles = cos.to(CUDA), sin.to(CUDA)
    q = fused.norm_rotate_store(qkv.to(CUDA), angles, norm, cache[0], cache[1], page, offset)
    by_head = torch.split(qkv.view(tokens, -1, dim).float(), [heads, kv_heads, kv_heads], dim=1)
    expected = [rotate(rms_norm(by_head[i], weights[i].float(), 1e-6), (cos, sin)) for i in range(2)]
    near(cache[0][page, :, offset], expected[1], ERROR_MAX[dtype])
    same(cache[1][page, :, offset].float(), by_head[2], "values")
    written = int((~cache.isnan()).sum())
    assert written == 2 * tokens * kv_heads * dim, f"{written} numbers are written"
    return found_near(q, expected[0], dtype)


def activation(dtype: torch.dtype) -> dict[str, Any]:
    gate_up = torch.randn(37, 2 * 14336).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    found_near(fused.silu_mul(gate_up.to(CUDA), gelu=True), gelu(gate, approximate="tanh") * up, dtype)
    gated = fused.sigmoid_mul(up.to(dtype).to(CUDA).contiguous(), gate_up[:, :14336].to(CUDA).contiguous())
    found_near(gated, up * gate.sigmoid(), dtype)
    return found_near(fused.silu_mul(gate_up.to(CUDA)), silu(gate) * up, dtype)


def fits(tile: Tile, dtype: torch.dtype, fp8: bool, rows: int, height: int) -> bool:
    """In float32, which is the library's, one that always fits into shared memory is enough."""
    if rows > (ROWS_FP8 if fp8 else ROWS)[-1]:
        return False
    return tile == TILES[-1] if dtype == torch.float32 else tile in tiles_for(height, rows)


def tiles(dtype: torch.dtype, fp8: bool, sizes: Sequence[tuple[int, int, int]]) -> list[Tile]:
    found = dict.fromkeys(tile for rows, height, _ in sizes for tile in tiles_for(height, rows))
    return [tile for tile in found if any(fits(tile, dtype, fp8, *size[:2]) for size in sizes)]


def products(dtype: torch.dtype, tile: Tile, fp8: bool) -> dict[str, Any]:
    worst = 0.0
    for rows, height, width in PRODUCTS:
        if not fits(tile, dtype, fp8, rows, height):
            continue
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(height, width).to(dtype)
        own: Weight = weight.to(CUDA)
        if fp8:
            quantised = quantise(weight)
            own, weight = quantised.to(CUDA), quantised.restored(torch.float64)
        found = skinny_matmul(x.to(CUDA), own, tile)
        worst = max(worst, near(found, linear(x.double(), weight.double()), ERROR_MAX[dtype]))
    return {"error": worst}


def split_products(dtype: torch.dtype, fp8: bool) -> dict[str, Any]:
    """By every tile whose columns are shared. The last to arrive differs from run to run; sums must not."""
    worst = 0.0
    for rows, height, width in SPLIT_PRODUCTS:
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(height, width).to(dtype)
        own: Weight = weight.to(CUDA)
        if fp8:
            quantised = quantise(weight)
            own, weight = quantised.to(CUDA), quantised.restored(torch.float64)
        expected, there = linear(x.double(), weight.double()), x.to(CUDA)
        for tile in split_tiles_for(height, width, rows):
            found = split_matmul(there, own, tile)
            worst = max(worst, near(found, expected, ERROR_MAX[dtype]))
            for _ in range(REPEATS):
                same(split_matmul(there, own, tile), found, f"{tile} run again")
    return {"error": worst}


def grouped(dtype: torch.dtype) -> dict[str, Any]:
    """fp8 with a scale for each group of columns, by the tile that nobody chose."""
    worst = 0.0
    for rows, height, width in PRODUCTS:
        x, values = torch.randn(rows, width).to(dtype), quantise(torch.randn(height, width)).values
        blocks = Fp8Weight(values, torch.rand(-(-width // 128), height) * 0.01, 128)
        found = MatmulTable({}).linear(x.to(CUDA), blocks.to(CUDA))
        expected = linear(x.double(), blocks.restored(torch.float32).double())
        worst = max(worst, near(found, expected, ERROR_MAX[dtype]))
    return {"error": worst}


def restoring(dtype: torch.dtype) -> dict[str, Any]:
    """What the library multiplies in place of fp8, for many rows."""
    for height, width in RESTORED:
        whole = quantise(torch.randn(height, width))
        groups = Fp8Weight(whole.values, torch.rand(-(-width // 128), height) * 0.01, 128)
        for weight in (whole, groups):
            same(restored(weight.to(CUDA), dtype), weight.restored(dtype), f"group {weight.group}")
    return {}


def whole_products(dtype: torch.dtype, tile: Tile, fp8: bool, gated: bool) -> dict[str, Any]:
    """With a norm in the head and perhaps a gate in the tail; no further from the truth than norm, product
    and gate apart."""
    worst, worst_apart = 0.0, 0.0
    for rows, height, width in NORMED_PRODUCTS:
        if not fits(tile, dtype, fp8, rows, height):
            continue
        residual, change = (torch.randn(2, rows, width) * 3).to(dtype)
        weight = (torch.randn(height, width) / width**0.5).to(dtype)
        norm = Norm(torch.rand(width).to(CUDA), 1e-6)
        own: Weight = weight.to(CUDA)
        if fp8:
            quantised = quantise(weight)
            own, weight = quantised.to(CUDA), quantised.restored(torch.float64)
        expected = linear(
            rms_norm((residual + change).double(), norm.weight.cpu().double(), norm.eps), weight.double()
        )
        if gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = silu(gate) * up
        stream = ResidualStream(residual.to(CUDA, copy=True), change.to(CUDA))
        found, after = normed_matmul(stream, norm, own, tile, gated=gated)
        same(after.residual, residual + change, "the stream")
        worst = max(worst, near(found, expected, ERROR_MAX[dtype]))
        apart, _ = MatmulTable({}).of_stream(stream, DeviceLinear(own, norm=norm, gated=gated))
        worst_apart = max(worst_apart, near(apart, expected, ERROR_MAX[dtype]))
    # in float32 both are as the order of their sums happens to be
    is_nearer = dtype == torch.float32 or worst <= 1.1 * worst_apart
    assert is_nearer, f"error {worst:.2e}, of the kernels apart {worst_apart:.2e}"
    return {"error": worst, "error_apart": worst_apart}


def tokens(
    limits: dict[str, Any], vocab: int = 151_936, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Over a true vocabulary. exp is rounded differently, which may move one draw of these rows to the token
    before or behind: tokens of so large a vocabulary are some 1e-5 wide."""
    torch.manual_seed(0)
    rows = 64
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    asked = [SamplingParams(seed=row * 977, max_tokens=1, **limits) for row in range(rows)]
    past = sampling.histories(rows, 2, vocab)
    found, logprobs, _ = sampling.on_device(logits, asked, past, CUDA)
    expected = sampling.on_cpu(logits.float(), asked, past)
    where = [(row, a, b) for row, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    is_near = len(where) <= 1 and all(neighbours(logits[row].float(), a, b, limits) for row, a, b in where)
    assert is_near, f"{len(where)} of {rows} tokens differ from the CPU's: (row, ours, its) {where[:8]}"
    own = logits.float().log_softmax(-1).gather(1, torch.tensor(found)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, own, atol=1e-4, rtol=1e-4)
    return {"rows": rows, "neighbours": len(where)}


def neighbours(logits: Tensor, one: int, other: int, limits: Mapping[str, Any]) -> bool:
    """True if two tokens follow each other in the order that tokens are drawn in: by id, or where top-k or
    top-p cut, the likeliest first."""
    if not limits.keys() & {"top_k", "top_p"}:
        return abs(one - other) == 1
    order = logits.argsort(descending=True, stable=True)
    places = [int((order == token).nonzero()) for token in (one, other)]
    return abs(places[0] - places[1]) == 1


def by_tiles(dtype: torch.dtype, name: str) -> bool:
    ok = True
    for fp8 in (False, True) if dtype != torch.float32 else (False,):
        normed = tiles(dtype, fp8, NORMED_PRODUCTS) if dtype == torch.bfloat16 else ()
        for tile in tiles(dtype, fp8, PRODUCTS):
            row = f"{tile}{' fp8' if fp8 else ''} {name}"
            ok &= check("kernels", f"matmul {row}", partial(products, dtype, tile, fp8))
            for gated in (False, True) if tile in normed else ():
                what = f"matmul with norm{' and gate' if gated else ''} {row}"
                ok &= check("kernels", what, partial(whole_products, dtype, tile, fp8, gated))
    if dtype == torch.bfloat16:
        for fp8, kind in ((False, ""), (True, " fp8")):
            ok &= check("kernels", f"split matmul{kind} {name}", partial(split_products, dtype, fp8))
    return ok


def in_precision(dtype: torch.dtype, shapes: Sequence[Shape]) -> bool:
    ok, name = True, str(dtype).removeprefix("torch.")
    checks = {
        "begin": beginning,
        "norm": norms,
        "store": store,
        "silu": activation,
        "delta net cut": delta_chunks_cut,
    }
    for what, run in checks.items():
        ok &= check("kernels", f"{what} {name}", partial(run, dtype))
    for net in DELTA_FLOAT32 if dtype == torch.float32 else DELTA_NETS:
        row = f"{net.key_heads}x{net.value_heads} of {net.key_dim}x{net.value_dim} {name}"
        ok &= check("kernels", f"delta net {row}", partial(delta_nets, net, dtype))
        ok &= check("kernels", f"delta net with drafts {row}", partial(delta_nets_of_drafts, net, dtype))
    for shape in shapes:
        for window in (None, 100):
            page = shape.page_size
            row = f"{shape.kv_heads}x{shape.group}x{shape.head_dim} page {page} window {window} {name}"
            ok &= check("kernels", f"decode {row}", partial(decode_attention, shape, dtype, window))
            run = partial(decode_attention_of_drafts, shape, dtype, window)
            ok &= check("kernels", f"decode with drafts {row}", run)
            ok &= check("kernels", f"prefill {row}", partial(prefill_attention, shape, dtype, window))
    ok &= by_tiles(dtype, name)
    if dtype != torch.float32:
        ok &= check("kernels", f"matmul fp8 in groups {name}", partial(grouped, dtype))
        ok &= check("kernels", f"fp8 restored {name}", partial(restoring, dtype))
        ok &= check("kernels", f"fp8 cache {name}", partial(fp8_cache, dtype))
    return ok


def main() -> int:
    """What is served first. A kernel takes a second to compile, in float32 up to half a minute: there the
    shapes are those of the small models that are checked in it."""
    ok = in_precision(torch.bfloat16, SHAPES)
    for what, limits in sampling.LIMITS.items():
        ok &= check("kernels", f"sampling {what}", partial(tokens, limits))
    for vocab in (128_256, 151_936):
        run = partial(tokens, sampling.LIMITS["all at once"], vocab, torch.bfloat16)
        ok &= check("kernels", f"sampling all at once of {vocab} in bfloat16", run)
    for right, masked in ((0.6, False), (1.0, True)):
        row = f"sampling behind drafts, {right:.0%} right{', with masks' if masked else ''}"
        ok &= check("kernels", row, partial(sampling_of_drafts, right, masked))
    ok &= in_precision(torch.float32, FLOAT32_SHAPES)
    ok &= in_precision(torch.float16, SHAPES[:1])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
