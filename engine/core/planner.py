"""Spends one step's token budget: decodes, then prompts by rank, on chunks and on admissions.

The rules A to I that are named here stand at the head of `engine.core.scheduler`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.core import policy
from engine.core.config import SchedulerConfig
from engine.core.cost import CostLearner
from engine.core.messages import RunnerInfo, ServiceClass, SlotStart, Started
from engine.core.policy import Circumstances
from engine.core.room import Room
from engine.core.sequence import Phase, Sequence, Status
from engine.core.step import Batch, InFlight, News
from engine.core.swap import Start
from engine.core.tenants import TenantCounters
from engine.core.waiting import Candidate, WaitingRoom

PASSED_MAX: Final = 16
"""Sequences of one tenant that one plan passes over by rule D."""
NO_CLASS: Final = -1
HIGHEST_CLASS: Final = max(ServiceClass)
"""Not found anew for every candidate: an Enum is iterated in Python."""


@dataclass(slots=True)
class Barred:
    """Who is admitted no more by this plan, since somebody before did not fit: those of its tenant and of no
    higher class, and of all tenants, when nobody of its own runs whose end would make room for it."""

    of_all: int = NO_CLASS
    """This class, and those below."""
    of_tenant: dict[str, int] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    """By rule D, by tenant."""

    def has(self, sequence: Sequence) -> bool:
        return sequence.service_class <= max(self.of_all, self.of_tenant.get(sequence.tenant, NO_CLASS))

    def add(self, candidate: Candidate, *, runs: bool) -> None:
        """This one did not fit; `runs` says whether others of its tenant do."""
        sequence = candidate.sequence
        below: int = HIGHEST_CLASS if candidate.in_turn else sequence.service_class
        self.of_all = max(self.of_all, NO_CLASS if runs else below)
        self.of_tenant[sequence.tenant] = max(self.of_tenant.get(sequence.tenant, NO_CLASS), below)

    def pass_over(self, sequence: Sequence) -> None:
        self.passed[sequence.tenant] += 1
        if self.passed[sequence.tenant] == PASSED_MAX:
            self.of_tenant[sequence.tenant] = HIGHEST_CLASS


@dataclass(slots=True)
class Planner:
    config: SchedulerConfig
    runner: RunnerInfo
    room: Room
    waiting: WaitingRoom
    tenants: TenantCounters
    learner: CostLearner
    in_flight: Mapping[int, InFlight]
    """By step."""
    is_odd: bool = False
    """Of the steps that had prompts beside decodes, the last."""
    prefix_query_tokens: int = 0
    """Of all prompts admitted, and of those found in the cache."""
    prefix_hit_tokens: int = 0

    def fill(self, batch: Batch, news: News, now: float) -> None:
        """Make room, and spend the whole budget as far as there is work for it."""
        self.room.grow(batch, now)
        self._plan_decodes(batch)
        self._spend(batch, news, now)

    def _plan_decodes(self, batch: Batch) -> None:
        decodes: dict[int, Sequence] = {}
        for slot, sequence in self.room.running.items():
            if not sequence.is_due:
                continue
            pending_len = sequence.pending_len
            if pending_len == 1:
                decodes[slot] = sequence
            else:
                sequence.expected_len = pending_len
                batch.chunks.append(sequence)
        batch.add_decodes(decodes)

    def _spend(self, batch: Batch, news: News, now: float) -> None:
        """What the decodes left, by rank: on chunks of those who run, and on admissions."""
        if not (batch.chunks or self.waiting.willing):
            return  # as in most steps
        circumstances = self._circumstances(now)
        batch.open_to_prompts(self._prompt_room_s(batch, circumstances), circumstances.cost)
        if self.room.has_free_slot or self.room.may_displace(now):  # else there is nothing to rank for
            self._admit(batch, news, circumstances)
        for sequence in self.waiting.rank(batch.unplanned, circumstances):
            batch.add_chunk(sequence)

    def _prompt_room_s(self, batch: Batch, circumstances: Circumstances) -> float:
        work = batch.work
        target_s, decodes_s = self.config.step_time_target_s, circumstances.cost.seconds(work)
        if not work.decode_rows:  # nobody streams
            return policy.room_alone_s(target_s, decodes_s)
        prompts = (policy.lateness(s, circumstances) for s in (*batch.chunks, *self.waiting.willing))
        self.is_odd = not self.is_odd
        return policy.prompt_room_s(target_s, decodes_s, prompts, is_odd=self.is_odd)

    def _circumstances(self, now: float) -> Circumstances:
        competing = {sequence.tenant for sequence in self.waiting.willing}
        return Circumstances(now, self.learner.cost, self.tenants.leads(competing))

    def _admit(self, batch: Batch, news: News, circumstances: Circumstances) -> None:
        room, now = self.room, circumstances.now
        barred = Barred()
        for candidate in self.waiting.candidates(batch.unplanned, circumstances):
            sequence = candidate.sequence
            if batch.is_full or barred.of_all == HIGHEST_CLASS:
                return
            if sequence.status is Status.RUNNING:
                batch.add_chunk(sequence)
                continue
            if barred.has(sequence) and not candidate.in_turn:
                continue
            start = room.start(sequence)
            sequence.expected_len = len(sequence.tokens) - start.computed_len
            if not candidate.in_turn and self._is_coming(sequence, start, batch):
                barred.pass_over(sequence)
            elif room.fits(sequence, start) or room.displace(sequence, start, batch, now):
                self._seat(sequence, start, batch, news, now)
            else:
                barred.add(candidate, runs=sequence.tenant in room.seats.slots)

    def _is_coming(self, sequence: Sequence, start: Start, batch: Batch) -> bool:
        """Whether a chunk of this very plan, or of one in flight, works towards the next page that
        `sequence` lacks (rule D)."""
        if sequence.pages or start.host_pages or not self.config.prefix_cache:
            return False
        hits_len = len(start.pages)
        if hits_len == sequence.reusable_len // self.runner.page_size:
            return False
        lacking = sequence.chain.identities[hits_len]
        flying = [s for flight in self.in_flight.values() for s in flight.chunks if s.slot is not None]
        return any(
            lacking in other.chain.identities[hits_len : hits_len + 1] for other in (*batch.chunks, *flying)
        )

    def _seat(self, sequence: Sequence, start: Start, batch: Batch, news: News, now: float) -> None:
        is_new = sequence.status is Status.WAITING
        self.room.seat(sequence, start, batch, now)
        slot, cached_len = sequence.slot, sequence.computed_len
        assert slot is not None
        if is_new:
            self.prefix_query_tokens += sequence.prompt_len
            self.prefix_hit_tokens += cached_len
            self.tenants.charge(sequence.tenant, sequence.prompt_len - cached_len)
            news.started.append(Started(sequence.handle, cached_len, sequence.spent_s[Phase.QUEUE]))
        seated = SlotStart(slot, sequence.tokens.tolist(), sequence.prompt_len, sequence.sampling)
        batch.seated.append(seated)
        batch.grown[slot] = list(sequence.pages)
        batch.chunks.append(sequence)
        batch.charge_copies()
        batch.add_chunk(sequence, tokens_min=1)
