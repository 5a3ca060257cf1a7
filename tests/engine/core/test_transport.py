from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.contract.messages import (
    READ_EVERY,
    AbortSequences,
    AddPrompt,
    AddRequest,
    CoreInput,
    CoreOutput,
    CoreProgress,
    Finished,
    FinishReason,
    PauseSequences,
    Read,
    ResumeSequences,
    SamplingParams,
    StepOutput,
    StopCore,
)
from engine.contract.packing import Biases, packed
from engine.core import transport
from engine.core.loop import Disconnected
from engine.core.queue.newcomers import AddSequence
from engine.core.transport import UNREAD_MAX, CoreTransport
from tests.bench.engine.core_window import alone
from tests.engine.core.harness import Harness, greedy

ADD = AddRequest(
    7,
    "req_7",
    [AddPrompt(packed([1, 2, 2**31]), 5, 0, [2**64 - 1]), AddPrompt(packed([3]), 6, 0, [1, 0])],
    SamplingParams(2**64 - 1, 5, logit_bias=Biases.of(((3, -1.5),)), stop_token_ids=(2,), logprobs=3),
    b"\x00salt",
)


class ApiSide:
    """The API process's two sockets."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.to_core, self.from_core = f"ipc://{folder}/in", f"ipc://{folder}/out"
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.push.bind(self.to_core)
        self.pull.bind(self.from_core)
        self._decoder: msgspec.msgpack.Decoder[CoreOutput] = msgspec.msgpack.Decoder(CoreOutput)

    def send(self, *messages: CoreInput) -> None:
        for message in messages:
            self.push.send(msgspec.msgpack.encode(message))

    def receive(self) -> CoreOutput:
        assert self.pull.poll(10_000), "nothing came"
        return self._decoder.decode(self.pull.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiSide]:
    side = ApiSide(tmp_path)
    yield side
    side.close()


@pytest.fixture
def core(api: ApiSide) -> Iterator[CoreTransport]:
    with CoreTransport(api.to_core, api.from_core) as core:
        yield core


def test_messages_arrive_whole_and_in_order(api: ApiSide, core: CoreTransport) -> None:
    sent: list[CoreInput] = [
        ADD,
        AbortSequences([7, 8]),
        PauseSequences([7]),
        ResumeSequences([7]),
        StopCore(),
    ]
    api.send(*sent)
    got: list[CoreInput] = []
    while len(got) < len(sent):
        got += core.inbox.receive(math.inf)
    assert got == sent
    assert core.inbox.receive(0) == []
    assert core.inbox.receive(0.001) == [], "a wait with an end ends"


def test_a_step_output_survives_the_wire(api: ApiSide, core: CoreTransport) -> None:
    h = Harness()
    h.add(1, [1, 2, 3], greedy(1, logprobs=2, prompt_logprobs=1))
    plan = h.plan()
    assert plan is not None
    h.finish_step(plan)
    output = h.scheduler.report()
    assert output is not None
    assert output.prompt_logprobs
    core.outbox.send(CoreProgress("loading"))
    core.outbox.send(output)
    assert api.receive() == CoreProgress("loading")
    assert api.receive() == output


def test_one_receive_takes_a_bounded_number_of_messages(
    api: ApiSide, core: CoreTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "RECEIVE_MAX", 2)
    api.send(*[AbortSequences([handle]) for handle in range(5)])
    got: list[CoreInput] = []
    while len(got) < 5:
        batch = core.inbox.receive(math.inf)
        assert 1 <= len(batch) <= 2
        got += batch
    assert got == [AbortSequences([handle]) for handle in range(5)]


def test_one_receive_takes_a_bounded_number_of_bytes(
    api: ApiSide, core: CoreTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message behind prompts of 4 MB waits for a step more, however few they are."""
    long = AddRequest(1, "long", [AddPrompt(packed([5] * 1000), 1, 0, [1])], SamplingParams(1, 1))
    monkeypatch.setattr(transport, "RECEIVE_LEN_MAX", 2 * len(msgspec.msgpack.encode(long)))
    api.send(*[long] * 3)
    lens = list[int]()
    while sum(lens) < 3:
        lens.append(len(core.inbox.receive(math.inf)))
        assert lens[-1] <= 2


