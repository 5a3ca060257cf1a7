"""Log-probabilities for those who ask: of the model's own distribution, before anything edits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.core.messages import TokenLogprobs

SORT_SHARE: Final = 8
"""Above this share of the row, finding and mending costs more than sorting."""


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Of n tokens, where they were computed."""

    chosen: Tensor
    """[n]"""
    best_ids: Tensor
    """[n, k], k the most that anybody asked for."""
    best_values: Tensor
    """[n, k]"""
    tops: Sequence[int]

    @staticmethod
    def of(logits: Tensor, tokens: Tensor, tops: Sequence[int], topk: TopK) -> LogprobColumns:
        """logits [n, vocab] as the model gave them, tokens [n] int64; row i asks for `tops[i]`."""
        logprobs = logits.log_softmax(dim=-1)
        values, ids = topk(logprobs, min(max(tops), logits.shape[1]))
        return LogprobColumns(logprobs.gather(1, tokens[:, None])[:, 0], ids, values, tops)

    @staticmethod
    def of_chosen(chosen: Tensor) -> LogprobColumns:
        """[n]: nobody asks for more."""
        nothing = chosen.new_empty(len(chosen), 0)
        return LogprobColumns(chosen, nothing, nothing, [0] * len(chosen))

    def moved(self, move: Callable[[Tensor], Tensor]) -> LogprobColumns:
        return LogprobColumns(move(self.chosen), move(self.best_ids), move(self.best_values), self.tops)

    def entries(self) -> list[TokenLogprobs]:
        """One per row."""
        columns = (self.chosen.tolist(), self.best_ids.tolist(), self.best_values.tolist(), self.tops)
        return [
            TokenLogprobs(logprob, row_ids[:top], row_values[:top])
            for logprob, row_ids, row_values, top in zip(*columns, strict=True)
        ]


TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""`stable_topk`, or what answers the same."""


def distinct_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `stable_topk`, of float32, without asking whether there are equals, which would wait for a device:
    each value is made a key of its own, its order above and its place below."""
    bits = (values + 0.0).view(torch.int32)  # no negative zero
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    keys = (order.long() << 32) | (last - torch.arange(last + 1, device=values.device))
    ids = last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, best first, the lower index first among equals: (values, ids), [n, k].

    torch.topk leaves the order of equals open, and which of them make the cut. The order is mended
    by sorting what it found; a row whose cut goes through equals is sorted whole.
    """
    if k == 0:
        return values[:, :0], torch.empty(len(values), 0, dtype=torch.int64)
    if k * SORT_SHARE >= values.shape[1]:
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :k], ids[:, :k]
    ids = values.topk(k, dim=-1).indices.sort(dim=-1).values
    best, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    cut = best[:, -1:]
    split = ((values >= cut).sum(dim=-1) > k) & cut[:, 0].isfinite()
    if split.any():
        whole, whole_ids = values[split].sort(dim=-1, descending=True, stable=True)
        best[split], ids[split] = whole[:, :k], whole_ids[:, :k]
    return best, ids
