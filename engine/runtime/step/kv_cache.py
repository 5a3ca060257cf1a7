"""Keys and values in pages, for paged attention, and a second, larger pool of pages in host memory.

Layout, per layer: `[page, kv_head, page_size, head_dim]`, keys and values apart. A page of one head
is contiguous, which is the tile that attention reads.

A page that no sequence owns may hold anything, NaN included: attention multiplies masked values by a
weight of zero, and zero times NaN is NaN. Three rules keep garbage out:

  1. Attention reads only pages that belong to the row.
  2. A page that a step begins and does not fill is cleared before it is written, so the places behind a
     sequence's last token, in its last page, are zero and never a previous owner's values.
  3. A fork copies a page whole, since the native kernels lay tokens out in their own order. So behind the
     tokens that count are values of the source, which are finite: a sequence that has others fails, and its
     pages are not found any more. On a GPU, where it may have failed in a step in flight, they are cleared if
     the attention does not mask what it loads.

Host memory (`HostPages`) keeps a page's layers side by side. Full pages are copied there when the prefix
cache evicts them, and back before anything reads them again.
On a GPU the memory is pinned and the copies are queued like any other work of the step. Pages are *staged*:
one kernel gathers the layers of many pages in a buffer on the device, and each run of neighbouring host pages
is one transfer. On a CPU both pools are RAM, and a copy is a `memcpy`, page by page: still far cheaper than
computing a page again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.spec import DecoderSpec
from engine.runtime.setup.model_errors import DoesNotFit
from engine.runtime.setup.runner_config import RunnerConfig

Move = tuple[int, int]
"""A copy of a page: its source and its target."""
Fork = tuple[int, int, int]
"""A copy of a page's first tokens: its source, its target, and their number."""

CACHE_MARGIN: Final = 0.25
"""Pages beyond what the slots can own, as a share of that: they keep prefixes of finished sequences."""
STATES_PER_SLOT: Final = 2
"""Snapshots of states for each slot, of its prompt's end and of its answer, beside those along long
prompts."""
PAGES_MIN: Final = 2
WINDOWS_PART: Final = 2
"""Windows for drafts take this part at most of what pages take, a half, `WINDOWS_BESIDE` pages left out: no
model fails to fit for them."""
WINDOWS_BESIDE: Final = 2 * PAGES_MIN
SWAP_BYTES_DEFAULT: Final = 4 << 30
KV_SHARE_DEFAULT: Final = 0.5
"""The KV cache's default part of the host memory that is free once the weights are loaded."""
SWAP_SHARE_DEFAULT: Final = 0.25
"""Share of the memory that is free before the cache is allocated. The default is the lesser of this share and
`SWAP_BYTES_DEFAULT`."""
STAGING_BYTES: Final = 32 << 20
"""The device memory, in bytes, in which pages are staged. One page that is larger is staged alone."""
MEASURED_PAGES: Final = 8
MEASURED_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of a pool of pages."""

    layers: int
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The places of a step's tokens in the cache, the same in every layer."""

    pages: Tensor
    """Each token's page, [T]."""
    offsets: Tensor
    """Each token's place in its page, [T]."""
    begun_pages: Tensor | None
    """The pages that this step begins and leaves partly empty, [n]; None: there are none."""


