"""Each kernel against its reference, on the GPU: the cases of the CPU's tests, larger, in every precision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from engine.bench.gpu.measuring import check
from engine.core.messages import SamplingParams
from engine.runtime.fp8 import Fp8Weight, quantise
from engine.runtime.kernels import fused
from engine.runtime.kernels.autotune import Linear, MatmulTable
from engine.runtime.kernels.begin import begin_step
from engine.runtime.kernels.fused import Norm, Stream
from engine.runtime.kernels.matmul import NARROW, TILES, Tile, Weight, normed_matmul, skinny_matmul
from engine.runtime.layers import Rotary, rms_norm, rotate
from engine.runtime.models.config import RopeConfig
from tests.engine.runtime.kernels import test_decode_attention as decode
from tests.engine.runtime.kernels import test_prefill_attention as prefill
from tests.engine.runtime.kernels import test_sampling as sampling
from tests.engine.runtime.kernels.cases import PagedCase, Shape, paged_case

CUDA = torch.device("cuda")
ERROR_MAX = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the reference's norm; a bf16 result is itself rounded by up to 4e-3."""
SHAPES = (
    Shape(2, 2, 64),
    Shape(8, 4, 128),
    Shape(4, 7, 128),
    Shape(2, 1, 64),
    Shape(2, 4, 256),
    Shape(2, 2, 64, 16),
)
LENGTHS = (3000, 1, 64, 65, 300, 0, 512, 513, 9000)
CHUNKS, CONTEXTS = (700, 1, 200, 64, 5, 129), (700, 100, 1200, 192, 4133, 129)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    assert torch.isfinite(found).all(), "not finite"
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error <= ERROR_MAX[dtype], f"relative error {error:.2e}, at most {ERROR_MAX[dtype]:.0e}"
    return {"error": error}


def decode_attention(shape: Shape, dtype: torch.dtype, window: int | None) -> dict[str, Any]:
    case = paged_case(shape, [1] * len(LENGTHS), LENGTHS, dtype=dtype)
    found = decode.run(case, window, programs=264, device=CUDA)
    assert torch.equal(found, decode.run(case, window, programs=100, device=CUDA)), "depends on the programs"
    for _ in range(20):  # the last to arrive differs from run to run; what it adds up must not
        assert torch.equal(found, decode.run(case, window, programs=264, device=CUDA)), "differs between runs"
    return near(found, case.expected(window), dtype)


def decode_alone(dtype: torch.dtype) -> dict[str, Any]:
    shape = Shape(8, 4, 128)
    case = paged_case(shape, [1] * len(LENGTHS), LENGTHS, dtype=dtype)
    alone = PagedCase(shape, [1], LENGTHS[:1], case.q[:1], case.keys, case.values, case.tables[:1], [])
    assert torch.equal(
        decode.run(alone, programs=7, device=CUDA), decode.run(case, programs=264, device=CUDA)[:1]
    )
    return {}


def prefill_attention(shape: Shape, dtype: torch.dtype, window: int | None) -> dict[str, Any]:
    case = paged_case(shape, CHUNKS, CONTEXTS, dtype=dtype)
    return near(prefill.run(case, window, device=CUDA), case.expected(window), dtype)


def fp8_cache(dtype: torch.dtype) -> dict[str, Any]:
    kv = torch.float8_e4m3fn
    case = paged_case(Shape(8, 4, 128), [1] * len(LENGTHS), LENGTHS, dtype=dtype, kv_dtype=kv)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    found = near(decode.run(case, scales=(0.5, 3.0), device=CUDA), case.expected(None), dtype)
    case = paged_case(Shape(8, 4, 128), CHUNKS, CONTEXTS, dtype=dtype, kv_dtype=kv)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    return found | near(prefill.run(case, scales=(0.5, 3.0), device=CUDA), case.expected(None), dtype)


