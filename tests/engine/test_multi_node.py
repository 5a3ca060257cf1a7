"""One model on two processes that somebody else starts, as torchrun and a LeaderWorkerSet do, over gloo."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.contract.messages import SamplingParams
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.runtime.parallel import nodes
from tests.engine.runtime.conftest import load
from tests.engine.runtime.test_with_scheduler import all_said, serve
from tests.engine.test_engine_process import CHAT, LONG, is_running
from tests.services import MODEL_DIR, Service, client, service, until

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 70))
MAX_TOKENS = 16
PROSE = {
    "model": "model",
    "prompt": PROMPT,
    "temperature": 0.0,
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
}
OPTIONS = ("--dtype", "float32", "--kernels", "torch")


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else is given. It is bound, and not listened on: rank 0 may still do so."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def group(directory: Path, port: int, **more: str) -> Iterator[list[Service]]:
    """Two ranks, by the same command line."""
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TMPDIR": str(directory),
                **more,
            }
            argv = ["engine", "serve", "--model", str(MODEL_DIR), "--port", "0", "--threads", "1"]
            argv += ["--tensor-parallel-size", "2", *OPTIONS]
            ranks.append(stack.enter_context(service(argv, **environment)))
        yield ranks


def of_one_process() -> str:
    """The answer to PROSE, computed here."""
    runner = load(MODEL_DIR, kernels="torch")
    scheduler = Scheduler(SchedulerConfig(step_tokens_max=64, queue_len_max=4), runner.info)
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=MAX_TOKENS)
    tokens, _ = all_said(serve(scheduler, runner, [AddSequence(1, "alone", PROMPT, sampling)]))
    *chosen, _end = tokens[1]
    assert len(chosen) == MAX_TOKENS
    return str(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).decode(chosen))


def test_two_nodes_give_the_tokens_of_one_process_and_drain_together(short_tmp: Path, port: int) -> None:
    with group(short_tmp, port) as (leader, other), client(leader) as http:
        assert leader.line("rank.joined")["rank"] == other.line("rank.joined")["rank"] == 1
        assert not leader.logged("rank.started")
        assert not other.logged("engine.listening")
        answer = http.post("/v1/completions", json=PROSE)
        assert answer.json()["choices"][0]["text"] == of_one_process()
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 100}) as response:
            lines = response.iter_lines()
            assert sum("content" in next(lines) for _ in range(12)) > 1
            for rank in (other, leader):  # as when a group is deleted
                rank.signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert leader.wait() == 0
        assert other.wait() == 0
        assert other.logged("rank.ended")
    assert list(short_tmp.iterdir()) == []


@pytest.mark.nightly
def test_the_other_ranks_end_with_a_killed_leader(short_tmp: Path) -> None:
    """The runner serves the store, as torchrun's agent does."""
    store = nodes.serve_store("127.0.0.1", 0)
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    with group(short_tmp, store.port, **more) as (leader, other), client(leader) as http:
        assert http.post("/v1/chat/completions", json=CHAT).text.count("data: [DONE]") == 1
        leader.signal(signal.SIGKILL)
        leader.wait()
        assert other.wait() == 3
        assert "rank 0" in other.line("rank.leader_gone")["reason"]
        until(lambda: not is_running(leader.line("core.started")["pid"]))


def test_a_wrong_place_is_refused_by_the_variables_name() -> None:
    argv = ["engine", "serve", "--model", str(MODEL_DIR), "--tensor-parallel-size", "2"]
    with service(argv, RANK="2", WORLD_SIZE="2", MASTER_PORT="1", MASTER_ADDR="") as rank:
        assert rank.wait() == 2
        assert rank.text.splitlines() == [
            "penstock engine: RANK: must be below WORLD_SIZE, which is 2, got 2",
            "penstock engine: MASTER_ADDR: must be set, to the host of rank 0",
        ]
