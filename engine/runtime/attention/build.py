"""Builds the attention back ends that were chosen for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from engine.runtime.attention.flash_attention import (
    FlashDecode,
    FlashPrefill,
    Version2,
    Version3,
)
from engine.runtime.attention.flashinfer_paged import (
    FlashInferDecode,
    FlashInferPrefill,
    TrtllmDecode,
    workspace,
)
from engine.runtime.attention.reference import ReferenceDecode, ReferencePrefill
from engine.runtime.setup.backends import Backend, BackendChoice, Chosen
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec, DecodePages, PrefillPages

VERSIONS: Final[Mapping[Backend, type[Version2]]] = {
    Backend.FLASH_ATTN_2: Version2,
    Backend.FLASH_ATTN_3: Version3,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a decode step."""

    rows_max: int
    """Rows, padding included, or tokens where rows verify drafts."""
    length_max: int
    """Keys that one row sees."""
    multiprocessors: int
    together_max: int = 1
    """Tokens of a row."""


def build_backends(
    choice: BackendChoice, cache: KVCache, spec: AttentionSpec, dtype: torch.dtype, bounds: Bounds
) -> tuple[DecodePages, PrefillPages]:
    """The decode and the prefill back end over `cache`, for queries in `dtype`.

    Sets `cache.clear_tails`: whether unused ends of pages have to be zero.
    """
    cache.clear_tails = choice.reads_whole_pages
    return (
        _decode(choice.decode, cache, spec, dtype, bounds),
        _prefill(choice.prefill, cache, spec, dtype),
    )


def _decode(
    chosen: Chosen, cache: KVCache, spec: AttentionSpec, dtype: torch.dtype, bounds: Bounds
) -> DecodePages:
    library, device = chosen.module, cache.keys[0].device
    if chosen.backend is Backend.TORCH:
        return ReferenceDecode(cache, spec)
    if chosen.backend is Backend.TRITON:
        from engine.runtime.attention.triton_paged import TritonDecode

        return TritonDecode(
            cache,
            spec,
            rows_max=bounds.rows_max,
            multiprocessors=bounds.multiprocessors,
            dtype=dtype,
            together_max=bounds.together_max,
        )
    assert library is not None, chosen
    if chosen.backend is Backend.FLASHINFER_TRTLLM:
        return TrtllmDecode(library, cache, spec, workspace(device), length_max=bounds.length_max)
    if chosen.backend is Backend.FLASHINFER:
        return FlashInferDecode(
            library,
            cache,
            spec,
            dtype,
            workspace(device),
            rows_max=bounds.rows_max,
            length_max=bounds.length_max,
        )
    return FlashDecode(cache, spec, VERSIONS[chosen.backend](library))


def _prefill(chosen: Chosen, cache: KVCache, spec: AttentionSpec, dtype: torch.dtype) -> PrefillPages:
    library = chosen.module
    if chosen.backend is Backend.TORCH:
        return ReferencePrefill(cache, spec)
    if chosen.backend in (Backend.TRITON, Backend.CUDNN):
        from engine.runtime.attention.triton_paged import LibraryPrefill, TritonPrefill

        ours = LibraryPrefill if chosen.backend is Backend.CUDNN else TritonPrefill
        return ours(cache, spec)
    assert library is not None, chosen
    if chosen.backend is Backend.FLASHINFER:
        return FlashInferPrefill(library, cache, spec, dtype, workspace(cache.keys[0].device))
    return FlashPrefill(cache, spec, VERSIONS[chosen.backend](library))
