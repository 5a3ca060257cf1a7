"""An engine's core in the test's own event loop: the real loop and scheduler over the fake runner.

A step takes its messages at its beginning, and its outputs are sent at its end, `step_s` later, as from a
process of its own. What plans have the runner compute, and what the core reports, is added up by request, to
be compared with the engine's log lines.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.contract.messages import (
    AddRequest,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    Finished,
    FinishReason,
    Pending,
    Plan,
    Runner,
    RunnerInfo,
    StepOutput,
    Want,
)
from engine.contract.packing import TOKEN_LEN
from engine.core.loop import CoreLoop, last_words
from engine.core.queue.newcomers import sequences_of
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Hold, Sequence
from shared.process.clock import Clock
from tests.async_runner import AsyncRunner
from tests.bench.engine.core_window import draft_by
from tests.fake_drafts import FakeDrafts
from tests.fake_runner import FakeRunner, solo


class Broken(Exception):
    """The error of a runner whose device is lost."""


@dataclass(slots=True)
class Computed:
    """The tokens that the core computed for one request, and what it reported of them."""

    prompt_lens: dict[int, int] = field(default_factory=dict)
    """The prompt lengths of all submitted sequences, by handle."""
    cached_lens: dict[int, int] = field(default_factory=dict)
    """The prompt tokens that were found in the prefix cache, by handle, of all sequences that have begun."""
    rows_len: Counter[int] = field(default_factory=Counter)
    """The number of tokens that plans had the runner compute, by handle."""
    positions: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The positions of these."""
    sampled: Counter[int] = field(default_factory=Counter)
    """The number of tokens that plans had the runner sample, by handle."""
    tokens: Counter[int] = field(default_factory=Counter)
    """The number of tokens that were reported, by handle."""
    verified_at: dict[int, int] = field(default_factory=dict)
    """The position of the newest row that verified drafts, by handle."""
    shared_len: int = 0
    """The tokens with which its prompts begin, computed once, where the API process says so."""
    prediction_lens: dict[int, int] = field(default_factory=dict)
    """The tokens that the caller predicts, by handle."""
    predicted: Counter[int] = field(default_factory=Counter)
    mispredicted: Counter[int] = field(default_factory=Counter)
    """The number of these that were right, and wrong, by handle."""
    ends: dict[int, Finished] = field(default_factory=dict)


class Inbox:
    def __init__(self) -> None:
        self.messages: list[CoreInput] = []
        self.arrival = asyncio.Event()

    def put(self, message: CoreInput) -> None:
        self.messages.append(message)
        self.arrival.set()

    def receive(self, wait_s: float) -> list[CoreInput]:
        """The messages that have arrived; the link does the waiting."""
        messages, self.messages = self.messages, []
        self.arrival.clear()
        return messages


class Outbox:
    def __init__(self) -> None:
        self.messages: list[CoreOutput] = []

    def send(self, message: CoreOutput) -> None:
        self.messages.append(message)


class BreakableRunner:
    """A runner that can be told to fail."""

    def __init__(self, runner: Runner, on_launch: Callable[[Plan], None]) -> None:
        self._runner = runner
        self._on_launch = on_launch
        self.info = runner.info
        self.is_broken = False

    def launch(self, plan: Plan) -> Pending:
        if self.is_broken:
            raise Broken("the device is lost")
        self._on_launch(plan)
        return self._runner.launch(plan)


def _drafter_of(vocab_size: int, sequence: Sequence) -> FakeDrafts:
    """Drafts of which some are right: the caller's as long as there are any."""
    sampling, prompt = sequence.sampling, [*sequence.tokens[: sequence.prompt_len]]
    answer = [*prompt, *solo(prompt, sampling, vocab_size).tokens]
    rng, left = random.Random(sampling.seed), len(sequence.prediction or ())
    return FakeDrafts(answer, sampling.stop_token_ids, vocab_size, 0.8, rng, left=left)


