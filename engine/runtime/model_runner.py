"""Executes plans: the tensors' side of `engine.core.messages.Runner`.

    leave, seat, grow     slots.apply
    swap out, swap in     host.copy
    compute               assemble the rows, forward, logits for the tokens that sample
    sample                sampler, log-probabilities, the new tokens into the slots

All of that is `launch`, and none of it needs a value that the device computes: a sampled token goes into
its slot on the device, where the next step finds it, and counts of a sequence's history go with it. So
the next plan can be launched before this one's values are here. `collect` reads them.

A step's host work is lists as long as its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.core.messages import Plan, RunnerInfo, RunResult
from engine.runtime.batch import Batch, assemble
from engine.runtime.kv_cache import HostPages, KVCache
from engine.runtime.logprobs import LogprobColumns, TopK, stable_topk
from engine.runtime.model import Model
from engine.runtime.sampler import DrawPlain, sample
from engine.runtime.slots import Slots

PROMPT_LOGPROB_ROWS: Final = 128
"""Positions whose logits over the whole vocabulary exist at once."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Implements the `Pending` protocol: a step's results, where they were computed."""

    tokens: Tensor | None = None
    """[S] int64: one per row that sampled."""
    tops: Sequence[int | None] = ()
    """By row that sampled, what its sequence asked for."""
    logprobs: LogprobColumns | None = None
    """Of the rows that asked, if any did."""
    prompt_logprobs: Sequence[tuple[int, Sequence[LogprobColumns]]] = ()
    """By slot, in pieces."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Computed:
        return Computed(
            None if self.tokens is None else move(self.tokens),
            self.tops,
            None if self.logprobs is None else self.logprobs.moved(move),
            [(slot, [piece.moved(move) for piece in pieces]) for slot, pieces in self.prompt_logprobs],
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
        )


@dataclass(slots=True)
class ModelRunner:
    """Implements the `Runner` protocol."""

    info: RunnerInfo
    model: Model
    cache: KVCache
    host: HostPages
    slots: Slots
    draw_plain: DrawPlain | None = None

    def run(self, plan: Plan) -> RunResult:
        """Launch and collect."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Computed:
        """Execute a plan. Asserts that it follows from the plans before."""
        self.slots.apply(plan)
        self.host.copy(plan.swapped_out, plan.swapped_in)
        if not plan.slots:
            return Computed()
        batch = assemble(plan, self.slots)
        hidden = self.model.forward(batch)
        prompt_logprobs = asked_prompt_logprobs(self.model, batch, hidden)
        if not batch.sampled:
            return Computed(prompt_logprobs=prompt_logprobs)
        tops = [self.slots.seat(row.slot).sampling.logprobs for row in batch.sampled]
        tokens, logits = self._sample(batch, hidden)
        return Computed(tokens, tops, _asked_logprobs(logits, tokens, tops), prompt_logprobs)

    def _sample(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden] -> a token per sampling row, [S], and what it was chosen by, [S, vocab]."""
        slots = [row.slot for row in batch.sampled]
        seats = [self.slots.seat(slot) for slot in slots]
        logits = self.model.logits(hidden if len(slots) == batch.tokens else hidden[batch.sampled_at])
        tokens = sample(logits, slots, seats, self.slots.columns, self.draw_plain)
        self.slots.append(slots, tokens)
        return tokens, logits


def asked_prompt_logprobs(
    model: Model, batch: Batch, hidden: Tensor, topk: TopK = stable_topk
) -> list[tuple[int, list[LogprobColumns]]]:
    """By slot, of the rows that compute a prompt whose log-probabilities are asked for."""
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
            found.append((row.slot, _of_targets(model, own, targets, top, topk)))
    return found


def _of_targets(model: Model, hidden: Tensor, targets: Tensor, top: int, topk: TopK) -> list[LogprobColumns]:
    """hidden [n, hidden] -> how likely each of the tokens [n] was that followed."""
    found = []
    for i in range(0, len(targets), PROMPT_LOGPROB_ROWS):
        wanted = targets[i : i + PROMPT_LOGPROB_ROWS]
        logits = model.logits(hidden[i : i + PROMPT_LOGPROB_ROWS])
        found.append(LogprobColumns.of(logits, wanted, [top] * len(wanted), topk))
    return found


def _asked_logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int | None]) -> LogprobColumns | None:
    """Of the rows that ask; None when none does."""
    asking = [(row, top) for row, top in enumerate(tops) if top is not None]
    if not asking:
        return None
    rows = [row for row, _ in asking]
    # A failed row has no token; what is computed for it is never read.
    return LogprobColumns.of(logits[rows], tokens[rows].clamp_min(0), [top for _, top in asking], stable_topk)
