"""Attention on a CPU, in torch: the protocols of its back ends, and the class that binds them to a step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import DecodeRows


class HostPrefillRows(Protocol):
    """A step's rows of several tokens, bound to their lengths and page tables."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T', H, D], the rows' tokens packed; k, v [T', Hkv, D], which are in the cache, too -> q's
        shape."""
        ...


class DecodeBackend(Protocol):
    """Attention for the rows of one token."""

    def prepare(self, batch: PackedBatch) -> DecodeRows: ...


class PrefillBackend(Protocol):
    """Attention for the rows of several tokens."""

    def prepare(self, batch: PackedBatch) -> HostPrefillRows: ...


class BatchAttention:
    """Implements `StepAttention`: stores the step's keys and values, then has each back end compute its
    rows."""

    def __init__(
        self, cache: KVCache, batch: PackedBatch, decode: DecodeBackend, prefill: PrefillBackend
    ) -> None:
        self._cache = cache
        self._batch = batch
        self._decode = decode.prepare(batch) if batch.decode_rows else None
        self._prefill = prefill.prepare(batch) if batch.decode_rows < len(batch.rows) else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] -> the attention of q [T, H, D], in q's shape."""
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
