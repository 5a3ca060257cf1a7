"""The engine as its operator has it: two processes, a model with weights, real signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.__main__ import NICENESS
from engine.api.core.process import SOCKETS_PREFIX
from engine.runtime.setup.hardware import usable_cores
from shared.process.exit_codes import ExitCode
from shared.process.socket_directory import remove_abandoned
from tests.effort import some
from tests.services import MODEL_DIR, Service, client, engine, gauges, until

pytestmark = pytest.mark.slow

CHAT = {"model": "model", "messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
LONG = {**CHAT, "ignore_eos": True, "max_tokens": 1900}


def is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("loop", some(["--overlap", "--no-overlap"], usual=1))
def test_it_serves_frees_and_tells_when_its_core_is_killed(short_tmp: Path, loop: str) -> None:
    with engine(short_tmp, loop, "--gap-target-ms", "inf") as process, client(process) as http:
        assert process.line("core.ready")["overlap"] is (loop == "--overlap")
        assert_carriers_come_first(process, threads=1)

        # an answer
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.text.count("data: [DONE]") == 1
        assert len(answer.text) > 200

        # a client that leaves in the middle: nothing is kept for it
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "n": 3}) as response:
            lines = response.iter_lines()
            assert sum("content" in next(lines) for _ in range(40)) > 1
            assert gauges(http.base_url)["running_sequences"] == 3
        until(lambda: gauges(http.base_url)["running_sequences"] == 0)
        assert gauges(http.base_url)["kv_pages:owned"] == 0
        assert gauges(http.base_url)["open_sequences"] == 0
        assert gauges(http.base_url)["requests:client_cancel"] == 1

        # the core is killed in the middle: the client is told, and so is the orchestrator
        with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(process.line("core.started")["pid"], signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"code":"engine_failed"' in rest
        assert "data: [DONE]" not in rest.splitlines()
        assert http.get("/livez").status_code == 500
        assert http.get("/readyz").status_code == 503
        late = http.post("/v1/chat/completions", json=CHAT)
        assert late.json()["error"]["code"] == "not_ready"
        assert "SIGKILL" in process.line("core.failed")["reason"]
        process.signal(signal.SIGTERM)
        assert process.wait() == ExitCode.CORE_DIED
    assert list(short_tmp.iterdir()) == []


THREADS = 2


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For what ends no process."""
    options = ("--max-num-seqs", "2", "--max-queue-len", "8", "--gap-target-ms", "inf")
    with engine(tmp_path_factory.mktemp("s"), *options, "--threads", str(THREADS)) as process:
        yield process


def test_a_large_request_that_is_accepted_cuts_off_no_answer_of_another_tenant(running: Service) -> None:
    body = {"model": "model", "prompt": ["7 "] * 4, "n": 64, "max_tokens": 2, "ignore_eos": True}
    with client(running) as http:
        victims = http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers={"x-penstock-tenant": "victim"}
        )
        with victims as answer:
            lines = answer.iter_lines()
            next(lines)
            other = http.post("/v1/completions", json=body, headers={"x-penstock-tenant": "attacker"})
            rest = "\n".join(lines)
        assert rest.count('"finish_reason":"length"') == 256
        assert rest.count("data: [DONE]") == 1
        assert other.status_code == 200
        assert len(other.json()["choices"]) == 256


def sigterm(process: Service) -> None:
    process.signal(signal.SIGTERM)


def sigterm_to_both(process: Service) -> None:
    """As systemd stops a service."""
    os.kill(process.line("core.started")["pid"], signal.SIGTERM)
    process.signal(signal.SIGTERM)


def ctrl_c(process: Service) -> None:
    """As a terminal tells its foreground group."""
    os.killpg(process.process.pid, signal.SIGINT)


@pytest.mark.parametrize("stop", some([sigterm_to_both, ctrl_c, sigterm], usual=1))
def test_a_stop_signal_lets_a_stream_finish(short_tmp: Path, stop: Callable[[Service], None]) -> None:
    with engine(short_tmp) as process, client(process) as http:
        body = {**CHAT, "ignore_eos": True, "max_tokens": 60}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stop(process)
            assert process.line("engine.draining")["open_sequences"] == 1
            assert "data: [DONE]" in list(lines)
        assert process.wait() == 0
        assert not is_running(process.line("core.started")["pid"])
    assert list(short_tmp.iterdir()) == []


