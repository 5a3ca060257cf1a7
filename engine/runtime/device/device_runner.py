"""Executes plans on a GPU, beside the host.

    leave, seat, grow         DeviceSlots.apply: the plan's changes, sent in a copy or two
    swap out, fork, swap in   HostPages.copy
    save, restore             States.copy
    compute, sample           a plan of rows alone that decode, or verify drafts, is one launch: a graph,
                              replayed; others go kernel by kernel
    guess                     the model's MTP layer, if it has one, kernel by kernel
    results                   copied to host memory, behind an event

`launch` queues all of that and never waits: it reads no result of the device, sends only from memory that is
left alone until it was read (`engine.runtime.device.transfer`), and copies results out before it returns, in
stream order, so that the next plan may overwrite them where they were. `collect` waits for the event, and so
for this plan's work and nothing behind it.

The kernels do all kinds of sampling, in a graph or not: penalties, biases, held stop tokens, truncation, the
chosen token's log-probability. The likeliest tokens are taken
afterwards from the logits, which stay where they are until the next plan.

**Drafts.** A row that verifies k drafts is k + 1 tokens of a step, each as a decode is, one position further.
The drafts lie where the tokens are to be; behind each of them is sampled by its own position, as if those
before were known, and what is right is found on the device, which counts it for penalties. The host reads the
tokens when they arrive, as of any step, and learns by them how many stay; nothing waits for that
(`engine.runtime.device.slots`). Where the model has states, the one behind the last right draft becomes the
slot's there, too (`engine.runtime.step.states`). An MTP layer guesses behind all of it
(`engine.runtime.device.device_mtp`).

*The law.* A token depends on its logits, its seed and its position, and on nothing that drafts change. Logits
do, in their last bits: a product's kernel is chosen by the number of rows, and attention's sums are divided
by the lengths of all rows. So it is with every change of a batch on a GPU, and drafts are no more than that:
in float32 the tokens are those without drafts, and in bfloat16 as likely to differ as in other company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import Plan, RunnerInfo, RunResult
from engine.runtime.device.device_decoder import DeviceModel, DeviceSampler
from engine.runtime.device.device_mtp import DeviceMtp
from engine.runtime.device.graphs import DecodeGraphs
from engine.runtime.device.slots import DeviceBatch, DeviceSlots
from engine.runtime.device.transfer import DeviceArrival, download, upload
from engine.runtime.step.kv_cache import HostPages, KVCache
from engine.runtime.step.logprobs import distinct_topk
from engine.runtime.step.pooling import Pooler
from engine.runtime.step.result_tensors import (
    Computed,
    GuessColumns,
    asked_logprobs,
    asked_prompt_logprobs,
    asked_scores,
)
from engine.runtime.step.states import States

NOTHING: Final = Computed()


@dataclass(frozen=True, slots=True)
class DevicePending:
    """Implements the `Pending` protocol: results that are being copied to host memory."""

    coming: Computed
    arrival: DeviceArrival

    def collect(self) -> RunResult:
        self.arrival.wait()
        return self.coming.collect()


@dataclass(slots=True)
class DeviceRunner:
    """Implements the `Runner` protocol."""

    info: RunnerInfo
    model: DeviceModel
    cache: KVCache
    host: HostPages
    slots: DeviceSlots
    sampler: DeviceSampler
    steps: DecodeGraphs[tuple[Tensor, Tensor]]
    """Runs a padded decode step, by a graph or kernel by kernel -> tokens and log-probabilities."""
    pooler: Pooler | None = None
    """Makes vectors of prompts, where the model embeds."""
    mtp: DeviceMtp | None = None
    """Guesses drafts, where the model has a layer for them."""
    hidden: Tensor | None = None
    """Where `steps` leave the final hidden states, [rows, hidden], if such a layer goes on from them."""

    @property
    def states(self) -> States | None:
        return self.model.states

    def run(self, plan: Plan) -> RunResult:
        """Launch and collect."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> DevicePending:
        """Queue a plan's work and the copy of its results. Asserts that it follows from the plans before."""
        return DevicePending(self.compute(plan).moved(download), DeviceArrival.on(self.slots.device))

    def compute(self, plan: Plan) -> Computed:
        """Queue a plan's work, and leave its results on the device."""
        self.slots.apply(plan)
        self.host.copy(plan.swapped_out, plan.swapped_in, plan.forked)
        if plan.saved or plan.restored:
            assert self.states is not None
            self.states.copy(plan.saved, plan.restored)
        return self._compute(DeviceBatch.of(plan, self.slots)) if plan.slots else Computed()

    def _compute(self, batch: DeviceBatch) -> Computed:
        drafted = batch.drafted
        if self.states is not None:
            self.states.open(batch.verifying)
        if batch.is_decode and self.steps.takes(batch.tokens, drafted):
            tokens, logprobs = self.steps.run(*batch.streams, drafted)
            return self._sampled(batch, tokens[: batch.tokens], logprobs, self.hidden)
        hidden = self.model.forward(batch) if drafted is None else self.model.verify(batch)
        prompts = asked_prompt_logprobs(self.model.logits, batch, hidden, distinct_topk)
        vectors = [] if self.pooler is None else self.pooler.vectors(batch, hidden)
        scores = asked_scores(self.model.logits, batch, hidden, self._uploaded)
        read = Computed(prompt_logprobs=prompts, vectors=vectors, scores=scores)
        if not batch.sampled:
            if self.mtp is not None:
                self.mtp.after(batch, hidden)
            return read
        own = hidden[batch.sampled_at]
        tokens, logprobs = self.sampler(own, batch.sampled_slots, batch.sampled_lengths, batch.ahead)
        return self._sampled(batch, tokens, logprobs, hidden, read)

    def _sampled(
        self,
        batch: DeviceBatch,
        tokens: Tensor,
        logprobs: Tensor,
        hidden: Tensor | None,
        read: Computed = NOTHING,
    ) -> Computed:
        """`hidden`: of all tokens. `read`: what its prompts were asked for."""
        slots = [row.slot for row in batch.sampled]
        tops = [self.slots.seat(slot).sampling.logprobs for slot in slots]
        if batch.drafted is None:
            self.slots.append(slots)
        else:
            self.slots.extend(batch.plan)
            tops = [top for top, n in zip(tops, batch.drafted.counts, strict=True) for _ in range(n)]
        logits = self.sampler.scratch.logits
        asked = asked_logprobs(logits, tokens, tops, distinct_topk, self._uploaded, chosen=logprobs)
        guesses: GuessColumns | None = None
        if self.mtp is not None:  # the last, as its logits lie where the others do
            assert hidden is not None
            guesses = self.mtp.after(batch, hidden[: batch.tokens])
        own = read if guesses is None else replace(read, guesses=guesses)
        return replace(own, tokens=tokens, tops=tops, logprobs=asked)

    def _uploaded(self, rows: Sequence[int]) -> Tensor:
        (at,) = upload([np.array(rows, np.int64)], self.slots.device)
        return at
