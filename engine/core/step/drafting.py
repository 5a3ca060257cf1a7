"""Which of a step's decodes verify drafts, and how many.

A sequence that decodes is looked at when `drafts_from` says so. What is found is offered to
`engine.core.drafts.price`, which takes what pays by the cost of a step as it was learned last.

Rules

1. What drafts add to a step keeps to the gap target of the classes that stream in it, or, where that cannot
   be kept without drafts either, to the share `LATE_SHARE` of the step: streams that draft nothing see that
   gap, too. Where prompts wait it is a part of their time, by the rule of `engine.core.estimate.pace`. They
   take `TOKENS_SHARE` of the tokens that decodes leave at most: the others are for prompts.
2. No sequence is preempted for drafts, and no page is taken that a running one may lack next.
3. A sequence drafts what stands behind its newest token. So it does where nothing of it is in flight, and
   sits out the plans that are made while its drafts are verified (`Hold.DRAFTS`): it is not known where they
   end. Where a runner computes while it is launched, as on a CPU, steps do not overlap, and each row may
   draft in each step.
4. Where steps overlap, a stream's newest token is always in flight, and so a plan with drafts is made once
   that step is committed (`waits`). All streams lose the host's time for it, while the device idles: some
   hundred microseconds, where a sequence that sits out every second step loses a whole one. So a plan waits
   if drafts are likely to gain more than that: those that stand behind known tokens, which are right only if
   the coming one is as well, and the next ones of those that verify now. Beside a step in flight others draft
   only what is worth the step that they will sit out, more than one token; but for those that follow a
   grammar, which sit it out anyway. To look for drafts on the device would spare the wait. But it would have
   to hold all indexes, and the host would plan pages, limits and masks by lengths that it does not know.
   Measured (`python -m tests.bench scheduler --overlap`): it is better than both others, steps that do not
   overlap and overlapped ones without drafts, at 1 stream, and near the better one at 8 and 32; behind it
   where nearly all drafts of 32 streams are right (0.82 and 0.86 of it). What a search on the device could
   add is the host's time for the steps that wait, some 0.3 to 0.7 ms each.
5. A look costs some 5 us of the core's thread, and to read a token 0.5 us, of which `READ_MAX` are read in a
   plan at most. Those whose looks find nothing are looked at more rarely (`Drafts.pause`), and so are those
   for which not even right drafts would pay.
6. Of a model that has states, each draft of a step takes one of `RunnerInfo.state_windows`; of others, a
   runner may have room for so many (`RunnerInfo.drafts_together`).
7. Where the model guesses (`RunnerInfo.guesses_max`), a plan asks for as many guesses as will pay in the
   next one: one takes its time in this step, and that of a draft in the next. They are asked for behind
   decodes that nothing else leads (`engine.core.drafts.guesses`), with pages for what they may become. Where
   steps overlap, they are asked for where it will pay to wait for them, as for drafts (rule 4): they are
   known when the step is back whose token they stand behind.
8. The indexes of all sequences take `ROOM` bytes at most. Those that come when it is used up draft nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from operator import mul
from typing import Final

from engine.contract.messages import RunnerInfo, agreed
from engine.core.drafts.drafter import Drafts, NGramDrafts, Proposal
from engine.core.drafts.guesses import GuessDrafts
from engine.core.drafts.prediction import PredictionDrafts
from engine.core.drafts.price import Offer, Sureness, lengths_by_shape, lengths_that_pay, tokens_of
from engine.core.estimate import pace
from engine.core.estimate.cost import CostLearner, Work
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.core.step.allocator import Allocator
from engine.core.step.flight import InFlight
from engine.core.step.plan_builder import PlanBuilder

LATE_SHARE: Final = 0.25
TOKENS_SHARE: Final = 0.5
LEAST_SHARE: Final = 1 / 256
"""The least share of a step that a draft is taken to cost, whatever was learned; or of what a token takes in
a large one, `LEAST_PART`."""
LEAST_PART: Final = 1 / 8
LEAST_S: Final = 1e-9
READ_MAX: Final = 4096
ROOM: Final = 64 << 20
LOOK_AGAIN: Final = 8
"""The tokens that pass until the next look where drafts do not pay."""
HOST_S: Final = 5e-4
"""The host's time for a step before it is known."""
HOST_WEIGHT: Final = 0.05
"""The weight of a step's beside all before it."""


def drafter_for(sequence: Sequence) -> Drafts:
    """The drafter of a sequence."""
    params = sequence.sampling
    lens = sequence.prompt_len, sequence.prompt_len + params.max_tokens
    if sequence.prediction:
        return PredictionDrafts(sequence.prediction, *lens, params.stop_token_ids)
    return NGramDrafts(lens[1], params.stop_token_ids)


