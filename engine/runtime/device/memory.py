"""How much of a GPU's memory the KV cache gets: arithmetic over what a profile run measured."""

from __future__ import annotations

from dataclasses import dataclass

from engine.runtime.errors import DoesNotFit
from engine.runtime.kv_cache import PAGES_MIN


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes. Measured with the weights loaded, by running the largest step once without a cache."""

    total: int
    free_at_start: int
    """Before this process took any: the rest belongs to others."""
    weights: int
    step_peak: int
    """The most that the step held beyond the weights."""
    outside_torch: int
    """Context, libraries, workspaces: taken, but not by torch's allocator."""
    graphs: int
    """What capturing adds: measured on the largest bucket, since the smaller ones share its pool."""


def kv_page_count(profile: MemoryProfile, utilization: float, page_bytes: int, useful: int) -> int:
    """Pages of `page_bytes` (all layers, keys and values), at most `useful`. Raises DoesNotFit.

    `utilization` is of the whole card, so that it means the same on every start; what others hold counts
    against the card, not against us, until the two together do not fit.
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
    pages = min((allowed - needed) // page_bytes, useful)
    if pages < PAGES_MIN:
        raise DoesNotFit(
            f"{_gib(allowed)} do not hold weights {_gib(profile.weights)}, a step {_gib(profile.step_peak)}, "
            f"graphs {_gib(profile.graphs)}, libraries {_gib(profile.outside_torch)} and {PAGES_MIN} KV "
            f"pages of {page_bytes >> 10} KiB: raise --gpu-memory-utilization, lower --max-step-tokens "
            "or --max-num-seqs, or use --weights fp8"
        )
    return pages


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
