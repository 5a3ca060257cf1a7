"""The engine as its operator has it: two processes, a model with weights, real signals.

Waits are for conditions and bounded; nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "engine" / "demo" / "model"
PATIENCE_S = 60.0
CHAT = {"model": "model", "messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
LONG = {**CHAT, "ignore_eos": True, "max_tokens": 1900}


class EngineProcess:
    def __init__(self, model: str, directory: Path, options: Sequence[str]) -> None:
        argv = [sys.executable, "-m", "engine", "serve", "--model", model, "--port", "0", "--threads", "1"]
        self._process = subprocess.Popen(
            [*argv, *options],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(directory)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                if line.startswith("{"):
                    self._queue.put(json.loads(line))

    def line(self, event: str) -> dict[str, Any]:
        """The first line with this event, of those that came and those to come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            for line in self.lines:
                if line["event"] == event:
                    return line
            self.lines.append(self._queue.get(timeout=max(0.0, deadline_s - time.monotonic())))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(PATIENCE_S)


@contextmanager
def engine(directory: Path, model: str = str(MODEL), options: Sequence[str] = ()) -> Iterator[EngineProcess]:
    process = EngineProcess(model, directory, options)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def client(process: EngineProcess) -> Iterator[httpx.Client]:
    port = process.line("engine.ready")["port"]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
        yield http


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gauges(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        sample.name.removeprefix("penstock_engine_") + "".join(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("penstock_engine_") and "bucket" not in sample.name
    }


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The name of a Unix socket may have 107 bytes."""
    return tmp_path_factory.mktemp("e")


def test_it_serves_frees_and_tells_when_its_core_is_killed(short_tmp: Path) -> None:
    with engine(short_tmp) as process, client(process) as http:
        # an answer
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.text.count("data: [DONE]") == 1
        assert len(answer.text) > 200

        # a client that leaves in the middle: nothing is kept for it
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "n": 3}) as response:
            lines = response.iter_lines()
            assert sum("content" in next(lines) for _ in range(40)) > 1
            assert gauges(http)["running_sequences"] == 3
        until(lambda: gauges(http)["running_sequences"] == 0)
        assert gauges(http)["kv_pagesowned"] == 0
        assert gauges(http)["open_sequences"] == 0
        assert gauges(http)["requests_totalclient_gone"] == 1

        # the core is killed in the middle: the client is told, and so is the orchestrator
        with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(process.line("core.started")["pid"], signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"code":"engine_failed"' in rest
        assert "[DONE]" not in rest
        assert http.get("/livez").status_code == 500
        assert http.get("/readyz").status_code == 503
        late = http.post("/v1/chat/completions", json=CHAT)
        assert late.json()["error"]["code"] == "engine_failed"
        assert "SIGKILL" in process.line("core.failed")["reason"]
        process.signal(signal.SIGTERM)
        assert process.wait() == 1
    assert list(short_tmp.iterdir()) == []


def test_sigterm_lets_a_stream_finish(short_tmp: Path) -> None:
    with engine(short_tmp) as process, client(process) as http:
        body = {**CHAT, "ignore_eos": True, "max_tokens": 60}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.signal(signal.SIGTERM)
            assert process.line("engine.draining")["open_sequences"] == 1
            assert "data: [DONE]" in list(lines)
        assert process.wait() == 0
        assert not is_running(process.line("core.started")["pid"])
    assert list(short_tmp.iterdir()) == []


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
        assert "[DONE]" not in rest
        assert '"code":"not_ready"' in rest
        assert process.wait() == 0
    assert list(short_tmp.iterdir()) == []


def test_the_core_does_not_outlive_the_api_process(short_tmp: Path) -> None:
    with engine(short_tmp) as process:
        core_pid = process.line("core.started")["pid"]
        process.line("engine.ready")
        process.signal(signal.SIGKILL)
        process.wait()
        until(lambda: not is_running(core_pid))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "neither a directory nor a hub id"),
        ({}, "tokenizer.json"),
        ({"config.json": '{"architectures": ["NoSuchForCausalLM"]}'}, "NoSuchForCausalLM"),
    ],
    ids=["no directory", "empty directory", "unknown architecture"],
)
def test_what_cannot_be_served_is_said(
    short_tmp: Path, tmp_path: Path, files: dict[str, str] | None, reason: str
) -> None:
    model = tmp_path / "model"
    if files is not None:
        model.mkdir()
        if files:
            (model / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
        for name, text in files.items():
            (model / name).write_text(text)
    with engine(short_tmp, str(model)) as process:
        assert reason in process.line("engine.start_failed")["reason"]
        assert process.wait() == 1
    assert list(short_tmp.iterdir()) == []
