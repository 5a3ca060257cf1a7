"""A step's results as tensors, on the host or on a device, before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import RunResult
from engine.contract.packing import TOKEN_LEN, unpacked
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.logprobs import LogprobColumns, TopK, stable_topk

LogitsOf = Callable[[Tensor], Tensor]
"""A model's head: hidden states [n, hidden] -> logits [n, vocab] float32."""
PROMPT_LOGPROB_ROWS: Final = 128
"""The number of prompt positions whose logits over the whole vocabulary exist at once."""
GUESSES_MAX: Final = 4
"""The most guesses of a model's MTP layer behind a row: it was trained for one, and each further one is right
less often."""
IndexOf = Callable[[Sequence[int]], Tensor]
"""Puts numbers where the logits are, [n] int64."""


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """The log-probabilities of tokens that were asked for behind n prompts, on the device where they were
    computed."""

    slots: Sequence[int]
    lens: Sequence[int]
    """The number of tokens that each slot's sequence asks about, [n]."""
    values: Tensor
    """Their log-probabilities, [n, k] float32, k being the most that any asks about."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> ScoreColumns:
        return ScoreColumns(self.slots, self.lens, move(self.values))

    def entries(self) -> list[tuple[int, list[float]]]:
        rows = zip(self.slots, self.lens, self.values.tolist(), strict=True)
        return [(slot, values[:length]) for slot, length, values in rows]


@dataclass(frozen=True, slots=True)
class GuessColumns:
    """The tokens guessed behind rows, still on the device that guessed them."""

    sampled: int
    """The rows that sampled."""
    asked: Sequence[tuple[int, int]]
    """The n rows that asked: each one's number among those that sampled, and its number of guesses."""
    values: Tensor
    """The guesses, [n, the most of any] int64."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> GuessColumns:
        return GuessColumns(self.sampled, self.asked, move(self.values))

    def entries(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.sampled)]
        for (place, number), own in zip(self.asked, self.values.tolist(), strict=True):
            found[place] = own[:number]
        return found


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
    scores: Sequence[ScoreColumns] = ()
    """The log-probabilities of tokens that were asked for behind prompts, in pieces."""
    guesses: Sequence[Sequence[int]] | GuessColumns = ()
    """Per sampled row, what was guessed behind its newest token; empty where none was asked for."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Computed:
        return Computed(
            None if self.tokens is None else move(self.tokens),
            self.tops,
            None if self.logprobs is None else self.logprobs.moved(move),
            [(slot, [piece.moved(move) for piece in pieces]) for slot, pieces in self.prompt_logprobs],
            [(slot, move(vector)) for slot, vector in self.vectors],
            [piece.moved(move) for piece in self.scores],
            self.guesses.moved(move) if isinstance(self.guesses, GuessColumns) else self.guesses,
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
            scores=[entry for piece in self.scores for entry in piece.entries()],
            guesses=self.guesses.entries()
            if isinstance(self.guesses, GuessColumns)
            else [list(own) for own in self.guesses],
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
    index_of: IndexOf = torch.tensor,
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
    found: list[tuple[int, list[LogprobColumns]]] = []
    if not batch.slots.asking:
        return found
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


def asked_scores(
    logits_of: LogitsOf, batch: PackedBatch, hidden: Tensor, index_of: IndexOf = torch.tensor
) -> list[ScoreColumns]:
    """The log-probabilities that are asked for behind the prompts which this step completes. They are those
    of the model's own logits; nothing is sampled."""
    if not batch.slots.asking:
        return []
    asked = [
        (row, seat.sampling.scored)
        for row, seat in ((row, batch.slots.seat(row.slot)) for row in batch.rows)
        if seat.sampling.scored and row.end == seat.prompt_len
    ]
    found = []
    for i in range(0, len(asked), PROMPT_LOGPROB_ROWS):
        part = asked[i : i + PROMPT_LOGPROB_ROWS]
        lens = [len(scored) // TOKEN_LEN for _, scored in part]
        width = max(lens)
        ids = [[*unpacked(scored), *[0] * (width - n)] for (_, scored), n in zip(part, lens, strict=True)]
        at = index_of([row.offset + row.length - 1 for row, _ in part])
        logprobs = logits_of(hidden[at]).float().log_softmax(dim=-1)
        wanted = index_of([token for row in ids for token in row]).view(len(part), width)
        found.append(ScoreColumns([row.slot for row, _ in part], lens, logprobs.gather(1, wanted)))
    return found
