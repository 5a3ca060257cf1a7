"""FlashInfer as a back end (Ye et al. 2025), and its TensorRT-LLM decode kernels, where it is installed.

The cache has its layout "HND". Two ways of working:

**Planned** (`FlashInferPrefill`, `FlashInferDecode`). A wrapper's `plan` lays out a step's work on the host,
from lengths that the host knows, and copies it to the device; `run` is then called for every layer. A window
is part of the plan, so layers of different windows have a wrapper each; they share the workspace, since
layers run one after the other. In a CUDA graph a wrapper belongs to one number of rows and reads fixed
buffers. `plan` comes before each replay, and only with lengths: the graph packs the pages' numbers into the
buffer on the device, where page tables are.

`plan` writes into memory that a copy reads later, in stream order. A host that runs ahead would overwrite
memory that has not been copied: the next plan waits for the copy of the one before, done when its step
begins.

**Unplanned** (`TrtllmDecode`). Kernels of TensorRT-LLM (on Hopper: XQA) that read page tables and lengths on
the device as they are, which a graph holds without any host work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import Ahead, AttentionSpec, DecodePages, PrefillPages, to_device

WORKSPACE_BYTES: Final = 128 << 20
"""The size of a workspace that FlashInfer's documentation asks for."""
GROUP_ON_CUDA_CORES_MAX: Final = 3
"""The largest group of query heads without tensor cores. Larger groups gain from them; some (5, 7) have no
other kernel."""
LAYOUT: Final = "HND"

