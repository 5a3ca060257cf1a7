"""How much of a GPU's memory the KV cache gets: arithmetic over what a profile run measured. And which errors
say that memory ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine.runtime.setup.model_errors import DoesNotFit
from engine.runtime.step.kv_cache import PAGES_MIN, pages_within

OUT_OF_MEMORY: Final = ("out of memory", "ALLOC_FAILED")
"""The words for memory that ends in the errors of CUDA and Triton, and of cuBLAS and cuDNN."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """A device's memory in bytes, measured with the weights loaded by running the largest step once."""

    total: int
    free_at_start: int
    """Free memory before this process took any: the rest belongs to other processes."""
    weights: int
    """The weights, and what a start sets aside beside them and the KV cache: tables and states of all
    slots."""
    step_peak: int
    """The most memory that the step held beyond the weights."""
    outside_torch: int
    """Memory of the context, libraries and workspaces, which torch's allocator does not see."""
    graphs: int
    """Memory that all graphs take."""


def kv_page_count(
    profile: MemoryProfile,
    utilization: float,
    page_bytes: int,
    useful: int,
    snapshots_bytes: int = 0,
    windows_bytes: int = 0,
) -> int:
    """The number of pages, each of `page_bytes` (all layers, keys and values), at most `useful`, beside
    snapshots of states and windows for drafts, of which those that are of use take so much. Raises
    DoesNotFit.

    `utilization` is a share of the whole card, so that it means the same on every start: memory of other
    processes lowers nothing until the two together do not fit.
    """
    assert 0.0 < utilization <= 1.0
    allowed = int(profile.total * utilization)
    if allowed > profile.free_at_start:
        raise DoesNotFit(
            f"{_gib(allowed)} asked for (--gpu-memory-utilization {utilization} of {_gib(profile.total)}), "
            f"but only {_gib(profile.free_at_start)} are free: end what else uses this GPU, or set "
            f"--gpu-memory-utilization to at most {int(profile.free_at_start / profile.total * 100) / 100}"
        )
    needed = profile.weights + profile.step_peak + profile.outside_torch + profile.graphs
    pages = min(pages_within(allowed - needed, page_bytes, snapshots_bytes, windows_bytes), useful)
    if pages < PAGES_MIN:
        raise DoesNotFit(
            f"{_gib(allowed)} do not hold weights {_gib(profile.weights)}, a step {_gib(profile.step_peak)}, "
            f"graphs {_gib(profile.graphs)}, libraries {_gib(profile.outside_torch)} and {PAGES_MIN} KV "
            f"pages of {page_bytes >> 10} KiB: raise --gpu-memory-utilization, lower --max-step-tokens "
            "or --max-num-seqs, or use --weights fp8"
        )
    return pages


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error, among `error` and those that it followed from, that says that memory ended; None if none
    does."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            return error
        error = error.__context__
    return None


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
