"""The log-probabilities that requests ask for: those of the model's own distribution, before any edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.contract.messages import TokenLogprobs

SORT_SHARE: Final = 8
"""Where k is at least this fraction (1 / SORT_SHARE) of a row, sorting the row is faster than selecting."""


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """The log-probabilities of n tokens, on the device where they were computed."""

    chosen: Tensor
    """The log-probability of each token itself, [n]."""
    best_ids: Tensor
    """The ids of the likeliest tokens in its place, [n, k], k being the most that any row asks for."""
    best_values: Tensor
    """Their log-probabilities, [n, k]."""
    tops: Sequence[int]
    """The number of likeliest tokens that each row asks for, [n]."""

    @staticmethod
    def of(logits: Tensor, tokens: Tensor, tops: Sequence[int], topk: TopK) -> LogprobColumns:
        """logits [n, vocab] as the model gave them, tokens [n] int64; row i asks for `tops[i]`."""
        logprobs = logits.log_softmax(dim=-1)
        values, ids = topk(logprobs, min(max(tops), logits.shape[1]))
        return LogprobColumns(logprobs.gather(1, tokens[:, None])[:, 0], ids, values, tops)

    @staticmethod
    def of_chosen(chosen: Tensor) -> LogprobColumns:
        """The columns for tokens whose log-probabilities, [n], are known, where no row asks for more."""
        nothing = chosen.new_empty(len(chosen), 0)
        return LogprobColumns(chosen, nothing, nothing, [0] * len(chosen))

    def moved(self, move: Callable[[Tensor], Tensor]) -> LogprobColumns:
        return LogprobColumns(move(self.chosen), move(self.best_ids), move(self.best_values), self.tops)

    def entries(self) -> list[TokenLogprobs]:
        """The log-probabilities as messages, one per row."""
        columns = (self.chosen.tolist(), self.best_ids.tolist(), self.best_values.tolist(), self.tops)
        return [
            TokenLogprobs(logprob, row_ids[:top], row_values[:top])
            for logprob, row_ids, row_values, top in zip(*columns, strict=True)
        ]


TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""`stable_topk`, or a function with the same results."""


def distinct_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The results of `stable_topk` for float32, without waiting for a device to learn whether there are
    equals: each value becomes a distinct key, the value's order in the upper bits and its place in the lower
    ones."""
    bits = (values + 0.0).view(torch.int32)  # no negative zero
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    keys = (order.long() << 32) | (last - torch.arange(last + 1, device=values.device))
    ids = last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, best first, the lower index first among equals: (values, ids), [n, k].

    torch.topk may return equals in any order, and any of those at the cut. Sorting its results restores the
    order. Where the next one equals the last, the row's candidates are all that are not less.
    """
    if k == 0:
        return values[:, :0], torch.empty(len(values), 0, dtype=torch.int64)
    if k * SORT_SHARE >= values.shape[1]:
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :k], ids[:, :k]
    found, ids = values.topk(k + 1, dim=-1)
    ids = ids[:, :k].sort(dim=-1).values
    best, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    least = found[:, k - 1]
    for row in (least == found[:, k]).nonzero()[:, 0].tolist():
        candidates = (values[row] >= least[row]).nonzero()[:, 0]
        own, order = values[row, candidates].sort(descending=True, stable=True)
        best[row], ids[row] = own[:k], candidates[order[:k]]
    return best, ids
