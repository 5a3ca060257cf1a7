"""The Triton kernels as attention back ends (`engine.runtime.step.protocols`).

Lengths, page tables and lists of work are prepared once per step and serve every layer. Decode takes them
from tensors on the device alone (`on_device`), so that a CUDA graph can hold the preparation too; for a
`PackedBatch` the host knows the lengths, and copies them to the device first, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.runtime.kernels.decode_attention import (
    DecodeScratch,
    DecodeWork,
    list_work,
    paged_decode,
    programs_of,
    query_counts,
    tile_tokens,
)
from engine.runtime.kernels.prefill_attention import paged_prefill, tile_list
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import (
    Ahead,
    AttentionSpec,
    DecodePages,
    PrefillPages,
    PrefillRows,
    to_device,
)
from engine.runtime.weights.fp8 import taken

FRESH_TOKENS_MIN: Final = 4096
"""The fewest tokens of a prompt that goes to the library. It needs a copy of keys and values and several
launches for each prompt. On an H200 a prompt of 2,048 tokens took 1.01 times as long with it as with our own
kernel for a model of 8B and 1.76 times for one of 0.6B, and one of 8,192 tokens 0.97 times for 8B."""
FRESH_TOKENS_MULTIPLE: Final = 512
"""The multiple of tokens to which prompts are rounded up for the library. cuDNN plans each length anew while
the host waits; so all multiples are planned before the first request."""
assert FRESH_TOKENS_MIN % FRESH_TOKENS_MULTIPLE == 0


class TritonDecode(DecodePages):
    """Back end for rows of one token, and for the tokens of rows that verify drafts. Owns the memory in which
    segments meet: one per device and stream."""

    def __init__(
        self,
        cache: KVCache,
        spec: AttentionSpec,
        *,
        rows_max: int,
        multiprocessors: int,
        dtype: torch.dtype | None = None,
        together_max: int = 1,
    ) -> None:
        """`dtype`: of queries; None: as the cache's, or bfloat16 for one in fp8. `together_max`: the tokens
        of a row at most."""
        self.cache: Final = cache
        self.spec: Final = spec
        device, stored = cache.keys[0].device, cache.geometry.dtype
        self.dtype: Final = dtype or (torch.bfloat16 if stored == torch.float8_e4m3fn else stored)
        self.tile: Final = tile_tokens(cache.geometry.page_size, spec.head_dim, self.dtype)
        self.together = query_counts(spec.heads // spec.kv_heads, spec.head_dim, together_max)
        self._programs_of = partial(programs_of, multiprocessors, stored)
        self._programs = self._programs_of()
        self.work: Final = {window: DecodeWork.empty(self._programs, device) for window in set(spec.windows)}
        heads = spec.heads, spec.kv_heads, spec.head_dim
        most = max(self.together, default=1)
        self.scratch: Final = DecodeScratch.empty(self._programs, rows_max, *heads, device, most)

    def on_device(self, tables: Tensor, lengths: Tensor, ahead: Ahead | None = None) -> TritonDecodeStep:
        behind, queries, programs = None, 1, self._programs
        if ahead is not None and self.together:
            behind, queries = ahead.behind, next(count for count in self.together if count >= ahead.most)
            programs = self._programs_of(queries * self.spec.heads // self.spec.kv_heads)
        for window, work in self.work.items():
            own = self.spec.kv_heads, window, self.tile, work
            list_work(lengths, *own, programs=programs, behind=behind)
        return TritonDecodeStep(self, tables, lengths, programs, behind, queries)


@dataclass(frozen=True, slots=True)
class TritonDecodeStep:
    back_end: TritonDecode
    tables: Tensor
    lengths: Tensor
    programs: int
    behind: Tensor | None = None
    """The tokens of the same row behind each; None: each is a row."""
    queries: int = 1
    """The tokens of a row for which the kernel has room."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [R, H, D] -> the same shape."""
        own = self.back_end
        window = own.spec.windows[layer]
        return paged_decode(
            q,
            own.cache.keys[layer],
            own.cache.values[layer],
            self.tables,
            self.lengths,
            own.work[window],
            own.scratch,
            scale=own.spec.scale,
            window=window,
            kv_scales=own.cache.scales[layer],
            programs=self.programs,
            tile=own.tile,
            behind=self.behind,
            queries=self.queries,
        )


class TritonPrefill(PrefillPages):
    """Back end for rows of several tokens, new or continuing."""

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        self._cache = cache
        self._spec = spec

    def of_chunks(self, chunks: Sequence[Row], tables: Tensor) -> TritonPrefillStep:
        """tables [R, P], a row per chunk, on the device."""
        device, group = tables.device, self._spec.heads // self._spec.kv_heads
        tiles = {
            window: to_device(tile_list(chunks, group, window), device) for window in set(self._spec.windows)
        }
        columns = to_device([(chunk.start, chunk.length, chunk.offset) for chunk in chunks], device)
        tokens = max(chunk.offset + chunk.length for chunk in chunks)
        return TritonPrefillStep(self._cache, self._spec, tables, columns, tiles, tokens)


