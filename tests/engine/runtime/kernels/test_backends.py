"""What the back ends prepare for a step. Whole models run on them in test_decoder.py."""

from __future__ import annotations

import torch

from engine.runtime.attention import AttentionSpec
from engine.runtime.kernels.attention import TritonDecode
from engine.runtime.kv_cache import KVCache, KVGeometry


def test_decode_prepares_from_the_device_alone() -> None:
    """As a graph does: no batch, no host; and layers of different windows share the preparation."""
    torch.manual_seed(0)
    cache = KVCache(KVGeometry(2, 2, 16, 16, torch.float32), pages=4)
    for part in (*cache.keys, *cache.values):
        part.normal_()
    spec = AttentionSpec(4, 2, 16, [None, 8])
    decode = TritonDecode(cache, spec, rows_max=2, length_max=64, programs=3)
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
