"""The fused kernels in the interpreter, against the CPU's layers, and the one that begins a decode step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.runtime.kernels import begin, fused
from engine.runtime.kernels.begin import begin_step
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import Rope
from engine.runtime.reference.layers import rms_norm, rotate

DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 896])
def test_norm_with_and_without_residual(hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype)
    close = partial(torch.testing.assert_close, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    close(fused.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
    total = x + residual
    found = fused.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    close(found, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (20, 10, 32), (7, 1, 128)])
def test_norm_rotate_store(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """Nothing but the tokens' own places in the cache is touched."""
    torch.manual_seed(0)
    tokens, size, pages = 6, 16, 9
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = Rotary(Rope(10_000.0), head_dim, 1).angles(torch.tensor([0, 1, 2, 500, 77, 3]), torch.float32)
    weights = torch.rand(2, head_dim)
    cache = torch.full((2, pages, kv_heads, size, head_dim), torch.nan, dtype=dtype)
    page, offset = torch.tensor([8, 8, 8, 0, 3, 5]), torch.tensor([14, 15, 0, 7, 1, 2])
    norm = fused.QKNorm(weights[0], weights[1], 1e-6) if normed else None
    found = fused.norm_rotate_store(qkv, angles, norm, cache[0], cache[1], page, offset)

    by_head = qkv.view(tokens, -1, head_dim).float()
    q, k, v = by_head.split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = rms_norm(q, weights[0], 1e-6), rms_norm(k, weights[1], 1e-6)
    close = partial(torch.testing.assert_close, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    close(found.float(), rotate(q, angles))
    close(cache[0][page, :, offset].float(), rotate(k, angles))
    assert torch.equal(cache[1][page, :, offset].float(), v)
    assert cache.isnan().sum() == cache.numel() - 2 * tokens * kv_heads * head_dim


def test_the_rest_of_a_page_that_is_begun_is_cleared_and_no_other() -> None:
    """A chunk that fills a page and begins the next; one that goes on in its page; three single tokens: at a
    page's begin, in its middle, at its end; and a chunk of one whole page."""
    rows = [(8, 12, 4), (6, 0, 3), (0, 3, 2), (1, 0, 1), (2, 9, 1), (3, 15, 1), (4, 0, 16)]
    page = torch.tensor([p for p, _, n in rows for _ in range(n)])
    offset = torch.tensor([first + i for _, first, n in rows for i in range(n)])
    kv_heads, head_dim, size = 3, 32, 16
    qkv = torch.randn(len(page), 9 * head_dim)
    angles = torch.ones(len(page), head_dim // 2), torch.zeros(len(page), head_dim // 2)
    cache = torch.full((2, 10, kv_heads, size, head_dim), torch.nan)
    fused.norm_rotate_store(qkv, angles, None, cache[0], cache[1], page, offset, clear_tails=True)
    expected = torch.full_like(cache, torch.nan)
    expected[:, 6, :, 3:] = 0.0
    expected[:, 1, :, 1:] = 0.0
    expected[0][page, :, offset], expected[1][page, :, offset] = qkv.view(-1, 9, head_dim)[:, 3:].split(3, 1)
    assert torch.equal(cache.nan_to_num(-1e9), expected.nan_to_num(-1e9))


def test_an_fp8_cache_is_scaled_and_never_overflows() -> None:
    qkv = torch.tensor([[1.0] * 32 + [2.0] * 32 + [10_000.0] * 16 + [-3.0] * 16])
    angles = (torch.ones(1, 16), torch.zeros(1, 16))
    cache = torch.zeros(2, 1, 1, 16, 32).to(torch.float8_e4m3fn)
    place = torch.zeros(1, dtype=torch.int64)
    fused.norm_rotate_store(qkv, angles, None, cache[0], cache[1], place, place, kv_scales=(0.5, 2.0))
    assert cache[0, 0, 0, 0].float().tolist() == [4.0] * 32
    assert cache[1, 0, 0, 0].float().tolist() == [448.0] * 16 + [-1.5] * 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [96, 1500])
def test_silu_mul(inner: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 2 * inner).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    close = partial(torch.testing.assert_close, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    close(fused.silu_mul(gate_up).float(), silu(gate) * up)
    close(fused.silu_mul(gate_up, gelu=True).float(), gelu(gate, approximate="tanh") * up)


def test_gates_that_lie_behind_other_columns() -> None:
    torch.manual_seed(0)
    x, gates = torch.randn(3, 1500), torch.randn(3, 1700)
    expected = x * gates[:, 200:].sigmoid()
    assert fused.sigmoid_mul(x, gates) is x
    torch.testing.assert_close(x, expected, atol=1e-6, rtol=1e-6)


SLOTS, PAGE = 5, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_that_a_step_knows_of_its_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order, several in one slot, at a page's begin and end; copies in several blocks."""
    monkeypatch.setattr(begin, "COPY_BLOCK", 32)
    torch.manual_seed(0)
    vocab, hidden, longest = 300, 80, 1000
    rotary = Rotary(Rope(10_000.0), 32, 1)
    embedding = torch.randn(vocab, hidden).to(dtype)
    tokens = torch.randint(vocab, (SLOTS, longest), dtype=torch.int32)
    page_table = torch.randint(1 << 30, (SLOTS, -(-longest // PAGE)), dtype=torch.int32)
    slots = torch.tensor([3, 0, 4, 4, 1], dtype=torch.int32)
    lengths = torch.tensor([1, 16, 17, 1000, 33], dtype=torch.int32)
    step, tables = begin_step(slots, lengths, tokens, page_table, embedding, rotary.table[None], PAGE)

    positions = lengths.long() - 1
    assert torch.equal(step.residual, embedding[tokens[slots, positions]])
    assert torch.equal(step.pages, page_table[slots, positions // PAGE].long())
    assert torch.equal(step.offsets, positions % PAGE)
    assert torch.equal(tables, page_table[slots])
    for found, expected in zip(step.angles[0], rotary.angles(positions, torch.float32), strict=True):
        torch.testing.assert_close(found, expected[:, 0], atol=1e-6, rtol=1e-6)
