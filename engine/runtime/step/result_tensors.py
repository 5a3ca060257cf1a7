"""A step's results as tensors, on the host or on a device, before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import RunResult
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.logprobs import LogprobColumns, TopK, stable_topk

LogitsOf = Callable[[Tensor], Tensor]
"""A model's head: hidden states [n, hidden] -> logits [n, vocab] float32."""
PROMPT_LOGPROB_ROWS: Final = 128
"""The number of prompt positions whose logits over the whole vocabulary exist at once."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Implements the `Pending` protocol: a step's results, on the device where they were computed."""

    tokens: Tensor | None = None
    """The sampled tokens, [S] int64; None where no row sampled."""
    tops: Sequence[int | None] = ()
    """Per sampled row, the number of likeliest tokens that its request asks for; None: no
    log-probabilities."""
    logprobs: LogprobColumns | None = None
    """The log-probabilities of the rows that ask for them; None where no row asks."""
    prompt_logprobs: Sequence[tuple[int, Sequence[LogprobColumns]]] = ()
    """Per slot, the log-probabilities of its prompt's tokens, in pieces."""
    vectors: Sequence[tuple[int, Tensor]] = ()
    """Per slot, its prompt's vector, float32."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Computed:
        return Computed(
            None if self.tokens is None else move(self.tokens),
            self.tops,
            None if self.logprobs is None else self.logprobs.moved(move),
            [(slot, [piece.moved(move) for piece in pieces]) for slot, pieces in self.prompt_logprobs],
            [(slot, move(vector)) for slot, vector in self.vectors],
        )

    def collect(self) -> RunResult:
        entries = iter(self.logprobs.entries() if self.logprobs else ())
        return RunResult(
            tokens=[] if self.tokens is None else self.tokens.tolist(),
            logprobs=[None if top is None else next(entries) for top in self.tops] if self.logprobs else [],
            prompt_logprobs=[
                (slot, [entry for piece in pieces for entry in piece.entries()])
                for slot, pieces in self.prompt_logprobs
            ],
            vectors=[(slot, _packed(vector)) for slot, vector in self.vectors],
        )


def _packed(vector: Tensor) -> bytes:
    """A vector as little-endian float32; empty where it is not finite."""
    numbers = vector.numpy()
    return numbers.astype("<f4", copy=False).tobytes() if np.isfinite(numbers).all() else b""


def asked_logprobs(
    logits: Tensor,
    tokens: Tensor,
    tops: Sequence[int | None],
    topk: TopK,
    index_of: Callable[[Sequence[int]], Tensor] = torch.tensor,
    *,
    chosen: Tensor | None = None,
) -> LogprobColumns | None:
    """The log-probabilities of the rows that ask for them; None when no row does.

    logits [at least S, vocab], tokens [S] int64; `tops` [S], None in rows that do not ask. `index_of` puts
    row numbers where the logits are. `chosen` [S]: the sampled tokens' log-probabilities, where they are
    known.
    """
    asking = [(row, top) for row, top in enumerate(tops) if top is not None]
    if not asking:
        return None
    rows, asked = zip(*asking, strict=True)
    at = index_of(rows)
    if chosen is not None and not any(asked):
        return LogprobColumns.of_chosen(chosen[at])
    # A failed row has no token; what is computed for it is never read.
    return LogprobColumns.of(logits[at].float(), tokens[at].clamp_min(0), asked, topk)


def asked_prompt_logprobs(
    logits_of: LogitsOf, batch: PackedBatch, hidden: Tensor, topk: TopK = stable_topk
) -> list[tuple[int, list[LogprobColumns]]]:
    """The slots that compute a prompt whose log-probabilities are asked for, with those of the step's
    tokens."""
    found = []
    for row in batch.rows:
        seat = batch.slots.seat(row.slot)
        top = seat.sampling.prompt_logprobs
        if top is None:
            continue
        followed = min(row.end, seat.prompt_len - 1) - row.start
        if followed > 0:
            targets = batch.slots.tokens[row.slot, row.start + 1 : row.start + 1 + followed].long()
            own = hidden[row.offset : row.offset + followed]
            found.append((row.slot, _logprobs_of_targets(logits_of, own, targets, top, topk)))
    return found


def _logprobs_of_targets(
    logits_of: LogitsOf, hidden: Tensor, targets: Tensor, top: int, topk: TopK
) -> list[LogprobColumns]:
    """hidden [n, hidden] -> the log-probabilities of the tokens [n] that followed."""
    found = []
    for i in range(0, len(targets), PROMPT_LOGPROB_ROWS):
        wanted = targets[i : i + PROMPT_LOGPROB_ROWS]
        logits = logits_of(hidden[i : i + PROMPT_LOGPROB_ROWS])
        found.append(LogprobColumns.of(logits, wanted, [top] * len(wanted), topk))
    return found