Wrapper = Any
"""A planned wrapper of FlashInfer, which has no types for these."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The rows' pages, packed, as every plan takes them: int32."""

    starts: Tensor
    """The start of each row's pages, and the end of the last row's, [R + 1] on the host."""
    numbers: Tensor
    """The pages' numbers, [starts[-1]] on the device."""
    last_lens: Tensor
    """The number of tokens in each row's last page, 1 to page_size, [R] on the host."""

    @staticmethod
    def of(lengths: Sequence[int], tables: Tensor, page_size: int) -> Pages:
        """The pages of rows with these tables [R, P], gathered on the device by places that the host
        computes."""
        counts = torch.tensor([-(-length // page_size) for length in lengths])
        row = torch.repeat_interleave(counts)
        begins = counts.cumsum(0) - counts
        places = row * tables.shape[1] + torch.arange(len(row)) - begins[row]
        numbers = tables.flatten()[to_device(places.tolist(), tables.device, torch.int64)].int()
        starts, last_lens = _starts_and_last_lens(lengths, page_size)
        return Pages(starts, numbers, last_lens)


def _starts_and_last_lens(lengths: Sequence[int], page_size: int) -> tuple[Tensor, Tensor]:
    starts = accumulate((-(-length // page_size) for length in lengths), initial=0)
    last_lens = [(length - 1) % page_size + 1 for length in lengths]
    return torch.tensor(list(starts), dtype=torch.int32), torch.tensor(last_lens, dtype=torch.int32)


class _Turn:
    """Makes a plan wait until the plan before it was copied, as the head of this module explains."""

    def __init__(self, device: torch.device) -> None:
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, plan: Callable[[], None]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        plan()
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True, slots=True)
class _Setting:
    """The settings that all plans of a model share."""

    library: ModuleType
    cache: KVCache
    spec: AttentionSpec
    dtype: torch.dtype
    """The type of queries."""
    workspace: Tensor

    @property
    def windows(self) -> set[int | None]:
        return set(self.spec.windows)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        spec = self.spec
        return spec.heads, spec.kv_heads, spec.head_dim, self.cache.geometry.page_size

    def how(self, window: int | None) -> dict[str, Any]:
        return {
            "window_left": _window_left(window),
            "sm_scale": self.spec.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.cache.geometry.dtype,
        }


def workspace(device: torch.device) -> Tensor:
    """A workspace of zeros: some kernels keep counters in it."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    cache: KVCache
    spec: AttentionSpec
    wrappers: Mapping[int | None, Wrapper]
    """The planned wrapper for each width of window."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [rows or tokens, H, D] -> the same shape."""
        wrapper = self.wrappers[self.spec.windows[layer]]
        k_scale, v_scale = self.cache.scales[layer]
        out: Tensor = wrapper.run(
            q, (self.cache.keys[layer], self.cache.values[layer]), k_scale=k_scale, v_scale=v_scale
        )
        return out


class FlashInferPrefill(PrefillPages):
    """The back end for rows of several tokens, with a cached past or without."""

    def __init__(
        self, library: ModuleType, cache: KVCache, spec: AttentionSpec, dtype: torch.dtype, workspace: Tensor
    ) -> None:
        self._setting = _Setting(library, cache, spec, dtype, workspace)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = {window: wrapper(workspace, LAYOUT) for window in self._setting.windows}
        self._turn = _Turn(workspace.device)

    def of_chunks(self, chunks: Sequence[Row], tables: Tensor) -> PlannedStep:
        """Bind a step, which has to be launched in full before the next is prepared: a wrapper holds one
        plan."""
        starts = list(accumulate((chunk.length for chunk in chunks), initial=0))
        assert [chunk.offset for chunk in chunks] == starts[:-1]
        setting = self._setting
        q_starts = torch.tensor(starts, dtype=torch.int32)
        pages = Pages.of([chunk.end for chunk in chunks], tables, setting.cache.geometry.page_size)

        def plan() -> None:
            for window, wrapper in self._wrappers.items():
                wrapper.plan(
                    q_starts,
                    pages.starts,
                    pages.numbers,
                    pages.last_lens,
                    *setting.sizes,
                    causal=True,
                    **setting.how(window),
                )

        self._turn(plan)
        return PlannedStep(setting.cache, setting.spec, self._wrappers)


class FlashInferDecode(DecodePages):
    """The back end for rows of one token."""

    def __init__(
        self,
        library: ModuleType,
        cache: KVCache,
        spec: AttentionSpec,
        dtype: torch.dtype,
        workspace: Tensor,
        *,
        rows_max: int,
        length_max: int,
    ) -> None:
        self._setting = _Setting(library, cache, spec, dtype, workspace)
        self._tensor_cores = spec.heads // spec.kv_heads > GROUP_ON_CUDA_CORES_MAX
        self._turn = _Turn(workspace.device)
        self._eager = {window: self._wrapper() for window in self._setting.windows}
        self._captured: dict[int, Mapping[int | None, Wrapper]] = {}
        pages = rows_max * -(-length_max // cache.geometry.page_size)

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=workspace.device)

        # One more than pages: entries of the tables behind a row's own are written there.
        self._numbers, self._starts, self._last_lens = (
            buffer(pages + 1),
            buffer(rows_max + 1),
            buffer(rows_max),
        )
        self._unread = buffer(pages)
        """Given to a plan in place of the pages' numbers, which are not known yet."""

    def prepare(self, lengths: Sequence[int], tables: Tensor) -> PlannedStep:
        setting = self._setting
        self._plan(self._eager, Pages.of(lengths, tables, setting.cache.geometry.page_size))
        return PlannedStep(setting.cache, setting.spec, self._eager)

    def plan(self, lengths: Sequence[int]) -> None:
        rows = len(lengths)
        if rows not in self._captured:
            self._captured[rows] = {window: self._wrapper(rows) for window in self._setting.windows}
        starts, last_lens = _starts_and_last_lens(lengths, self._setting.cache.geometry.page_size)
        pages = Pages(starts, self._unread[: int(starts[-1])], last_lens)
        self._plan(self._captured[rows], pages)

    def on_device(self, tables: Tensor, lengths: Tensor, ahead: Ahead | None = None) -> PlannedStep:
        """Pack the pages' numbers into the buffer that the wrappers read, after `plan` of as many rows."""
        size, nobodys = self._setting.cache.geometry.page_size, len(self._numbers) - 1
        counts = (lengths.long() + (size - 1)) // size
        column = torch.arange(tables.shape[1], device=tables.device)
        place = (counts.cumsum(0) - counts)[:, None] + column
        place = torch.where(column < counts[:, None], place, nobodys)
        self._numbers.scatter_(0, place.flatten(), tables.int().flatten())
        return PlannedStep(self._setting.cache, self._setting.spec, self._captured[len(tables)])

    def _wrapper(self, rows: int | None = None) -> Wrapper:
        """The wrapper of a window and a graph's number of rows."""
        fixed = {}
        if rows is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._starts[: rows + 1],
                "paged_kv_indices_buffer": self._numbers,
                "paged_kv_last_page_len_buffer": self._last_lens[:rows],
            }
        return self._setting.library.BatchDecodeWithPagedKVCacheWrapper(
            self._setting.workspace, LAYOUT, use_tensor_cores=self._tensor_cores, **fixed
        )

    def _plan(self, wrappers: Mapping[int | None, Wrapper], pages: Pages) -> None:
        setting = self._setting

        def plan() -> None:
            for window, wrapper in wrappers.items():
                wrapper.plan(
                    pages.starts, pages.numbers, pages.last_lens, *setting.sizes, **setting.how(window)
                )

        self._turn(plan)


class TrtllmDecode(DecodePages):
    """The back end for rows of one token, by TensorRT-LLM's kernels."""

    def __init__(
        self, library: ModuleType, cache: KVCache, spec: AttentionSpec, workspace: Tensor, *, length_max: int
    ) -> None:
        self.decode: Final[Callable[..., Tensor]] = library.trtllm_batch_decode_with_kv_cache
        self.cache: Final = cache
        self.spec: Final = spec
        self.workspace: Final = workspace
        self.length_max: Final = length_max

    def on_device(self, tables: Tensor, lengths: Tensor, ahead: Ahead | None = None) -> TrtllmStep:
        return TrtllmStep(self, tables.int().contiguous(), lengths)


@dataclass(frozen=True, slots=True)
class TrtllmStep:
    back_end: TrtllmDecode
    tables: Tensor
    lengths: Tensor

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [R, H, D] -> the same shape."""
        own = self.back_end
        k_scale, v_scale = own.cache.scales[layer]
        return own.decode(
            query=q.contiguous(),
            kv_cache=(own.cache.keys[layer], own.cache.values[layer]),
            workspace_buffer=own.workspace,
            block_tables=self.tables,
            seq_lens=self.lengths,
            max_seq_len=own.length_max,
            bmm1_scale=own.spec.scale * k_scale,
            bmm2_scale=v_scale,
            window_left=_window_left(own.spec.windows[layer]),
            kv_layout=LAYOUT,
        )


def _window_left(window: int | None) -> int:
    """The number of keys to the left of a query that it sees; -1: all."""
    return -1 if window is None else window - 1
