from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from shared.process.lifecycle import MOVES, IllegalPhase, Lifecycle, Phase, on_stop_signals

ROUTES = {
    Phase.STARTING: [],
    Phase.READY: [Phase.READY],
    Phase.DRAINING: [Phase.READY, Phase.DRAINING],
    Phase.STOPPED: [Phase.DRAINING, Phase.STOPPED],
    Phase.FAILED: [Phase.FAILED],
}


def in_phase(phase: Phase) -> Lifecycle:
    lifecycle = Lifecycle()
    for step in ROUTES[phase]:
        lifecycle.to(step)
    return lifecycle


@pytest.mark.parametrize("start", Phase)
@pytest.mark.parametrize("goal", Phase)
def test_only_the_moves_of_the_table_are_possible(start: Phase, goal: Phase) -> None:
    lifecycle = in_phase(start)
    if goal in MOVES[start]:
        lifecycle.to(goal, "because")
        assert (lifecycle.phase, lifecycle.reason) == (goal, "because")
    else:
        with pytest.raises(IllegalPhase):
            lifecycle.to(goal)
        assert lifecycle.phase is start


@pytest.mark.parametrize(
    ("phase", "started", "ready", "live"),
    [
        (Phase.STARTING, False, False, True),
        (Phase.READY, True, True, True),
        (Phase.DRAINING, True, False, True),
        (Phase.STOPPED, True, False, True),
        (Phase.FAILED, True, False, False),
    ],
)
def test_probes_answer_from_the_phase(phase: Phase, started: bool, ready: bool, live: bool) -> None:
    lifecycle = in_phase(phase)
    assert (lifecycle.is_started, lifecycle.is_ready, lifecycle.is_live) == (started, ready, live)


async def test_stop_signals_reach_the_loop() -> None:
    names: asyncio.Queue[str] = asyncio.Queue()
    on_stop_signals(names.put_nowait)
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert await asyncio.wait_for(names.get(), 30) == number.name
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


CHILD = """
import os, signal, sys
from shared.process.lifecycle import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's own")
def test_a_child_does_not_outlive_its_parent() -> None:
    # both share one stdout pipe: it reads as ended only when the child is gone too
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("stdout=subprocess.PIPE", "stdout=subprocess.PIPE, stderr=1")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    parent.kill()
    try:
        parent.communicate(timeout=30)
    finally:
        parent.wait(30)


def test_a_child_whose_parent_is_gone_exits() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD, "0"], capture_output=True, timeout=60, check=False)
    assert child.returncode == 1
    assert b"parent process is gone" in child.stderr