@dataclass(frozen=True, slots=True)
class TritonPrefillStep:
    cache: KVCache
    spec: AttentionSpec
    tables: Tensor
    chunks: Tensor
    tiles: Mapping[int | None, Tensor]
    tokens: int
    """The packed tokens up to the end of the last chunk."""

    def __call__(self, layer: int, q: Tensor, *, out: Tensor | None = None) -> Tensor:
        """q [T', H, D] -> the same shape, in `out` where that is given."""
        assert self.tokens <= len(q)
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
            kv_scales=self.cache.scales[layer],
            out=out,
        )


PromptAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Causal attention of one prompt: q [H, L, D], k and v [Hkv, L, D], the factor of scores -> [H, L, D]."""


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """cuDNN's kernel, the fastest for whole prompts on Hopper; FlashAttention where cuDNN declines."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
    return out[0]


class LibraryPrefill(PrefillPages):
    """Prefill with a library for long prompts that have no cached past, and the Triton kernel for other rows.

    The library wants keys and values side by side: they are copied out of their pages, which takes a
    hundredth of the time that a prompt of `FRESH_TOKENS_MIN` spends in attention. A prompt is rounded up
    with zeros behind its last token, which no other token sees. Layers with a window shorter than the prompt
    stay with the Triton kernel, which skips what the window hides.
    """

    def __init__(
        self, cache: KVCache, spec: AttentionSpec, library: PromptAttention = cudnn_attention
    ) -> None:
        self._cache = cache
        self._spec = spec
        self._library = library
        self._triton = TritonPrefill(cache, spec)

    def warm_up(self, tokens_max: int, dtype: torch.dtype) -> None:
        """Have the library plan every length that a prompt in `dtype` can be rounded up to."""
        spec, device = self._spec, self._cache.keys[0].device
        if None not in spec.windows:
            return
        for length in range(FRESH_TOKENS_MIN, tokens_max + FRESH_TOKENS_MULTIPLE, FRESH_TOKENS_MULTIPLE):
            q = torch.zeros(length, spec.heads, spec.head_dim, dtype=dtype, device=device)
            k, v = torch.zeros(2, spec.kv_heads, length, spec.head_dim, dtype=dtype, device=device)
            self._library(q.transpose(0, 1), k, v, self._spec.scale)

    def of_chunks(self, chunks: Sequence[Row], tables: Tensor) -> PrefillRows:
        """tables [R, P], a row per chunk, on the device."""
        whole = self._triton.of_chunks(chunks, tables)
        fresh = [i for i, chunk in enumerate(chunks) if chunk.start == 0 and chunk.length >= FRESH_TOKENS_MIN]
        if not fresh:
            return whole
        others = [i for i in range(len(chunks)) if i not in fresh]
        rest = None
        if others:  # a list as an index would be copied to the device, and waited for
            others_tables = torch.stack([tables[i] for i in others])
            rest = self._triton.of_chunks([chunks[i] for i in others], others_tables)
        rows = [(chunks[i], tables[i]) for i in fresh]
        return LibraryPrefillStep(self._cache, self._spec, self._library, rows, rest, whole)


@dataclass(frozen=True, slots=True)
class LibraryPrefillStep:
    cache: KVCache
    spec: AttentionSpec
    library: PromptAttention
    fresh: Sequence[tuple[Row, Tensor]]
    """The chunks that the library computes, each with its page table [P]."""
    rest: TritonPrefillStep | None
    whole: TritonPrefillStep
    """All rows by the Triton kernel, for layers with a window."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [T', H, D] -> the same shape."""
        if self.spec.windows[layer] is not None:
            return self.whole(layer, q)
        out = q.new_empty(q.shape)
        if self.rest is not None:
            self.rest(layer, q, out=out)
        for chunk, table in self.fresh:
            own = slice(chunk.offset, chunk.offset + chunk.length)
            query = _rounded_up(q[own], 0).transpose(0, 1)
            keys, values = (
                _rounded_up(self._copied(part[layer], table, chunk.length, scale, q.dtype), 1)
                for part, scale in zip(
                    (self.cache.keys, self.cache.values), self.cache.scales[layer], strict=True
                )
            )
            out[own] = self.library(query, keys, values, self.spec.scale)[:, : chunk.length].transpose(0, 1)
        return out

    def _copied(self, pages: Tensor, table: Tensor, length: int, scale: float, dtype: torch.dtype) -> Tensor:
        """A row's keys or values, [Hkv, length, D], copied from `pages` [pages, Hkv, page_size, D]."""
        count = -(-length // pages.shape[2])
        found = taken(pages, table[:count]).transpose(0, 1)
        found = found.reshape(pages.shape[1], -1, pages.shape[3])[:, :length]
        return found if pages.dtype == dtype else (found.float() * scale).to(dtype)


def _rounded_up(x: Tensor, tokens: int) -> Tensor:
    """[tokens, heads, D] or [heads, tokens, D], by `tokens` -> the same with zeros behind, as many tokens
    as a multiple of `FRESH_TOKENS_MULTIPLE`. Strides are as they were: the library plans for those, too."""
    missing = -x.shape[tokens] % FRESH_TOKENS_MULTIPLE
    return F.pad(x, (0, 0) * (2 - tokens) + (0, missing)) if missing else x
