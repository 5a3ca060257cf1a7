"""One sequence: its tokens, its slot and pages, and its life cycle.

                    admit             stall
      WAITING ------------> RUNNING ----------> STALLED          each of them may `finish`
                            |     ^ <---------- |                or YIELDED, by `step_aside`, as STALLED
                    preempt |     |    admit    | preempt        in every other move
                            v     | admit       |
                            PREEMPTED <---------+

`MOVES` below is that drawing, and `_move` obeys it. Status and holdings change together, in the
same method:

                 slot    pages
    WAITING       -        -
    RUNNING      yes      yes
    STALLED       -       yes
    YIELDED       -       yes
    PREEMPTED     -        -

Beside the status, which says what a sequence holds, it is *paused* or not, which says whether its
client reads. A pause may come and go at any moment of its life; the scheduler lets the status follow
when it next plans. A stalled sequence that is no longer paused waits for a slot.

Two lengths say where a sequence stands. `tokens` are all that are known, prompt and output;
`computed_len` counts those whose keys and values lie in its pages. The difference, `pending_len`, is
what the next rows compute: a whole prompt after admission, one token in decode, and prompt plus
output after a preemption. So prefill, decode and recomputation are one thing to the scheduler, and
at least one token is always pending, because the newest token is sampled before it is computed.

B. A token that a sequence has sent is never sent again: after a preemption its output is part of its
   known tokens and is restored, not sampled.

The work of steps in flight is counted beside these lengths until it is committed: `in_flight_len`
tokens being computed, and `coming` tokens being sampled, whose values the host does not know yet.

    tokens   [ p p p p p p o o ] ? ?             computed_len 7, in_flight_len 2, coming 2
    pages    [ x x x x x x x . . ]               planned_len 9, pending_len 1: it may go on at once

A plan goes by `planned_len`. What needs a token's value, as a page's identity does, waits for the commit.
Only a running sequence has anything in flight, so a stalled or preempted one, or one that yielded, holds what
it has computed and nothing changes it. One that finishes may leave rows in flight behind; they bring nothing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from engine.contract.messages import Finished, FinishReason, SamplingParams, ServiceClass, Want
from engine.core.drafts.drafter import Drafts, Proposal
from engine.core.drafts.guesses import GuessDrafts
from engine.core.drafts.price import Sureness
from engine.core.pages.block_manager import BlockManager, PageChain, PageIdentity


class Status(Enum):
    """The status of a sequence, which says what it holds."""

    WAITING = "waiting"
    """Waits for its first admission."""
    RUNNING = "running"
    """Holds a slot and pages, and is in every plan that has budget for it."""
    STALLED = "stalled"
    """Was paused while it ran: it gave its slot back, and keeps its pages until others need them."""
    PREEMPTED = "preempted"
    """Gave slot and pages back, and waits to be admitted again."""
    YIELDED = "yielded"
    """Gave its slot to another tenant, keeps its pages until others need them, and waits to be admitted
    again."""
    FINISHED = "finished"

    # Members are single objects. Enum's own hash is that of its name, computed in Python for every look-up.
    __hash__ = object.__hash__


MOVES: Final[Mapping[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.STALLED, Status.YIELDED, Status.PREEMPTED, Status.FINISHED}),
    Status.STALLED: frozenset({Status.RUNNING, Status.PREEMPTED, Status.FINISHED}),
    Status.YIELDED: frozenset({Status.RUNNING, Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class IllegalMove(RuntimeError):
    """A sequence was told to make a move that its table does not have. Always a bug."""


class Hold(Enum):
    """A reason that keeps a sequence out of every plan, whatever room there is: see `Sequence.hold`."""

    PAUSED = "paused"
    """Its client does not read. Ends with a message, or at the stall deadline."""
    FETCHING = "fetching"
    """Pages of its prefix are being read from disk. Ends when they are, or when computing them is faster."""
    LAST_COMING = "last coming"
    """A step in flight samples its last token. Ends with that step's commit."""
    DRAFTS = "drafts"
    """A step in flight verifies drafts of its tokens, so that it is not known how many come. Ends with that
    step's commit."""
    MASK = "mask"
    """Its grammar is not compiled, its next mask is not filled, or the token that the mask follows from is
    still coming. Ends when a thread is done, or with a step's commit."""


