"""Executes plans: the tensors' side of `engine.core.messages.Runner`.

    leave, seat, grow     slots.apply
    swap out, swap in     host.copy
    compute               assemble the rows, forward, logits for the tokens that sample
    sample                sampler, log-probabilities, the new tokens into the slots

A step's host work is lists as long as its rows; results come back in one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.core.messages import Plan, RunnerInfo, RunResult, TokenLogprobs
from engine.runtime.attention import BatchAttention, DecodeBackend, PrefillBackend
from engine.runtime.batch import Batch, Row, assemble
from engine.runtime.kv_cache import HostPages, KVCache
from engine.runtime.logprobs import token_logprobs
from engine.runtime.models.decoder import Decoder
from engine.runtime.sampler import sample
from engine.runtime.slots import Slots

PROMPT_LOGPROB_ROWS: Final = 128
"""Positions whose logits over the whole vocabulary exist at once."""


@dataclass(slots=True)
class ModelRunner:
    """Implements the `Runner` protocol."""

    info: RunnerInfo
    decoder: Decoder
    cache: KVCache
    host: HostPages
    slots: Slots
    decode: DecodeBackend
    prefill: PrefillBackend

    @torch.inference_mode()
    def run(self, plan: Plan) -> RunResult:
        """Execute a plan. Asserts that it follows from the plans before."""
        self.slots.apply(plan)
        self.host.copy(plan.swapped_out, plan.swapped_in)
        if not plan.slots:
            return RunResult([], [], [])
        batch = assemble(plan, self.slots)
        attention = BatchAttention(self.cache, batch, self.decode, self.prefill)
        hidden = self.decoder.forward(batch.token_ids, batch.positions, attention)
        prompt_logprobs = self._prompt_logprobs(batch, hidden)
        if not batch.sampled:
            return RunResult([], [], prompt_logprobs)
        tokens, logprobs = self._sample(batch, hidden)
        return RunResult(tokens, logprobs, prompt_logprobs)

    def _sample(self, batch: Batch, hidden: Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
        """hidden [T, hidden] -> a token per sampling row, and its log-probabilities if any row asked."""
        slots = [row.slot for row in batch.sampled]
        seats = [self.slots.seat(slot) for slot in slots]
        logits = self.decoder.logits(hidden[batch.sampled_at])
        tokens = sample(logits, slots, seats, self.slots.columns)
        tops = [seat.sampling.logprobs for seat in seats]
        self.slots.append(slots, tokens)
        return tokens.tolist(), _asked_logprobs(logits, tokens, tops)

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> list[tuple[int, list[TokenLogprobs]]]:
        found = []
        for row in batch.rows:
            seat = self.slots.seat(row.slot)
            top = seat.sampling.prompt_logprobs
            followed = min(row.end, seat.prompt_len - 1) - row.start
            if top is not None and followed > 0:
                found.append((row.slot, self._row_prompt_logprobs(row, followed, top, hidden)))
        return found

    def _row_prompt_logprobs(self, row: Row, followed: int, top: int, hidden: Tensor) -> list[TokenLogprobs]:
        """For the row's first `followed` positions, how likely the prompt token after each was."""
        own = hidden[row.offset : row.offset + followed]
        targets = self.slots.tokens[row.slot, row.start + 1 : row.start + 1 + followed].long()
        found: list[TokenLogprobs] = []
        for i in range(0, followed, PROMPT_LOGPROB_ROWS):
            wanted = targets[i : i + PROMPT_LOGPROB_ROWS]
            logits = self.decoder.logits(own[i : i + PROMPT_LOGPROB_ROWS])
            found += token_logprobs(logits, wanted, [top] * len(wanted))
        return found


def _asked_logprobs(logits: Tensor, tokens: Tensor, tops: list[int | None]) -> list[TokenLogprobs | None]:
    """One entry per row, or none at all when nobody asked."""
    asking = [(i, top) for i, top in enumerate(tops) if top is not None]
    if not asking:
        return []
    rows = [i for i, _ in asking]
    # A failed row has no token; what is computed for it is never read.
    computed = token_logprobs(logits[rows], tokens[rows].clamp_min(0), [top for _, top in asking])
    found: list[TokenLogprobs | None] = [None] * len(tops)
    for i, entry in zip(rows, computed, strict=True):
        found[i] = entry
    return found
