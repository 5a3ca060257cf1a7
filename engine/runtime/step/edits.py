"""The edits of a sequence's logits: what is done to them before a token is drawn.

They are made in one order. `EDITS` lists those that a request asks for:

  1. penalties: the repetition penalty over prompt and output (positive logits divided, negative multiplied),
     then the frequency and presence penalties over the output
  2. `logit_bias`, which is added
  3. stop tokens that `min_tokens` holds back: their logits become float32's smallest number

and behind them logits beyond float32 are clamped to its range. The last edit is the plan's, for each step:

  4. the mask of a grammar (`engine.contract.messages.Plan.masks`): the logits of tokens that it forbids, and
     of those that it does not know, become float32's smallest number. Those of allowed ones are at least half
     of it, so that a token whose logit an edit before made as small, a held stop, is still drawn if nothing
     else may be.

Rules:

1. An edit is a value that is made when its sequence is seated, by what its request asks for. The logits of a
   request that asks for none are not copied.
2. The samplers of the host call `Edits.edit`. The device's makes the same edits in `kernels.sampling`, from
   tables by slot that hold what the functions here say (`penalties_of`, `bias_of`, `held_stops_of`), since a
   captured graph calls no Python. The mask is for whatever draws: `forbid` is it in torch, and the native
   draw passes over what it forbids. The tests hold them equal.
3. Log-probabilities are those of the model's own logits, before any edit.

A penalty is for the tokens that its sequence has (`History`). Those are few beside a vocabulary: a pass over
one of 152k takes as long as to edit all logits of a thousand tokens, and a penalty made of some such passes
would take longer than a small model's whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract.messages import SamplingParams, SlotAssignment

_ABSENT: Final = -1


class History:
    """The tokens of a sequence's prompt and output, and how often each is in the output."""

    __slots__ = ("_counts", "_ids", "_len")

    def __init__(self, prompt: Sequence[int], output: Sequence[int], vocab_size: int, len_max: int) -> None:
        """`len_max` is the most tokens that the sequence may come to."""
        self._counts: NDArray[np.int32] = np.full(vocab_size, _ABSENT, np.int32)
        """How often each token of the vocabulary is in the output, or `_ABSENT`."""
        self._counts[prompt] = 0
        present, counts = np.unique(np.array(output, np.int64), return_counts=True)
        self._counts[present] = counts
        present = np.flatnonzero(self._counts != _ABSENT)
        self._len = len(present)
        self._ids: NDArray[np.int32] = np.empty(min(vocab_size, len_max), np.int32)
        """The tokens that are present, each once, and room for more."""
        self._ids[: self._len] = present

    def append(self, token: int) -> None:
        """Note one more token of the output."""
        if self._counts[token] == _ABSENT:
            self._counts[token] = 0
            self._ids[self._len] = token
            self._len += 1
        self._counts[token] += 1

    def __len__(self) -> int:
        """The number of tokens that are present."""
        return self._len

    def take_back(self, tokens: Sequence[int], length: int) -> None:
        """Undo `append` of these tokens, before which `length` tokens were present."""
        for token in tokens:
            self._counts[token] -= 1
        self._counts[self._ids[length : self._len]] = _ABSENT
        self._len = length

    @property
    def present(self) -> tuple[Tensor, Tensor]:
        """The tokens, [n] int32, each once, and how often each is in the output, [n] int32."""
        ids = self._ids[: self._len]
        return torch.from_numpy(ids), torch.from_numpy(self._counts[ids])


FLOAT_MAX: Final = torch.finfo(torch.float32).max
ALLOWED_MIN: Final = -FLOAT_MAX / 2
"""The least logit of a token that a mask allows."""
PENALTY_BOUNDS: Final = (2.0**-126, 2.0**126)
"""The least and the largest repetition penalty, so that it and its reciprocal are normal numbers of
float32."""


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    """The repetition penalty, clamped to `PENALTY_BOUNDS`, and the frequency and presence penalties."""
    low, high = PENALTY_BOUNDS
    repetition = min(max(params.repetition_penalty, low), high)
    return repetition, params.frequency_penalty, params.presence_penalty


