"""The outputs of one request's sequences: what the core has computed and the client was not yet sent.

    core_client --on_token--> ChoiceOutput (one per sequence) --news--> RequestOutput --take--> handler

Tokens become text as they arrive, not when they are written: a stop string must reach the core at once,
whether or not the client reads. What arrives while the writer waits is merged into one `Delta` per choice.

Backpressure. A client that does not read makes the writer wait, and what comes meanwhile piles up here,
unsent. Past a high-water mark the choice `is_behind`, and the core is told to pause its sequence. The
low-water mark is zero, because the writer always takes everything: when it comes back, what it was waiting
for has been sent, and the core is told to resume. So a choice holds at most the mark, what was on its way
when the mark was passed, and as much again with the writer. Answers that are not streamed are read at their
end: they are bounded by `max_tokens`, and never behind.

Only what the writer could take counts as unsent. A sequence is not paused for tokens whose text is held back
(part of a character, the beginning of a stop string), because only more tokens can release them. A token that
has no text, such as a special one, can be taken where tokens are told.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

import msgspec

from engine.api.answer.detokenizer import Detokenizer, PartsDetokenizer
from engine.api.answer.parts import Part, PartKind
from engine.api.answer.text_room import TextRoom
from engine.api.told.attribution import SequenceMarks, Spent, Timing, causes_of
from engine.api.told.halts import Halts
from engine.api.told.steps import StepRing
from engine.contract.messages import Finished, FinishReason, Moved, ServiceClass, Started, TokenLogprobs
from shared.apis.generation import FinishReasonName
from shared.wire.causes import Cause
from shared.wire.errors import (
    ApiError,
    EngineFailed,
    FirstTokenDeadline,
    GrammarFailed,
    Overloaded,
    SlowClient,
)
from shared.wire.shapes import STOP_LEN_MAX

UNSENT_TOKENS_MAX: Final = 64
TOO_LATE_RETRY_S_MAX: Final = 30.0
UNSENT_TEXT_LEN_MAX: Final = 16 * 1024
"""The most characters that are unsent before a sequence is paused."""
TEXT_PIECES_MAX: Final = 512
"""The most pieces of text that are kept apart before they are joined. Each is a string object of fifty bytes
beside its characters, which an answer that is not streamed would hold for every token."""
TRAIL_MAX: Final = 4 * STOP_LEN_MAX
"""The most tokens that wait for their text. A stop string whose bytes are a token each holds back as many;
beyond that they have none, as special tokens have, behind one that begins a character."""
assert UNSENT_TEXT_LEN_MAX >= 64 * UNSENT_TOKENS_MAX, "ordinary text is bounded by its tokens"


class Entry(NamedTuple):
    """A token that is sent by itself, with its log-probabilities where they were asked for."""

    token_id: int
    start: int
    """The position of the token's text, in characters of the answer."""
    logprobs: TokenLogprobs | None
    """The token's log-probabilities. None when they were not asked for, and for a stop token, which is
    not part of the text."""


class Delta(msgspec.Struct, frozen=True):
    """The output of one choice since its last delta. It is a Struct because one is made for every
    event."""

    index: int
    parts: list[Part]
    """The parts that came, in their order; empty where only tokens without text did."""
    entries: list[Entry]
    """The tokens of the parts. Empty unless token ids or log-probabilities were asked for."""
    finish_reason: FinishReasonName | None
    is_first: bool

    @property
    def text(self) -> str:
        """The text of the answer itself."""
        return "".join([part.text for part in self.parts if part.kind is PartKind.TEXT])


