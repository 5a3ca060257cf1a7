"""Paged attention on CPU, in torch operations alone.

Decode gathers each row's pages into a contiguous block and multiplies. Rows of like length, within a
factor of two, share a bucket, so that one long sequence does not make the short ones read its
padding. Padding repeats the row's own last page: masked values are then finite (see kv_cache.py), and
no other sequence's page is read. The query heads of one group are packed as rows of the same
matrix: SDPA's `enable_gqa` is several times slower here.

Prefill runs row by row. Each chunk sees its cached context through one gather; long chunks are cut
into blocks of queries, which bounds the mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec

WORKSPACE_BYTES_MAX: Final = 16 << 20
"""Bytes of the gathered keys (or values) of one bucket, unless a single row needs more."""
QUERY_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows that are gathered together: b rows of P pages, L = P * page_size keys each."""

    rows: Tensor
    """The rows of the batch, [b]."""
    gather: Tensor
    """Rows of the cache seen as [pages * Hkv, page_size * D]: [b * Hkv * P]."""
    bias: Tensor
    """0 where a key is seen, -inf where it is not: [b, 1, 1, L]."""


class PagedAttention:
    """Implements `StepAttention` over pages: stores a step's keys and values, then computes its decode rows
    and the rows behind them."""

    def __init__(self, cache: KVCache, batch: PackedBatch, spec: AttentionSpec, workspace: Workspace) -> None:
        self._cache = cache
        self._batch = batch
        self._spec = spec
        self._workspace = workspace
        n, tables = batch.decode_rows, batch.page_tables
        self._buckets = {window: self._bucketed(tables, window) for window in set(spec.windows)}
        self._chunks = [
            (row, _gather_index(table[None, : -(-row.end // cache.geometry.page_size)], spec.kv_heads))
            for row, table in zip(batch.rows[n:], tables[n:], strict=True)
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] -> the attention of q [T, H, D], in q's shape."""
        self._cache.write(layer, k, v, self._batch.places)
        window = self._spec.windows[layer]
        buckets = self._buckets[window]
        if len(buckets) == 1 and not self._chunks:
            return self._decoded(layer, q, buckets[0])
        out = torch.empty_like(q)
        for bucket in buckets:
            out[bucket.rows] = self._decoded(layer, q[bucket.rows], bucket)
        for row, gather in self._chunks:
            own = slice(row.offset, row.offset + row.length)
            if row.start == 0:
                keys, values = k[own].transpose(0, 1), v[own].transpose(0, 1)
            else:
                keys, values = (part[0, :, : row.end] for part in self._gathered(layer, gather, 1))
            self._prefill(out[own], q[own], keys, values, row.start, window)
        return out

    def _gathered(self, layer: int, gather: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The keys and values of some rows' pages, [rows, Hkv, keys, D] each."""
        shape = (rows, self._spec.kv_heads, -1, self._spec.head_dim)
        keys = self._workspace.gather(0, self._cache.keys[layer], gather)
        values = self._workspace.gather(1, self._cache.values[layer], gather)
        return keys.view(shape), values.view(shape)

    # -- decode rows ------------------------------------------------------------------------------

    def _decoded(self, layer: int, q: Tensor, bucket: _Bucket) -> Tensor:
        """q [b, H, D] -> [b, H, D]."""
        spec = self._spec
        packed = q.reshape(len(q), spec.kv_heads, -1, spec.head_dim) * spec.scale
        keys, values = self._gathered(layer, bucket.gather, len(q))
        weights = (packed @ keys.transpose(2, 3) + bucket.bias).softmax(dim=-1)
        return (weights @ values).reshape(q.shape)

    def _bucketed(self, tables: Tensor, window: int | None) -> list[_Bucket]:
        size = self._cache.geometry.page_size
        spans = []
        for index, row in enumerate(self._batch.rows[: self._batch.decode_rows]):
            first = _first_seen(row.end - 1, window) // size
            spans.append(_Span(index, first, (row.end - 1) // size + 1 - first, row.end))
        return [self._bucket(group, tables, window) for group in self._groups(spans)]

    def _groups(self, spans: Sequence[_Span]) -> Iterable[Sequence[_Span]]:
        """The spans in groups of like size, as many in each as the workspace takes, in the order of their
        rows."""
        members: defaultdict[int, list[_Span]] = defaultdict(list)
        for span in spans:
            members[1 << (span.count - 1).bit_length()].append(span)
        geometry = self._cache.geometry
        page_bytes = geometry.page_bytes // (2 * geometry.layers)
        for pages, alike in sorted(members.items()):
            at_once = max(1, WORKSPACE_BYTES_MAX // (pages * page_bytes))
            yield from (alike[i : i + at_once] for i in range(0, len(alike), at_once))

    def _bucket(self, spans: Sequence[_Span], tables: Tensor, window: int | None) -> _Bucket:
        geometry = self._cache.geometry
        rows = torch.tensor([span.row for span in spans])
        first = torch.tensor([[span.first] for span in spans])
        last = torch.tensor([[span.first + span.count - 1] for span in spans])
        end = torch.tensor([[span.end] for span in spans])
        width = max(span.count for span in spans)
        pages = tables[rows[:, None], torch.minimum(first + torch.arange(width), last)]
        keys_at = first * geometry.page_size + torch.arange(width * geometry.page_size)
        hidden = keys_at >= end
        if window is not None:
            hidden |= keys_at < end - window
        bias = torch.zeros(hidden.shape, dtype=geometry.dtype).masked_fill_(hidden, -torch.inf)
        gather = _gather_index(pages, geometry.kv_heads)
        return _Bucket(rows, gather, bias[:, None, None])

    # -- the rows behind them ---------------------------------------------------------------------

    def _prefill(
        self, out: Tensor, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None
    ) -> None:
        """q, out [t, H, D] at positions start...; keys, values [Hkv, start + t, D].

        The key-value head is SDPA's batch, so that a group reads one head's keys through a stride of
        zero instead of through copies.
        """
        spec = self._spec
        grouped = q.view(len(q), spec.kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        whole = start == 0 and (window is None or window >= len(q))
        for block in [slice(0, len(q))] if whole else _blocks(len(q)):
            seen = slice(_first_seen(start + block.start, window), start + block.stop)
            attended = F.scaled_dot_product_attention(
                grouped[:, :, block],
                keys[:, None, seen].expand(-1, grouped.shape[1], -1, -1),
                values[:, None, seen].expand(-1, grouped.shape[1], -1, -1),
                attn_mask=None if whole else _mask(start, block, seen, window),
                is_causal=whole,
                scale=spec.scale,
            )
            out[block] = attended.permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Span:
    """Pages [first, first + count) of a row's table, which hold all keys that the row sees, the last at end -
    1."""

    row: int
    first: int
    count: int
    end: int


class Workspace:
    """The memory for gathered keys and values, kept between calls: a fresh allocation costs ten times the
    copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffers = [torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)]

    def gather(self, which: int, cache: Tensor, index: Tensor) -> Tensor:
        """Copy rows `index` [n] of a layer's cache, seen as [pages * Hkv, page_size * D] -> [n, page_size *
        D]."""
        tiles = cache.view(-1, cache.shape[2] * cache.shape[3])
        needed = len(index) * tiles.shape[1]
        if self._buffers[which].numel() < needed:
            self._buffers[which] = torch.empty(needed, dtype=cache.dtype)
        out = self._buffers[which][:needed].view(len(index), -1)
        torch.index_select(tiles, 0, index, out=out)
        return out


def _gather_index(pages: Tensor, kv_heads: int) -> Tensor:
    """pages [b, P] -> rows of the cache [b * Hkv * P], in an order that puts a head's pages side by side."""
    return (pages[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten()


def _mask(start: int, block: slice, seen: slice, window: int | None) -> Tensor:
    """[queries, keys] bool: True where the query sees the key."""
    queries = torch.arange(start + block.start, start + block.stop)[:, None]
    keys = torch.arange(seen.start, seen.stop)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def _blocks(length: int) -> Iterable[slice]:
    return (slice(i, min(i + QUERY_BLOCK, length)) for i in range(0, length, QUERY_BLOCK))


def _first_seen(position: int, window: int | None) -> int:
    """The first key that a query at this position sees."""
    return 0 if window is None else max(0, position - window + 1)