def bias_of(params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The tokens [n] of `logit_bias`, and the numbers [n] that are added to their logits."""
    biases = params.logit_bias
    ids, values = np.frombuffer(biases.ids, np.uint32), np.frombuffer(biases.values, np.float64)
    return ids.astype(np.int64), values.astype(np.float32)


def held_stops_of(params: SamplingParams, vocab_size: int) -> list[int]:
    """The stop tokens that `min_tokens` holds back, those that the model has."""
    return [token for token in params.stop_token_ids if token < vocab_size] if params.min_tokens else []


def forbid(row: Tensor, mask: bytes) -> None:
    """Edit logits [vocab] float32 of one sequence by its mask, in place."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(row), bitorder="little")
    row.clamp_(min=ALLOWED_MIN).masked_fill_(torch.from_numpy(bits == 0), -FLOAT_MAX)


class Edit(Protocol):
    """One edit of the logits of one sequence, on the host."""

    def is_due(self, output_len: int) -> bool:
        """True if it changes the logits of the token behind so many of output."""
        ...

    def edit(self, row: Tensor) -> None:
        """Edit logits [vocab] float32, in place."""
        ...

    def append(self, token: int) -> None:
        """Note one more token of the output."""
        ...


@dataclass(frozen=True, slots=True)
class Penalties:
    history: History
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, start: SlotAssignment, vocab_size: int, len_max: int) -> Edit | None:
        if not start.sampling.needs_history:
            return None
        ids = start.token_ids
        prompt, output = ids[: start.prompt_len], ids[start.prompt_len :]
        return cls(History(prompt, output, vocab_size, len_max), *penalties_of(start.sampling))

    def is_due(self, output_len: int) -> bool:
        return True

    def edit(self, row: Tensor) -> None:
        ids, output = self.history.present
        own = row[ids]
        if self.repetition != 1.0:
            own = torch.where(own > 0, own / self.repetition, own * self.repetition)
        own -= self.frequency * output
        own -= self.presence * (output > 0)
        row[ids] = own

    def append(self, token: int) -> None:
        self.history.append(token)


@dataclass(frozen=True, slots=True)
class Bias:
    ids: Tensor
    """Tokens [n] int64."""
    values: Tensor
    """The numbers [n] float32 that are added to their logits."""

    @classmethod
    def of(cls, start: SlotAssignment, vocab_size: int, len_max: int) -> Edit | None:
        if not start.sampling.logit_bias:
            return None
        return cls(*map(torch.from_numpy, bias_of(start.sampling)))

    def is_due(self, output_len: int) -> bool:
        return True

    def edit(self, row: Tensor) -> None:
        row[self.ids] += self.values

    def append(self, token: int) -> None:
        """Nothing: the output changes no bias."""


@dataclass(frozen=True, slots=True)
class HeldStops:
    ids: list[int]
    until: int
    """The tokens of output from which on they may be sampled."""

    @classmethod
    def of(cls, start: SlotAssignment, vocab_size: int, len_max: int) -> Edit | None:
        if not start.sampling.min_tokens:
            return None
        return cls(held_stops_of(start.sampling, vocab_size), start.sampling.min_tokens)

    def is_due(self, output_len: int) -> bool:
        return output_len < self.until

    def edit(self, row: Tensor) -> None:
        row[self.ids] = -FLOAT_MAX

    def append(self, token: int) -> None:
        """Nothing: its place in the output is all that counts."""


EDITS: Final[tuple[Callable[[SlotAssignment, int, int], Edit | None], ...]] = (
    Penalties.of,
    Bias.of,
    HeldStops.of,
)
"""The edits in their order: each is made of a sequence that is seated, the vocabulary's size and the most
tokens that the sequence may come to, or is None where the request does not ask for it."""


@dataclass(frozen=True, slots=True)
class Edits:
    """All edits of one sequence's logits."""

    each: tuple[Edit, ...] = ()

    @classmethod
    def of(cls, start: SlotAssignment, vocab_size: int, len_max: int) -> Edits:
        made = [make(start, vocab_size, len_max) for make in EDITS]
        return cls(tuple(edit for edit in made if edit is not None)) if any(made) else NO_EDITS

    def are_due(self, output_len: int) -> bool:
        """True if some edit changes the logits of the token behind so many of output."""
        return any(edit.is_due(output_len) for edit in self.each)

    def edit(self, row: Tensor, output_len: int) -> None:
        """Edit logits [vocab] float32 of the token behind so many of output, in place."""
        for edit in self.each:
            if edit.is_due(output_len):
                edit.edit(row)
        row.clamp_(-FLOAT_MAX, FLOAT_MAX)

    def append(self, token: int) -> None:
        """Note one more token of the output."""
        for edit in self.each:
            edit.append(token)

    @contextmanager
    def ahead(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that notes drafts, one more token of the output each; they are forgotten in the
        end."""
        histories = [(edit.history, len(edit.history)) for edit in self.each if isinstance(edit, Penalties)]
        drafts: list[int] = []

        def note(token: int) -> None:
            drafts.append(token)
            self.append(token)

        yield note
        for history, length in histories:
            history.take_back(drafts, length)


NO_EDITS: Final = Edits()