class ChoiceOutput:
    """The output of one sequence: tokens in, deltas out."""

    is_ending = False
    """True once the core was told to end it: what comes then is counted, and not sent."""
    grammar_s = 0.0
    """The time that compiling its grammar and filling its masks took the core, in seconds."""
    drafted = accepted = 0
    """The drafts of its tokens that steps verified, and those of them that were right: so many steps were
    saved."""
    scores: Sequence[float] = ()
    """The log-probabilities behind its prompt, where they were asked for and have come."""
    vector: bytes = b""
    """The vector of its prompt, where that was asked for and has come."""
    predicted = mispredicted = 0
    """The numbers of predicted tokens that were tried and are in the answer, and of those that were wrong."""
    finish_reason: FinishReasonName | None = None
    first_token_at: float | None = None
    stopped_by: str | int | None = None
    """The stop string, or the id of the stop token, that ended it. None where nothing of the kind did."""
    _queue_s: float | None = None
    """How long the sequence waited for its first admission, in seconds. None until the core has begun it."""
    _final_timing: Timing | None = None

    def __init__(
        self,
        index: int,
        output: RequestOutput,
        detokenizer: Detokenizer,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        keeps_entries: bool = False,
        tells_calls: bool = False,
        submitted_at: float = 0.0,
        steps: StepRing | None = None,
        prompt_len: int = 0,
        service_class: ServiceClass = ServiceClass.DEFAULT,
    ) -> None:
        """`tells_calls`: the finish reason of an answer that ends with a call says so."""
        self.index = index
        self.output = output
        self._detokenizer = detokenizer
        self._cut = detokenizer.cut if isinstance(detokenizer, PartsDetokenizer) else None
        """Makes parts of text. None where all of it is of one kind."""
        self._tells_calls = tells_calls
        self._stop_token_ids = stop_token_ids
        self._keeps_entries = keeps_entries

        self._text: list[str] = []
        self._entries: list[Entry] = []
        self._trail: deque[tuple[int, Entry]] = deque()
        """The end of each token's text, and its entry, for tokens whose text is not released yet."""
        self._is_first = True
        self._has_news = False
        self._unsent_tokens = 0
        """Tokens that came since there was something to send."""
        self._unsent_text_len = 0
        self._steps: Final = StepRing() if steps is None else steps
        self._marks: Final = SequenceMarks(
            service_class, prompt_len, self._steps.mark(), admitted_before=tuple(self._steps.admitted)
        )
        self._halts: Final = Halts(self._steps)
        self._preempted_in_prefill_s = 0.0

        self.prompt_logprobs: list[TokenLogprobs] = []
        self.completion_tokens = 0
        self.cached_len = self.host_len = self.disk_len = 0
        self.submitted_at = submitted_at

    @property
    def has_begun(self) -> bool:
        """True if the core has begun the sequence. Its prompt then counts as computed."""
        return self._queue_s is not None

    @property
    def reasoning_tokens(self) -> int:
        """The part of `completion_tokens` that is reasoning."""
        return self._detokenizer.reasoning_tokens

    @property
    def calls(self) -> int:
        """The number of calls in the answer."""
        return self._detokenizer.calls

    @property
    def stage(self) -> str:
        """The stage that the sequence is in, for the log."""
        if self._queue_s is None:
            return "queue"
        if self._halts.is_paused:
            return "stalled"
        if self._halts.is_preempted:
            return "preempted"
        return "prefill" if self.first_token_at is None else "decode"

    @property
    def is_behind(self) -> bool:
        """True if so much is unsent that the client cannot be reading, and the sequence should
        pause."""
        passed = self._unsent_tokens >= UNSENT_TOKENS_MAX or self._unsent_text_len >= UNSENT_TEXT_LEN_MAX
        return passed and not (self.output.is_whole or self.is_ending)

    def timing(self, now: float) -> Timing:
        """The sequence's times: as the core reports them once the sequence has ended, and until then
        as they are seen from here."""
        if self._final_timing is not None:
            return self._final_timing
        if self._queue_s is None:
            return Timing(queue_s=now - self.submitted_at)
        halts, begun_at = self._halts, self.submitted_at + self._queue_s
        stalled_s, preempted_s = halts.stalled_s(now), halts.preempted_s(now)
        if self.first_token_at is None:
            prefill_s, decode_s = now - begun_at - preempted_s - stalled_s, 0.0
        else:
            prefill_s = self.first_token_at - begun_at - self._preempted_in_prefill_s
            decode_s = now - self.first_token_at - stalled_s - (preempted_s - self._preempted_in_prefill_s)
        prefill_s = max(0.0, prefill_s)
        return Timing(
            self._queue_s, prefill_s, decode_s, preempted_s, halts.preemptions, stalled_s, halts.swaps
        )

    def causes(self, now: float, *, shared: bool) -> list[Cause]:
        """The causes of the sequence's waits, in the order of its life. To be called once, when nothing
        more comes. `shared` says that its request has other sequences."""
        for one in self._halts.take_over(now, is_last=True):
            self._marks.interrupted(one)
        spent = Spent(self.timing(now), self.cached_len, self.completion_tokens, self.grammar_s)
        return list(causes_of(self._marks, spent, self._steps, shared=shared))

    # -- from the core ----------------------------------------------------------------------------

    def on_started(self, started: Started) -> None:
        self.cached_len, self.host_len = started.cached_len, started.host_len
        self.disk_len = started.disk_len
        self._queue_s = started.queue_s
        self.output.begin()
        self._marks.admitted = self._steps.mark()
        self._marks.admitted_first = tuple(self._steps.admitted)
        self._steps.admitted[self._marks.service_class] += 1

    def on_paused(self, now: float) -> None:
        """Note that the core was told to pause the sequence."""
        self._halts.pause(now)

    def on_resumed(self, now: float) -> None:
        self._halts.resume(now)

    def on_moved(self, moved: Moved, now: float) -> None:
        """Note that the sequence was preempted, or admitted again."""
        self._halts.moved(moved.move, moved.swapped, now)

    def on_predicted(self, right: int, wrong: int) -> None:
        """Note that a step tried what the caller predicts: so many of the tokens that came were in it, and so
        many of it were wrong."""
        self.predicted += right
        self.mispredicted += wrong

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None, now: float) -> bool:
        """Take a token. Returns True when it completed a stop string, so that the core must be told
        to end the sequence."""
        assert self.finish_reason is None
        if self.is_ending:
            self.completion_tokens += 1
            return False
        if self.first_token_at is None:
            self.first_token_at = now
            self._marks.first_token = self._steps.mark()
            self._preempted_in_prefill_s = self._halts.preempted_s(now)
        if self._halts:
            for one in self._halts.take_over(now, is_last=False):
                self._marks.interrupted(one)
        self.completion_tokens += 1
        detokenizer = self._detokenizer
        if token_id in self._stop_token_ids:
            self.stopped_by = token_id
            if self._keeps_entries:
                end = detokenizer.decoded_len
                self._trail.append((end, Entry(token_id, end, None)))
            return False  # the core knows it, and its Finished comes in the same message
        if self._keeps_entries:
            text, start, end = detokenizer.push_placed(token_id)
            self._trail.append((end, Entry(token_id, start, logprobs)))
        else:
            text = detokenizer.push(token_id)
        self._release(text)
        if self._has_news:
            self._unsent_tokens += 1
        if detokenizer.stopped:  # the core would report the times a step later
            self._final_timing = self.timing(now)
            self.stopped_by = detokenizer.stopped_by
            self._finish(self._stop_reason())
        return detokenizer.stopped

    def on_finished(self, finished: Finished) -> None:
        self._final_timing = Timing(
            finished.queue_s,
            finished.prefill_s,
            finished.decode_s,
            finished.preempted_s,
            finished.preemptions,
            finished.stalled_s,
            self._halts.swaps,
        )
        self.grammar_s = finished.grammar_s
        self.drafted, self.accepted = finished.drafted, finished.accepted
        if finished.reason.is_callers:
            self.completion_tokens += finished.late_tokens
        if self.is_ending:
            return
        match finished.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._release(self._detokenizer.finish())
                is_stop = finished.reason is FinishReason.STOP or self._detokenizer.stopped
                self.stopped_by = self._detokenizer.stopped_by or self.stopped_by
                self._finish(self._stop_reason() if is_stop else "length")
            case FinishReason.REJECTED:
                self.output.fail(Overloaded("The engine's queue is full.", retry_after_s=1.0))
            case FinishReason.TOO_LATE:
                self.output.fail(_too_late(finished.expected_s))
            case FinishReason.NUMERIC:
                self.output.fail(EngineFailed("The model's output for this request was not finite."))
            case FinishReason.GRAMMAR:
                self.output.fail(GrammarFailed("The answer could not be made to follow what was asked for."))
            case FinishReason.STALLED:
                self.output.fail(SlowClient("The client stopped reading its answer."))
            case FinishReason.ABORTED:
                self.output.fail(EngineFailed("The engine ended this request.", detail="aborted unasked"))

    # -- to the writer ----------------------------------------------------------------------------

    def take(self) -> Delta:
        """Everything that can be sent since the last call."""
        parts: list[Part] = []
        if self._text:
            text = "".join(self._text)
            parts = [Part(text)] if self._cut is None else self._cut(text)
        delta = Delta(self.index, parts, self._entries, self.finish_reason, self._is_first)
        self._text.clear()
        self._entries = []
        self._is_first = self._has_news = False
        self._unsent_tokens = self._unsent_text_len = 0
        return delta

    def _release(self, text: str) -> None:
        if text:
            self.output.keep(text)
            self._text.append(text)
            if len(self._text) >= TEXT_PIECES_MAX:
                self._text = ["".join(self._text)]
            self._unsent_text_len += len(text)
        trail, released_len = self._trail, self._detokenizer.released_len
        while trail and (trail[0][0] <= released_len or len(trail) > TRAIL_MAX):
            self._entries.append(trail.popleft()[1])
        if text or self._entries:
            self._tell()

    def _stop_reason(self) -> FinishReasonName:
        """The finish reason of an answer that was not cut off."""
        return "tool_calls" if self._tells_calls and self.calls else "stop"

    def _finish(self, reason: FinishReasonName) -> None:
        """End the choice. The tokens that were held back are sent, too, except those from the first on
        whose text a stop string has removed."""
        cut = self._detokenizer.released_len
        is_cut = self._detokenizer.stopped
        kept = takewhile(lambda item: not is_cut or item[1].start < cut or item[0] <= cut, self._trail)
        self._entries += [entry for _, entry in kept]
        self._trail.clear()
        self.finish_reason = reason
        self._tell()
        self.output.finish_one()

    def _tell(self) -> None:
        if not self._has_news:
            self._has_news = True
            self.output.tell(self)