class KVCache:
    """`keys[layer]` and `values[layer]` are [pages, Hkv, page_size, D]."""

    def __init__(
        self,
        geometry: KVGeometry,
        pages: int,
        scales: Sequence[tuple[float, float]] | None = None,
        device: torch.device | None = None,
        pool: Tensor | None = None,
    ) -> None:
        """`scales`: per layer, the factors of stored keys and of stored values; None: 1. `device`: the pool's
        device; None is torch's default. `pool`: that of a cache which these layers are a part of; None: it is
        allocated."""
        self.geometry: Final = geometry
        self.pages: Final = pages
        self.scales: Final = [(1.0, 1.0)] * geometry.layers if scales is None else list(scales)
        self.clear_tails = False
        """True if the kernel that stores on a device has to keep the second rule: Triton's attention kernels
        mask what they load, some libraries' do not."""
        shape = (pages, geometry.kv_heads, geometry.page_size, geometry.head_dim)
        # Uninitialised: the system hands out memory as pages are first written.
        self.pool: Final = (
            torch.empty(2, geometry.layers, *shape, dtype=geometry.dtype, device=device)
            if pool is None
            else pool
        )
        self.keys: Final = list(self.pool[0])
        self.values: Final = list(self.pool[1])

    def part(self, layers: slice) -> KVCache:
        """Some of the layers, over the same memory."""
        pool = self.pool[:, layers]
        return KVCache(
            replace(self.geometry, layers=pool.shape[1]), self.pages, self.scales[layers], pool=pool
        )

    def write(self, layer: int, k: Tensor, v: Tensor, places: TokenPlaces) -> None:
        """Store a step's keys and values, [T, Hkv, D] each."""
        keys, values = self.keys[layer], self.values[layer]
        if places.begun_pages is not None:
            keys.index_fill_(0, places.begun_pages, 0.0)
            values.index_fill_(0, places.begun_pages, 0.0)
        keys[places.pages, :, places.offsets] = k
        values[places.pages, :, places.offsets] = v

    def fork(self, forked: Sequence[Fork]) -> None:
        """Copy the first tokens of pages to other pages, in this order (third rule)."""
        for source, page, length in forked:
            self.pool[:, :, page].copy_(self.pool[:, :, source])
            if self.clear_tails:
                self.pool[:, :, page, :, length:].zero_()


