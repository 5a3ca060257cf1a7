"""FlashAttention as a back end, version 2 or 3 (Dao 2023; Shah et al. 2024), where it is installed.

Both read the cache where it lies: they want pages as [page, page_size, Hkv, D] with any strides but the
last, and the cache's, [page, Hkv, page_size, D], are that with two axes exchanged. Version 2 wants pages of a
multiple of 256 tokens, version 3 takes any. Their causal mask is aligned to the last key, as here, and a
window counts the keys to the left of a query, itself not included.

Decode needs nothing from the host, so a CUDA graph holds it as it is; the number of splits of a row follows
from the shape of the page tables, which a graph does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import Ahead, AttentionSpec, DecodePages, PrefillPages, to_device


@dataclass(frozen=True, slots=True)
class Ragged:
    """The lengths of rows of several tokens, packed: int32, on the device."""

    q_starts: Tensor
    """The start of each row's queries, and the end of the last row's, [R + 1]."""
    k_starts: Tensor
    """The start of each row's keys if they were packed, and the end of the last row's, [R + 1]."""
    lengths: Tensor
    """The number of keys of each row, [R]."""
    q_len_max: int
    k_len_max: int

    @staticmethod
    def of(chunks: Sequence[Row], tables: Tensor) -> Ragged:
        """The lengths of chunks that follow each other without gaps."""
        q_starts = list(accumulate((chunk.length for chunk in chunks), initial=0))
        assert [chunk.offset for chunk in chunks] == q_starts[:-1]
        ends = [chunk.end for chunk in chunks]
        return Ragged(
            to_device(q_starts, tables.device),
            to_device(list(accumulate(ends, initial=0)), tables.device),
            to_device(ends, tables.device),
            max(chunk.length for chunk in chunks),
            max(ends),
        )


@dataclass(frozen=True, slots=True)
class Version2:
    """The calls of the package `flash_attn`. keys, values [pages, page_size, Hkv, D]; tables [R, P] int32."""

    library: ModuleType
    tables_name: ClassVar[str] = "block_table"

    def decode(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, **how: Any
    ) -> Tensor:
        """q [R, 1, H, D] -> the same shape."""
        how |= {self.tables_name: tables, "cache_seqlens": lengths}
        out: Tensor = self.library.flash_attn_with_kvcache(q, keys, values, **how)
        return out

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, rows: Ragged, **how: Any
    ) -> Tensor:
        """q [T, H, D] -> the same shape."""
        lengths = rows.q_starts, rows.k_starts, rows.q_len_max, rows.k_len_max
        out: Tensor = self.library.flash_attn_varlen_func(
            q, keys, values, *lengths, block_table=tables, **how
        )
        return out


class Version3(Version2):
    """The calls of the module `flash_attn_interface`. Its `flash_attn_varlen_func` takes no pages, but
    `flash_attn_with_kvcache` takes both kinds of rows."""

    tables_name = "page_table"

    def prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, rows: Ragged, **how: Any
    ) -> Tensor:
        how |= {"cu_seqlens_q": rows.q_starts, "max_seqlen_q": rows.q_len_max}
        return self.decode(q, keys, values, tables, rows.lengths, **how)


@dataclass(frozen=True, slots=True)
class _Layers:
    """A model's cache as the library sees it, layer by layer."""

    cache: KVCache
    spec: AttentionSpec

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.keys[layer].transpose(1, 2), self.cache.values[layer].transpose(1, 2)

    def how(self, layer: int) -> dict[str, Any]:
        window = self.spec.windows[layer]
        window_size = (-1, -1) if window is None else (window - 1, 0)
        return {"softmax_scale": self.spec.scale, "causal": True, "window_size": window_size}


class FlashDecode(DecodePages):
    """The back end for rows of one token."""

    def __init__(self, cache: KVCache, spec: AttentionSpec, version: Version2) -> None:
        self._layers = _Layers(cache, spec)
        self._version = version

    def on_device(self, tables: Tensor, lengths: Tensor, ahead: Ahead | None = None) -> FlashDecodeStep:
        return FlashDecodeStep(self._layers, self._version, tables.int(), lengths)


@dataclass(frozen=True, slots=True)
class FlashDecodeStep:
    layers: _Layers
    version: Version2
    tables: Tensor
    lengths: Tensor

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [R, H, D] -> the same shape."""
        pages, how = self.layers.pages(layer), self.layers.how(layer)
        return self.version.decode(q[:, None], *pages, self.tables, self.lengths, **how)[:, 0]


class FlashPrefill(PrefillPages):
    """The back end for rows of several tokens, with a cached past or without."""

    def __init__(self, cache: KVCache, spec: AttentionSpec, version: Version2) -> None:
        self._layers = _Layers(cache, spec)
        self._version = version

    def of_chunks(self, chunks: Sequence[Row], tables: Tensor) -> FlashPrefillStep:
        return FlashPrefillStep(self._layers, self._version, tables.int(), Ragged.of(chunks, tables))


@dataclass(frozen=True, slots=True)
class FlashPrefillStep:
    layers: _Layers
    version: Version2
    tables: Tensor
    rows: Ragged

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [T', H, D] -> the same shape."""
        pages, how = self.layers.pages(layer), self.layers.how(layer)
        return self.version.prefill(q, *pages, self.tables, self.rows, **how)
