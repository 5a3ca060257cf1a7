"""Drafts by a model's own MTP layer on a GPU: what `engine.runtime.host.mtp` tells of it, in our kernels.

The layer is a decoder of one layer (`DecoderSpec.mtp_body`) that has the model's embedding and head, and one
more layer of the model's pages. It is launched kernel by kernel behind a step, whether that is a graph or
not, and waits for nothing:

1. It stores the keys and values of all tokens of a step, those of wrong drafts as well: the step that
   computes the tokens in their places stores others there, and no guess looks that far.
2. How many drafts are right, and so where a row's guesses begin, is found on the device. A plan asks for
   guesses only where the pages have room for them if all drafts are right.
3. Guesses are written behind the known tokens, where drafts and sampled tokens will be, and come with the
   results of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract.messages import Want
from engine.runtime.collective.collective import Collective
from engine.runtime.device.device_decoder import DeviceDecoder
from engine.runtime.device.device_sampling import SamplingScratch, draw
from engine.runtime.device.slots import DeviceBatch, DeviceSlots
from engine.runtime.device.transfer import upload
from engine.runtime.kernels.autotune import DeviceLinear
from engine.runtime.kernels.begin import StepRows
from engine.runtime.kernels.fused import rms_norm
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import DecodePages
from engine.runtime.step.result_tensors import GuessColumns
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import mtp_parameters


class DeviceMtpLayer:
    """The weights, and what they compute. A rank has its heads and its part of the MLP."""

    def __init__(
        self,
        config: DecoderSpec,
        source: WeightSource,
        model: DeviceDecoder,
        *,
        fp8: bool = False,
        ranks: Collective,
    ) -> None:
        """`config` describes the whole model, which has such a layer, and whose network is `model`."""
        of_embedding, of_hidden, matrix = mtp_parameters(config)
        device = model.device
        self.body: Final = DeviceDecoder(config.mtp_body, source, device, fp8=fp8, ranks=ranks, beside=model)
        self._norms: Final = [norm.read(source).to(device).float() for norm in (of_embedding, of_hidden)]
        self._eps: Final = config.norm.eps
        weight, bias = matrix.read(source)
        assert bias is None
        self._fc: Final = DeviceLinear(weight.to(device))
        self._model: Final = model

    @property
    def linears(self) -> list[DeviceLinear]:
        return [self._fc, *self.body.linears]

    def rows(
        self, following: Tensor, hidden: Tensor, positions: Tensor, pages: Tensor, size: int
    ) -> StepRows:
        """The layer's input for T positions: made of the tokens behind them, [T] int64, the model's hidden
        states at them, [T, hidden], and the pages that they are in, of `size` tokens."""
        table = self._model.table
        embedded = F.embedding(following, self._model.embedding)
        parts = zip((embedded, hidden.contiguous()), self._norms, strict=True)
        joined = torch.cat([rms_norm(part, norm, self._eps) for part, norm in parts], dim=1)
        x = table.linear(joined, self._fc.weight)
        return StepRows(x, self.body.angles(positions), pages, positions % size)

    def follow(self, step: StepRows, cache: KVCache) -> None:
        """Store keys and values."""
        self.body.table = self._model.table
        self.body.store_first(step, cache)

    def through(
        self, step: StepRows, cache: KVCache, decode: DecodePages, tables: Tensor, lengths: Tensor
    ) -> Tensor:
        """Store keys and values, and attend -> hidden states [T, hidden], normed."""
        self.body.table = self._model.table
        return self.body.normed(self.body.forward(step, cache, decode.on_device(tables, lengths)))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Rows that ask for guesses, on the host: those that ask for the most first."""

    row: Row
    number: int
    """The number of guesses."""
    place: int
    """The row's number among those that sample."""
    drafts: int
    """Those that it verified."""
    first: int
    """The number of its first token among those that were sampled."""