class HostPages:
    """A pool of pages in host memory, beside a cache's own."""

    def __init__(self, cache: KVCache, pages: int, *, stages: bool | None = None) -> None:
        """`stages`: whether copies are staged; None: on a GPU."""
        self.pages: Final = pages
        self._cache: Final = cache
        self._stages: Final = cache.pool.is_cuda if stages is None else stages
        self._staged_max: Final = max(1, STAGING_BYTES // cache.geometry.page_bytes)
        both, layers, _, *page = cache.pool.shape
        is_pinned = cache.pool.is_cuda and pages > 0
        # All layers of a page side by side: one copy moves it.
        self._pool: Final = torch.empty(
            pages, both, layers, *page, dtype=cache.pool.dtype, pin_memory=is_pinned, device="cpu"
        )
        self._words: Final = _in_words(cache.pool).movedim(2, 0)
        """The cache as [pages, 2, layers, words of a page in a layer], for staged copies."""
        self._host_words: Final = _in_words(self._pool)
        """Host memory in the same shape."""
        self.keys: Final = list(self._pool[:, 0].unbind(1))
        self.values: Final = list(self._pool[:, 1].unbind(1))

    def copy(self, out: Sequence[Move], back: Sequence[Move], forked: Sequence[Fork] = ()) -> None:
        """Copy (page, host page) pairs out, then fork pages, then copy (host page, page) pairs back. No page
        is the target of two copies out, or of two back."""
        cache, host = self._cache.pool, self._pool
        if self._stages:
            self._copy_staged(out, back, forked)
            return
        for page, host_page in out:
            host[host_page].copy_(cache[:, :, page])
        self._cache.fork(forked)
        for host_page, page in back:
            cache[:, :, page].copy_(host[host_page])

    def _copy_staged(self, out: Sequence[Move], back: Sequence[Move], forked: Sequence[Fork]) -> None:
        cache, host = self._words, self._host_words
        for moves in self._batches((host_page, page) for page, host_page in out):
            staged = cache.index_select(0, self._places(moves))
            for at, first, count in _runs(moves):
                host[first : first + count].copy_(staged[at : at + count], non_blocking=True)
        self._cache.fork(forked)
        for moves in self._batches(back):
            staged = cache.new_empty(len(moves), *cache.shape[1:])
            for at, first, count in _runs(moves):
                staged[at : at + count].copy_(host[first : first + count], non_blocking=True)
            cache.index_copy_(0, self._places(moves), staged)

    def _batches(self, moves: Iterable[Move]) -> Iterator[list[Move]]:
        """(host page, page) pairs in the order of host pages, as many at a time as are staged."""
        ordered = sorted(moves)
        for at in range(0, len(ordered), self._staged_max):
            yield ordered[at : at + self._staged_max]

    def _places(self, moves: Sequence[Move]) -> Tensor:
        """The pages of (host page, page) pairs, [n], sent to the device without waiting for it."""
        pool = self._cache.pool
        places = torch.tensor([page for _, page in moves], pin_memory=pool.is_cuda, device="cpu")
        return places.to(pool.device, non_blocking=True)

    def view(self, host_page: int) -> memoryview:
        """The bytes of a host page, for other threads (`engine.core.pages.host_pool` says which may)."""
        return self._pool[host_page].view(-1).view(torch.uint8).numpy().data

    def measure(self) -> float:
        """Seconds to copy one page out or back, the least of a few rounds; 0 without host pages. Overwrites
        pages."""
        everything = [(page, page) for page in range(min(self.pages, self._cache.pages, MEASURED_PAGES))]
        if not everything:
            return 0.0
        rounds = []
        for _ in range(MEASURED_ROUNDS):
            started_s = time.perf_counter()
            self.copy(everything, everything)
            if self._cache.pool.is_cuda:
                torch.cuda.synchronize()
            rounds.append(time.perf_counter() - started_s)
        return min(rounds) / (2 * len(everything))


def _in_words(pool: Tensor) -> Tensor:
    """A pool with all that a layer has of a page, [..., words], in the largest words that its bytes fill:
    what moves pages takes such words whatever the type of keys and values, fp8 included."""
    flat = pool.flatten(3).view(torch.uint8)
    return flat.view(torch.int64) if flat.shape[-1] % 8 == 0 else flat


def _runs(moves: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
    """The runs of neighbouring host pages among ordered (host page, page) pairs: the place of the first among
    the pairs, its host page, and their number."""
    at = 0
    for end in range(1, len(moves) + 1):
        if end == len(moves) or moves[end][0] != moves[end - 1][0] + 1:
            yield at, moves[at][0], end - at
            at = end


def page_count(
    config: RunnerConfig,
    model: DecoderSpec,
    geometry: KVGeometry,
    max_model_len: int,
    available_bytes: int,
    states_bytes: int = 0,
    snapshots_bytes: int = 0,
    windows_bytes: int = 0,
) -> int:
    """The number of pages to allocate. Raises DoesNotFit.

    `available_bytes` is the memory that is free once the weights are loaded. The memory of a step is set
    aside first. `states_bytes`, which all slots' states take, are part of what the KV cache gets, and so are
    `snapshots_bytes` (`pages_within`) and `windows_bytes` (`window_count`). The result is never more than the
    slots could own, plus a margin for the prefix cache: a tiny model on a large machine takes little.
    """
    useful = useful_pages(config, max_model_len)
    if config.kv_cache_memory is not None:
        budget = config.kv_cache_memory
    else:
        budget = int(max(0, available_bytes - step_bytes(config, model)) * KV_SHARE_DEFAULT)
    rest = max(0, budget - states_bytes)
    pages = min(pages_within(rest, geometry.page_bytes, snapshots_bytes, windows_bytes), useful)
    if pages < PAGES_MIN:
        states = f" beside {states_bytes >> 20} MiB of states" if states_bytes else ""
        others = ", --max-num-seqs" if states_bytes else ""
        raise DoesNotFit(
            f"{budget >> 20} MiB hold only {pages} KV pages of {geometry.page_bytes >> 10} KiB{states}; free "
            f"memory, raise --kv-cache-memory, or lower --max-step-tokens{others}"
        )
    return pages


def pages_within(memory_bytes: int, page_bytes: int, snapshots_bytes: int, windows_bytes: int = 0) -> int:
    """The number of pages that memory holds beside windows for drafts and snapshots of states, of which those
    that are of use take so much: windows get their part of it (`window_count`), and of the rest snapshots as
    much as the pages at most (`state_place_count`)."""
    above = max(0, memory_bytes - WINDOWS_BESIDE * page_bytes)
    rest = memory_bytes - min(above // (WINDOWS_PART + 1), windows_bytes)
    return (rest - min(max(0, rest) // 2, snapshots_bytes)) // page_bytes


def host_page_count(
    config: RunnerConfig, geometry: KVGeometry, max_model_len: int, available_bytes: int
) -> int:
    """The number of pages of host memory to set aside; by itself never more than the slots could own."""
    if config.swap_memory is not None:
        return config.swap_memory // geometry.page_bytes
    budget = min(SWAP_BYTES_DEFAULT, int(available_bytes * SWAP_SHARE_DEFAULT))
    useful = config.max_num_seqs * _pages_per_sequence(config, max_model_len)
    return min(budget // geometry.page_bytes, useful)


def useful_pages(config: RunnerConfig, max_model_len: int) -> int:
    """The number of pages that the slots could own, and a margin for prefixes of finished sequences."""
    return int(config.max_num_seqs * _pages_per_sequence(config, max_model_len) * (1 + CACHE_MARGIN))


def useful_states(config: RunnerConfig, geometry: KVGeometry, max_model_len: int, state_bytes: int) -> int:
    """The number of snapshots that the slots' sequences could have, and a margin for those that ended: along
    a prompt of theirs they take no more memory than its pages (`engine.core.scheduler_config`)."""
    if not (state_bytes and config.prefix_cache):
        return 0
    along = _pages_per_sequence(config, max_model_len) * geometry.page_bytes // state_bytes
    return int(config.max_num_seqs * (STATES_PER_SLOT + along) * (1 + CACHE_MARGIN))


def state_place_count(
    config: RunnerConfig, geometry: KVGeometry, max_model_len: int, pages: int, state_bytes: int
) -> int:
    """The number of places for snapshots beside so many pages: as many as are useful, and no more memory than
    the pages take."""
    useful = useful_states(config, geometry, max_model_len, state_bytes)
    return min(useful, pages * geometry.page_bytes // max(1, state_bytes))


def useful_windows(config: RunnerConfig, drafts_max: int) -> int:
    """The number of drafts that a step may verify of a model with states: as many as there are slots, those
    of one row at least."""
    return min(config.max_num_seqs * drafts_max, max(config.max_num_seqs, drafts_max))


def window_count(useful: int, geometry: KVGeometry, pages: int, state_bytes: int) -> int:
    """The number of states for drafts beside so many pages: as many as are useful, and a part of the memory
    that the pages take."""
    beside_bytes = max(0, pages - WINDOWS_BESIDE) * geometry.page_bytes
    return min(useful, beside_bytes // WINDOWS_PART // max(1, state_bytes))


def _pages_per_sequence(config: RunnerConfig, max_model_len: int) -> int:
    return -(-max_model_len // config.page_size)


def step_bytes(config: RunnerConfig, model: DecoderSpec) -> int:
    """An upper bound, in bytes, of the largest step's activations: the tensors of one layer, logits,
    sampling.

    Counted rather than profiled: a full step of a large model takes seconds on a CPU.
    """
    channels = max((own.channels for own in model.deltas), default=0)
    widths = 3 * model.intermediate_size + 4 * model.heads * model.head_dim + 4 * channels
    token = 4 * (4 * model.hidden_size + widths)
    row = 4 * 4 * model.vocab_size
    return config.max_step_tokens * token + config.max_num_seqs * row
