"""Spends one step's token budget: on decodes, then by rank on chunks of running prefills (chunked prefill)
and on admissions.

The first sequence of a tenant that does not fit ends the tenant's admissions for its class and those below,
so none overtakes it for good, and none of its class takes the pages that a preempted sequence just released.
In the turn of the oldest (`engine.core.queue.policy`) it ends the tenant's admissions for every class. While
none of its tenant runs, it ends them for all tenants; otherwise it waits until one of its own tenant ends,
and other tenants do not.

D. A sequence waits, and others pass it, while another computes the very page that it lacks next. In its turn
   the oldest does not wait. But while another computes its whole prompt it *follows* that, and has no turn:
   the `n` choices of one request compute their prompt once. (`PASSED_MAX` of them end the admissions of their
   tenant, so that planning stays cheap.) These are two rules, and not one by pages: with a turn a choice
   would compute a prompt twice that is charged once, and without one a sequence would wait for ever whose
   first page others compute all the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from engine.contract.messages import RunnerInfo, ServiceClass, SlotAssignment, Started, StepOutput
from engine.core.estimate import pace
from engine.core.estimate.cost import CostLearner, Work
from engine.core.estimate.pace import Credit, PrefillBudget
from engine.core.queue import deadlines
from engine.core.queue.deadlines import HurryCredits, Rate
from engine.core.queue.policy import Circumstances
from engine.core.queue.tenants import TenantCounters
from engine.core.queue.waiting import Candidate, WaitingQueue
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import LifePhase, Sequence, Status
from engine.core.step.allocator import Allocator
from engine.core.step.drafting import Drafting
from engine.core.step.flight import InFlight
from engine.core.step.host_tier import Prefix
from engine.core.step.plan_builder import PlanBuilder

PASSED_MAX: Final = 16
"""Sequences of one tenant that one plan passes over by rule D, as others compute what they lack."""
SEATED_LEN_MAX: Final = 128 * 1024
"""Known tokens of admitted sequences after which a plan admits no other. An admission costs the host 20 ns
for each, also of those in the cache, mostly for their pages: 63 choices of a cached prompt of 130,000 tokens
would take 0.18 s."""
NO_CLASS: Final = -1
HURRIED_OF: Final = 8
"""The number of running prompts of which one may be hurried: those that have run for longest."""
HIGHEST_CLASS: Final = max(ServiceClass)
"""Computed once, because the members of an Enum are iterated in Python, for every candidate."""


@dataclass(slots=True)
class Blocked:
    """The sequences that a plan admits no more, because one before them did not fit."""

    of_all: int = NO_CLASS
    """The highest class of which no sequence of any tenant is admitted."""
    of_tenant: dict[str, int] = field(default_factory=dict)
    """The highest class of which no sequence of a tenant is admitted, by tenant."""
    passed: Counter[str] = field(default_factory=Counter)
    """The number of sequences that rule D passed over as others compute what they lack, by tenant."""

    def has(self, sequence: Sequence) -> bool:
        return sequence.service_class <= max(self.of_all, self.of_tenant.get(sequence.tenant, NO_CLASS))

    def add(self, candidate: Candidate, *, runs: bool) -> None:
        """Block what a candidate that did not fit blocks; `runs` says whether others of its tenant run."""
        sequence = candidate.sequence
        below: int = HIGHEST_CLASS if candidate.in_turn else sequence.service_class
        self.of_all = max(self.of_all, NO_CLASS if runs else below)
        self.of_tenant[sequence.tenant] = max(self.of_tenant.get(sequence.tenant, NO_CLASS), below)

    def pass_over(self, sequence: Sequence) -> None:
        self.passed[sequence.tenant] += 1
        if self.passed[sequence.tenant] == PASSED_MAX:
            self.of_tenant[sequence.tenant] = HIGHEST_CLASS


@dataclass(slots=True)
class Outlook:
    """The work before the first tokens of newcomers, the same for all that come between two plans."""

    rate: Rate
    rivals: list[Sequence]
    """The prompts that may go before a newcomer's, `LOOKED_AT_MAX` at most."""
    lens: list[int]
    """The tokens of each that are still to be computed."""

    def add(self, newcomer: Sequence) -> None:
        if len(self.rivals) < deadlines.LOOKED_AT_MAX:
            self.rivals.append(newcomer)
            self.lens.append(newcomer.expected_len)