def _nothing() -> None:
    """Do nothing."""


class RequestOutput:
    """The outputs of all choices of one request, and the handler that waits for them."""

    def __init__(
        self,
        choices: int,
        *,
        whole: bool = False,
        tells_begin: bool = False,
        on_end: Callable[[], None] = _nothing,
        room: TextRoom | None = None,
    ) -> None:
        """`room` is for the text of a whole answer. `tells_begin`: the handler of a stream is to go on once
        the core has begun a sequence, before there is output."""
        self.open = choices
        """The number of choices that have not finished."""
        self._in_core = choices
        """The number of sequences of which the core may still tell something."""
        self._left_core: asyncio.Future[None] | None = None
        self.has_begun = False
        """True if the core has begun any of the sequences."""
        self._tells_begin = tells_begin
        self._is_stirred = False
        self.is_whole = whole
        """True if the answer is not streamed, so that its handler waits until every choice has
        finished."""
        self._room = room
        self.on_each: Callable[[], None] = _nothing
        """Called whenever a choice has finished."""
        self._on_end = on_end
        """Called when nothing more will come. The handler may still be waiting for its client
        then."""
        self._news: list[ChoiceOutput] = []
        self.error: ApiError | None = None
        """The error that has ended the request, whether or not its handler has noticed. None where
        none did."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """True if the handler waits for output, so that its client has read what there was."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def is_done(self) -> bool:
        """True if every choice has finished and everything was taken."""
        return not self.open and not self._news

    def begin(self) -> None:
        """Note that the core has begun a sequence."""
        if self._tells_begin and not self.has_begun:
            self.stir()
        self.has_begun = True

    def stir(self) -> None:
        """Let the handler of a stream, which may wait in `take`, go on without output."""
        self._is_stirred = True
        self._wake()

    def tell(self, choice: ChoiceOutput) -> None:
        self._news.append(choice)
        self._wake()

    def keep(self, text: str) -> None:
        """Hold the memory of text that is kept until the answer's end, or end the request where there is
        none."""
        if self._room is not None and self.error is None:
            try:
                self._room.take(text)
            except Overloaded as error:
                self.fail(error)

    def finish_one(self) -> None:
        """Note that a choice, whose last output was announced by `tell`, has finished."""
        self.open -= 1
        self.on_each()
        self._wake()
        if not self.open:
            self._on_end()

    def leave_core(self) -> None:
        """Note that the core tells nothing more of one of the sequences."""
        self._in_core -= 1
        if not self._in_core and self._left_core is not None and not self._left_core.done():
            self._left_core.set_result(None)

    async def wait_left_core(self, within_s: float) -> None:
        """Wait until the core has told all of the sequences, for `within_s` at most."""
        if self._in_core:
            self._left_core = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._left_core}, timeout=within_s)

    def close(self) -> None:
        """Drop the references to the handler and to the choices. They refer to this object, and the
        cycle would keep the answer until the next full garbage collection."""
        self._on_end = self.on_each = _nothing
        self._news.clear()
        self.error = None

    def fail(self, error: ApiError) -> None:
        """End the request with `error`, after the output that has already come. Only the first error
        counts."""
        self.error = self.error or error
        self._wake()
        self._on_end()

    async def take(self) -> list[Delta]:
        """Wait for output. Returns one delta for each choice that has any, in the order in which they
        came; none after `stir`.

        Raises the error that ended the request. Must not be called once `is_done`.
        """
        while not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._is_stirred:
            self._is_stirred = False
            return []
        if self.error is not None and (self.is_whole or not self._news):
            raise self.error
        news, self._news = self._news, []
        return [choice.take() for choice in news]

    @property
    def _has_news(self) -> bool:
        if self.error is not None or self._is_stirred:
            return True
        return not self.open if self.is_whole else bool(self._news)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._has_news:
            self._waiter.set_result(None)


def _too_late(expected_s: float) -> FirstTokenDeadline:
    retry_after_s = min(max(1.0, math.ceil(expected_s / 4)), TOO_LATE_RETRY_S_MAX)
    if not expected_s:
        return FirstTokenDeadline("The first token did not come in time.", retry_after_s=retry_after_s)
    return FirstTokenDeadline(
        f"The first token is expected in {expected_s:.1f} s, which is later than it is of use. "
        "Please try again later, or with a shorter prompt.",
        retry_after_s=retry_after_s,
        detail=f"expected in {expected_s:.1f} s",
    )
