"""The tokens of a sequence with penalties, which are for the tokens that it has alone.

Those are few beside a vocabulary: a pass over one of 152k takes as long as to edit all logits of a thousand
tokens, and a penalty made of some such passes would take longer than a small model's whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

    @property
    def present(self) -> tuple[Tensor, Tensor]:
        """The tokens, [n] int32, each once, and how often each is in the output, [n] int32."""
        ids = self._ids[: self._len]
        return torch.from_numpy(ids), torch.from_numpy(self._counts[ids])
