"""`python -m engine.runtime.parallel.rank`: a rank that is not rank 0. Started by `ranks`, on its end of a
socket pair as standard input.

It makes the calls that rank 0 makes, as it is told, and answers each. It never reads a clock, and decides
nothing. An error of its own is its last message; when a collective fails it sends nothing and waits to be
ended, since another rank is to blame.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING

from engine.runtime.parallel.wire import (
    Build,
    Closed,
    Execute,
    Goodbye,
    Here,
    Landed,
    Loaded,
    RankDone,
    RankEnd,
    RankFailed,
    Start,
    digest_of,
)
from engine.runtime.setup.model_errors import CollectiveFailed, ModelError, RankLost
from shared.process import logs
from shared.process.lifecycle import die_with_parent

if TYPE_CHECKING:
    from engine.contract.messages import Pending, Runner
    from engine.runtime.collective.group import Meeting

log = logs.get(__name__)


def main() -> int:
    wire = RankEnd(socket.socket(fileno=sys.stdin.fileno()))
    start = wire.receive()
    assert isinstance(start, Start)
    die_with_parent(start.leader_pid, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(f"engine-rank-{start.rank}")
    try:
        return follow(wire, start)
    except Closed:
        return 0


def follow(wire: RankEnd, start: Start, meeting: Meeting | None = None) -> int:
    """Load and execute until rank 0 says goodbye. Returns the process's exit status. Raises Closed when rank
    0 is gone."""
    try:
        execute(wire, load(wire, start, meeting))
    except Closed:
        raise
    except CollectiveFailed as error:
        log.warning("rank.collective_failed", reason=str(error))
        wire.wait_for_the_end()
        raise Closed from error
    except ModelError as error:
        log.error("rank.failed", reason=str(error))
        wire.send(RankFailed(str(error)))
    except Exception as error:
        wire.send(RankFailed(f"{type(error).__name__}: {' '.join(str(error).split())}"))
        raise
    else:
        return 0
    return 1


def load(wire: RankEnd, start: Start, meeting: Meeting | None = None) -> Runner:
    """This rank's shard, and a runner of the sizes that rank 0 chose."""
    import torch  # takes seconds

    from engine.runtime.load import load_shard
    from engine.runtime.parallel.joining import connect

    wire.send(Here())
    with torch.inference_mode():
        group = connect(start.config, start.rank, start.store_file, meeting)
        shard = load_shard(start.config, group.device, _quiet, group)
        wire.send(Loaded(shard.page_count()))
        build = wire.receive()
        assert isinstance(build, Build)
        runner = shard.build(build.info, _quiet)
    wire.send(RankDone())
    gc.collect()
    gc.freeze()  # as rank 0's process does: a collection that walks torch's modules would delay all ranks
    return runner


def _quiet(stage: str) -> None:
    """Drop the message: rank 0 reports the progress of all ranks."""


def execute(wire: RankEnd, runner: Runner) -> None:
    """Execute plans until rank 0 says goodbye, or is gone, which raises Closed. Raises RankLost when tokens
    differ from rank 0's."""
    launched: deque[tuple[int, Pending]] = deque()
    while True:
        match wire.receive():
            case Execute(plan):
                launched.append((plan.step, runner.launch(plan)))
            case Landed(step, digest):
                own_step, pending = launched.popleft()
                assert own_step == step, "collected in the order of the launches"
                if digest_of(pending.collect().tokens) != digest:
                    raise RankLost(f"its tokens of step {step} are not those of rank 0")
            case Goodbye():
                return
            case message:
                raise AssertionError(f"{type(message).__name__} between steps")
        wire.send(RankDone())


if __name__ == "__main__":
    sys.exit(main())
