"""Snapshots of states: when one is taken, where a chunk ends for it, and what comes out of one.

Rules

1. A snapshot is the state behind a whole number of pages, since a prefix goes on from where it has both. It
   is copied out of the slot in the plan behind the step that came to it, before that plan computes anything,
   and so of a step in flight, too. It is kept under the identity of its last page, once the prefix cache
   finds that.
2. It is taken where others are likely to go on: where the known tokens end, rounded down to a page and so
   that one is left to compute; where pages were found and no state behind them, since a second prompt has
   come there; behind every `every_len` tokens of a long prompt; and at each end of a page of the answer. Of
   an answer's the newest alone is kept.
3. A chunk ends there for it, where computing what the state saves takes longer than one more step would, by
   the learned cost. It also ends with a page where that makes it shorter by `SHORTER_PART` at most: a
   sequence that loses its slot at the end of a page keeps its state, if copying that out and back takes less
   than computing again what came behind the last snapshot.
4. A plan copies states out of slots first, then states to slots, then it computes. So a slot is given away,
   and a place is gone on from, in the plan that copies its state.
5. A row that verified drafts may have passed the end of a page. The state there is copied in the very next
   plan, as long as the slot has it (`Sequence.passed`): where steps overlap it may be gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from engine.contract.messages import RunnerInfo, StateCounts
from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import BlockManager, PageIdentity
from engine.core.pages.state_pool import StatePool
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.core.step.flight import ComingState, InFlight

SHORTER_PART: Final = 0.25
"""The largest part of a chunk that is left to the next so that it ends with a page."""


class StateTier:
    """Decides which states are copied out of slots and to them, and keeps the copies that the next plan
    makes."""

    def __init__(self, places: int, pages: BlockManager, every_len: int) -> None:
        size = pages.page_size
        self.pool: Final = StatePool(places)
        self._pages: Final = pages
        self._every_len: Final = max(1, -(-every_len // size)) * size
        self._saved: dict[int, tuple[int, int]] = {}
        """The slot whose state is copied to each place, and how many tokens before its own. A place that is
        dropped and used again within one plan gets the later state alone."""
        self._restored: list[tuple[int, int]] = []
        self._step = 0
        """The step that was planned last."""
        self._saves = 0
        self._restores = 0
        self.stateless_tokens = 0
        """Prompt tokens whose pages were found at a first admission, and no state behind them."""

    @classmethod
    def of(cls, runner: RunnerInfo, config: SchedulerConfig, pages: BlockManager) -> StateTier | None:
        """None for a model without states, and where prefixes are not cached."""
        if not (runner.state_bytes and config.prefix_cache):
            return None
        assert not runner.host_pages, "no state lies behind pages in host memory"
        return cls(runner.state_places, pages, config.state_every_len)

    @property
    def copies(self) -> int:
        """The number of states that the plan in the making copies, out of slots and to them."""
        return len(self._saved) + len(self._restored)

    # -- where snapshots are taken ----------------------------------------------------------------

    def cut(self, sequence: Sequence, position: int, length: int, cost: StepCost) -> int:
        """The length of a chunk of at most `length` tokens from `position` on (rule 3)."""
        end, size = position + length, self._pages.page_size
        stop = self._next_stop(sequence, position, cost)
        if stop is not None and stop < end:
            return stop - position
        whole = end // size * size - position
        return whole if length < sequence.pending_len and whole >= (1 - SHORTER_PART) * length else length

    def _next_stop(self, sequence: Sequence, position: int, cost: StepCost) -> int | None:
        """The next place behind `position` at which a chunk of this prompt ends for a snapshot."""
        stops = (sequence.branch_len, self._before_last(sequence), sequence.state_len + self._every_len)
        ahead = [stop for stop in stops if position < stop <= stops[1] and self._pays(sequence, stop, cost)]
        return min(ahead, default=None)

    def _pays(self, sequence: Sequence, stop: int, cost: StepCost) -> bool:
        since = sequence.state_len
        return cost.chunk_s(since, stop - since) > cost.fixed_s + 2 * cost.page_s if stop > since else False

    def _before_last(self, sequence: Sequence) -> int:
        """The last place of a snapshot before its newest known token is computed."""
        size = self._pages.page_size
        return min(len(sequence.tokens) - 1, sequence.named_len) // size * size

    def is_coming(self, sequence: Sequence, found: int, other: Sequence, cost: StepCost) -> bool:
        """True if `other` computes towards a snapshot that `sequence` could go on from, which has found one
        behind `found` pages."""
        stop, size = self._next_stop(other, other.computed_len, cost), self._pages.page_size
        if stop is None or not found * size < stop <= sequence.reusable_len:
            return False
        at = stop // size - 1
        return sequence.chain.identities[at] == other.chain.extend(other.tokens, at + 1)[at]

    def lacks_prompt(self, sequence: Sequence, cost: StepCost) -> bool:
        """True if a running sequence computes towards the last snapshot of its prompt."""
        last = self._before_last(sequence)
        if sequence.output_len or not sequence.computed_len < last:
            return False
        return self._pays(sequence, last, cost)

    # -- copies out of slots ----------------------------------------------------------------------

    def save_due(self, running: Iterable[Sequence], flights: Mapping[int, InFlight], now: float) -> None:
        """Copy the states of those sequences that have come to a place of rule 2."""
        size = self._pages.page_size
        for sequence in running:
            back = sequence.planned_len % size
            at = sequence.planned_len - back
            if sequence.verifying or back > self._passed(sequence):
                continue
            if not sequence.state_len < at <= sequence.named_len:
                continue
            is_last = at >= self._before_last(sequence)
            if is_last or at == sequence.branch_len or at - sequence.state_len >= self._every_len:
                self._save(sequence, at, back, flights.get(sequence.last_step), now)

    def save_left(self, sequence: Sequence, cost: StepCost, now: float) -> None:
        """Copy the state of a sequence that loses its slot, with nothing in flight, if that pays (rule 3)."""
        since, back = sequence.state_len, sequence.computed_len % self._pages.page_size
        at = sequence.computed_len - back
        if not since < at <= sequence.named_len or back > self._passed(sequence):
            return
        if 2 * cost.page_s < cost.chunk_s(since, at - since):
            self._save(sequence, at, back, None, now)

    def _passed(self, sequence: Sequence) -> int:
        """The tokens before its newest computed one of which the slot still has the states (rule 5)."""
        return sequence.passed if sequence.last_step == self._step else 0

    def _save(self, sequence: Sequence, at: int, back: int, flight: InFlight | None, now: float) -> None:
        """Copy the state behind its first `at` tokens, `back` before those that are computed or planned."""
        assert sequence.slot is not None
        count = at // self._pages.page_size
        identities = sequence.chain.extend(sequence.tokens, count)
        identity, before = identities[count - 1], sequence.state_len
        if flight is None and self._pages.find(identity) is None:
            return  # another computed its last page, and lost it
        sequence.state_len = at
        if self.pool.has(identity):
            self.pool.use(identity)
            return
        if before >= sequence.prompt_len:
            self.pool.drop([identities[before // self._pages.page_size - 1]])
        place = self.pool.take(sequence.tenant, now)
        if place is None:
            return
        self._saved[place] = sequence.slot, back
        self._saves += 1
        if flight is None:
            self.pool.keep(place, identity)
        else:
            flight.states.append(ComingState(place, identity))

    def settle(self, states: Iterable[ComingState]) -> None:
        """Keep the states that a committed step came to, as far as the prefix cache has their pages."""
        for coming in states:
            if self._pages.find(coming.identity) is None:
                self.pool.give_back(coming.place)
            else:
                self.pool.keep(coming.place, coming.identity)

    # -- copies to slots --------------------------------------------------------------------------

    def restore(self, identity: PageIdentity, slot: int) -> None:
        """Let the plan in the making begin a slot with a kept state."""
        self._restored.append((self.pool.read(identity), slot))
        self._restores += 1

    def restore_s(self, victim: Sequence, cost: StepCost) -> float:
        """The time to restore `victim` if it were preempted now, in seconds: what others share of it stays,
        with the states behind it, and the rest is computed again."""
        shared = self._pages.leading_shared(victim.pages)
        known_len = self.pool.known_len(victim.chain.identities[:shared]) * self._pages.page_size
        copy_s = cost.page_s if known_len else 0.0
        return copy_s + cost.chunk_s(known_len, victim.computed_len - known_len)

    def keep_until(self, sequence: Sequence, deadline_s: float) -> None:
        """Keep the states of a sequence that ends for its session's next turn: its newest, and its prompt's
        last, from which the turn goes on if its template leaves something of the answer out."""
        size, identities = self._pages.page_size, sequence.chain.identities
        for end in {sequence.state_len // size, (sequence.prompt_len - 1) // size}:
            if 0 < end <= len(identities):
                self.pool.keep_until(identities[end - 1], deadline_s)

    def counts(self) -> StateCounts:
        pool = self.pool
        return StateCounts(
            pool.free, pool.kept, self._saves, self._restores, pool.evicted, self.stateless_tokens
        )

    def take_copies(self, step: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """The copies of the plan of this step, which is made now: those out of slots as (slot, place, tokens
        back), those to slots as (place, slot)."""
        self._step = step
        saved = [(slot, place, back) for place, (slot, back) in self._saved.items()]
        restored, self._restored, self._saved = self._restored, [], {}
        self.pool.plan_made()
        return saved, restored
