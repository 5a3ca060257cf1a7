"""The API process's side of the core: the sequences that wait and run there, their outputs, and whether it
lives.

Rules.

1. A handle is counted up and never reused, so an abort cannot end another sequence.
2. Whether there is room in the core's queue is decided here, at once, from what this process knows
   (`engine.api.core.queue`).
3. A request that submits also releases, however it ended. One that ends before its sequences do aborts them,
   and hears of their last tokens until the core says that they have ended. Releasing aborts as well, and
   nothing more is heard.
4. A sequence whose client is behind in reading is paused once, and resumed once the client has caught up.
5. A core that leaves a Ping unanswered for `core_timeout_s` hangs: it takes no more work until it answers,
   and what it holds ends at once. A request of which it has begun nothing is as good as never sent, since a
   core says that a sequence begins before it computes anything of it; so it is `not_ready`, and another
   replica may serve it. One that has begun has failed. Should the core go on, it finds their aborts behind
   what it was sent, which keeps its place in the queue until then, and what it says of them is late.
6. The core is dead as soon as its process has ended, has said CoreFailed, or has sent what cannot be read.
   Then every open request fails at once, and no other is taken. What a dead core said last may be lost with
   it, so even those that seem to wait have failed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final, Protocol

import msgspec

from engine.api.answer.outputs import ChoiceOutput, RequestOutput
from engine.api.core.queue import RETRY_AFTER_S_MIN, CoreQueue
from engine.api.told.metrics import EngineMetrics
from engine.api.told.steps import StepRing
from engine.contract.messages import (
    AbortSequences,
    AddPrompt,
    AddRequest,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreProgress,
    CoreReady,
    CoreStats,
    Finished,
    LiftDeadlines,
    PauseSequences,
    Ping,
    Pong,
    ResumeSequences,
    RunnerInfo,
    SamplingParams,
    ServiceClass,
    StepOutput,
    StopCore,
    TokenLogprobs,
)
from engine.contract.packing import TOKEN_LEN
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire import engine_words
from shared.wire.errors import ApiError, CoreHangs, EngineFailed, InternalError, NotReady
from shared.wire.ids import RequestId

LAST_WORDS_S: Final = 0.2
"""How long messages that are still under way are waited for after the core's process has ended."""
PING_EVERY_S: Final = 1.0
LOOKS: Final = 10
SILENCE_S: Final = 0.25
"""The time from which on a Ping without an answer is a silence of the core."""
SILENCES_MAX: Final = 64
"""Silences that are kept."""
"""The parts of the time in which a Ping must be answered. Where this process was stopped together with its
core, as with their container, one of them is over when it goes on, and the core has the others to answer."""
_NO_ANSWER: Final = "the core does not answer"

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """The tenant that a request's sequences belong to, their service class, the salt of their page hashes,
    and whether another turn follows (`AddRequest.has_next_turn`)."""

    tenant: str = ""
    service_class: ServiceClass = ServiceClass.DEFAULT
    cache_salt: bytes = b""
    has_next_turn: bool = False


class CoreDied(Exception):
    """The core is gone, or cannot be talked to. The message is for the operator."""


class CoreLink(Protocol):
    """A core process and the two sockets to it. Tests have a core of their own behind this interface."""

    async def start(self) -> None:
        """Start the process. Raises OSError and CoreDied when it cannot be started."""
        ...

    async def receive(self) -> CoreOutput:
        """The next message. Raises CoreDied when it cannot be read."""
        ...

    async def died(self) -> str:
        """Wait until the process has ended. Returns how it ended, in words."""
        ...

    def send(self, message: CoreInput) -> None:
        """Queue a message for the core, without waiting. Raises CoreDied when the core takes no more
        messages."""
        ...

    async def close(self, grace_s: float) -> None:
        """Wait for the process to end, kill it after `grace_s` seconds, and remove the sockets."""
        ...


class Parked(Protocol):
    """A part of a request that waits for room in the queue."""

    @property
    def output(self) -> RequestOutput: ...

    def more(self) -> None: ...