class LifePhase(Enum):
    """A part of a sequence's life. It is in exactly one at every moment, so the five times add up to its
    life."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    STALLED = "stalled"


NEVER: Final = 1 << 62


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of the core, from its arrival to its end."""

    handle: int
    sampling: SamplingParams
    prompt_len: int
    tokens: array[int]
    """All known tokens: the prompt, then the output. Until the first of the output they are the prompt's own,
    which its other choices share: thousands may wait."""
    chain: PageChain
    arrived_at: float
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.DEFAULT
    has_next_turn: bool = False
    """True if a prompt that goes on from its end is likely to come within seconds."""
    first_token_by: float = math.inf
    """The core's clock when its first token is of no use any more, in seconds."""
    status: Status = Status.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    computed_len: int = 0
    in_flight_len: int = 0
    coming: int = 0
    guessing: int = 0
    """The guesses that the model makes behind its newest token in a step in flight."""
    verifying: int = 0
    """Drafts that a step in flight verifies. They are counted as in flight, and the tokens behind them as
    coming, as if all were right."""
    prediction: array[int] | None = None
    """The tokens that its caller expects its output to be."""
    drafter: Drafts | None = None
    """Finds its drafts; None before it is first looked at, and where it drafts nothing."""
    guesser: GuessDrafts | None = None
    """Has drafts by the model's guesses; None where it makes none."""
    foreseen: Sequence_[int] = ()
    """Where it follows a grammar: the drafts behind which its masks are known."""
    foreseen_why: Sequence_[Sureness] = ()
    """Why each of them is drafted. Empty where that was not told."""
    masks_ahead: Sequence_[bytes] = ()
    """The mask behind each of them."""
    draft: Proposal | None = None
    """The proposal that these begin with; None where the grammar forces them."""
    draft_chance: float = 0.0
    """The chance of the drafts that it verified last, or verifies, that one is right."""
    drafts_from: int = NEVER
    """The computed tokens from which on a plan is to look at it for drafts."""
    looks_from: int = 0
    """The computed tokens from which on it is looked at for drafts before its masks are filled."""
    drafted: int = 0
    """Drafts that steps verified, or verify."""
    accepted: int = 0
    mispredicted: int = 0
    """The drafts that its caller predicted, and that were wrong."""
    last_step: int = 0
    """The number of the newest step that computes for it, in flight or committed; 0: none."""
    given_up_len: int = 0
    """The most tokens of which it gave up what it had computed."""
    again_tokens: int = 0
    """Tokens among these that steps computed again, or compute again."""
    is_only_read: bool = field(init=False)
    """True if its prompt is computed and nothing sampled. It is never a decode."""
    is_pooled: bool = field(init=False)
    """True if its prompt's vector is asked for. What the runner gathered for that is lost with the slot."""
    expected_len: int = field(init=False)
    """Known tokens that are still to be computed: while it waits, those that the prefix cache lacked at the
    last look-up; while it computes its prompt, those pending at the last plan."""
    paused_at: float | None = None
    """The core's clock at the pause, in seconds; None when it is not paused."""
    state_len: int = 0
    """The tokens behind which the newest snapshot of its state was taken, or restored
    (`engine.core.step.state_tier`)."""
    passed: int = 0
    """The drafts that were right in its last row, if that verified and has landed: its slot still has the
    states before them, until a step behind computes."""
    branch_len: int = 0
    """The tokens of its prefix whose pages were found when it was admitted, with a state or without."""
    named_len: int = NEVER
    """The first tokens whose pages others may find. Nobody asks again for what lies behind them: it leaves
    nothing in the prefix cache, and no snapshot of a state."""
    mask: bytes | None = b""
    """The tokens that its grammar lets the next one be (`engine.contract.messages.Plan.masks`), b"" where it
    has no grammar; None until that is known, from the plan on that samples under the mask before."""
    grammar_s: float = 0.0
    """The time that its grammar took threads."""
    awaits: PageIdentity | None = None
    """The last of the pages of its prefix that are read from disk, while it waits for them."""
    preemptions: int = 0
    """Preemptions while it ran, yields included. Those while it was stalled are not counted: there is at most
    one for each pause."""
    yields: int = 0
    """How often it stepped aside for a tenant that held less (rule J). These count as preemptions, too."""
    prompt_logprobs_sent: int = 0
    """The number of prompt positions of which the next token's log-probabilities have been reported."""
    spent_s: dict[LifePhase, float] = field(default_factory=lambda: dict.fromkeys(LifePhase, 0.0))
    _phase_since: float = field(init=False)

    def __post_init__(self) -> None:
        assert 1 <= self.prompt_len == len(self.tokens)
        assert self.sampling.max_tokens >= 0
        self.is_only_read = not self.sampling.max_tokens
        self.is_pooled = self.sampling.vector_len > 0
        self._phase_since = self.arrived_at
        self.expected_len = self.prompt_len

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def planned_len(self) -> int:
        """The number of its tokens that are computed once all steps in flight are done."""
        return self.computed_len + self.in_flight_len

    @property
    def pending_len(self) -> int:
        """The number of its tokens that no plan computes yet, those coming included; at least one until it
        ends, or its last step is in flight."""
        return len(self.tokens) + self.coming - self.computed_len - self.in_flight_len

    @property
    def hold(self) -> Hold | None:
        """The reason why no plan may compute for it now; None: it is *due*, and the next plan may, if there
        is room. All that plan go by this, and so does the proof at the head of `engine.core.scheduler`."""
        if self.paused_at is not None:
            return Hold.PAUSED
        if self.awaits is not None:
            return Hold.FETCHING
        if self.mask is None:
            return Hold.MASK
        if not self.in_flight_len:
            return None  # one of which all is computed has ended
        if self.verifying:
            return Hold.DRAFTS
        return Hold.LAST_COMING if self.planned_len >= self.kv_len_max else None

    @property
    def lacking_len(self) -> int:
        """The number of its known tokens that are to be computed, as far as that is known: a newcomer's that
        the prefix cache lacked at the last look-up, else those that its pages lack. What is in flight is not
        computed yet."""
        return self.expected_len if self.status is Status.WAITING else len(self.tokens) - self.computed_len

    @property
    def kv_len_max(self) -> int:
        """The most tokens whose keys and values it may hold: the last token that it samples needs none."""
        return self.prompt_len + max(0, self.sampling.max_tokens - 1)

    @property
    def reusable_len(self) -> int:
        """The number of leading tokens that may come from the prefix cache instead of being computed.

        That is never the last known token, whose logits are needed. Positions whose prompt log-probabilities
        are asked for and not sent yet must be computed too, and all where the vector of the prompt is.
        """
        if self.is_pooled:
            return 0
        return self.prompt_logprobs_sent if self.is_scored else len(self.tokens) - 1

    @property
    def prompt_identity(self) -> PageIdentity | None:
        """The identity of all that others with the same prompt may take of it; None for a prompt of one
        token, and where its vector is asked for."""
        return None if self.is_pooled else self.chain.identity(self.tokens, self.prompt_len - 1)

    @property
    def is_scored(self) -> bool:
        """True if log-probabilities of its prompt are asked for and not all sent yet."""
        return self.sampling.prompt_logprobs is not None and self.prompt_logprobs_sent < self.prompt_len - 1

    def is_protected(self, preemptions_max: int) -> bool:
        """True if it was preempted as often as rule C allows one to be; yields are not counted."""
        return self.preemptions - self.yields >= preemptions_max

    @property
    def is_paused(self) -> bool:
        return self.paused_at is not None

    @property
    def phase(self) -> LifePhase:
        if self.is_paused or self.status is Status.STALLED:
            return LifePhase.STALLED
        if self.status is Status.WAITING:
            return LifePhase.QUEUE
        if self.status in (Status.YIELDED, Status.PREEMPTED):
            return LifePhase.PREEMPTED
        return LifePhase.DECODE if self.output_len else LifePhase.PREFILL

    def pause(self, now: float) -> None:
        """Keep it out of further plans, because its client does not read."""
        assert not self.is_paused
        self._charge(now)
        self.paused_at = now

    def resume(self, now: float) -> None:
        assert self.is_paused
        self._charge(now)
        self.paused_at = None

    def admit(self, slot: int, pages: list[int], computed_len: int, now: float) -> None:
        """Take a slot, and pages for all known tokens, of which the first `computed_len` are computed
        already."""
        assert 0 <= computed_len <= self.reusable_len
        assert self.hold is None
        self._move(Status.RUNNING, now)
        self.slot, self.pages, self.computed_len = slot, pages, computed_len
        self.state_len = computed_len

    def stall(self, now: float) -> None:
        """Give the slot back and keep the pages."""
        assert self.is_paused
        assert not self.in_flight_len
        self._move(Status.STALLED, now)
        self.slot = None

    def step_aside(self, now: float) -> None:
        """Give the slot up to another tenant and keep the pages."""
        assert not self.in_flight_len
        self.preemptions += 1
        self.yields += 1
        self._move(Status.YIELDED, now)
        self.slot = None

    def preempt(self, now: float) -> None:
        """Give up slot and pages, and keep the tokens. The caller has released the pages at the block
        manager."""
        assert not self.in_flight_len
        self.preemptions += self.status is Status.RUNNING
        self.given_up_len = max(self.given_up_len, self.computed_len)
        self._move(Status.PREEMPTED, now)
        self._vacate()

    def finish(self, now: float) -> None:
        """End it in any status. The caller has released its pages at the block manager."""
        self._move(Status.FINISHED, now)
        self._vacate()

    def want(self, length: int) -> Want:
        """The result that a row of its next `length` tokens is to bring."""
        return Want.SAMPLE if length == self.pending_len and not self.is_only_read else Want.NOTHING

    def launch(self, step: int, length: int, want: Want) -> None:
        """Count a step that computes its next `length` tokens, and what it brings."""
        assert self.status is Status.RUNNING
        assert step > self.last_step
        self.last_step, self.passed = step, 0
        if self.given_up_len:
            self.again_tokens += max(0, min(self.given_up_len - self.planned_len, length))
        self.in_flight_len += length
        if want:
            self.coming += 1
            if self.mask:
                self.mask, self.foreseen, self.foreseen_why, self.masks_ahead = None, (), (), ()
                self.drafts_from = NEVER
        if want is Want.VERIFY:
            self.verifying = length - 1
            self.coming += length - 1
            self.drafted += length - 1

    def foresee(self, drafts: Sequence_[int], masks: Sequence_[bytes], why: Sequence_[Sureness] = ()) -> None:
        """Know the masks behind drafts, none of which ends it."""
        stops = self.sampling.stop_token_ids
        length = next((at for at, token in enumerate(drafts) if token in stops), len(drafts))
        self.foreseen, self.masks_ahead, self.foreseen_why = drafts[:length], masks[:length], why[:length]
        self.drafts_from = 0 if length else NEVER

    def land(self, length: int, want: Want) -> None:
        """Count the row of its oldest step in flight as computed. A sampled token is given to `append`
        next."""
        assert self.status is Status.RUNNING
        self.computed_len += length
        self.in_flight_len -= length
        self.coming -= want is Want.SAMPLE

    def land_drafts(self, accepted: int) -> int:
        """Count the drafts of its row in flight as `accepted` right ones and none else, so that what is left
        is to be landed as so many decodes and one more. Returns how many of the drafts, the leading ones, its
        caller predicted."""
        wrong = self.verifying - accepted
        predicted = 0 if self.drafter is None else self.drafter.learn(self.verifying, accepted)
        self.mispredicted += max(0, predicted - accepted)
        self.in_flight_len -= wrong
        self.coming -= wrong
        self.accepted += accepted
        self.verifying, self.passed = 0, accepted
        return predicted

    def hear(self, guesses: list[int]) -> None:
        """Take what the model guesses behind its newest token."""
        self.guessing = 0
        if self.guesser is not None and guesses:
            self.guesser.hear(guesses, len(self.tokens))
            self.looks_from = 0
            if self.mask == b"":
                self.drafts_from = 0

    def append(self, token: int, now: float) -> None:
        """Append a sampled token to the known ones."""
        assert self.status is Status.RUNNING
        assert self.computed_len == len(self.tokens)
        if self.computed_len == self.prompt_len:
            self._charge(now)
            self.tokens = self.tokens[:]
        self.tokens.append(token)

    def name_head(self, pages: BlockManager, end: int) -> None:
        """Let others find the head in which its first `end` tokens end, which are computed, unless nobody
        asks for it."""
        assert end <= self.computed_len
        if end % pages.page_size and pages.shares_heads and end <= self.named_len:
            head = self.chain.identity(self.tokens, end)
            assert head is not None
            pages.register_head(self.pages[end // pages.page_size], head)

    def finished(self, reason: FinishReason) -> Finished:
        """The report of its end."""
        return Finished(
            handle=self.handle,
            reason=reason,
            queue_s=self.spent_s[LifePhase.QUEUE],
            prefill_s=self.spent_s[LifePhase.PREFILL],
            decode_s=self.spent_s[LifePhase.DECODE],
            preempted_s=self.spent_s[LifePhase.PREEMPTED],
            preemptions=self.preemptions,
            stalled_s=self.spent_s[LifePhase.STALLED],
            late_tokens=self.coming - self.verifying + (reason is FinishReason.NUMERIC),
            again_tokens=self.again_tokens,
            grammar_s=self.grammar_s,
            drafted=self.drafted,
            accepted=self.accepted,
            mispredicted=self.mispredicted,
        )

    def _vacate(self) -> None:
        self.slot, self.pages, self.computed_len = None, [], 0
        self.state_len = self.branch_len = 0

    def _move(self, status: Status, now: float) -> None:
        if status not in MOVES[self.status]:
            raise IllegalMove(f"sequence {self.handle}: {self.status.value} -> {status.value}")
        self._charge(now)
        self.status = status

    def _charge(self, now: float) -> None:
        """Add the time since the last change of phase to the present phase."""
        self.spent_s[self.phase] += now - self._phase_since
        self._phase_since = now


def due_of(waiting: Iterable[Sequence]) -> list[Sequence]:
    """The sequences without a slot whose `hold` is None. That is spelt out, since thousands may wait
    and a call takes three times as long; tests compare the two."""
    return [s for s in waiting if s.paused_at is None and s.awaits is None and s.mask is not None]
