"""Keys and values, in pages.

Layout, per layer: `[page, kv_head, page_size, head_dim]`, keys and values apart. A page of one head
is contiguous, which is the tile that attention reads.

A page that nobody owns may hold anything, NaN included: attention multiplies masked values by a
weight of zero, and zero times NaN is NaN. Two rules keep garbage out:

  1. Attention reads only pages that belong to the row.
  2. A page that a step begins and does not fill is wiped before it is written, so what lies behind
     a sequence's last token, in its last page, is zero and never a previous owner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.runtime.config import RunnerConfig
from engine.runtime.errors import DoesNotFit
from engine.runtime.models.config import ModelConfig

CACHE_MARGIN: Final = 0.25
"""Pages beyond what the slots can own, as a share of that: they keep prefixes of finished sequences."""
PAGES_MIN: Final = 2


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of a pool of pages."""

    layers: int
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """One page in all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where a step's tokens go, the same in every layer."""

    pages: Tensor
    """[T]"""
    offsets: Tensor
    """[T], within the page."""
    begun_pages: Tensor | None
    """[n]: pages that this step begins and leaves partly empty."""


class KVCache:
    """`keys[layer]` and `values[layer]` are [pages, Hkv, page_size, D]."""

    def __init__(self, geometry: KVGeometry, pages: int) -> None:
        self.geometry: Final = geometry
        self.pages: Final = pages
        shape = (pages, geometry.kv_heads, geometry.page_size, geometry.head_dim)
        # Uninitialised: the system hands out memory as pages are first written.
        self.keys: Final = [torch.empty(shape, dtype=geometry.dtype) for _ in range(geometry.layers)]
        self.values: Final = [torch.empty(shape, dtype=geometry.dtype) for _ in range(geometry.layers)]

    def write(self, layer: int, k: Tensor, v: Tensor, places: TokenPlaces) -> None:
        """k, v: [T, Hkv, D]."""
        keys, values = self.keys[layer], self.values[layer]
        if places.begun_pages is not None:
            keys.index_fill_(0, places.begun_pages, 0.0)
            values.index_fill_(0, places.begun_pages, 0.0)
        keys[places.pages, :, places.offsets] = k
        values[places.pages, :, places.offsets] = v


def page_count(
    config: RunnerConfig, model: ModelConfig, geometry: KVGeometry, max_model_len: int, available_bytes: int
) -> int:
    """How many pages to allocate. Raises DoesNotFit.

    `available_bytes` is what is free once the weights are in place. What a step needs for itself is
    set aside first. The result is never more than the slots could own, plus a margin for the prefix
    cache: a tiny model on a large machine takes little.
    """
    pages_per_sequence = -(-max_model_len // config.page_size)
    useful = int(config.max_num_seqs * pages_per_sequence * (1 + CACHE_MARGIN))
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        budget = int(max(0, available_bytes - step_bytes(config, model)) * config.memory_fraction)
    pages = min(budget // geometry.page_bytes, useful)
    if pages < PAGES_MIN:
        raise DoesNotFit(
            f"{budget >> 20} MiB hold only {pages} KV pages of {geometry.page_bytes >> 10} KiB; free memory, "
            "raise kv_cache_bytes or memory_fraction, or lower step_tokens_max"
        )
    return pages


def step_bytes(config: RunnerConfig, model: ModelConfig) -> int:
    """Activations of the largest step, from above: every live tensor of one layer, logits, sampling.

    Counted rather than profiled: a full step of a large model takes seconds on a CPU.
    """
    token = 4 * (4 * model.hidden_size + 3 * model.intermediate_size + 4 * model.heads * model.head_dim)
    row = 4 * 4 * model.vocab_size
    return config.step_tokens_max * token + config.max_num_seqs * row