class CoreClient:
    def __init__(
        self,
        *,
        queue_len_max: int,
        queue_tokens_max: int = 1 << 40,
        core_timeout_s: float = 30.0,
        metrics: EngineMetrics,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._link: CoreLink | None = None
        self._queue = CoreQueue(queue_len_max, queue_tokens_max)
        self._core_timeout_s = core_timeout_s
        self._unsent: asyncio.Future[str] | None = None
        """Done when the core did not take a message; the result says why."""
        self._metrics = metrics
        self._clock = clock
        self._handles = itertools.count(1)
        self._live: dict[int, ChoiceOutput] = {}
        self._paused: set[int] = set()
        self._parked: dict[Parked, None] = {}
        """The requests that wait for room in the queue, in their order."""
        self._is_stopping = False
        self._refusal: ApiError | None = None
        """The error for every new request; None while requests are taken."""
        self.settled = asyncio.Event()
        """Set once the core is ready, or has failed to become ready."""
        self.info: RunnerInfo | None = None
        self.stats: CoreStats | None = None
        self.steps: Final = StepRing()
        self.stirred: Final = asyncio.Event()
        """Set whenever sequences are submitted and when a step is back. Who waits for it clears it."""
        self.failure: str | None = None
        self.answers = True
        """True if the core answered the last Ping in time."""
        self.silences: Final[deque[tuple[float, float]]] = deque(maxlen=SILENCES_MAX)
        """The latest times in which the core left a Ping unanswered: begin and end, in seconds."""
        self._ponged = asyncio.Event()
        self._pinged = 0

    @property
    def live(self) -> int:
        """The number of sequences that have not ended and were not released."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> tuple[int, ...]:
        """Prompt tokens that are to be computed and are not, by class."""
        return self._queue.tokens(() if self.stats is None else self.stats.class_tokens)

    # -- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        request_id: RequestId,
        prompts: list[AddPrompt],
        sampling: SamplingParams,
        outputs: Sequence[ChoiceOutput],
        share: Share,
        first_token_s: float = math.inf,
        bearer: int = 0,
        grammar: str = "",
        prediction: bytes = b"",
        shared: bytes = b"",
    ) -> list[int]:
        """Queue a request's sequences, all or none, whose first token is of use for `first_token_s` seconds:
        that of the sequence at `bearer` has to come by then. `sampling` is the first sequence's; each follows
        `grammar`, and is expected to answer as `prediction` has it. All prompts begin with the ids `shared`,
        packed. Returns their handles.

        Raises NotReady, EngineFailed, and Overloaded when the queue is full, or when a tenant has filled
        its part of it.
        """
        shared_len = len(shared)
        lens = [(shared_len + len(prompt.ids)) // TOKEN_LEN for prompt in prompts for _ in prompt.seeds]
        self.check_room(share.tenant, len(lens), sum(lens))
        self.stirred.set()
        handles = list(islice(self._handles, len(lens)))
        self._queue.enter(handles[0], lens, share.tenant, share.service_class)
        self._live.update(zip(handles, outputs, strict=True))
        self._send(
            AddRequest(
                handles[0],
                request_id,
                prompts,
                sampling,
                share.cache_salt,
                share.tenant,
                share.service_class,
                first_token_s,
                bearer,
                grammar,
                share.has_next_turn,
                prediction,
                shared,
            )
        )
        return handles

    def check_room(self, tenant: str, sequences: int, tokens: int) -> None:
        """Raise what `submit` raises for so much, before more is done for it."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        self.check_answers()
        if self.info is None:
            raise NotReady(engine_words.STARTING, retry_after_s=RETRY_AFTER_S_MIN)
        self._queue.check_room(tenant, sequences, tokens)

    def await_room(self, parked: Parked) -> None:
        """Call `parked.more` once there may be more room, unless `forget` comes before. A core that fails
        fails its request."""
        self._parked[parked] = None

    def forget(self, parked: Parked) -> None:
        self._parked.pop(parked, None)

    def _unpark(self) -> None:
        if not self._parked:
            return
        waiting, self._parked = self._parked, {}
        for parked in waiting:
            parked.more()

    def check_answers(self) -> None:
        """Raise NotReady while the core hangs."""
        if not self.answers:
            raise NotReady(engine_words.HANGS, detail=_NO_ANSWER)

    def abort(self, handles: Iterable[int]) -> None:
        """Have the core end those of a request's sequences that have not ended. Their tokens are counted
        until it says that they have."""
        ending = [handle for handle in handles if handle in self._live and not self._live[handle].is_ending]
        for handle in ending:
            self._live[handle].is_ending = True
            self._queue.leave_aborted(handle)
            self._paused.discard(handle)
        if self._is_stopping:  # nobody answers any more
            for handle in ending:
                self._forget(handle)
        elif ending:
            self._send(AbortSequences(ending))

    def release(self, handles: Sequence[int]) -> None:
        """Forget sequences whose request has ended, and abort those that have not ended themselves."""
        self.abort(handles)
        for handle in handles:
            self._disconnect(handle)

    def lift_deadline(self, handle: int) -> None:
        """Let the first token of a sequence come at any time, since its request has begun with another."""
        if handle in self._live:
            self._send(LiftDeadlines([handle]))

    def resume(self, handles: Iterable[int]) -> None:
        """Resume those of a request's sequences that are paused: its client has taken everything."""
        if not self._paused:  # nearly always the case, and this is called for every event
            return
        paused = self._paused.intersection(handles)
        if paused:
            now = self._clock.monotonic()
            for handle in paused:
                self._live[handle].on_resumed(now)
            self._paused -= paused
            self._send(ResumeSequences(sorted(paused)))

    def _pause(self, handles: list[int], now: float) -> None:
        for handle in handles:
            self._live[handle].on_paused(now)
        self._paused.update(handles)
        self._send(PauseSequences(handles))

    def shut(self, error: ApiError) -> None:
        """End every open request with `error`, and refuse all that come. Each releases what it holds."""
        self._refusal = error
        self._fail_open(error, error)

    def _fail_open(self, begun: ApiError, unbegun: ApiError) -> None:
        """End every open request: with `begun` where the core has begun any of it, else with `unbegun`."""
        parked, self._parked = self._parked, {}
        for output in (*(live.output for live in self._live.values()), *(one.output for one in parked)):
            output.fail(begun if output.has_begun else unbegun)

    def _forget(self, handle: int) -> None:
        self._queue.leave(handle)
        self._disconnect(handle)

    def _disconnect(self, handle: int) -> None:
        self._paused.discard(handle)
        if (output := self._live.pop(handle, None)) is not None:
            output.output.leave_core()

    def _send(self, message: CoreInput) -> None:
        assert self._link is not None
        try:
            self._link.send(message)
        except CoreDied as error:
            assert self._unsent is not None
            if not self._unsent.done():
                self._unsent.set_result(str(error))

    # -- the core's life --------------------------------------------------------------------------

    async def run(self, link: CoreLink) -> None:
        """Start the core and follow it until it is gone. `failure` then says why, unless it was told
        to stop."""
        self._link = link
        unsent = self._unsent = asyncio.get_running_loop().create_future()
        try:
            await link.start()
        except Exception as error:  # even a bug must be reported: `start` waits for ready or failed
            if not isinstance(error, OSError | CoreDied):
                log.exception("core.start_failed")
            self._fail(f"the core process could not be started: {type(error).__name__}: {error}")
            return
        receiver = asyncio.create_task(self._receive_all(link), name="core-receive")
        watcher = asyncio.create_task(link.died(), name="core-watch")
        pinger = asyncio.create_task(self._ping_all(), name="core-ping")
        try:
            await asyncio.wait({receiver, watcher, unsent}, return_when=asyncio.FIRST_COMPLETED)
            # prefer the core's own last message to its exit status, and that to a message it did not take
            for ends in ({receiver, watcher}, {receiver}):
                if not any(end.done() for end in ends):
                    await asyncio.wait(ends, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
            self._fail(next(end.result() for end in (receiver, watcher, unsent) if end.done()))
        except Exception as error:  # a bug: outputs are no longer routed, so no request may wait for one
            log.exception("core.receive_failed")
            self._fail(f"the core's outputs could not be routed: {type(error).__name__}")
        finally:
            receiver.cancel()
            watcher.cancel()
            pinger.cancel()

    async def _ping_all(self) -> None:
        """Set `answers` by whether the core answers pings in time, and end what it holds when it does not.
        At most one Ping is unanswered at any time."""
        await self._ponged.wait()  # set once the core is ready
        while True:
            await self._clock.sleep(PING_EVERY_S)
            self._ponged.clear()
            self._pinged += 1
            pinged_at = self._clock.monotonic()
            self._send(Ping(self._pinged))
            if await self._is_ponged():
                self._note_silence(pinged_at)
                continue
            self.answers = False
            log.error("core.hangs", timeout_s=self._core_timeout_s, open_sequences=len(self._live))
            self._fail_open(
                EngineFailed(engine_words.HUNG_IN, detail=_NO_ANSWER),
                CoreHangs(engine_words.HUNG_BEFORE, detail=_NO_ANSWER),
            )
            self.release(list(self._live))
            await self._ponged.wait()
            self._note_silence(pinged_at)
            self.answers = True
            log.warning("core.answers_again")

    def _note_silence(self, pinged_at: float) -> None:
        if (now := self._clock.monotonic()) - pinged_at >= SILENCE_S:
            self.silences.append((pinged_at, now))

    def silent_s(self, since: float, now: float) -> float:
        """The time since then in which the core left a Ping unanswered, in seconds. Less than a second of it,
        before the Ping, is not known."""
        return sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self.silences)

    async def _is_ponged(self) -> bool:
        """Wait for the answer to the last Ping. Returns False when none came in time."""
        for _ in range(LOOKS):
            try:
                async with asyncio.timeout(self._core_timeout_s / LOOKS):
                    await self._ponged.wait()
                return True
            except TimeoutError:
                continue
        return False

    async def stop(self, grace_s: float) -> None:
        """Tell the core to end, and kill it after `grace_s` seconds."""
        self._is_stopping = True
        if self._link is None:
            return
        was_told = self.failure is None and self.info is not None
        if was_told:
            self._send(StopCore())
        await self._link.close(grace_s if was_told else 0.0)

    async def _receive_all(self, link: CoreLink) -> str:
        """Route the core's messages until it fails. Returns why it failed."""
        while True:
            try:
                message = await link.receive()
            except CoreDied as error:
                return str(error)
            match message:
                case StepOutput():
                    self._on_step(message)
                case Pong():
                    self._ponged.set()
                case CoreProgress(stage):
                    log.info("core.progress", stage=stage)
                case CoreReady(runner, overlap):
                    self.info = runner
                    self._metrics.core_ready(runner)
                    self.settled.set()
                    self._ponged.set()
                    told = msgspec.structs.asdict(runner)
                    del told["timed_steps"]
                    log.info("core.ready", overlap=overlap, **told)
                case CoreFailed(failure):
                    return failure

    def _fail(self, reason: str) -> None:
        if self.failure is not None or self._is_stopping:
            return
        self.failure = reason
        log.error("core.failed", reason=reason, open_sequences=len(self._live))
        self.shut(EngineFailed(engine_words.FAILED_IN, detail=reason))
        for handle in list(self._live):
            self._disconnect(handle)
        self._queue.clear()
        self.stats = None  # the last statistics no longer hold
        self.settled.set()

    # -- outputs ----------------------------------------------------------------------------------

    def _on_step(self, step: StepOutput) -> None:
        """Deliver the outputs of one step to their requests. This is the hot path."""
        now = self._clock.monotonic()
        live = self._live
        self.stirred.set()
        self.stats = step.stats
        self._queue.see(step.stats.newest)
        if step.record is not None:
            self.steps.push(step.record)
        self._take_news(step, now)
        stopped: list[int] = []
        behind: list[int] = []
        late_tokens = again_tokens = drafted = accepted = charged = 0
        predicted = self._predicted(step) if step.predicted else ()
        for handle, token, logprobs in zip(step.handles, step.tokens, step.logprobs or repeat(None)):  # noqa: B905
            if (output := live.get(handle)) is None or (stopped and handle in stopped):
                late_tokens += 1  # a step that verified drafts brings several tokens of one sequence
                continue
            if self._deliver(output, token, logprobs, now):
                stopped.append(handle)
            elif output.is_behind and handle not in self._paused and handle not in behind:
                behind.append(handle)
        for output, before, right, wrong in predicted:  # a right one may come behind the end of its text
            output.on_predicted(min(right, output.completion_tokens - before), wrong)
        ended = {finished.handle for finished in step.finished}
        for finished in step.finished:
            output = None if finished.handle in stopped else live.get(finished.handle)
            if output is not None:
                self._end(output, finished)
            if output is None or not finished.reason.is_callers:
                late_tokens += finished.late_tokens
            again_tokens += finished.again_tokens
            drafted, accepted = drafted + finished.drafted, accepted + finished.accepted
            charged += finished.mispredicted
            self._forget(finished.handle)
        self.release([handle for handle in stopped if handle not in ended])
        if behind and (behind := [handle for handle in behind if handle in live]):
            self._pause(behind, now)
        self._metrics.on_step(step)
        self._metrics.count_uncharged(late=late_tokens, preempted=again_tokens)
        if drafted:
            self._metrics.count_drafts(drafted, accepted, charged)
        self._unpark()

    def _predicted(self, step: StepOutput) -> list[tuple[ChoiceOutput, int, int, int]]:
        """The outputs whose callers' predictions the step tried, the tokens that each has before it, and how
        many of those that were tried are right and wrong."""
        found: list[tuple[ChoiceOutput, int, int, int]] = []
        for handle, right, wrong in step.predicted:
            if (output := self._live.get(handle)) is not None:
                found.append((output, output.completion_tokens, right, wrong))
            else:  # its request has ended and been charged
                self._metrics.count_uncharged(draft=wrong)
        return found

    def _take_news(self, step: StepOutput, now: float) -> None:
        """Deliver what happens a few times in a sequence's life."""
        live = self._live
        for started in step.started:
            self._queue.leave(started.handle)
            self._queue.latest_s = started.queue_s
            if (output := live.get(started.handle)) is not None:
                output.on_started(started)
        for moved in step.moved:
            if (output := live.get(moved.handle)) is not None:
                output.on_moved(moved, now)
        for handle, prompt_logprobs in step.prompt_logprobs:
            if (output := live.get(handle)) is not None:
                output.prompt_logprobs += prompt_logprobs
        for handle, scores in step.scores:
            if (output := live.get(handle)) is not None:
                output.scores = scores
        for handle, vector in step.vectors:
            if (output := live.get(handle)) is not None:
                output.vector = vector

    def _deliver(self, output: ChoiceOutput, token: int, logprobs: TokenLogprobs | None, now: float) -> bool:
        """Deliver one token. Returns True when the sequence must end here. An exception ends this
        request alone."""
        try:
            return output.on_token(token, logprobs, now)
        except Exception as error:
            _fail_alone(output, error)
            return True

    def _end(self, output: ChoiceOutput, finished: Finished) -> None:
        try:
            output.on_finished(finished)
        except Exception as error:
            _fail_alone(output, error)


def _fail_alone(output: ChoiceOutput, error: Exception) -> None:
    log.exception("output.failed")
    output.output.fail(InternalError("The answer could not be decoded.", detail=type(error).__name__))
