"""The Triton kernels as attention back ends (`engine.runtime.attention`).

What a step needs (lengths, page tables, lists of work) is prepared once and serves every layer. Decode takes
it from tensors on the device alone (`on_device`), so that a CUDA graph can hold the preparation too; from a
`Batch`, whose rows the host knows, it copies lengths there first, without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runtime.attention import AttentionSpec
from engine.runtime.batch import Batch
from engine.runtime.kernels.decode_attention import (
    DecodeScratch,
    DecodeWork,
    list_work,
    paged_decode,
    split_count,
)
from engine.runtime.kernels.prefill_attention import Chunk, paged_prefill, tile_list
from engine.runtime.kv_cache import KVCache


class TritonDecode:
    """Back end for rows of one token. Owns the memory in which splits meet: one per device and stream."""

    def __init__(
        self, cache: KVCache, spec: AttentionSpec, *, rows_max: int, length_max: int, programs: int
    ) -> None:
        self._cache = cache
        self._spec = spec
        self._programs = programs
        device, page_size = cache.keys[0].device, cache.geometry.page_size
        windows = set(spec.windows)
        self._work = {window: DecodeWork.empty(rows_max, device) for window in windows}
        splits = max(split_count(length_max, window, page_size) for window in windows)
        heads = spec.heads, spec.kv_heads, spec.head_dim
        self._scratch = DecodeScratch.empty(rows_max, *heads, splits, device)

    def prepare(self, batch: Batch, tables: Tensor | None = None) -> TritonDecodeStep:
        """`tables`: the decode rows' page tables, if they are on the device already."""
        rows = batch.decode_rows
        lengths = _to_device([row.end for row in batch.rows[:rows]], self._cache.keys[0].device)
        return self.on_device(batch.page_tables[:rows] if tables is None else tables, lengths)

    def on_device(self, tables: Tensor, lengths: Tensor) -> TritonDecodeStep:
        """tables [R, P], lengths [R] int32, both on the device: launches only, nothing is read back."""
        for window, work in self._work.items():
            list_work(lengths, window, self._cache.geometry.page_size, work)
        return TritonDecodeStep(
            self._cache, self._spec, self._work, self._scratch, tables, lengths, self._programs
        )


@dataclass(frozen=True, slots=True)
class TritonDecodeStep:
    cache: KVCache
    spec: AttentionSpec
    work: Mapping[int | None, DecodeWork]
    scratch: DecodeScratch
    tables: Tensor
    lengths: Tensor
    programs: int

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [R, H, D] -> the same shape."""
        window = self.spec.windows[layer]
        return paged_decode(
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            self.tables,
            self.lengths,
            self.work[window],
            self.scratch,
            scale=self.spec.scale,
            window=window,
            programs=self.programs,
        )


class TritonPrefill:
    """Back end for rows of several tokens, new or continuing."""

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        self._cache = cache
        self._spec = spec

    def prepare(self, batch: Batch, tables: Tensor | None = None) -> TritonPrefillStep:
        """`tables`: the page tables of the rows after the decode rows, if they are on the device already."""
        rows = batch.rows[batch.decode_rows :]
        base = rows[0].offset
        chunks = [Chunk(row.start, row.length, row.offset - base) for row in rows]
        tables = batch.page_tables[batch.decode_rows :] if tables is None else tables
        return self.of_chunks(chunks, tables)

    def of_chunks(self, chunks: Sequence[Chunk], tables: Tensor) -> TritonPrefillStep:
        """tables [R, P], a row per chunk, on the device."""
        device, group = tables.device, self._spec.heads // self._spec.kv_heads
        tiles = {
            window: _to_device(tile_list(chunks, group, window), device) for window in set(self._spec.windows)
        }
        columns = _to_device([(chunk.start, chunk.length, chunk.offset) for chunk in chunks], device)
        return TritonPrefillStep(self._cache, self._spec, tables, columns, tiles)


@dataclass(frozen=True, slots=True)
class TritonPrefillStep:
    cache: KVCache
    spec: AttentionSpec
    tables: Tensor
    chunks: Tensor
    tiles: Mapping[int | None, Tensor]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """q [T', H, D] -> the same shape. Keys and values are read from the cache, wherever else they are."""
        window = self.spec.windows[layer]
        return paged_prefill(
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            self.tables,
            self.chunks,
            self.tiles[window],
            scale=self.spec.scale,
            window=window,
        )


def _to_device(numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int32, from pinned memory where there is a device to copy to: the host does not wait."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
