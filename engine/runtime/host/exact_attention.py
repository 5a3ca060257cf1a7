"""Attention on a CPU, in torch, of which a token's result has the same bits in any company: for models with
states (`engine.runtime.reference.exact`)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.runtime.step.batch import PackedBatch, Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec

TILE_ROWS: Final = 16
"""Rows of every product of queries with keys, and of weights with values."""
BLOCK_KEYS: Final = 64
"""The keys of one, at least: whole pages."""


class ExactAttention:
    """Implements `StepAttention` over pages, row by row: in tiles of queries and blocks of keys, of fixed
    sizes and at fixed positions, added up in their order. Computed in float32."""

    def __init__(self, cache: KVCache, batch: PackedBatch, spec: AttentionSpec) -> None:
        self._cache = cache
        self._batch = batch
        self._spec = spec
        size = cache.geometry.page_size
        self._block_pages = -(-BLOCK_KEYS // size)
        self._tables = [
            self._table(row, table) for row, table in zip(batch.rows, batch.page_tables, strict=True)
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] -> the attention of q [T, H, D], in q's shape."""
        self._cache.write(layer, k, v, self._batch.places)
        out = torch.empty_like(q)
        for row, table in zip(self._batch.rows, self._tables, strict=True):
            own = slice(row.offset, row.offset + row.length)
            keys, values = (
                self._gathered(pages, table) for pages in (self._cache.keys[layer], self._cache.values[layer])
            )
            out[own] = self._row(
                row, q[own].float() * self._spec.scale, keys, values, self._spec.windows[layer]
            )
        return out

    def _table(self, row: Row, table: Tensor) -> Tensor:
        """The row's pages in whole blocks, [blocks * pages of a block]: behind the last one it is repeated,
        as what no sequence owns may be NaN."""
        used = -(-row.end // self._cache.geometry.page_size)
        whole = -(-used // self._block_pages) * self._block_pages
        return table[torch.arange(whole).clamp_max(used - 1)]

    def _gathered(self, pages: Tensor, table: Tensor) -> Tensor:
        """[Hkv, blocks, keys of a block, D] float32"""
        found = pages[table].transpose(0, 1).float()
        return found.reshape(len(found), -1, self._block_pages * pages.shape[2], pages.shape[3])

    def _row(self, row: Row, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q [t, H, D] -> the same shape."""
        heads, group, dim = self._spec.kv_heads, self._spec.heads // self._spec.kv_heads, self._spec.head_dim
        block_keys, count = keys.shape[2], row.length * group
        tiles = -(-count // TILE_ROWS)
        packed = q.new_zeros(heads, tiles * TILE_ROWS, dim)
        packed[:, :count] = q.view(row.length, heads, group, dim).transpose(0, 1).reshape(heads, count, dim)
        positions = (row.start + torch.arange(tiles * TILE_ROWS) // group).clamp_max(row.end - 1)
        out = torch.empty_like(packed)
        for tile in range(tiles):
            own = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
            blocks = int(positions[own][-1]) // block_keys + 1
            seen = self._seen(positions[own], blocks * block_keys, window).view(TILE_ROWS, blocks, block_keys)
            out[:, own] = _attended(
                packed[:, own], keys[:, :blocks], values[:, :blocks], seen.transpose(0, 1)
            )
        by_token = out[:, :count].view(heads, row.length, group, dim).transpose(0, 1)
        return by_token.reshape(row.length, -1, dim)

    @staticmethod
    def _seen(positions: Tensor, keys: int, window: int | None) -> Tensor:
        """[queries, keys] bool"""
        at, queries = torch.arange(keys), positions[:, None]
        seen = at <= queries
        return seen if window is None else seen & (at > queries - window)


def _attended(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """q [Hkv, rows, D], keys and values [Hkv, blocks, keys, D], seen [blocks, rows, keys] -> q's shape."""
    shape = keys.shape
    every = q[:, None].expand(-1, shape[1], -1, -1).reshape(-1, *q.shape[1:])
    scores = torch.bmm(every, keys.reshape(-1, *shape[2:]).transpose(1, 2)).view(*shape[:2], -1, shape[2])
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = (scores - scores.amax(dim=(1, 3), keepdim=True)).exp()
    parts = torch.bmm(weights.flatten(0, 1), values.reshape(-1, *shape[2:])).view(*shape[:2], *q.shape[1:])
    sums = weights.sum(dim=3, keepdim=True)
    total, out = sums[:, 0], parts[:, 0]
    for block in range(
        1, shape[1]
    ):  # in their order, so that later ones, of which all is zero, change nothing
        total, out = total + sums[:, block], out + parts[:, block]
    return out / total
