"""Attention over a device's pages in torch alone: slow, and the reference for the other back ends.

Every page of every row's table is gathered and multiplied in float32, whatever the lengths are, so that
decode has fixed shapes and can be captured. Keys and values that no row owns may be NaN: they are masked
before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import Ahead, AttentionSpec, DecodePages, PrefillPages
from engine.runtime.weights.fp8 import taken


@dataclass(frozen=True, slots=True)
class ReferenceDecode(DecodePages):
    """The back end for rows of one token."""

    cache: KVCache
    spec: AttentionSpec

    def on_device(self, tables: Tensor, lengths: Tensor, ahead: Ahead | None = None) -> ReferenceDecodeStep:
        return ReferenceDecodeStep(self.cache, self.spec, tables.long(), lengths.long())


@dataclass(frozen=True, slots=True)
class ReferenceDecodeStep:
    cache: KVCache
    spec: AttentionSpec
    tables: Tensor
    lengths: Tensor

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [R, H, D] -> the same shape."""
        return _attend(self.cache, self.spec, layer, q[:, None], self.tables, self.lengths - 1)[:, 0]


@dataclass(frozen=True, slots=True)
class ReferencePrefill(PrefillPages):
    """The back end for rows of several tokens."""

    cache: KVCache
    spec: AttentionSpec

    def of_chunks(self, chunks: Sequence[Row], tables: Tensor) -> ReferencePrefillStep:
        return ReferencePrefillStep(self.cache, self.spec, chunks, tables.long())


@dataclass(frozen=True, slots=True)
class ReferencePrefillStep:
    cache: KVCache
    spec: AttentionSpec
    chunks: Sequence[Row]
    tables: Tensor

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [T', H, D] -> the same shape."""
        out = torch.empty_like(q)
        size = self.cache.geometry.page_size
        for chunk, table in zip(self.chunks, self.tables, strict=True):
            own = slice(chunk.offset, chunk.offset + chunk.length)
            pages = table[None, : -(-chunk.end // size)]
            start = torch.full((1,), chunk.start, device=q.device)
            out[own] = _attend(self.cache, self.spec, layer, q[None, own], pages, start)[0]
        return out


def _attend(
    cache: KVCache, spec: AttentionSpec, layer: int, q: Tensor, tables: Tensor, starts: Tensor
) -> Tensor:
    """q [R, t, H, D] at positions from starts [R] on; tables [R, P] -> q's shape. Positions below 0 see no
    key."""
    rows, tokens, heads, dim = q.shape
    query = starts[:, None] + torch.arange(tokens, device=q.device)
    key = torch.arange(tables.shape[1] * cache.geometry.page_size, device=q.device)
    seen = key <= query[..., None]
    window = spec.windows[layer]
    if window is not None:
        seen &= key > query[..., None] - window
    written = seen.any(1)[:, None, :, None]

    def gathered(pages: Tensor, scale: float) -> Tensor:
        """[R, Hkv, keys, D] float32"""
        found = taken(pages, tables).transpose(1, 2).reshape(rows, spec.kv_heads, -1, dim).float() * scale
        return torch.where(written, found, 0.0)

    keys = gathered(cache.keys[layer], cache.scales[layer][0])
    values = gathered(cache.values[layer], cache.scales[layer][1])
    grouped = q.float().view(rows, tokens, spec.kv_heads, -1, dim)
    scores = torch.einsum("rtkgd,rkld->rkgtl", grouped, keys) * spec.scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = torch.where(seen.any(-1)[:, None, None, :, None], scores.softmax(-1), 0.0)
    found = torch.einsum("rkgtl,rkld->rtkgd", weights, values)
    return found.reshape(rows, tokens, heads, dim).to(q.dtype)