def test_an_undecodable_message_is_an_error(api: ApiSide, core: CoreTransport) -> None:
    api.push.send(b"\x92\xa3add\x01")
    with pytest.raises(msgspec.ValidationError):
        core.inbox.receive(math.inf)


def let_it_fall_behind(core: CoreTransport) -> None:
    """Send as many messages as the API process may be behind. None of the steps between them waits."""
    for number in range(UNREAD_MAX):
        assert core.inbox.receive(0) == []
        core.outbox.send(CoreProgress(str(number)))


def test_an_api_process_that_is_too_far_behind_is_waited_for_and_misses_nothing(
    api: ApiSide, core: CoreTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_fall_behind(core)
    monkeypatch.setattr(transport, "PARENT_CHECK_MS", 20)
    parents = iter([os.getppid(), os.getppid(), os.getppid(), -1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getppid", lambda: next(parents))
        with pytest.raises(Disconnected):
            core.inbox.receive(0)
    api.push.send(msgspec.msgpack.encode(Read(READ_EVERY)))
    assert core.inbox.receive(0) == [], "it has read some"
    for number in range(UNREAD_MAX):
        assert api.receive() == CoreProgress(str(number))


def test_an_api_process_that_is_too_far_behind_is_heard(api: ApiSide, core: CoreTransport) -> None:
    """The API process says what it has read behind what it sent before."""
    let_it_fall_behind(core)
    api.send(AbortSequences([7]))
    assert core.inbox.receive(0) == [AbortSequences([7])]


def test_waiting_ends_when_the_parent_is_gone(core: CoreTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PARENT_CHECK_MS", 20)
    answers = iter([os.getppid(), os.getppid(), -1])
    monkeypatch.setattr(os, "getppid", lambda: next(answers))
    with pytest.raises(Disconnected):
        core.inbox.receive(math.inf)


def test_receive_notices_a_dead_parent_whether_busy_or_idle(
    core: CoreTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: -1)
    with pytest.raises(Disconnected):
        core.inbox.receive(0)


CORE = """
    import sys
    from engine.core.scheduler_config import SchedulerConfig
    from engine.core.loop import CoreLoop
    from engine.core.transport import CoreTransport
    from tests.fake_runner import FakeRunner, runner_info
    with CoreTransport(*sys.argv[1:3]) as core:
        CoreLoop(FakeRunner(runner_info(), 64), core.inbox, core.outbox, SchedulerConfig(64)).run()
"""
PARENT = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]).wait()
"""


def test_a_core_in_its_own_process_dies_with_its_parent(api: ApiSide) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(PARENT), textwrap.dedent(CORE), api.to_core, api.from_core]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        try:
            api.receive()  # ready
            api.send(alone(AddSequence(1, "req_1", [1, 2, 3], greedy(3))))
            ends: list[Finished] = []
            while not ends:
                step = api.receive()
                assert isinstance(step, StepOutput)
                ends = step.finished
            assert ends[0].reason is FinishReason.LENGTH
        finally:
            parent.kill()
        assert parent.stdout is not None
        assert parent.stdout.read() == b""  # the end of the pipe: the core, which inherited it, is gone


def test_a_thread_ends_a_wait_for_messages_and_none_is_lost(api: ApiSide, core: CoreTransport) -> None:
    threading.Timer(0.01, core.inbox.ring).start()
    assert core.inbox.receive(math.inf) == []
    core.inbox.ring()
    assert core.inbox.receive(math.inf) == [], "it was rung before the wait"
    for _ in range(100_000):  # more than a pipe holds
        core.inbox.ring()
    api.send(AbortSequences([1]))
    got: list[CoreInput] = []
    while not got:
        got += core.inbox.receive(math.inf)
    assert got == [AbortSequences([1])]