@dataclass(slots=True)
class Planner:
    """Fills the plan of one step."""

    config: SchedulerConfig
    runner: RunnerInfo
    allocator: Allocator
    waiting: WaitingQueue
    tenants: TenantCounters
    learner: CostLearner
    in_flight: Mapping[int, InFlight]
    """The steps in flight, by step number."""
    drafting: Drafting | None = None
    """None where no row verifies drafts."""
    credit: Credit = field(default_factory=Credit)
    """The time that the last step left to prompts."""
    hurries: HurryCredits = field(default_factory=HurryCredits)
    outlook: Outlook | None = None
    """The last one that was taken; None once anything but a newcomer has changed it."""
    prefix_query_tokens: int = 0
    """Prompt tokens of all sequences that were admitted for the first time."""
    prefix_hit_tokens: int = 0
    """The part of these tokens that the prefix cache had, in any tier."""
    prefix_host_tokens: int = 0
    """The part of these that came back from host memory."""
    prefix_disk_tokens: int = 0
    """The part that came from disk."""

    def fill(self, builder: PlanBuilder, news: StepOutput, now: float) -> None:
        """Let decodes grow, and spend the whole budget as far as there is work for it."""
        self.allocator.grow(builder, now)
        self._plan_decodes(builder, now)
        self._plan_prompts(builder, news, now)

    def _plan_decodes(self, builder: PlanBuilder, now: float) -> None:
        decodes: dict[int, Sequence] = {}
        due: list[Sequence] = []
        for slot, sequence in self.allocator.running.items():
            if sequence.hold is not None:
                continue
            pending_len = sequence.pending_len
            if pending_len == 1 and not sequence.is_only_read:
                decodes[slot] = sequence
                if sequence.drafts_from <= sequence.computed_len:
                    due.append(sequence)
            else:
                sequence.expected_len = pending_len
                builder.prefills.append(sequence)
        if self.drafting is not None and (due or (decodes and self.runner.guesses_max)):
            self.drafting.add(builder, decodes, due, now, beside_prompts=self._has_prompts(builder, now))
        else:
            builder.add_decodes(decodes)

    def _has_prompts(self, builder: PlanBuilder, now: float) -> bool:
        """True if prompts run, or wait and may be admitted, so that drafts leave them their time."""
        if builder.prefills or not any(self.waiting.queues.values()):
            return bool(builder.prefills)
        return self.allocator.has_free_slot or self.allocator.may_preempt(now)

    def _plan_prompts(self, builder: PlanBuilder, news: StepOutput, now: float) -> None:
        """Spend what the decodes left, by rank: on admissions and on chunks of running sequences."""
        waiting = self.waiting.due if any(self.waiting.queues.values()) else []
        if not (builder.prefills or waiting):
            self.credit = Credit()
            return  # the usual step
        circumstances = self._circumstances(now, waiting)
        decodes_s, drafts_s = builder.decodes_s(circumstances.cost)
        budget = self._budget(builder.rows, decodes_s)
        builder.open_to_prompts(budget.beside(drafts_s), self.credit, circumstances.cost)
        rate = Rate(decodes_s, budget.seconds, len(builder.rows), builder.tokens_left)
        self._hurry(builder, rate, drafts_s, now)
        if self.allocator.has_free_slot or self.allocator.may_preempt(
            now
        ):  # else ranking would change nothing
            self._admit_by_rank(builder, news, circumstances)
        for sequence in self.waiting.rank(builder.unplanned_prefills, circumstances):
            builder.add_chunk(sequence)
        self.credit = builder.credit
        if builder.hurried is not None:
            self.hurries.spend(builder.hurried.tenant, builder.hurried_s, now)

    def _budget(self, streams: Sequence_[Sequence], decodes_s: float) -> PrefillBudget:
        """The time for prompts beside these decodes, which take `decodes_s`."""
        targets, error = self.config.gap_targets_s, self.learner.error
        if not streams:
            return pace.prompt_budget(targets[ServiceClass.DEFAULT], decodes_s, pace.ALONE_SHARE, error)
        target_s = min([targets[sequence.service_class] for sequence in streams])
        return pace.prompt_budget(target_s, decodes_s, self.config.prompt_share, error)

    # -- first-token deadlines --------------------------------------------------------------------

    def _hurry(self, builder: PlanBuilder, rate: Rate, drafts_s: float, now: float) -> None:
        """Choose the prompt that is hurried, if one is: what would miss its deadline, by rule 2 of
        `engine.core.queue.deadlines`. `rate` is that without drafts, which take `drafts_s`."""
        fast = deadlines.hurried(rate, self.learner.error).beside(drafts_s)
        rate = rate.beside(drafts_s)
        if fast.prompts_s <= rate.prompts_s:
            return
        first_token_by = math.inf
        for sequence in builder.prefills[:HURRIED_OF]:
            by = sequence.first_token_by
            if (
                by >= first_token_by
                or sequence.output_len
                or not self.hurries.left_s(sequence.tenant, now) > 0.0
            ):
                continue
            needs_s = deadlines.prefill_s(builder.cost, rate, sequence.planned_len, sequence.pending_len)
            if now + needs_s * (1.0 + self.learner.error) > by:
                builder.hurried, first_token_by = sequence, by
        if builder.hurried is not None:
            left_s = self.hurries.left_s(builder.hurried.tenant, now)
            builder.extra_s = min(fast.prompts_s - rate.prompts_s, left_s)

    def first_token_s(self, sequence: Sequence, now: float, within_s: float) -> float:
        """The estimate of a newcomer's time to first token, by which what is hopeless is refused (rule 1 of
        `engine.core.queue.deadlines`), or more where even that is at most `within_s`. Its work does not grow
        with the queue: a flood of requests with deadlines would cost its square otherwise."""
        if self.outlook is None:
            self.outlook = self._look_out()
        cost, rate, rivals = self.learner.cost, self.outlook.rate, self.outlook.rivals
        position, own_len = sequence.prompt_len - sequence.expected_len, sequence.expected_len
        most_s = deadlines.first_token_most_s(cost, rate, self.outlook.lens, position, own_len)
        if most_s <= within_s:
            return most_s
        before: list[int] = []
        if rivals:
            ranked = self.waiting.rank([*rivals, sequence], self._circumstances(now, [*rivals, sequence]))
            before = [other.expected_len for other in ranked[: ranked.index(sequence)]]
        allowance_s = self.hurries.left_s(sequence.tenant, now)
        fast = deadlines.hurried(rate, self.learner.error)
        return deadlines.first_token_s(cost, rate, fast, before, position, own_len, allowance_s)

    def _look_out(self) -> Outlook:
        prefills: list[Sequence] = []
        streams: list[Sequence] = []
        for other in self.allocator.running.values():
            if other.hold is None:
                is_stream = other.pending_len == 1 and not other.is_only_read
                (streams if is_stream else prefills).append(other)
        work = Work.of([each.planned_len for each in streams], [1] * len(streams))
        budget = self._budget(streams, decodes_s := self.learner.cost.seconds(work))
        waiting = [other for other in islice(self.waiting, deadlines.LOOKED_AT_MAX) if not other.is_paused]
        rivals = [*prefills, *waiting][: deadlines.LOOKED_AT_MAX]
        rate = Rate(decodes_s, budget.seconds, len(streams), self.config.step_tokens_max)
        return Outlook(rate, rivals, [other.expected_len for other in rivals])

    def _circumstances(self, now: float, rivals: Iterable[Sequence]) -> Circumstances:
        competing = {sequence.tenant for sequence in rivals}
        return Circumstances(now, self.learner.cost, self.tenants.leads(competing), self.tenants.admitted_at)

    def _admit_by_rank(self, builder: PlanBuilder, news: StepOutput, circumstances: Circumstances) -> None:
        allocator, now = self.allocator, circumstances.now
        blocked = Blocked()
        computing = self._prefilling(builder)
        self.waiting.computed = {s.prompt_identity for s in computing if allocator.lacks_prompt(s)}
        for candidate in self.waiting.candidates(builder.unplanned_prefills, circumstances):
            sequence = candidate.sequence
            if builder.is_full or blocked.of_all == HIGHEST_CLASS:
                return
            if sequence.status is Status.RUNNING:
                builder.add_chunk(sequence)
                continue
            if builder.seated_len >= SEATED_LEN_MAX or (blocked.has(sequence) and not candidate.in_turn):
                continue
            prefix = allocator.find_prefix(sequence)
            sequence.expected_len = len(sequence.tokens) - prefix.computed_len
            is_coming = not candidate.in_turn and self._is_coming(sequence, prefix, builder)
            if is_coming or self.waiting.is_following(sequence):
                blocked.pass_over(sequence)
            elif not builder.has_time_for(sequence, prefix.computed_len):
                return
            elif allocator.fits(sequence, prefix) or allocator.preempt_for(sequence, prefix, builder, now):
                self._admit(sequence, prefix, builder, news, now)
            else:
                blocked.add(candidate, runs=sequence.tenant in allocator.holdings.slots)

    def _is_coming(self, sequence: Sequence, prefix: Prefix, builder: PlanBuilder) -> bool:
        """True if a chunk of this very plan, or of a step in flight, works towards the next page that
        `sequence` lacks, so that it may wait for that (rule D)."""
        if sequence.pages or not self.config.prefix_cache:
            return False
        hits_len, states = len(prefix.pages) + len(prefix.kept), self.allocator.states
        if hits_len == sequence.reusable_len // self.runner.page_size:
            return False
        lacking = sequence.chain.identities[hits_len]
        others = self._prefilling(builder)
        if states is not None:
            cost = self.learner.cost
            return any(states.is_coming(sequence, hits_len, other, cost) for other in others)
        return any(lacking in other.chain.identities[hits_len : hits_len + 1] for other in others)

    def _prefilling(self, builder: PlanBuilder) -> list[Sequence]:
        """The sequences of which this plan, or a step in flight, computes prompts."""
        flying = [s for flight in self.in_flight.values() for s in flight.prefills if s.slot is not None]
        return builder.prefills + flying

    def _admit(
        self, sequence: Sequence, prefix: Prefix, builder: PlanBuilder, news: StepOutput, now: float
    ) -> None:
        is_new = sequence.status is Status.WAITING
        self.tenants.admitted_at[sequence.tenant] = now
        brought = self.allocator.admit(sequence, prefix, builder, now)
        slot, cached_len = sequence.slot, sequence.computed_len
        assert slot is not None
        if is_new:
            self.prefix_query_tokens += sequence.prompt_len
            self.prefix_hit_tokens += cached_len
            self.tenants.charge(sequence.tenant, sequence.prompt_len - cached_len)
            self.prefix_host_tokens += brought.host_len
            self.prefix_disk_tokens += brought.disk_len
            queue_s = sequence.spent_s[LifePhase.QUEUE]
            news.started.append(
                Started(sequence.handle, cached_len, queue_s, brought.host_len, brought.disk_len)
            )
        seated = SlotAssignment(slot, sequence.tokens.tobytes(), sequence.prompt_len, sequence.sampling)
        builder.seated.append(seated)
        builder.grown[slot] = list(sequence.pages)
        builder.prefills.append(sequence)
        if self.allocator.lacks_prompt(sequence):
            self.waiting.computed.add(sequence.prompt_identity)
        builder.charge_copies()
        builder.add_chunk(sequence, tokens_min=1)
        builder.charge_seat(sequence)
