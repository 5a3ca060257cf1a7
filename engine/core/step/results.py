"""Commits a step: tokens go to their sequences, full pages to the prefix cache,
news to the next report, and its record to whoever looks back.

A record has what the step computed, what it took, and what those that waited for it lacked: counts and times
alone, so that it may be told to whoever had a sequence in the step or waited for it. The core makes one at
every commit, and sends it along with the step's tokens. It is kept, added up and searched by the API process
(`engine.api.told.steps`), when a request asks. It is made in every step and read for few of them, so it has
what the step knows already: nothing is added up, and the classes of the decodes are counted anew only when
others decode.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from engine.contract.messages import (
    NUMERIC_FAILURE,
    FinishReason,
    RunResult,
    ServiceClass,
    StepOutput,
    TokenLogprobs,
    Want,
    agreed,
)
from engine.contract.records import Lack, StepRecord
from engine.core.pages.block_manager import BlockManager
from engine.core.queue.tenants import TenantCounters
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence, Status
from engine.core.step.allocator import Allocator
from engine.core.step.flight import InFlight

T = TypeVar("T")

# -- tokens and pages -----------------------------------------------------------------------------


@dataclass(slots=True)
class Results:
    """Takes in the results of steps at their commits."""

    config: SchedulerConfig
    pages: BlockManager
    tenants: TenantCounters
    forget: Callable[[Sequence], None]
    """`forget(sequence)` lets no other sequence find what its pages hold."""
    matched: list[tuple[int, int]] = field(default_factory=list)
    """The tokens that came for sequences with grammars which go on, (handle, token) each, since the scheduler
    took them."""

    def take(
        self, flight: InFlight, result: RunResult, news: StepOutput, now: float
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        """Take in the results row by row.

        Yields each sequence that its token ends, with the reason; the caller ends it before it asks for the
        next one. Rows of sequences that ended meanwhile bring nothing, as they are late (rule H).
        """
        plan = flight.plan
        unsound = self._take_prompt_logprobs(flight, result.prompt_logprobs, news)
        if result.vectors:
            unsound |= self._take_read(flight, result.vectors, news.vectors, bool)
        if result.scores:
            unsound |= self._take_read(flight, result.scores, news.scores, _are_finite)
        assert len(result.tokens) == (plan.sampled if plan.drafts else plan.wants.count(Want.SAMPLE))
        logprobs = result.logprobs or [None] * len(result.tokens)
        sampled = zip(result.tokens, logprobs, strict=True)
        served: Counter[str] = Counter()
        verified, guesses = 0, iter(result.guesses)
        for sequence, length, want in zip(flight.rows, plan.lengths, plan.wants, strict=True):
            brought = next(sampled) if want else None
            guessed = next(guesses, []) if want else []
            if want is Want.VERIFY:
                assert brought is not None
                row = [brought, *islice(sampled, length - 1)]
                reason = self._take_verified(sequence, plan.drafts[verified], row, served, news, now)
                verified += 1
                sequence.hear(guessed)
                if reason is not None:
                    yield sequence, reason
                continue
            if sequence.status is Status.FINISHED:
                continue
            self._advance(sequence, length, want)
            reason = None
            if sequence.handle in unsound:
                reason = self._fail(sequence)
            elif brought is not None:
                served[sequence.tenant] += brought[0] != NUMERIC_FAILURE
                reason = self._take_token(sequence, *brought, news, now)
                sequence.hear(guessed)
            elif sequence.is_only_read and sequence.computed_len == sequence.prompt_len:
                reason = FinishReason.LENGTH
            if reason is not None:
                yield sequence, reason
        for tenant, tokens in served.items():
            self.tenants.charge(tenant, tokens)

    def _take_verified(
        self,
        sequence: Sequence,
        drafts: list[int],
        sampled: list[tuple[int, TokenLogprobs | None]],
        served: Counter[str],
        news: StepOutput,
        now: float,
    ) -> FinishReason | None:
        """Take in a row that verified drafts: as a decode for each right one, and another. Wrong ones took
        time from other tenants, so they count as served, and are charged to nobody but a caller who predicted
        them."""
        if sequence.status is Status.FINISHED:
            return None
        right = agreed(drafts, [token for token, _ in sampled])
        if predicted := sequence.land_drafts(right):
            news.predicted.append((sequence.handle, min(right, predicted), max(0, predicted - right)))
        served[sequence.tenant] += len(drafts) - right
        reason, matched = None, len(self.matched)
        for token, logprobs in sampled[: right + 1]:
            assert reason is None, "a draft behind an end"
            self._advance(sequence, 1, Want.SAMPLE)
            served[sequence.tenant] += token != NUMERIC_FAILURE
            reason = self._take_token(sequence, token, logprobs, news, now)
        if reason is not None:
            del self.matched[matched:]
        return reason

    def _advance(self, sequence: Sequence, length: int, want: Want) -> None:
        """Count the row's tokens as computed, and give the pages that they fill to the prefix cache, and the
        head in which the part of the prompt ends that other sequences may take from there."""
        size, before = self.pages.page_size, sequence.computed_len
        full_before = before // size
        sequence.land(length, want)
        full = min(sequence.computed_len, sequence.named_len) // size
        if full > full_before and self.config.prefix_cache:
            identities = sequence.chain.extend(sequence.tokens, full)
            for index in range(full_before, full):
                self.pages.register(sequence.pages[index], identities[index])
        prompt_end = sequence.prompt_len - 1
        if before <= prompt_end <= sequence.computed_len and self.config.prefix_cache:
            sequence.name_head(self.pages, prompt_end)

    def _take_token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, news: StepOutput, now: float
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
        self, flight: InFlight, columns: list[tuple[int, list[TokenLogprobs]]], news: StepOutput
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

    def _take_read(
        self,
        flight: InFlight,
        read: list[tuple[int, T]],
        told: list[tuple[int, T]],
        is_finite: Callable[[T], bool],
    ) -> set[int]:
        """Report what prompts were read for, by slot. Returns the handles of sequences for which that is not
        finite."""
        of_slot = dict(zip(flight.plan.slots, flight.rows, strict=True))
        unsound: set[int] = set()
        for slot, value in read:
            sequence = of_slot[slot]
            if not is_finite(value):
                unsound.add(sequence.handle)
            elif sequence.status is not Status.FINISHED:
                told.append((sequence.handle, value))
        return unsound


def _are_finite(logprobs: list[float]) -> bool:
    return not any(map(math.isnan, logprobs))


# -- the record -----------------------------------------------------------------------------------


CLASSES: Final = tuple(ServiceClass)
NO_DECODES: Final = (0,) * len(CLASSES)


class StepBook:
    """Makes the records of steps, in the order of their commits."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator: Final = allocator
        self._ended_at = 0.0
        """The last commit, or the moment after it at which there was work again."""
        self._slots: list[int] = []
        """The slots of the last step that was counted; empty where some of its rows did not decode."""
        self._decodes = NO_DECODES
        """The decodes of the last step that was counted, by class."""
        self._single_prompts = 0
        """The rows of that step that computed one token of a prompt, as where all others were cached. To the
        cost of a step they are decodes; whoever reads a record is to know them from streams."""
        self._record: StepRecord | None = None

    def wake(self, now: float) -> None:
        """Note that there is work again after a time without any."""
        self._ended_at = now

    def commit(self, flight: InFlight, step_s: float, expected_s: float, now: float) -> None:
        """Make the record of a step that is committed now and took `step_s`, where `expected_s` was expected
        before it was made."""
        work, plan, allocator = flight.work, flight.plan, self._allocator
        interval_s, self._ended_at = max(now - self._ended_at, step_s), now
        if plan.seated or plan.left or plan.slots != self._slots or work.prompt_tokens:
            self._count_decodes(flight)
        pages, single_prompts = allocator.pages, self._single_prompts
        self._record = StepRecord(
            plan.step,
            interval_s,
            step_s,
            expected_s,
            len(plan.slots) - work.decode_rows + single_prompts,
            work.prompt_tokens + single_prompts,
            self._decodes,
            work.copied_pages,
            flight.lack,
            allocator.holders,
            100 * pages.owned // pages.total,
        )

    def _count_decodes(self, flight: InFlight) -> None:
        """Count the classes of the rows that decode. A slot has the same sequence until it is left and seated
        again, so steps with the same slots have the same counts."""
        plan = flight.plan
        rows = zip(flight.rows, plan.positions, plan.lengths, plan.wants, strict=True)
        classes = [
            row.service_class
            for row, position, length, want in rows
            if (length == 1 or want is Want.VERIFY) and position >= row.prompt_len
        ]
        flex, default, priority = [classes.count(each) for each in CLASSES]
        self._decodes = (flex, default, priority)
        self._single_prompts = flight.work.decode_rows - len(classes)
        self._slots = plan.slots if len(classes) == len(plan.slots) else []

    def take(self) -> StepRecord | None:
        """The record of the step that was committed since the last call. None when none was."""
        record, self._record = self._record, None
        return record


def lack_of(allocator: Allocator, *, waits: bool) -> Lack:
    """The reason why sequences still wait once a plan is made; `waits` says whether any does."""
    if not waits:
        return Lack.NOTHING
    return allocator.lack or (Lack.TURN if allocator.has_free_slot else Lack.SLOTS)
