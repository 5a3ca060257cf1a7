"""A model with its KV cache, as the runner calls it: from a step's batch to hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.runtime.reference.delta_net import StepStates
from engine.runtime.reference.torch_decoder import StepAttention, TorchDecoder
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.states import States


class PagedModel(Protocol):
    """The forward pass: in torch below, in C++ in `engine.runtime.native`, on a GPU in
    `engine.runtime.device`."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Store the tokens' keys and values -> final hidden states [T, hidden], normed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, hidden] -> logits [S, vocab] float32, valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class TorchModel:
    """The forward pass in torch's operations, which runs wherever torch does: the reference for the
    others."""

    decoder: TorchDecoder
    attend: Callable[[PackedBatch], StepAttention]
    """Binds attention to a step's rows."""
    states: States | None = None
    """The states of a model that has them: its bits depend on the sequence alone
    (`engine.runtime.reference.exact`)."""

    def forward(self, batch: PackedBatch) -> Tensor:
        attention, states = self.attend(batch), None
        if self.states is not None:
            windows = self.states.open(batch.verifying)
            states = StepStates(self.states, batch.rows, batch.decode_rows, windows=windows)
        return self.decoder.forward(batch.token_ids, batch.positions, attention, states)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)
