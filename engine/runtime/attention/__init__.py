"""Attention over the paged cache, behind one call per layer.

Prefill and decode are different problems (many queries of one sequence against its own keys; one
query of many sequences, each against its own pages), so each has a back end of its own, chosen
apart. A back end prepares a step once, and is then called for every layer.

A query at position p sees the keys at positions (p - window, p].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.runtime.batch import Batch
from engine.runtime.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model's attention looks like."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: Sequence[int | None]
    """Per layer."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class DecodeStep(Protocol):
    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [decode_rows, H, D] -> the same shape. The rows' keys and values are in the cache already."""
        ...


class PrefillStep(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The other rows' tokens, packed: q [T', H, D]; k, v [T', Hkv, D], also in the cache -> q's shape."""
        ...


class DecodeBackend(Protocol):
    def prepare(self, batch: Batch) -> DecodeStep: ...


class PrefillBackend(Protocol):
    def prepare(self, batch: Batch) -> PrefillStep: ...


class BatchAttention:
    """A model's `StepAttention`: stores the step's keys and values, then each back end takes its rows."""

    def __init__(self, cache: KVCache, batch: Batch, decode: DecodeBackend, prefill: PrefillBackend) -> None:
        self._cache = cache
        self._batch = batch
        self._decode = decode.prepare(batch) if batch.decode_rows else None
        self._prefill = prefill.prepare(batch) if batch.decode_rows < len(batch.rows) else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D]; k, v [T, Hkv, D] -> [T, H, D]."""
        self._cache.write(layer, k, v, self._batch.places)
        if self._prefill is None:
            assert self._decode is not None
            return self._decode(layer, q)
        n = self._batch.decode_rows
        if self._decode is None:
            return self._prefill(layer, q, k, v)
        out = q.new_empty(q.shape)
        out[:n] = self._decode(layer, q[:n])
        out[n:] = self._prefill(layer, q[n:], k[n:], v[n:])
        return out
