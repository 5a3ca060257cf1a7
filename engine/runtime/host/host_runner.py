"""Executes plans on a CPU: the implementation of `engine.contract.messages.Runner`.

    leave, seat, grow         slots.apply
    swap out, fork, swap in   host.copy
    save, restore             states.copy
    compute                   assemble the rows, forward, logits for the tokens that sample, vectors of the
                              prompts that ask for them
    sample                    sampler, log-probabilities, the new tokens into the slots, states.select
    guess                     the drafts of the model's MTP layer, if it has one

`launch` does all of that; `collect` reads the results. Sampled tokens and the counts of a sequence's history
go into the slots, where the next step finds them. The host's work per step is proportional to its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contract.messages import Plan, RunnerInfo, RunResult, agreed
from engine.runtime.host.model import PagedModel
from engine.runtime.host.mtp import Mtp
from engine.runtime.host.sampler import Draw, sample, sample_ahead
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import HostPages, KVCache
from engine.runtime.step.logprobs import stable_topk
from engine.runtime.step.pooling import Pooler
from engine.runtime.step.result_tensors import (
    Computed,
    asked_logprobs,
    asked_prompt_logprobs,
    asked_scores,
)
from engine.runtime.step.seats import HostSlots
from engine.runtime.step.states import States


@dataclass(slots=True)
class HostRunner:
    """Implements the `Runner` protocol."""

    info: RunnerInfo
    model: PagedModel
    cache: KVCache
    host: HostPages
    slots: HostSlots
    draw: Draw | None = None
    states: States | None = None
    """The states that the model keeps by slot, if it has any."""
    pooler: Pooler | None = None
    """Makes vectors of prompts, where the model embeds."""
    mtp: Mtp | None = None
    """Guesses drafts, where the model has a layer for them."""

    def run(self, plan: Plan) -> RunResult:
        """Launch and collect."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Computed:
        """Execute a plan. Asserts that it follows from the plans before it."""
        self.slots.apply(plan)
        if plan.swapped_out or plan.swapped_in or plan.forked:
            self.host.copy(plan.swapped_out, plan.swapped_in, plan.forked)
        if plan.saved or plan.restored:
            assert self.states is not None
            self.states.copy(plan.saved, plan.restored)
        if not plan.slots:
            return Computed()
        batch = PackedBatch.of(plan, self.slots)
        if plan.drafts:
            for row, drafts in zip(batch.verifying, plan.drafts, strict=True):
                self.slots.propose(row.slot, drafts)
        hidden = self.model.forward(batch)
        prompt_logprobs = asked_prompt_logprobs(self.model.logits, batch, hidden)
        vectors = [] if self.pooler is None else self.pooler.vectors(batch, hidden)
        scores = asked_scores(self.model.logits, batch, hidden)
        if not batch.sampled:
            if self.mtp is not None:
                self.mtp.after(batch, hidden)
            return Computed(prompt_logprobs=prompt_logprobs, vectors=vectors, scores=scores)
        if plan.drafts:
            tops, tokens, logits = self._sample_ahead(batch, hidden)
        else:
            tops = [self.slots.seat(row.slot).sampling.logprobs for row in batch.sampled]
            tokens, logits = self._sample(batch, hidden)
        logprobs = asked_logprobs(logits, tokens, tops, stable_topk)
        # The guesses are the last, as a head's logits lie where the next ones do.
        guesses = [] if self.mtp is None else self.mtp.after(batch, hidden)
        return Computed(tokens, tops, logprobs, prompt_logprobs, vectors, scores, guesses)

    def _sample(self, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden] -> a token per sampling row, [S], and the logits that it was drawn from, [S,
        vocab]."""
        slots = [row.slot for row in batch.sampled]
        seats = [self.slots.seat(slot) for slot in slots]
        logits = self.model.logits(hidden if len(slots) == batch.tokens else hidden[batch.sampled_at])
        tokens = sample(logits, slots, seats, self.slots.columns, self.draw, batch.plan.masks)
        self.slots.append(slots, tokens)
        return tokens, logits

    def _sample_ahead(self, batch: PackedBatch, hidden: Tensor) -> tuple[list[int | None], Tensor, Tensor]:
        """hidden [T, hidden] of a step in which rows verify -> for each token that is sampled, what its
        request asks for of log-probabilities; the tokens, [S], and their logits, [S, vocab]."""
        verifying = dict(zip((row.slot for row in batch.verifying), batch.plan.drafts, strict=True))
        slots = [row.slot for row in batch.sampled]
        seats, drafts = [self.slots.seat(slot) for slot in slots], [verifying.get(slot, []) for slot in slots]
        tops = [
            seat.sampling.logprobs
            for seat, own in zip(seats, drafts, strict=True)
            for _ in range(len(own) + 1)
        ]
        logits = self.model.logits(hidden[batch.sampled_at])
        tokens = sample_ahead(logits, slots, seats, drafts, self.slots.columns, self.draw, batch.plan.masks)
        sampled = iter(tokens.tolist())
        for slot, own in zip(slots, drafts, strict=True):
            brought = [next(sampled) for _ in range(len(own) + 1)]
            right = agreed(own, brought)
            self.slots.extend(slot, brought[: right + 1])
            if own and self.states is not None:
                self.states.select(slot, right)
        return tops, tokens, logits
