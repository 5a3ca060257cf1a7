"""A core without a process: it speaks the messages, and says what the test tells it to say."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.api.core.client import CoreDied
from engine.contract.messages import (
    AbortSequences,
    AddRequest,
    CoreInput,
    CoreOutput,
    CoreReady,
    CoreStats,
    Finished,
    FinishReason,
    LiftDeadlines,
    PauseSequences,
    Ping,
    Pong,
    ResumeSequences,
    RunnerInfo,
    Started,
    StepOutput,
    StopCore,
    TokenLogprobs,
)
from engine.contract.packing import TOKEN_LEN
from engine.core.queue.newcomers import AddSequence, sequences_of

Script = Callable[[AddSequence], list[int]]


@dataclass(slots=True)
class Running:
    add: AddSequence
    script: list[int]
    sent: int = 0


class FakeCore:
    """A `CoreLink`. Each step starts what waits and gives every running sequence one token, unless it
    is paused.

    By itself it steps whenever there is work; with `is_held` it steps when told to. A sequence that
    has reached the end of its script waits for ever. An aborted one ends at once; with `heeds_aborts` false
    it goes on until the test ends it.
    """

    def __init__(
        self,
        script: Script,
        *,
        pages: int = 32,
        page_size: int = 16,
        max_model_len: int = 256,
        vocab_size: int = 340,
        is_silent: bool = False,
        vector_len: int = 0,
    ) -> None:
        """`is_silent`: it starts, and never says that it is ready."""
        self.script = script
        self.info = RunnerInfo(pages, page_size, 8, max_model_len, vocab_size, "float32", 0.1, 0.1)
        self.scores: Callable[[AddSequence], list[float]] = lambda add: [
            -1.0 - at for at in range(len(add.sampling.scored) // TOKEN_LEN)
        ]
        """The log-probabilities of the tokens that a sequence has scored."""
        self.info = msgspec.structs.replace(self.info, vector_len=vector_len)
        self.is_silent = is_silent
        self.is_held = False
        self.admits = True
        self.heeds_aborts = True
        self.asked: list[AddRequest] = []
        self.added: list[AddSequence] = []
        self.aborted: list[int] = []
        self.pauses: list[PauseSequences | ResumeSequences] = []
        self.unread: list[CoreInput] | None = None
        """What a core that hangs was sent since. None for one that does not."""
        self.withheld: set[int] = set()
        """Those that find no slot."""
        self.lifted: list[int] = []
        self.paused: set[int] = set()
        self.is_stopped = False
        self.is_closed = False
        self.newest = 0
        """The newest that it says to have seen."""
        self.predicted: list[tuple[int, int, int]] = []
        """What the next step says of predictions."""
        self.waiting: dict[int, AddSequence] = {}
        self.running: dict[int, Running] = {}
        self._steps = 0
        self._messages: asyncio.Queue[CoreOutput] = asyncio.Queue()
        self._work = asyncio.Event()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    # -- CoreLink ---------------------------------------------------------------------------------

    async def start(self) -> None:
        if not self.is_silent:
            self.say(CoreReady(self.info))
        self._task = asyncio.create_task(self._run())

    async def receive(self) -> CoreOutput:
        return await self._messages.get()

    async def died(self) -> str:
        return await asyncio.shield(self._death)

    def send(self, message: CoreInput) -> None:
        if self._death.done():
            raise CoreDied("the fake core is dead")
        if self.unread is None:
            self._take(message)
        else:
            self.unread.append(message)

    def _take(self, message: CoreInput) -> None:
        match message:
            case AddRequest():
                self.asked.append(message)
                for add in sequences_of(message):
                    add = msgspec.structs.replace(add, prompt_ids=list(add.prompt_ids))
                    self.added.append(add)
                    self.waiting[add.handle] = add
                    self.newest = add.handle
            case AbortSequences(handles):
                self.aborted += handles
                for handle in handles if self.heeds_aborts else []:
                    if handle in self.waiting or handle in self.running:
                        self.finish(handle, FinishReason.ABORTED)
            case PauseSequences(handles):
                self.pauses.append(message)
                self.paused.update(handles)
            case ResumeSequences(handles):
                self.pauses.append(message)
                self.paused.difference_update(handles)
            case LiftDeadlines(handles):
                self.lifted += handles
            case Ping(number):
                self.say(Pong(number))
            case StopCore():
                self.is_stopped = True
                self.die("stopped")
        self._work.set()

    async def close(self, grace_s: float) -> None:
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()

    # -- for the test -----------------------------------------------------------------------------

    def die(self, how: str = "the core process was ended by SIGKILL") -> None:
        if not self._death.done():
            self._death.set_result(how)

    def hang(self) -> None:
        """From now on read nothing and make no step."""
        self.unread = []

    def go_on(self) -> None:
        """Take what was sent while it hung, in order."""
        assert self.unread is not None
        messages, self.unread = self.unread, None
        for message in messages:
            self._take(message)

    def say(self, message: CoreOutput) -> None:
        self._messages.put_nowait(message)

    def release(self) -> None:
        self.is_held = False
        self._work.set()

    @property
    def left(self) -> int:
        """The number of sequences that have steps to go."""
        return len(self.waiting) + len(self._willing)

    def step(self) -> None:
        started = []
        if self.admits:
            for handle in self._admissible:
                add = self.waiting.pop(handle)
                started.append(Started(handle, 0, 0.001))
                script = self.script(add)
                self.running[handle] = Running(add, script if add.sampling.max_tokens else script[:1])
        rows = self._willing
        sampling = [row for row in rows if row.add.sampling.max_tokens]
        wants = any(row.add.sampling.logprobs is not None for row in sampling)
        output = StepOutput(
            step=self._steps,
            handles=[row.add.handle for row in sampling],
            tokens=[row.script[row.sent] for row in sampling],
            logprobs=[_logprobs(row.script[row.sent], row.add.sampling.logprobs) for row in sampling]
            if wants
            else [],
            prompt_logprobs=[
                (
                    row.add.handle,
                    [_known(token, row.add.sampling.prompt_logprobs) for token in row.add.prompt_ids[1:]],
                )
                for row in rows
                if row.sent == 0 and row.add.sampling.prompt_logprobs is not None
            ],
            started=started,
            finished=[],
            stats=self._stats(),
            scores=[(row.add.handle, self.scores(row.add)) for row in rows if row.add.sampling.scored],
            vectors=[
                (row.add.handle, vector_of(row.add.prompt_ids, length))
                for row in rows
                if (length := row.add.sampling.vector_len)
            ],
            predicted=self.predicted,
        )
        self._steps, self.predicted = self._steps + 1, []
        for row in rows:
            row.sent += 1
            reason = self._end(row)
            if reason is not None:
                del self.running[row.add.handle]
                output.finished.append(Finished(row.add.handle, reason, 0.001, 0.002, 0.003, 0.0, 0))
        self.say(output)

    def finish(
        self, handle: int, reason: FinishReason, expected_s: float = 0.0, late_tokens: int = 0
    ) -> None:
        """End a sequence without a token."""
        self.running.pop(handle, None)
        self.waiting.pop(handle, None)
        self.paused.discard(handle)
        finished = [Finished(handle, reason, 0.001, 0.002, 0.003, 0.0, 0, 0.007, expected_s, late_tokens)]
        self.say(StepOutput(self._steps, [], [], [], [], [], finished, self._stats()))

    def _stats(self) -> CoreStats:
        owned = len(self.running)
        free, stalled = self.info.pages - owned, len(self.paused)
        counts = CoreStats(len(self.waiting), owned, free, 0, owned, 10, 4, 0, 0.004, owned, stalled)
        return msgspec.structs.replace(counts, newest=self.newest)

    def _end(self, row: Running) -> FinishReason | None:
        sampling = row.add.sampling
        if sampling.max_tokens and row.script[row.sent - 1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if row.sent >= sampling.max_tokens else None

    @property
    def _has_work(self) -> bool:
        if self.is_held or self.unread is not None:
            return False
        return bool(self._willing) or (self.admits and bool(self._admissible))

    @property
    def _admissible(self) -> list[int]:
        return [handle for handle in self.waiting if handle not in self.withheld]

    @property
    def _willing(self) -> list[Running]:
        return [
            row
            for row in self.running.values()
            if row.sent < len(row.script) and row.add.handle not in self.paused
        ]

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if self._has_work:
                self.step()
                await asyncio.sleep(0)
            else:
                self._work.clear()


def vector_of(prompt_ids: Sequence[int], length: int) -> bytes:
    """Its vector of a prompt: the prompt's length, then its ids."""
    return struct.pack(f"<{length}f", *[len(prompt_ids), *prompt_ids, *[0] * length][:length])


def _known(token: int, top: int | None) -> TokenLogprobs:
    return TokenLogprobs(-0.25 - token / 1000, list(range(top or 0)), [-1.0 - i for i in range(top or 0)])


def _logprobs(token: int, top: int | None) -> TokenLogprobs | None:
    return None if top is None else _known(token, top)
