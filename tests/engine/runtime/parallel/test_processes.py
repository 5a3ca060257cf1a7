"""The engine as its operator has it, on two ranks: it serves, and whatever happens to a rank, it says so."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.process.exit_codes import ExitCode
from tests.engine.test_engine_process import CHAT, LONG, is_running
from tests.services import ROOT, Service, client, engine, until

pytestmark = pytest.mark.slow

RANKS = ("--tensor-parallel-size", "2")


@contextmanager
def in_the_middle(http: httpx.Client) -> Iterator[Iterator[str]]:
    """Of a long answer: the lines that are still to come."""
    with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
        lines = response.iter_lines()
        assert sum("content" in next(lines) for _ in range(12)) > 1
        yield lines


def rank_pid(process: Service) -> int:
    pid: int = process.line("rank.started")["pid"]
    return pid


def assert_failed(process: Service, http: httpx.Client, reason: str) -> None:
    """Not ready, for a reason that the log names as well, and nobody is left."""
    assert reason in process.line("core.failed")["reason"]
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert reason in answer.json()["problems"][0]
    until(lambda: not is_running(rank_pid(process)))
    until(lambda: not is_running(process.line("core.started")["pid"]))
    process.signal(signal.SIGTERM)
    assert process.wait() == ExitCode.CORE_DIED


def test_it_serves_and_tells_when_a_rank_is_killed(short_tmp: Path) -> None:
    with engine(short_tmp, *RANKS) as process, client(process) as http:
        progress = [line["stage"] for line in process.logged("core.progress")]
        [kernels] = [stage for stage in progress if stage.startswith("computing with")]
        assert re.fullmatch(r"computing with native kernels \(\w+, 2 shards, 1 threads\)", kernels)
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.text.count("data: [DONE]") == 1
        assert len(answer.text) > 200
        with in_the_middle(http) as lines:
            os.kill(rank_pid(process), signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"code":"engine_failed"' in rest
        assert "data: [DONE]" not in rest.splitlines()
        assert_failed(process, http, "rank 1 was ended by SIGKILL")
    assert list(short_tmp.iterdir()) == []


@pytest.mark.nightly
def test_a_rank_that_stops_answering(short_tmp: Path) -> None:
    """It is alive, and would hold up the others for ever."""
    with engine(short_tmp, *RANKS, "--rank-timeout-s", "2") as process, client(process) as http:
        with in_the_middle(http) as lines:
            os.kill(rank_pid(process), signal.SIGSTOP)
            assert '"code":"engine_failed"' in "\n".join(lines)
        assert_failed(process, http, "no answer from rank 1 for 2 s")
    assert list(short_tmp.iterdir()) == []


SICK_RANK = """
import sys
if "engine.runtime.parallel.rank" in sys.orig_argv:
    from engine.runtime.setup.model_errors import DoesNotFit
    from engine.runtime.weights.checkpoint import Checkpoint
    def stack(*args, **kwargs):
        raise DoesNotFit("there is no room for the shard")
    Checkpoint.stack = stack
"""


@pytest.mark.nightly
def test_a_rank_that_cannot_load(short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SICK_RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with engine(short_tmp, *RANKS) as process:
        reason = process.line("engine.start_failed")["reason"]
        assert "rank 1: there is no room for the shard" in reason
        assert process.wait() == ExitCode.FAILED
        until(lambda: not is_running(rank_pid(process)))
    assert list(short_tmp.iterdir()) == []


@pytest.mark.nightly
def test_ranks_end_with_the_engine(short_tmp: Path) -> None:
    with engine(short_tmp, *RANKS) as process:
        process.line("engine.ready")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        until(lambda: not is_running(rank_pid(process)))
    assert list(short_tmp.iterdir()) == []


@pytest.mark.nightly
def test_a_stopped_rank_does_not_outlive_a_killed_engine(short_tmp: Path) -> None:
    with engine(short_tmp, *RANKS) as process:
        process.line("engine.ready")
        os.kill(rank_pid(process), signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        process.wait()
        until(lambda: not is_running(process.line("core.started")["pid"]))
        until(lambda: not is_running(rank_pid(process)))


STUCK_CORE = """
import os, sys, threading
if sys.orig_argv[-2:] == ["engine", "core"]:
    from engine.runtime.collective.group import Group
    add_up = Group.all_reduce_
    def all_reduce_(self, x):
        if os.path.exists(os.environ["STUCK_IF"]):
            threading.Event().wait()
        return add_up(self, x)
    Group.all_reduce_ = all_reduce_
"""


@pytest.mark.nightly
def test_a_collective_that_never_ends(
    short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: whatever becomes of the other ranks, the core's main thread waits on."""
    (tmp_path / "sitecustomize.py").write_text(STUCK_CORE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("STUCK_IF", str(tmp_path / "stuck"))
    with engine(short_tmp, *RANKS, "--rank-timeout-s", "2") as process, client(process) as http:
        with in_the_middle(http) as lines:
            (tmp_path / "stuck").touch()
            assert '"code":"engine_failed"' in "\n".join(lines)
        assert_failed(process, http, "no answer from rank 1 for 2 s")
    assert list(short_tmp.iterdir()) == []
