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

from engine.runtime.step.batch import PackedBatch, Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec

WORKSPACE_BYTES_MAX: Final = 16 << 20
"""Bytes of the gathered keys (or values) of one bucket, unless a single row needs more."""
QUERY_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows that are gathered together: b rows of P pages, L = P * page_size keys each."""

    rows: Tensor | None
    """The rows of the batch, [b]; None: all of them, in order."""
    gather: Tensor
    """Rows of the cache seen as [pages * Hkv, page_size * D]: [b * Hkv * P]."""
    bias: Tensor
    """0 where a key is seen, -inf where it is not: [b, 1, 1, L]."""


class TorchDecode:
    """The back end for rows of one token."""

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        self._cache = cache
        self._spec = spec
        self._workspace = _Workspace(cache.geometry.dtype)

    def prepare(self, batch: PackedBatch) -> _DecodeStep:
        rows = batch.rows[: batch.decode_rows]
        tables = batch.page_tables
        buckets = {window: self._buckets(rows, tables, window) for window in set(self._spec.windows)}
        return _DecodeStep(self._cache, self._spec, self._workspace, buckets)

    def _buckets(self, rows: Sequence[Row], tables: Tensor, window: int | None) -> list[_Bucket]:
        size = self._cache.geometry.page_size
        spans = []
        for index, row in enumerate(rows):
            first = _first_seen(row.end - 1, window) // size
            spans.append(_Span(index, first, (row.end - 1) // size + 1 - first, row.end))
        groups = list(self._groups(spans))
        return [self._bucket(group, tables, window, alone=len(groups) == 1) for group in groups]

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

    def _bucket(self, spans: Sequence[_Span], tables: Tensor, window: int | None, *, alone: bool) -> _Bucket:
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
        return _Bucket(None if alone else rows, gather, bias[:, None, None])


@dataclass(frozen=True, slots=True)
class _Span:
    """Pages [first, first + count) of a row's table, which hold all keys that the row sees, the last at end -
    1."""

    row: int
    first: int
    count: int
    end: int


class _DecodeStep:
    def __init__(
        self,
        cache: KVCache,
        spec: AttentionSpec,
        workspace: _Workspace,
        buckets: dict[int | None, list[_Bucket]],
    ) -> None:
        self._cache = cache
        self._spec = spec
        self._workspace = workspace
        self._buckets = buckets

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        buckets = self._buckets[self._spec.windows[layer]]
        if len(buckets) == 1:
            return self._attend(layer, q, buckets[0])
        out = torch.empty_like(q)
        for bucket in buckets:
            assert bucket.rows is not None
            out[bucket.rows] = self._attend(layer, q[bucket.rows], bucket)
        return out

    def _attend(self, layer: int, q: Tensor, bucket: _Bucket) -> Tensor:
        """q [b, H, D] -> [b, H, D]."""
        b, spec = len(q), self._spec
        packed = q.reshape(b, spec.kv_heads, -1, spec.head_dim) * spec.scale
        shape = (b, spec.kv_heads, -1, spec.head_dim)
        keys = self._workspace.gather(0, self._cache.keys[layer], bucket.gather).view(shape)
        values = self._workspace.gather(1, self._cache.values[layer], bucket.gather).view(shape)
        weights = (packed @ keys.transpose(2, 3) + bucket.bias).softmax(dim=-1)
        return (weights @ values).reshape(b, spec.heads, spec.head_dim)


class TorchPrefill:
    """The back end for rows of several tokens, with a cached past or without."""

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        self._cache = cache
        self._spec = spec
        self._workspace = _Workspace(cache.geometry.dtype)

    def prepare(self, batch: PackedBatch) -> _PrefillStep:
        size, heads = self._cache.geometry.page_size, self._spec.kv_heads
        rows, tables = batch.rows[batch.decode_rows :], batch.page_tables[batch.decode_rows :, None]
        gathers = [
            _gather_index(table[:, : -(-row.end // size)], heads)
            for row, table in zip(rows, tables, strict=True)
        ]
        return _PrefillStep(self._cache, self._spec, self._workspace, rows, gathers)


class _PrefillStep:
    def __init__(
        self,
        cache: KVCache,
        spec: AttentionSpec,
        workspace: _Workspace,
        rows: Sequence[Row],
        gathers: Sequence[Tensor],
    ) -> None:
        self._cache = cache
        self._spec = spec
        self._workspace = workspace
        self._rows = rows
        self._gathers = gathers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        base = self._rows[0].offset
        for row, gather in zip(self._rows, self._gathers, strict=True):
            own = slice(row.offset - base, row.offset - base + row.length)
            if row.start == 0:
                keys, values = k[own].transpose(0, 1), v[own].transpose(0, 1)
            else:
                keys, values = self._context(layer, row, gather)
            self._attend(out[own], q[own], keys, values, row.start, self._spec.windows[layer])
        return out

    def _context(self, layer: int, row: Row, gather: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [Hkv, end, D] of all tokens up to the chunk's last."""
        shape = (self._spec.kv_heads, -1, self._spec.head_dim)
        keys = self._workspace.gather(0, self._cache.keys[layer], gather).view(shape)
        values = self._workspace.gather(1, self._cache.values[layer], gather).view(shape)
        return keys[:, : row.end], values[:, : row.end]

    def _attend(
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


class _Workspace:
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