def beginning(dtype: torch.dtype) -> dict[str, Any]:
    """Positions beyond 100,000 too, where cosines are computed in another way."""
    slots = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=CUDA)
    lengths = torch.tensor([1, 65, 4096, 131_072], dtype=torch.int32, device=CUDA)
    known = torch.randint(1000, (4, 131_073), dtype=torch.int32, device=CUDA)
    table = torch.randint(1 << 30, (4, 2048), dtype=torch.int32, device=CUDA)
    embedding = torch.randn(1000, 1024, device=CUDA).to(dtype)
    rotary = Rotary(RopeConfig(500_000.0), 128)
    frequencies = rotary.inverse_frequencies.to(CUDA)
    step, tables = begin_step(slots, lengths, known, table, embedding, frequencies, 64)
    at = lengths.long() - 1
    assert torch.equal(step.residual, embedding[known[slots, at]])
    assert torch.equal(tables, table[slots])
    assert torch.equal(step.pages, table[slots, at // 64].long())
    assert torch.equal(step.offsets, at % 64)
    expected = torch.cat(rotary.angles(at.cpu(), torch.float32), dim=-1)[:, 0]
    return near(torch.cat(step.angles, dim=-1).cpu(), expected, torch.float32)


def norms(dtype: torch.dtype) -> dict[str, Any]:
    x, residual = torch.randn(2, 37, 4096, device=CUDA).to(dtype)
    weight = torch.rand(4096, device=CUDA).to(dtype)
    total = x + residual
    found = fused.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    return near(found.cpu(), rms_norm(total.cpu().float(), weight.cpu().float(), 1e-6), dtype)


def store(dtype: torch.dtype) -> dict[str, Any]:
    tokens, heads, kv_heads, dim = 50, 32, 8, 128
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    cos, sin = Rotary(RopeConfig(10_000.0), dim).angles(torch.arange(tokens) * 77, torch.float32)
    weights = torch.rand(2, dim).to(dtype)
    cache = torch.full((2, 9, kv_heads, 16, dim), torch.nan, dtype=dtype, device=CUDA)
    places = torch.randperm(9 * 16)[:tokens]
    page, offset = (places // 16).to(CUDA), (places % 16).to(CUDA)
    norm = fused.QKNorm(*weights.to(CUDA), 1e-6)
    q = fused.norm_rotate_store(qkv.to(CUDA), (cos.to(CUDA), sin.to(CUDA)), norm, *cache, page, offset)
    by_head = qkv.view(tokens, -1, dim).float().split([heads, kv_heads, kv_heads], dim=1)
    expected = [rotate(rms_norm(by_head[i], weights[i].float(), 1e-6), (cos, sin)) for i in range(2)]
    near(cache[0][page, :, offset].float().cpu(), expected[1], dtype)
    assert torch.equal(cache[1][page, :, offset].float().cpu(), by_head[2])
    assert cache.isnan().sum() == cache.numel() - 2 * tokens * kv_heads * dim
    return near(q.float().cpu(), expected[0], dtype)


def activation(dtype: torch.dtype) -> dict[str, Any]:
    gate_up = torch.randn(37, 2 * 14336).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return near(fused.silu_mul(gate_up.to(CUDA)).cpu(), silu(gate) * up, dtype)


def products(dtype: torch.dtype) -> dict[str, Any]:
    worst = 0.0
    for rows, height, width in ((1, 4096, 4096), (17, 1000, 1000), (64, 6144, 4096)):
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(height, width).to(dtype)
        expected = linear(x.double(), weight.double())
        # In float32, which is the library's, only the smallest fits into shared memory.
        tiles = TILES if rows > 1 else (NARROW, *TILES)
        for tile in tiles if dtype != torch.float32 else TILES[-1:]:
            found = skinny_matmul(x.to(CUDA), weight.to(CUDA), tile).cpu()
            worst = max(worst, near(found, expected, dtype)["error"])
        if dtype != torch.float32:
            quantised = quantise(weight)
            restored = quantised.values.double() * quantised.scales[:, None].double()
            found = skinny_matmul(x.to(CUDA), quantised.to(CUDA), TILES[1]).cpu()
            worst = max(worst, near(found, linear(x.double(), restored), dtype)["error"])
            groups = -(-width // 128)
            blocks = Fp8Weight(quantised.values, torch.rand(groups, height) * 0.01, 128).to(CUDA)
            found = MatmulTable({}).linear(x.to(CUDA), blocks).cpu()
            expected = linear(x.double(), blocks.restored(torch.float32).cpu().double())
            worst = max(worst, near(found, expected, dtype)["error"])
    return {"error": worst}


def whole_products(dtype: torch.dtype) -> dict[str, Any]:
    """With a norm in the head and a gate in the tail; and no further from the truth than norm, product and
    gate apart. By every tile, but where it is one more to compile: fp8, and a weight that no tile fits."""
    worst, worst_apart = 0.0, 0.0
    for rows, height, width, tiles in (
        (1, 6144, 1024, TILES),
        (16, 2048, 4096, TILES),
        (7, 1000, 1000, TILES[1:2]),
    ):
        residual, change = (torch.randn(2, rows, width) * 3).to(dtype)
        weight = (torch.randn(height, width) / width**0.5).to(dtype)
        norm = Norm(torch.rand(width).to(CUDA), 1e-6)
        x = rms_norm((residual + change).double(), norm.weight.cpu().double(), norm.eps)
        quantised = quantise(weight)
        cases: list[tuple[Weight, Tensor, Sequence[Tile]]] = [(weight.to(CUDA), weight.double(), tiles)]
        if rows == 1:
            cases.append((quantised.to(CUDA), quantised.restored(torch.float64), tiles[1:2]))
        for (own, meant, own_tiles), gated in product(cases, (False, True)):
            y = linear(x, meant)
            gate, up = y.chunk(2, dim=-1)
            expected = silu(gate) * up if gated else y
            for tile in own_tiles:
                stream = Stream(residual.to(CUDA, copy=True), change.to(CUDA))
                found, after = normed_matmul(stream, norm, own, tile, gated=gated)
                assert torch.equal(after.residual.cpu(), residual + change), f"{tile}: the stream"
                worst = max(worst, near(found.cpu(), expected, dtype)["error"])
            apart, _ = MatmulTable({}).of_stream(stream, Linear(own, norm=norm, gated=gated))
            worst_apart = max(worst_apart, near(apart.cpu(), expected, dtype)["error"])
    assert worst <= 1.1 * worst_apart, f"error {worst:.2e}, of the kernels apart {worst_apart:.2e}"
    return {"error": worst, "error_apart": worst_apart}


def tokens(limits: dict[str, Any]) -> dict[str, Any]:
    """Over a true vocabulary. Of the random rows one in a thousand may differ: exp is rounded differently."""
    torch.manual_seed(0)
    rows, vocab = 64, 151_936
    logits = torch.randn(rows, vocab) * 3
    asked = [SamplingParams(seed=row * 977, max_tokens=1, **limits) for row in range(rows)]
    past = sampling.histories(rows, 2, vocab)
    found, logprobs, _ = sampling.on_device(logits, asked, past, CUDA)
    expected = sampling.on_cpu(logits, asked, past)
    differing = sum(a != b for a, b in zip(found, expected, strict=True))
    assert differing == 0, f"{differing} of {rows} tokens differ from the CPU's"
    own = logits.log_softmax(-1).gather(1, torch.tensor(found)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, own, atol=1e-4, rtol=1e-4)
    return {"rows": rows}


def in_precision(dtype: torch.dtype, shapes: Sequence[Shape]) -> bool:
    ok, name = True, str(dtype).removeprefix("torch.")
    for shape in shapes:
        for window in (None, 100):
            page = shape.page_size
            row = f"{shape.kv_heads}x{shape.group}x{shape.head_dim} page {page} window {window} {name}"
            ok &= check("kernels", f"decode {row}", partial(decode_attention, shape, dtype, window))
            ok &= check("kernels", f"prefill {row}", partial(prefill_attention, shape, dtype, window))
    checks = {
        "begin": beginning,
        "norm": norms,
        "store": store,
        "silu": activation,
        "matmul": products,
        "decode alone": decode_alone,
    }
    for what, run in checks.items():
        ok &= check("kernels", f"{what} {name}", partial(run, dtype))
    if dtype == torch.bfloat16:
        ok &= check("kernels", f"matmul with norm and gate {name}", partial(whole_products, dtype))
    if dtype != torch.float32:
        ok &= check("kernels", f"fp8 cache {name}", partial(fp8_cache, dtype))
    return ok


def main() -> int:
    """What is served first; each shape of attention is a second of compiling, and in float32 several."""
    ok = in_precision(torch.bfloat16, SHAPES)
    for what, limits in sampling.LIMITS.items():
        ok &= check("kernels", f"sampling {what}", partial(tokens, limits))
    for dtype in (torch.float16, torch.float32):
        ok &= in_precision(dtype, SHAPES[:1])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