class InProcessCore:
    """A `CoreLink` to a core in the same event loop."""

    def __init__(
        self,
        info: RunnerInfo,
        config: SchedulerConfig,
        clock: Clock,
        *,
        step_s: float,
        overlap: bool,
        runner: Runner | None = None,
    ) -> None:
        """`runner`: one that computes, in the place of the fake one."""
        self._step_s = step_s
        self._clock = clock
        self._inbox, self._outbox = Inbox(), Outbox()
        self._told: asyncio.Queue[CoreOutput] = asyncio.Queue()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._requests: dict[int, str] = {}
        self.computed: dict[str, Computed] = {}
        """The computed tokens by request id."""
        self.hangs_s = 0.0
        """Seconds by which its next step takes longer."""
        if runner is None:
            tokens_max = config.step_tokens_max
            runner = AsyncRunner(info, tokens_max, self._unread) if overlap else FakeRunner(info, tokens_max)
        self.runner = BreakableRunner(runner, self._count_rows)
        self._loop = CoreLoop(self.runner, self._inbox, self._outbox, config, clock, overlap=overlap)
        self._step = self._loop._overlapped_step if overlap else self._loop._plain_step
        self.scheduler = self._loop._scheduler
        if info.drafts_max and isinstance(runner, FakeRunner):
            draft_by(self.scheduler, partial(_drafter_of, info.vocab_size))

    def _count_rows(self, plan: Plan) -> None:
        rows = self.scheduler._in_flight[plan.step].rows
        columns = zip(rows, plan.positions, plan.lengths, plan.wants, strict=True)
        for sequence, position, length, want in columns:
            handle = sequence.handle
            computed = self.computed[self._requests[handle]]
            if want is Want.VERIFY:  # what is behind the first counts once it turns out right
                length, computed.verified_at[handle] = 1, position
            computed.rows_len[handle] += length
            computed.positions[handle].update(range(position, position + length))
            computed.sampled[handle] += want is not Want.NOTHING

    def _unread(self) -> list[int]:
        """The slots of sequences that are paused, or verify drafts in the step before."""
        sequences = self.scheduler._allocator.running.values()
        held = (Hold.PAUSED, Hold.DRAFTS)
        return [s.slot for s in sequences if s.hold in held and s.slot is not None]

    # -- CoreLink ---------------------------------------------------------------------------------

    async def start(self) -> None:
        self._tell(CoreReady(self.runner.info, False))
        self._task = asyncio.create_task(self._run())

    async def receive(self) -> CoreOutput:
        return await self._told.get()

    async def died(self) -> str:
        return await asyncio.shield(self._death)

    def send(self, message: CoreInput) -> None:
        if isinstance(message, AddRequest):
            self._note(message)
        self._inbox.put(message)

    def _note(self, message: AddRequest) -> None:
        for added in sequences_of(message):
            self._requests[added.handle] = added.request_id
            computed = self.computed.setdefault(added.request_id, Computed())
            computed.prompt_lens[added.handle] = len(added.prompt_ids)
            computed.shared_len = len(message.shared) // TOKEN_LEN
            computed.prediction_lens[added.handle] = len(added.prediction or ())

    async def close(self, grace_s: float) -> None:
        self.die("closed")
        if self._task is not None:
            await asyncio.wait([self._task])

    def die(self, how: str) -> None:
        """End the core; outputs that are not sent yet are lost."""
        if not self._death.done():
            self._death.set_result(how)
        if self._task is not None:
            self._task.cancel()

    # -- the loop ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wait()
            try:
                if not self._loop._take_in():
                    return
                self._step()
            except Broken as error:
                self._tell(CoreFailed(last_words(error)))
                return
            hangs_s, self.hangs_s = self.hangs_s, 0.0
            await asyncio.sleep(self._step_s + hangs_s)
            for message in self._outbox.messages:
                self._tell(message)
            self._outbox.messages.clear()

    async def _wait(self) -> None:
        idle_s = self.scheduler.idle_s(self._clock.monotonic())
        if not idle_s or self._inbox.messages:
            return
        try:
            async with asyncio.timeout(None if idle_s == math.inf else idle_s):
                await self._inbox.arrival.wait()
        except TimeoutError:
            return

    def _tell(self, message: CoreOutput) -> None:
        if isinstance(message, StepOutput):
            self._add_up(message)
        self._told.put_nowait(message)

    def _add_up(self, step: StepOutput) -> None:
        for started in step.started:
            computed = self.computed[self._requests[started.handle]]
            computed.cached_lens[started.handle] = started.cached_len
        failed = {each.handle for each in step.finished if each.reason is FinishReason.NUMERIC}
        for handle, tokens in Counter(step.handles).items():
            computed = self.computed[self._requests[handle]]
            computed.tokens[handle] += tokens
            if right := tokens - (handle not in failed):  # of a row that verified
                computed.rows_len[handle] += right
                at = computed.verified_at[handle]
                computed.positions[handle].update(range(at + 1, at + 1 + right))
                computed.sampled[handle] += right
        for handle, right, wrong in step.predicted:
            computed = self.computed[self._requests[handle]]
            computed.predicted[handle] += right
            computed.mispredicted[handle] += wrong
        for finished in step.finished:
            self.computed[self._requests[finished.handle]].ends[finished.handle] = finished
