"""Rank 0's watch over the others: who is lost is named once, everybody is ended, and nobody waits on."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.parallel import ranks as parallel_ranks
from engine.runtime.parallel.ranks import Ranks
from engine.runtime.parallel.wire import (
    Closed,
    Execute,
    Here,
    Landed,
    RankEnd,
    Reader,
    ToRank,
    digest_of,
    frame,
)
from engine.runtime.setup.model_errors import CollectiveFailed, RankLost
from engine.runtime.setup.runner_config import RunnerConfig
from tests.fakes import VirtualClock
from tests.services import PATIENCE_S, ROOT, until

PLAN = Plan(7, [], [], [], [0], [0], [1], [Want.SAMPLE])


class Stage:
    """Puppets, all of which play the same part, and a clock that the test moves."""

    def __init__(self, part: str, size: int = 2, timeout_s: float = 60.0) -> None:
        config = RunnerConfig(part, tensor_parallel_size=size, rank_timeout_s=timeout_s)
        self.clock = VirtualClock()
        self.reasons: list[str] = []
        self._told = threading.Event()
        self.ranks = Ranks(config, self._hear, self.clock)
        assert self.ranks.answers(Here) == [Here()] * (size - 1)

    def _hear(self, reason: str) -> None:
        self.reasons.append(reason)
        self._told.set()

    def lost(self) -> str:
        """Why, once it is."""
        assert self._told.wait(PATIENCE_S)
        assert len(self.reasons) == 1
        return self.reasons[0]

    def until_done(self) -> None:
        """Everything that was sent is answered."""
        until(lambda: not any(rank.told_at_s for rank in self.ranks._ranks))

    def assert_gone(self) -> None:
        assert all(rank.process and rank.process.returncode is not None for rank in self.ranks._ranks)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    monkeypatch.setattr(parallel_ranks, "MODULE", "tests.engine.runtime.parallel.puppet")
    stages: list[Stage] = []

    def start(*args: Any, **kwargs: Any) -> Stage:
        stages.append(Stage(*args, **kwargs))
        return stages[-1]

    yield start
    for started in stages:
        started.ranks.close()
        started.assert_gone()
        assert not started.ranks._watch.is_alive()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("exit", "rank 1 exited with status 3"),
        ("be killed", "rank 1 was ended by SIGKILL"),
        ("complain", "rank 1: the device has fallen off the bus"),
        ("hang up", "rank 1 has closed its socket"),
        ("talk nonsense", "what the ranks say cannot be followed: ValidationError"),
    ],
)
def test_a_lost_rank_is_named_and_all_are_ended(stage: Callable[..., Stage], part: str, reason: str) -> None:
    running = stage(part, size=3)
    running.ranks.send(Execute(PLAN))
    assert running.lost().replace("rank 2", "rank 1") == reason
    running.assert_gone()
    with pytest.raises(RankLost, match="rank"):
        running.ranks.send(Execute(PLAN))
    with pytest.raises(RankLost, match="rank"):
        running.ranks.answers(Here)


def test_a_rank_that_is_late(stage: Callable[..., Stage]) -> None:
    running = stage("stop", timeout_s=30.0)
    running.ranks.serve()
    running.ranks.send(Execute(PLAN))
    running.clock.advance(30.1)
    assert running.lost() == "no answer from rank 1 for 30 s"
    running.assert_gone()


def test_of_several_that_are_late_the_stopped_one_is_to_blame(stage: Callable[..., Stage]) -> None:
    """The others are in a collective with it."""
    running = stage("wait", size=4, timeout_s=30.0)
    running.ranks.serve()
    running.ranks.send(Execute(PLAN))
    second = running.ranks._ranks[1]
    assert second.process is not None
    second.process.send_signal(signal.SIGSTOP)
    until(lambda: second.is_stopped)
    running.clock.advance(30.1)
    assert running.lost() == "no answer from rank 2 for 30 s"


def test_several_that_are_late(stage: Callable[..., Stage]) -> None:
    running = stage("wait", size=3, timeout_s=30.0)
    running.ranks.serve()
    running.ranks.send(Execute(PLAN))
    running.clock.advance(30.1)
    assert running.lost() == "no answer from rank 1, 2 for 30 s"


def test_who_answers_is_not_late_however_time_flies(stage: Callable[..., Stage]) -> None:
    running = stage("obey", timeout_s=30.0)
    running.ranks.serve()
    for _ in range(3):
        running.ranks.send(Execute(PLAN))
        running.ranks.send(Landed(7, 0))
        running.until_done()
        running.clock.advance(1e6)
    assert not running.reasons


def test_a_step_that_takes_too_long_though_all_answer(stage: Callable[..., Stage]) -> None:
    """As when rank 0's own device waits for something that no rank knows of."""
    running = stage("obey", timeout_s=30.0)
    running.ranks.serve()
    with running.ranks.step(7):
        running.ranks.send(Execute(PLAN))
        running.until_done()
        running.clock.advance(31.0)
        assert running.lost() == "step 7 has taken 30 s, though all ranks answer"


