"""What the back ends prepare for a step. Whole models run on them in ../device/test_network.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.runtime.attention import triton_paged
from engine.runtime.attention.triton_paged import LibraryPrefill, TritonDecode, TritonPrefill
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec


def test_decode_prepares_from_the_device_alone() -> None:
    """As a graph does: no batch, no host; and layers of different windows share the preparation."""
    torch.manual_seed(0)
    cache = KVCache(KVGeometry(2, 2, 16, 16, torch.float32), pages=4)
    for part in (*cache.keys, *cache.values):
        part.normal_()
    spec = AttentionSpec(4, 2, 16, [None, 8])
    decode = TritonDecode(cache, spec, rows_max=2, multiprocessors=1)
    tables, lengths = torch.tensor([[3, 1], [2, 0]]), torch.tensor([20, 7], dtype=torch.int32)
    q = torch.randn(2, 4, 16)
    together = decode.on_device(tables, lengths)
    both = [together(layer, q) for layer in range(2)]
    alone = decode.on_device(tables[1:], lengths[1:])
    assert all(torch.equal(both[layer][1:], alone(layer, q[1:])) for layer in range(2))
    cache.keys[1].copy_(cache.keys[0])
    cache.values[1].copy_(cache.values[0])
    step = decode.on_device(tables, lengths)
    full, windowed = step(0, q), step(1, q)
    torch.testing.assert_close(full[1], windowed[1])  # 7 keys, all within the window
    assert not torch.allclose(full[0], windowed[0])


def test_long_fresh_prompts_go_to_the_library_and_the_rest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fresh rows, one too short, one over a cached past; a layer with a window stays with our kernel. The
    library plans for few lengths, and sees nothing of what lies behind a row's last token."""
    monkeypatch.setattr(triton_paged, "FRESH_TOKENS_MIN", 20)
    monkeypatch.setattr(triton_paged, "FRESH_TOKENS_MULTIPLE", 8)
    torch.manual_seed(0)
    cache = KVCache(KVGeometry(2, 2, 16, 16, torch.float32), pages=12)
    for part in (*cache.keys, *cache.values):
        part.normal_()
    spec = AttentionSpec(4, 2, 16, [None, 8])
    chunks = [Row(0, 0, 33, 0), Row(0, 0, 5, 33), Row(0, 10, 21, 38), Row(0, 0, 20, 59)]
    tables = torch.randperm(12).view(4, 3)
    for part in (*cache.keys, *cache.values):
        part[tables[0, 2], :, 1:] = torch.nan  # behind the 33rd
    q = torch.randn(79, 4, 16)
    lengths: list[int] = []

    def library(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        lengths.append(q.shape[1])
        alone = q[None], k[None], v[None]
        return scaled_dot_product_attention(*alone, is_causal=True, scale=scale, enable_gqa=True)[0]

    ours = TritonPrefill(cache, spec).of_chunks(chunks, tables)
    both = LibraryPrefill(cache, spec, library).of_chunks(chunks, tables)
    torch.testing.assert_close(both(0, q), ours(0, q), atol=1e-5, rtol=1e-5)
    assert lengths == [40, 24]
    assert torch.equal(both(1, q), ours(1, q))
    assert lengths == [40, 24]
    short = LibraryPrefill(cache, spec, library).of_chunks([Row(0, 0, 5, 0)], tables[1:2])
    assert short(0, q[33:38]).shape == (5, 4, 16)
    assert lengths == [40, 24]


def test_queries_that_a_chunk_does_not_have_are_the_callers_mistake() -> None:
    """A kernel would read and write beyond the tensor."""
    cache = KVCache(KVGeometry(1, 2, 16, 16, torch.float32), pages=1)
    step = TritonPrefill(cache, AttentionSpec(4, 2, 16, [None])).of_chunks(
        [Row(0, 0, 5, 33)], torch.zeros(1, 1)
    )
    with pytest.raises(AssertionError):
        step(0, torch.zeros(5, 4, 16))
