"""A model with its KV cache, as the runner calls it: a step's batch in, hidden states out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.runtime.batch import PackedBatch
from engine.runtime.host.attention import BatchAttention, DecodeBackend, PrefillBackend
from engine.runtime.host.network import TorchDecoder
from engine.runtime.kv_cache import KVCache


class PagedModel(Protocol):
    """The forward pass. Implemented in torch below, and in C++ by engine/runtime/native."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Stores the tokens' keys and values -> final hidden states [T, hidden], normed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab], float32; to be used before the next call."""
        ...


@dataclass(frozen=True, slots=True)
class TorchModel:
    """Operation by operation: runs wherever torch does, and says what the other one must compute."""

    decoder: TorchDecoder
    cache: KVCache
    decode: DecodeBackend
    prefill: PrefillBackend

    def forward(self, batch: PackedBatch) -> Tensor:
        attention = BatchAttention(self.cache, batch, self.decode, self.prefill)
        return self.decoder.forward(batch.token_ids, batch.positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)