def _foreseen(sequence: Sequence, draft: Proposal, most: int) -> Proposal:
    """The drafts behind which masks are known: the beginning of what was drafted, and what the grammar forces
    behind it."""
    tokens = [*sequence.foreseen[:most]]
    known = draft.tokens[: min(draft.predicted, len(tokens))]
    return draft._replace(tokens=tokens, predicted=agreed(known, tokens), why=sequence.foreseen_why[:most])


def _chances(sequence: Sequence, draft: Proposal) -> Sequence_[float]:
    """The chance of each draft, where they differ."""
    if not draft.why:
        return ()
    assert sequence.drafter is not None
    of = {
        Sureness.DRAFTED: draft.chance,
        Sureness.FORCED: sequence.drafter.forced().chance,
        Sureness.SURE: 1.0,
    }
    return [of[why] for why in draft.why]


def _pause(sequence: Sequence, tokens: int) -> None:
    """Look at a sequence again in so many tokens."""
    if sequence.mask:
        sequence.looks_from = sequence.computed_len + tokens
    else:
        sequence.drafts_from = sequence.computed_len + tokens


@dataclass(slots=True)
class Drafting:
    """Chooses the drafts of a step."""

    config: SchedulerConfig
    runner: RunnerInfo
    allocator: Allocator
    learner: CostLearner
    drafts_max: int
    """Drafts of a row at most."""
    room: int = ROOM
    """Bytes that further indexes may take."""
    drafter_of: Callable[[Sequence], Drafts] = drafter_for
    in_flight: Mapping[int, InFlight] = field(default_factory=dict)
    """The steps in flight, by step number."""
    host_s: float = HOST_S
    """The host's time for a step, while the device idles if no other is in flight."""

    def waits(self) -> bool:
        """True if the next plan is to be made once the step in flight is committed (rule 4)."""
        running = self.allocator.running.values()
        streams = [each for each in running if each.coming and each.mask == b"" and not each.is_paused]
        guessing = [each for each in streams if each.guessing]
        others = [each for each in streams if not each.guessing]
        coming = [each for each in others if each.drafts_from <= each.computed_len and not each.verifying]
        verifying = [each for each in others if each.verifying]
        if not (coming or verifying or guessing):
            return False
        early = self._looked_at_early(coming)
        drafts = [(each, draft.chance, len(draft.tokens), draft.chance) for each, draft in early]
        drafts += [(each, each.draft_chance, each.verifying, 1.0) for each in verifying]
        drafts += [
            (each, each.guesser.chance, each.guessing, 1.0) for each in guessing if each.guesser is not None
        ]
        if drafts and self._gains(streams, drafts):
            return True
        for sequence, _ in early:
            assert sequence.drafter is not None
            sequence.drafter.pass_over()
            _pause(sequence, sequence.drafter.pause)
        return False

    def _looked_at_early(self, coming: list[Sequence]) -> list[tuple[Sequence, Proposal]]:
        """The proposals of streams whose next token is still coming."""
        found: list[tuple[Sequence, Proposal]] = []
        to_read = READ_MAX
        for sequence in coming:
            most = min(self.drafts_max, sequence.kv_len_max - sequence.planned_len - 1)
            if most < 1 or (drafter := sequence.drafter or self._begin(sequence)) is None:
                continue
            read_len = drafter.read_len
            draft = drafter.look(sequence.tokens, most, to_read)
            to_read -= drafter.read_len - read_len
            if draft is not None:
                found.append((sequence, draft))
            elif drafter.has_read:
                _pause(sequence, drafter.pause)
        return found

    def _gains(self, streams: list[Sequence], drafts: list[tuple[Sequence, float, int, float]]) -> bool:
        """True if these streams have more tokens per second with drafts, and the host's time for it. Of each
        that drafts: the chance that one is right, their number, and the chance that they are any."""
        rows = len(streams)
        work = Work.of([each.planned_len for each in streams], [1] * rows)
        step_s = self.learner.known.seconds(work)
        drafts_s = self._drafts_s([each for each, *_ in drafts], work, step_s)
        offers = [
            Offer(chance, most, draft_s)
            for (_, chance, most, _), draft_s in zip(drafts, drafts_s, strict=True)
        ]
        by_slot = {each.handle: each for each in streams}
        spare = self.spare_drafts(self.config.step_tokens_max, rows)
        lengths = lengths_that_pay(
            offers, rows, step_s, self.spare_s(by_slot, step_s, beside_prompts=False), spare
        )
        longer_s: float = self.host_s + sum(map(mul, drafts_s, lengths))
        gained = sum(
            any_right * tokens_of(chance, length)
            for (_, chance, _, any_right), length in zip(drafts, lengths, strict=True)
        )
        return bool(gained * step_s > rows * longer_s)

    def note_host(self, seconds: float) -> None:
        """Learn the host's time for a step."""
        self.host_s += HOST_WEIGHT * (seconds - self.host_s)

    def add(
        self,
        builder: PlanBuilder,
        decodes: dict[int, Sequence],
        due: list[Sequence],
        now: float,
        *,
        beside_prompts: bool,
    ) -> None:
        """Add rows for the decodes, by slot, of which those in `due` are to be looked at for drafts.
        `beside_prompts`: prompts may have a part of the step."""
        looks = self._looked_at(due, self.spare_drafts(builder.tokens_left, len(decodes)))
        drafts = self._chosen(looks, builder, decodes, now, beside_prompts) if looks else {}
        if drafts:
            builder.add_decodes({slot: each for slot, each in decodes.items() if slot not in drafts})
            builder.add_verifying({slot: decodes[slot] for slot in drafts}, [*drafts.values()])
        else:
            builder.add_decodes(decodes)
        if self.runner.guesses_max:
            self._ask(builder, decodes, now, beside_prompts)

    def foresee(self, sequence: Sequence) -> list[int] | None:
        """The drafts of a sequence with a grammar, behind its newest token; None where it drafts nothing."""
        most = min(self.drafts_max, sequence.kv_len_max - sequence.computed_len - 1)
        drafter = sequence.drafter or self._begin(sequence)
        if drafter is None or most < 1:
            return None
        sequence.draft = None
        if sequence.looks_from <= sequence.computed_len:
            sequence.draft = drafter.look(sequence.tokens, most, READ_MAX)
            if sequence.draft is None and drafter.has_read:
                sequence.looks_from = sequence.computed_len + drafter.pause
        return [] if sequence.draft is None else sequence.draft.tokens

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        if sequence.drafter is not None:
            self.room += sequence.drafter.size
            sequence.drafter = sequence.guesser = None

    def _looked_at(self, due: list[Sequence], spare: int) -> list[tuple[Sequence, Proposal]]:
        """The sequences for which drafts were found."""
        found: list[tuple[Sequence, Proposal]] = []
        to_read = READ_MAX
        for sequence in due:
            computed_len = sequence.computed_len
            most = min(self.drafts_max, spare, sequence.kv_len_max - computed_len - 1)
            if most < 1:
                _pause(sequence, LOOK_AGAIN)
            if sequence.in_flight_len or most < 1:
                continue
            drafter = sequence.drafter or self._begin(sequence)
            if drafter is None:
                continue
            if sequence.mask:
                found.append((sequence, _foreseen(sequence, sequence.draft or drafter.forced(), most)))
                continue
            read_len = drafter.read_len
            draft = drafter.look(sequence.tokens, most, to_read)
            to_read -= drafter.read_len - read_len
            if draft is not None:
                found.append((sequence, draft))
            elif drafter.has_read:
                sequence.drafts_from = computed_len + drafter.pause
        return found

    def _begin(self, sequence: Sequence) -> Drafts | None:
        """The drafter of a sequence that has none; None where there is no room for it."""
        drafter = self.drafter_of(sequence)
        if drafter.size > self.room:
            sequence.drafts_from = sequence.kv_len_max
            return None
        self.room -= drafter.size
        if self.runner.guesses_max:
            sequence.guesser = drafter = GuessDrafts(drafter, sequence.sampling.stop_token_ids)
        sequence.drafter = drafter
        return drafter

    def _ask(
        self, builder: PlanBuilder, decodes: Mapping[int, Sequence], now: float, beside_prompts: bool
    ) -> None:
        """Ask for the guesses that will pay as drafts of the next step (rule 7)."""
        verifying = dict(zip(builder.slots[builder.decodes :], builder.drafts, strict=False))
        asking: list[tuple[int, GuessDrafts, int]] = []
        for slot, sequence in decodes.items():
            guesser, drafts = sequence.guesser, len(verifying.get(slot, ()))
            most = min(self.runner.guesses_max, sequence.kv_len_max - sequence.planned_len - drafts - 2)
            if guesser is None or not guesser.asks or most <= 0:
                continue
            if self.runner.is_async or not sequence.in_flight_len:
                asking.append((slot, guesser, most))
        if not asking:
            return
        offered = [(decodes[slot], own.chance, most, 1.0) for slot, own, most in asking]
        if self.runner.is_async and not self._gains([*decodes.values()], offered):
            return
        cost, rows = self.learner.known, len(decodes)
        work = Work.of([each.planned_len for each in decodes.values()], [1] * rows)
        step_s = cost.seconds(work)
        guess_s = max(self.runner.guess_share * step_s / rows, LEAST_S)
        lens = [decodes[slot].computed_len for slot, _, _ in asking]
        drafts_s = self.learner.drafts_s(lens, work, step_s)
        offers = [
            Offer(guesser.chance, most, own_s, guesser.acceptance.is_probing and own_s * rows < step_s)
            for (_, guesser, most), own_s in zip(asking, (guess_s + each for each in drafts_s), strict=True)
        ]
        spare_s = self.spare_s(decodes, cost.seconds(builder.work), beside_prompts=beside_prompts)
        lengths = lengths_that_pay(
            offers, rows, step_s, spare_s, self.spare_drafts(builder.tokens_left + rows, rows)
        )
        for (slot, guesser, _), length in zip(asking, lengths, strict=True):
            if not length:
                guesser.acceptance.pass_over()
                continue
            own = len(verifying.get(slot, ()))
            if (fit := self.allocator.grow_for_drafts(decodes[slot], own + length, builder, now)) > own:
                builder.guesses[slot] = decodes[slot].guessing = fit - own
                builder.guess_s += (fit - own) * guess_s

    def _chosen(
        self,
        looks: list[tuple[Sequence, Proposal]],
        builder: PlanBuilder,
        decodes: Mapping[int, Sequence],
        now: float,
        beside_prompts: bool,
    ) -> dict[int, list[int]]:
        """The drafts that pay of those that were found, by slot, as far as there are pages for them."""
        cost, rows = self.learner.known, len(decodes)
        work = Work.of([each.planned_len for each in decodes.values()], [1] * rows)
        step_s = cost.seconds(work)
        drafts_s = self._drafts_s([each for each, _ in looks], work, step_s)
        offers = [
            Offer(draft.chance, len(draft.tokens), draft_s, draft.is_probe, _chances(sequence, draft))
            for (sequence, draft), draft_s in zip(looks, drafts_s, strict=True)
        ]
        spare_s = self.spare_s(decodes, step_s, beside_prompts=beside_prompts)
        own = rows, step_s, spare_s, self.spare_drafts(builder.tokens_left, rows)
        if self.runner.verify_shapes and not beside_prompts:
            lengths = lengths_by_shape(offers, *own, self.runner.verify_shapes)
        else:
            lengths = lengths_that_pay(offers, *own)
        drafts: dict[int, list[int]] = {}
        for (sequence, draft), offer, length in zip(looks, offers, lengths, strict=True):
            drafter, slot = sequence.drafter, sequence.slot
            assert drafter is not None
            assert slot is not None
            if self.in_flight and not sequence.mask and tokens_of(offer.chance, length) <= 1.0:
                continue
            if not length:
                drafter.pass_over()
                # more rarely, too, where not even right ones would pay
                pause = LOOK_AGAIN if offer.draft_s * rows >= step_s else drafter.pause
                _pause(sequence, pause)
            elif (fit := self.allocator.grow_for_drafts(sequence, length, builder, now)) > 0:
                drafter.take(draft)
                sequence.draft_chance = draft.chance
                drafts[slot] = draft.tokens[:fit]
        return drafts

    def _drafts_s(self, sequences: list[Sequence], work: Work, step_s: float) -> list[float]:
        """The time that a draft of each of these adds to a step."""
        least_s = max(min(LEAST_SHARE, LEAST_PART / work.decode_rows) * step_s, LEAST_S)
        drafts_s = self.learner.drafts_s([each.computed_len for each in sequences], work, step_s)
        return [max(draft_s, least_s) for draft_s in drafts_s]

    def spare_drafts(self, tokens_left: int, decodes: int) -> int:
        """The drafts that a step has room for: of what the decodes leave the rest is for prompts (rule 1)."""
        spare = int(TOKENS_SHARE * (tokens_left - decodes))
        if self.runner.state_bytes:
            return min(spare, self.runner.state_windows)
        return min(spare, self.runner.drafts_together or spare)

    def spare_s(self, decodes: Mapping[int, Sequence], step_s: float, *, beside_prompts: bool) -> float:
        """The time by which drafts may make a step longer (rule 1)."""
        targets, error = self.config.gap_targets_s, self.learner.error
        target_s = min(targets[sequence.service_class] for sequence in decodes.values())
        if beside_prompts:
            return pace.drafts_s(target_s, step_s, self.config.prompt_share, error)
        spare_s = target_s / (1.0 + error) - step_s
        return spare_s if spare_s > 0.0 else LATE_SHARE * step_s