@dataclass(frozen=True, slots=True)
class DeviceMtp:
    """The layer, bound to a runner's slots and to its layer of the cache."""

    layer: DeviceMtpLayer
    cache: KVCache
    """The pages of that layer alone."""
    slots: DeviceSlots
    decode: DecodePages
    """Attention over that layer."""
    scratch: SamplingScratch
    """The memory of the model's own sampler, which has found there which drafts are right."""

    def after(self, batch: DeviceBatch, hidden: Tensor) -> GuessColumns | None:
        """The guesses that the plan asks for, once the tokens that the step sampled are in the slots: hidden
        [T, hidden]; None where none is asked for."""
        slots = self.slots
        following = slots.tokens[batch.token_slots, batch.positions + 1].long()
        own = following, hidden, batch.positions, batch.places.pages, slots.page_size
        self.layer.follow(self.layer.rows(*own), self.cache)
        asked = _asked(batch)
        return self._guesses(batch, asked, hidden) if asked else None

    def _guesses(self, batch: DeviceBatch, asked: Sequence[_Asked], hidden: Tensor) -> GuessColumns:
        tokens, page_size, most = self.slots.tokens, self.slots.page_size, asked[0].number
        numbers = [[each.row.slot, each.row.offset, each.row.start, each.first] for each in asked]
        drafts = np.array([each.drafts for each in asked], np.int64)
        last = np.array([each.row.length - 1 - each.drafts for each in asked], np.int64)
        table, drafted, at = upload([np.array(numbers, np.int64).T, drafts, last], tokens.device)
        own, offsets, starts, firsts = table
        if drafts.any():
            behind = torch.arange(int(drafts.max()), device=tokens.device)
            verified = (firsts[:, None] + behind).clamp_max(len(self.scratch.agreed) - 1)
            right = (self.scratch.agreed[verified] > 0) & (behind < drafted[:, None])
            at = at + right.long().cumprod(1).sum(1)
        hidden, positions = hidden[offsets + at], starts + at
        found = torch.zeros(len(asked), most, dtype=torch.int64, device=tokens.device)
        for done in range(most):
            count = sum(each.number > done for each in asked)
            own, hidden, positions = own[:count], hidden[:count], positions[:count]
            tables = self.slots.page_table[own]
            pages = tables.gather(1, (positions // page_size)[:, None])[:, 0].long()
            following = tokens[own, positions + 1].long()
            step = self.layer.rows(following, hidden, positions, pages, page_size)
            lengths = (positions + 1).int()
            hidden = self.layer.through(step, self.cache, self.decode, tables, lengths)
            found[:count, done] = self._drawn(hidden, own.int(), lengths + 1)
            positions = positions + 1
        return GuessColumns(len(batch.sampled), [(each.place, each.number) for each in asked], found)

    def _drawn(self, hidden: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        logits = self.layer.body.logits(hidden, self.scratch.logits[: len(slots)])
        own = slots, positions, self.slots.sampling, self.scratch, self.slots.tokens
        return draw(logits, *own).clamp_min(0)


def _asked(batch: DeviceBatch) -> list[_Asked]:
    plan = batch.plan
    if not any(plan.guesses):
        return []
    wants = [want for want in plan.wants if want]
    found, first = [], 0
    for place, (row, want, number) in enumerate(zip(batch.sampled, wants, plan.guesses, strict=True)):
        drafts = row.length - 1 if want is Want.VERIFY else 0
        if number:
            found.append(_Asked(row, number, place, drafts, first))
        first += drafts + 1
    for each in found:
        _assert_room(each, batch.slots)
    return sorted(found, key=lambda each: -each.number)


def _assert_room(asked: _Asked, slots: DeviceSlots) -> None:
    """The pages have room for the keys of guesses, and the context for the guesses."""
    end, slot = asked.row.end + asked.number, asked.row.slot
    assert end - 1 <= slots.seat(slot).pages * slots.page_size, f"slot {slot}: no page for a guess"
    assert end < slots.max_model_len, f"slot {slot}: no room for a guess"