def assert_carriers_come_first(process: Service, threads: int) -> None:
    """Threads that compute on all cores give way to those that carry."""
    nicer_by = NICENESS if threads >= usable_cores() else 0
    core_pid = process.line("core.started")["pid"]
    assert os.getpgid(core_pid) == core_pid != os.getpgid(process.process.pid)
    assert os.getsid(core_pid) == os.getsid(process.process.pid)  # else no priority counts between them
    niceness = {
        int(task.name): os.getpriority(os.PRIO_PROCESS, int(task.name))
        for task in Path(f"/proc/{core_pid}/task").iterdir()
    }
    carriers = {
        thread for thread in niceness if "ZMQ" in Path(f"/proc/{core_pid}/task/{thread}/comm").read_text()
    }
    own = os.getpriority(os.PRIO_PROCESS, process.process.pid)
    assert carriers
    assert {niceness[thread] for thread in carriers} == {own}
    assert niceness[core_pid] == min(own + nicer_by, 19)
    assert sum(value == min(own + nicer_by, 19) for value in niceness.values()) >= threads


def test_threads_that_compute_on_all_cores_give_way_to_those_that_carry(running: Service) -> None:
    running.line("engine.ready")
    assert_carriers_come_first(running, THREADS)


def test_a_core_that_logs_from_the_background_is_not_stopped(running: Service) -> None:
    running.line("engine.ready")
    status = Path(f"/proc/{running.line('core.started')['pid']}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert ignored & 1 << (signal.SIGTTOU - 1)


def test_sigterm_while_it_starts(short_tmp: Path) -> None:
    with engine(short_tmp) as process:
        core_pid = process.line("core.started")["pid"]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not is_running(core_pid)
    assert list(short_tmp.iterdir()) == []


def test_a_second_signal_ends_the_drain(short_tmp: Path) -> None:
    with engine(short_tmp) as process, client(process) as http:
        with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            process.signal(signal.SIGINT)
            process.line("engine.draining")
            process.signal(signal.SIGINT)
            rest = "\n".join(lines)
        assert "data: [DONE]" not in rest.splitlines()
        assert '"code":"not_ready"' in rest
        assert process.wait() == ExitCode.DRAIN_CUT
    assert list(short_tmp.iterdir()) == []


@pytest.mark.nightly
def test_the_core_does_not_outlive_the_api_process(short_tmp: Path) -> None:
    with engine(short_tmp) as process:
        core_pid = process.line("core.started")["pid"]
        process.line("engine.ready")
        process.signal(signal.SIGKILL)
        process.wait()
        until(lambda: not is_running(core_pid))
    assert len(list(short_tmp.iterdir())) == 1
    remove_abandoned(short_tmp, SOCKETS_PREFIX)
    assert list(short_tmp.iterdir()) == []


UNSERVED: dict[str, tuple[dict[str, str] | None, str]] = {
    "no directory": (None, "neither a directory nor a hub id"),
    "unknown architecture": (
        {"config.json": '{"architectures": ["NoSuchForCausalLM"]}'},
        "NoSuchForCausalLM",
    ),
    "empty directory": ({}, "has no config.json"),
}


@pytest.mark.parametrize("name", some(list(UNSERVED), usual=2))
def test_what_cannot_be_served_is_said_and_a_variable_that_nothing_reads_is_named(
    short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files, reason = UNSERVED[name]
    model = tmp_path / "model"
    if files is not None:
        model.mkdir()
        if files:
            (model / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
        for file, text in files.items():
            (model / file).write_text(text)
    monkeypatch.setenv("PENSTOCK_ENGNE_PORT", "9000")
    monkeypatch.setenv("PENSTOCK_GATEWAY_LOG_LEVEL", "debug")
    with engine(short_tmp, model=str(model)) as process:
        assert process.line("environment.unread")["names"] == ["PENSTOCK_ENGNE_PORT"]
        assert reason in process.line("engine.start_failed")["reason"]
        assert process.wait() == 1
    assert list(short_tmp.iterdir()) == []
