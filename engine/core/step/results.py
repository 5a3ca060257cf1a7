"""Takes in a step's results: tokens go to their sequences, full pages to the prefix cache, news to the next
report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.contract.messages import NUMERIC_FAILURE, FinishReason, RunResult, TokenLogprobs, Want
from engine.core.config import SchedulerConfig
from engine.core.pages.block_manager import BlockManager
from engine.core.queue.tenants import TenantCounters
from engine.core.sequence import Sequence, Status
from engine.core.step.flight import InFlight, News


@dataclass(slots=True)
class Results:
    """Takes in the results of steps at their commits."""

    config: SchedulerConfig
    pages: BlockManager
    tenants: TenantCounters
    merge: Callable[[Sequence, int, int], None]
    """`merge(sequence, index, page)` replaces the page at this index of the sequence's table by one that
    holds the same."""
    forget: Callable[[Sequence], None]
    """`forget(sequence)` lets no other sequence find what its pages hold."""
    matched: list[tuple[int, int]] = field(default_factory=list)
    """The tokens that came for sequences with grammars which go on, (handle, token) each, since the scheduler
    took them."""

    def take(
        self, flight: InFlight, result: RunResult, news: News, now: float
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        """Take in the results row by row.

        Yields each sequence that its token ends, with the reason; the caller ends it before it asks for the
        next one. Rows of sequences that ended meanwhile bring nothing (rule H).
        """
        plan = flight.plan
        unsound = self._take_prompt_logprobs(flight, result.prompt_logprobs, news)
        assert len(result.tokens) == plan.sampled
        logprobs = result.logprobs or [None] * len(result.tokens)
        sampled = zip(result.tokens, logprobs, strict=True)
        served: Counter[str] = Counter()
        for sequence, length, want in zip(flight.rows, plan.lengths, plan.wants, strict=True):
            brought = next(sampled) if want else None
            if sequence.status is Status.FINISHED:
                continue
            self._advance(sequence, length, want)
            reason = None
            if sequence.handle in unsound:
                reason = self._fail(sequence)
            elif brought is not None:
                served[sequence.tenant] += brought[0] != NUMERIC_FAILURE
                reason = self._take_token(sequence, *brought, news, now)
            elif sequence.is_only_read and sequence.computed_len == sequence.prompt_len:
                reason = FinishReason.LENGTH
            if reason is not None:
                yield sequence, reason
        for tenant, tokens in served.items():
            self.tenants.charge(tenant, tokens)

    def _advance(self, sequence: Sequence, length: int, want: Want) -> None:
        """Count the row's tokens as computed, and give the pages that they fill to the prefix cache, and the
        head in which the part of the prompt ends that other sequences may take from there."""
        size, before = self.pages.page_size, sequence.computed_len
        full_before = before // size
        sequence.land(length, want)
        full = sequence.computed_len // size
        if full > full_before and self.config.prefix_cache:
            identities = sequence.chain.extend(sequence.tokens, full)
            for index in range(full_before, full):
                found = self.pages.register(sequence.pages[index], identities[index])
                if found != sequence.pages[index]:
                    self.merge(sequence, index, found)
        prompt_end = sequence.prompt_len - 1
        if before <= prompt_end <= sequence.computed_len and self.config.prefix_cache:
            sequence.name_head(self.pages, prompt_end)

    def _take_token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, news: News, now: float
    ) -> FinishReason | None:
        if token == NUMERIC_FAILURE:
            return self._fail(sequence)
        sequence.append(token, now)
        news.handles.append(sequence.handle)
        news.tokens.append(token)
        news.logprobs.append(logprobs)
        if token in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        if sequence.output_len == sequence.sampling.max_tokens:
            return FinishReason.LENGTH
        if sequence.mask is None:
            self.matched.append((sequence.handle, token))
        return None

    def _fail(self, sequence: Sequence) -> FinishReason:
        self.forget(sequence)  # what broke it may be in its pages: no other sequence may find them
        return FinishReason.NUMERIC

    def _take_prompt_logprobs(
        self, flight: InFlight, columns: list[tuple[int, list[TokenLogprobs]]], news: News
    ) -> set[int]:
        """Report the prompt log-probabilities that were not sent before; a preempted sequence computes some
        positions a second time. Returns the handles of sequences of which one is not finite."""
        unsound: set[int] = set()
        if not columns:
            return unsound
        row_of = {slot: row for row, slot in enumerate(flight.plan.slots)}
        for slot, entries in columns:
            row = row_of[slot]
            sequence, start = flight.rows[row], flight.plan.positions[row]
            fresh = entries[max(0, sequence.prompt_logprobs_sent - start) :]
            if sequence.status is not Status.FINISHED and fresh:
                news.prompt_logprobs.append((sequence.handle, fresh))
                sequence.prompt_logprobs_sent = start + len(entries)
                if any(math.isnan(entry.logprob) for entry in fresh):
                    unsound.add(sequence.handle)
        return unsound