def test_a_start_takes_what_it_takes(stage: Callable[..., Stage]) -> None:
    running = stage("stop", timeout_s=30.0)
    running.ranks.send(Execute(PLAN))
    running.clock.advance(1e6)
    assert running.ranks._late() is None
    running.ranks.serve()
    assert running.lost() == "no answer from rank 1 for 30 s"


def fail_in_a_step(running: Stage) -> None:
    with running.ranks.step(7):
        running.ranks.send(Execute(PLAN))
        raise CollectiveFailed("connection reset by peer")


def test_a_failed_collective_is_the_lost_ranks_fault(stage: Callable[..., Stage]) -> None:
    with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
        fail_in_a_step(stage("be killed"))


def test_a_failed_collective_nobody_is_to_blame_for(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_ranks, "LAST_WORDS_S", 0.01)
    with pytest.raises(RankLost, match="a collective failed: connection reset by peer"):
        fail_in_a_step(stage("obey"))


def test_a_rank_that_cannot_be_killed_holds_up_nobody(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in a driver."""
    running = stage("stop", timeout_s=30.0)
    running.ranks.serve()
    with monkeypatch.context() as patched:
        patched.setattr(parallel_ranks, "EXIT_S", 0.01)
        patched.setattr(subprocess.Popen, "kill", lambda process: None)
        running.ranks.send(Execute(PLAN))
        running.clock.advance(30.1)
        assert running.lost() == "no answer from rank 1 for 30 s"


def test_closing_is_no_loss(stage: Callable[..., Stage]) -> None:
    running = stage("obey", size=3)
    running.ranks.send(Execute(PLAN))
    running.ranks.close()
    running.assert_gone()
    assert not running.reasons


def test_a_plan_larger_than_any_buffer(stage: Callable[..., Stage]) -> None:
    running = stage("obey")
    start = SlotAssignment.of(0, list(range(1_000_000)), 1_000_000, SamplingParams(seed=1, max_tokens=1))
    running.ranks.send(Execute(msgspec.structs.replace(PLAN, seated=[start])))
    running.until_done()
    assert not running.reasons


def test_a_plan_that_a_stopped_rank_does_not_take_in(stage: Callable[..., Stage]) -> None:
    """The main thread waits for room in a buffer, and no longer than the watch."""
    running = stage("stop", timeout_s=30.0)
    running.ranks.serve()
    running.ranks.send(Execute(PLAN))
    running.clock.advance(30.1)
    start = SlotAssignment.of(0, list(range(1_000_000)), 1_000_000, SamplingParams(seed=1, max_tokens=1))
    with pytest.raises(RankLost, match="no answer from rank 1 for 30 s"):
        running.ranks.send(Execute(msgspec.structs.replace(PLAN, seated=[start])))


@given(st.lists(st.integers(0, 1 << 32 - 1), max_size=20), st.lists(st.integers(1, 60), max_size=40))
def test_frames_come_back_however_they_are_cut(digests: list[int], cuts: list[int]) -> None:
    sent = [Landed(step, digest) for step, digest in enumerate(digests)]
    data = b"".join(map(frame, sent))
    reader = Reader(msgspec.msgpack.Decoder(ToRank))
    received: list[ToRank] = []
    for cut in cuts:
        received += reader.feed(data[:cut])
        data = data[cut:]
    received += reader.feed(data)
    assert received == sent


def test_a_rank_notices_that_rank_0_is_gone() -> None:
    ours, theirs = socket.socketpair()
    end = RankEnd(theirs)
    ours.sendall(frame(Landed(1, 2)) + frame(Execute(PLAN))[:-1])
    assert end.receive() == Landed(1, 2)
    ours.close()
    with pytest.raises(Closed):
        end.receive()
    with pytest.raises(Closed):
        end.send(Here())
    end.wait_for_the_end()
    theirs.close()


def test_a_digest_is_of_tokens_in_their_order() -> None:
    assert digest_of([1, 2, 3]) == digest_of((1, 2, 3))
    assert len({digest_of(tokens) for tokens in ([], [1, 2, 3], [1, 3, 2], [1, 2], [-1])}) == 5


def test_ranks_start_before_torch_is_imported() -> None:
    """So that all of them import it at the same time."""
    script = "import sys, engine.runtime.parallel.leader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=PATIENCE_S).returncode == 0
