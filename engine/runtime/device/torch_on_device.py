"""A model on a GPU that the Triton network lacks pieces of: torch's operations, launched one by one.

It is the reference network (`engine.runtime.reference.torch_decoder`) over the device's cache, slots,
attention and sampler, so that every family works on its first day. No graph is captured of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.device.device_decoder import Attend, StepTables, StepTokens
from engine.runtime.device.graphs import DecodeInputs
from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.reference.delta_net import StepStates
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.fp8 import FP8_MAX


class TorchOnDevice:
    """Implements `engine.runtime.device.device_decoder.DeviceNetwork`."""

    def __init__(
        self, config: DecoderSpec, source: WeightSource, device: torch.device, ranks: Collective = ALONE
    ) -> None:
        """`config` describes the whole model; the rank's part of it is read."""
        self.device: Final = device
        self.ranks: Final = ranks
        self.table = MatmulTable({})
        with device:
            self._decoder = TorchDecoder(config, source, ranks)

    @property
    def linears(self) -> list[DeviceLinear]:
        """None that is multiplied by a kernel of ours."""
        return []

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.embedding.dtype

    def hidden(
        self, step: StepTokens, cache: KVCache, attend: Attend, states: StepStates | None = None
    ) -> Tensor:
        if states is not None:
            states.states.begin(states.chunks)
        attention = Storing(cache, step, attend)
        return self._decoder.forward(step.token_ids, step.positions, attention, states)

    def decode(self, inputs: DecodeInputs, kept: StepTables) -> Tensor:
        slots, positions = inputs.slots.long(), inputs.lengths.long() - 1
        tables, page_size = kept.page_table[slots], kept.cache.geometry.page_size
        pages = tables.gather(1, (positions // page_size)[:, None])[:, 0].long()
        step = StepTokens(kept.tokens[slots, positions].long(), positions, pages, positions % page_size)
        attend = kept.attention.on_device(tables, inputs.lengths, inputs.ahead)
        return self.hidden(step, kept.cache, attend, inputs.bound(kept.states))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._decoder.logits(hidden)
        return logits if out is None else out.copy_(logits)


@dataclass(frozen=True, slots=True)
class Storing:
    """Implements `StepAttention`: stores a step's keys and values, then attends to the cache."""

    cache: KVCache
    step: StepTokens
    attend: Attend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (self.cache.keys[layer], k), (self.cache.values[layer], v)
        for (pages, x), scale in zip(parts, self.cache.scales[layer], strict=True):
            if self.cache.clear_tails:  # of pages that are begun; for others, of the one for padding rows
                begun = torch.where(self.step.offsets == 0, self.step.pages, len(pages) - 1)
                _bytes_of(pages).index_fill_(0, begun, 0)
            _bytes_of(pages)[self.step.pages, :, self.step.offsets] = _bytes_of(
                _stored(x, scale, pages.dtype)
            )
        return self.attend(layer, q.contiguous())


def _stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype) if scale == 1.0 else (x.float() / scale).to(dtype)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def _bytes_of(x: Tensor) -> Tensor:
    """x, or fp8 as bytes: not every version of torch writes fp8 by index."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
