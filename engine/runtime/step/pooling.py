"""The vectors of prompts: hidden states are gathered over the chunks of a prompt, and go through the modules
of its model (`engine.contract.embedders`).

Rules:

1. A prompt's vector is of its own hidden states alone, one vector at a time, so that it is the same in any
   company. On the host it is the same to the bit however the prompt was cut into chunks, where the hidden
   states are: the sum of a mean adds one token after the other, in float64.
2. Modules compute in float32, whatever the network does.
3. What is gathered belongs to a seat, and is gone with it: a prompt's rows follow each other from its first
   token on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract.embedders import Activation, DenseModule, Embedder, Normalization, PoolingMode
from engine.runtime.setup.model_errors import UnsupportedModel
from engine.runtime.step.batch import PackedBatch, Row
from engine.runtime.step.seats import Seat
from engine.runtime.weights.checkpoint import Checkpoint, Inspection, checkpoint_files
from shared.text.model_files import BadModelFile

ACTIVATIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}
_WEIGHT: Final = "linear.weight"
_BIAS: Final = "linear.bias"


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(weight x + bias), [inputs] -> [outputs]"""

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    @staticmethod
    def read(module: DenseModule, directory: Path, device: torch.device | None) -> Dense:
        """Raises ModelError where the weights are not there, or do not fit."""
        files = checkpoint_files(directory / module.directory)
        parts: list[tuple[str, tuple[int, ...]]] = [(_WEIGHT, (module.inputs,))]
        if module.bias:
            parts.append((_BIAS, ()))
        inspection = Inspection(files, torch.float32)
        for name, columns in parts:
            inspection.stack([name], [module.outputs], *columns)
        inspection.verify()
        source = Checkpoint(files, torch.float32, device=device)
        read = [source.stack([name], [module.outputs], *columns) for name, columns in parts]
        return Dense(read[0], read[1] if module.bias else None, ACTIVATIONS[module.activation])

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


def normalized(x: Tensor) -> Tensor:
    return F.normalize(x, dim=0)


@dataclass(frozen=True, slots=True)
class Pooler:
    """Makes vectors of the prompts that ask for them."""

    mode: PoolingMode
    modules: Sequence[Callable[[Tensor], Tensor]]
    vector_len: int

    @staticmethod
    def load(
        embedder: Embedder, directory: Path, hidden_len: int, device: torch.device | None = None
    ) -> Pooler:
        """Raises ModelError."""
        try:
            vector_len = embedder.vector_len(hidden_len)
        except BadModelFile as error:
            raise UnsupportedModel(str(error)) from error
        modules = [
            normalized if isinstance(module, Normalization) else Dense.read(module, directory, device)
            for module in embedder.behind
        ]
        return Pooler(embedder.pooling, modules, vector_len)

    def vectors(self, batch: PackedBatch, hidden: Tensor) -> list[tuple[int, Tensor]]:
        """hidden [T, hidden] of a step -> the slots whose prompts it completed, with their vectors."""
        return [*self._completed(batch, hidden)]

    def _completed(self, batch: PackedBatch, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        for row in batch.rows:
            seat = batch.slots.seat(row.slot)
            if length := seat.sampling.vector_len:
                self._gather(seat, row, hidden[row.offset : row.offset + row.length])
                if row.end == seat.prompt_len:
                    yield row.slot, self._finished(seat, length)

    def _gather(self, seat: Seat, row: Row, hidden: Tensor) -> None:
        """hidden [n, hidden] of the prompt's next tokens."""
        if self.mode == "mean":
            assert (seat.gathered is None) is (row.start == 0)
            seat.gathered = _added(seat.gathered, hidden)
        elif self.mode == "cls" and row.start == 0:
            seat.gathered = hidden[0].float().clone()  # no view that keeps the step's states
        elif self.mode == "lasttoken" and row.end == seat.prompt_len:
            seat.gathered = hidden[-1].float()

    def _finished(self, seat: Seat, length: int) -> Tensor:
        """The vector [length] float32. One that is cut is normalized behind the cut, if it is before."""
        assert seat.gathered is not None
        x = seat.gathered
        if self.mode == "mean":
            x = (x / seat.prompt_len).float()
        for module in self.modules:
            x = module(x)
        if length == self.vector_len:
            return x
        cut = x[:length]
        return normalized(cut) if self.modules and self.modules[-1] is normalized else cut


def _added(before: Tensor | None, hidden: Tensor) -> Tensor:
    """The sum over tokens [hidden] float64, added to that of the tokens before."""
    if hidden.device.type != "cpu":
        own = hidden.sum(dim=0, dtype=torch.float64)
        return own if before is None else before + own
    tokens = hidden.double() if before is None else torch.cat([before[None], hidden.double()])
    # numpy adds rows in their order; torch has several sums, which depend on the number of rows
    return torch.from_numpy(np.add.reduce(tokens.numpy(), axis=0))
