"""Drafts by a model's own MTP layer (multi-token prediction; DeepSeek-V3, 2024): from the model's last hidden
state at a position, and the token behind it, the layer guesses the token behind that.

    x = fc(norm(embedding(token behind)), norm(hidden))         both norms are the layer's own
    hidden' = norm(layer(x)), logits = head(hidden')            embedding and head are the model's

The layer attends to what it computed of the positions before, so it has keys and values of its own: one more
layer of the same pages. So whatever becomes of a page becomes of theirs: it is found, copied, taken away.
Pages of another kind would need a second one of each of these ways; computing them again would need all
hidden states. Each step stores those of the tokens that it computes, which takes `fc` and the layer's
products for keys and values alone. Where a plan asks for guesses, they are made one after the other: each
round takes the hidden state and the guess of the round before.

Rules

1. No token depends on it. What it guesses is verified like all drafts; so its sums may have any order.
2. What a page has at its last position was computed with the token that followed there first. A sequence
   that takes the page and goes on otherwise has worse guesses, at worst.
3. A guess is drawn as the token in its place will be, by the sequence's parameters and the random number of
   its seed and position: of two distributions that are alike the same number mostly gives the same token,
   and more often than the likeliest token is the one that is drawn.
4. Keys and values behind a row's newest computed token are those of guesses, until the step that computes the
   token in their place stores others there.
5. It is computed by torch beside either network, on one thread where the native kernels have the others: it
   is one layer, and most of a guess's time is that of the head, which is the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract.messages import Plan, Want
from engine.runtime.collective.collective import Collective
from engine.runtime.host.sampler import Draw, draw_by_torch
from engine.runtime.host.torch_paged import PagedAttention, Workspace
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.reference.layers import PackedLinear
from engine.runtime.reference.torch_decoder import NORMS, TorchLayers
from engine.runtime.step.batch import PackedBatch, Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.seats import HostSlots
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import mtp_parameters, read_embedding


class MtpLayer:
    """The weights, and what they compute. A rank has its heads and its part of the MLP."""

    def __init__(self, config: DecoderSpec, source: WeightSource, ranks: Collective) -> None:
        """`config` describes the whole model, which has such a layer."""
        self._norm_of = NORMS[config.norm.kind]
        self._eps: Final = config.norm.eps
        self._embedding: Final = read_embedding(config, source)
        of_embedding, of_hidden, matrix = mtp_parameters(config)
        self._norms: Final = of_embedding.read(source), of_hidden.read(source)
        self._fc: Final = PackedLinear(*matrix.read(source))
        self.layers: Final = TorchLayers(config.mtp_body, source, ranks)

    def joined(self, following: Tensor, hidden: Tensor) -> Tensor:
        """The tokens behind T positions, [T] int64, and the model's hidden states at these, [T, hidden] ->
        what the layer takes, [T, hidden]."""
        of_embedding, of_hidden = self._norms
        embedded = self._norm_of(F.embedding(following, self._embedding), of_embedding, self._eps)
        return self._fc(torch.cat((embedded, self._norm_of(hidden, of_hidden, self._eps)), dim=1))


@dataclass(slots=True)
class Mtp:
    """The layer, bound to a runner's slots and to its layer of the cache."""

    layer: MtpLayer
    cache: KVCache
    """The pages of that layer alone."""
    slots: HostSlots
    logits: Callable[[Tensor], Tensor]
    """The model's head."""
    draw: Draw = draw_by_torch
    _workspace: Workspace = field(init=False)

    def __post_init__(self) -> None:
        self._workspace = Workspace(self.cache.geometry.dtype)

    def after(self, batch: PackedBatch, hidden: Tensor) -> list[list[int]]:
        """Make the guesses that the plan asks for, once the tokens that the step sampled are in the slots:
        hidden [T, hidden] -> the guesses of each row that sampled; empty where none is asked for."""
        rows, kept = _known_rows(batch, self.slots)
        self._follow(rows, hidden if kept is None else hidden[kept])
        if not batch.plan.guesses:
            return []
        asked, lasts = [], []
        numbers = iter(batch.plan.guesses)
        for row, (slot, _, length), want in zip(batch.rows, rows, batch.plan.wants, strict=True):
            number = min(next(numbers), self._room(slot)) if want else 0
            if number > 0:
                asked.append((slot, number))
                lasts.append(row.offset + length - 1)
        found = self.guess(asked, hidden[lasts]) if asked else {}
        return [found.get(row.slot, []) for row in batch.sampled]

    def _room(self, slot: int) -> int:
        """The guesses for whose keys and values a slot has pages, and for which a sequence has room."""
        seat = self.slots.seat(slot)
        in_pages = seat.pages * self.slots.page_size - (seat.known_len - 2)
        return min(in_pages, self.slots.max_model_len - seat.known_len)

    def _follow(self, rows: Sequence[tuple[int, int, int]], hidden: Tensor) -> None:
        """Store the keys and values of rows (slot, start, length); hidden: of their tokens."""
        own = _batch_of(rows, self.slots)
        x = self.layer.joined(self._following(own), hidden)
        k, v = self.layer.layers.first_keys(x, own.positions)
        self.cache.write(0, k, v, own.places)

    def guess(self, asked: Sequence[tuple[int, int]], hidden: Tensor) -> dict[int, list[int]]:
        """Guess behind the newest tokens of slots: (slot, number of guesses) each, of which all tokens but
        the newest are computed; hidden [n, hidden], at the last of these -> the guesses by slot."""
        found: dict[int, list[int]] = {slot: [] for slot, _ in asked}
        lens = {slot: self.slots.seat(slot).known_len for slot, _ in asked}
        spec = AttentionSpec.of(self.layer.layers.config)
        for done in range(max(number for _, number in asked)):
            going = [at for at, (_, number) in enumerate(asked) if number > done]
            hidden = hidden if len(going) == len(asked) else hidden[going]
            asked = [asked[at] for at in going]
            own = _batch_of([(slot, lens[slot] - 2 + done, 1) for slot, _ in asked], self.slots)
            x = self.layer.joined(self._following(own), hidden)
            attention = PagedAttention(self.cache, own, spec, self._workspace)
            hidden = self.layer.layers.through(x, own.positions, attention)
            slots, positions = [slot for slot, _ in asked], [lens[slot] + done for slot, _ in asked]
            guesses = self.draw(
                self.logits(hidden), range(len(slots)), slots, positions, self.slots.columns
            ).clamp_min(0)
            self.slots.tokens.numpy()[slots, positions] = guesses.numpy()
            for slot, guess in zip(slots, guesses.tolist(), strict=True):
                found[slot].append(guess)
        return found

    def _following(self, batch: PackedBatch) -> Tensor:
        """The tokens behind those of the rows, [T] int64."""
        return self.slots.tokens[batch.token_slots, batch.positions + 1].long()


def _known_rows(batch: PackedBatch, slots: HostSlots) -> tuple[list[tuple[int, int, int]], Tensor | None]:
    """A step's rows as (slot, start, length), those that verified without their wrong drafts; and the places
    of their tokens in the step, None: all."""
    rows, kept = [], list[int]()
    for row, want in zip(batch.rows, batch.plan.wants, strict=True):
        length = row.length
        if want is Want.VERIFY:
            length = slots.seat(row.slot).known_len - 1 - row.start
        rows.append((row.slot, row.start, length))
        kept += range(row.offset, row.offset + length)
    return rows, None if len(kept) == batch.tokens else torch.tensor(kept)


def _batch_of(rows: Sequence[tuple[int, int, int]], slots: HostSlots) -> PackedBatch:
    """A batch of rows (slot, start, length)."""
    own_slots, starts, lengths = ([row[at] for row in rows] for at in range(3))
    plan = Plan(0, [], [], [], own_slots, starts, lengths, [Want.NOTHING] * len(rows))
    packed, offset = [], 0
    for slot, start, length in rows:
        packed.append(Row(slot, start, length, offset))
        offset += length
    return PackedBatch(plan, slots, tuple(packed), ())
