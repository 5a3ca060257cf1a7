"""A start that fails says what to change; what becomes of the process when its core dies is an option."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from engine.api.http.server import StartFailed, serve
from engine.config import EngineConfig
from shared.process.exit_codes import ExitCode
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve
from tests.engine.api.fake_core import FakeCore
from tests.services import ROOT


async def problem(serve: Serve, **settings: Any) -> str:
    with pytest.raises(StartFailed) as caught:
        async with serve(**settings):
            pass
    return str(caught.value)


async def test_a_port_that_is_taken_is_named_with_its_option(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = await problem(serve, port=port)
    assert told == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --port"


async def test_somebody_is_told_why_it_does_not_start(tmp_path: Path) -> None:
    def resolve(_: str) -> Path:
        raise StartFailed("there is no such model")

    told: list[str] = []
    config = EngineConfig(model=str(tmp_path), port=0)
    assert await serve(config, resolve, lambda *_: FakeCore(lambda _: []), told.append) is ExitCode.FAILED
    assert told == ["there is no such model"]


def test_a_terminals_last_line_is_a_sentence(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "engine", "serve", "--model", str(tmp_path / "none"), "--port", "0"]
    try:
        done = subprocess.run(command, stdout=theirs, stderr=theirs, cwd=ROOT)
        *_, last = os.read(terminal, 65_536).decode().splitlines()
    finally:
        os.close(terminal)
        os.close(theirs)
    assert done.returncode == ExitCode.FAILED
    assert last.startswith("penstock engine: ")
    assert str(tmp_path / "none") in last


@pytest.mark.parametrize(
    ("host", "address"), [("192.0.2.1", "192.0.2.1:0"), ("2001:db8::1", "[2001:db8::1]:0")]
)
async def test_an_address_of_another_machine_is_named_with_its_option(
    serve: Serve, host: str, address: str
) -> None:
    told = await problem(serve, host=host)
    assert told.startswith(f"cannot listen on {address}: ")
    assert told.endswith("; choose another with --host")


async def test_a_host_that_has_no_address_is_named_with_its_option(serve: Serve) -> None:
    told = await problem(serve, host="no.such.host.invalid")
    assert told.startswith("cannot listen on no.such.host.invalid:0: ")
    assert told.endswith("; choose another with --host")


async def test_a_probe_port_that_is_taken_is_named_with_its_option(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = await problem(serve, probe_port=port)
    taken_already = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert told == f"{taken_already}; choose another with --probe-port"


async def test_the_probe_port_answers_probes_and_metrics_alone(serve: Serve) -> None:
    async with serve(probe_port=0) as served, httpx.AsyncClient(verify=False, timeout=PATIENCE_S) as http:
        url = f"http://127.0.0.1:{served.engine.probe_port}"
        for path in ("/livez", "/readyz", "/startupz"):
            assert (await http.get(url + path)).json() == {"phase": "ready", "ok": True}
        assert "penstock_engine_ready 1.0" in (await http.get(url + "/metrics")).text
        assert (await http.get(url + "/v1/models")).status_code == 404
        refused = await http.post(url + "/v1/chat/completions", json={"model": MODEL, "messages": []})
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert refused.status_code == 404
        await served.engine.drain()
        assert (await http.get(url + "/readyz")).status_code == 503
        assert (await http.get(url + "/livez")).status_code == 200


async def test_a_core_that_does_not_get_ready_names_the_time_it_had(serve: Serve) -> None:
    told = await problem(serve, core={"is_silent": True}, startup_timeout_s=0.01)
    assert told == "the core was not ready after 0.01 s (--startup-timeout-s)"


# -- after a failure ------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as logged:
        yield logged


class Process:
    """`engine.api.http.server.serve` in this process: its core, its exit status, and what it logs."""

    def __init__(self, config: EngineConfig, model_dir: Path, logged: list[MutableMapping[str, Any]]) -> None:
        self.core = FakeCore(lambda _: [5])  # one token, and then it waits for ever
        self.logged = logged
        self.exit = asyncio.create_task(serve(config, lambda _: model_dir, lambda *_: self.core))

    async def line(self, event: str) -> MutableMapping[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for line in self.logged:
                    if line["event"] == event:
                        return line
                await asyncio.sleep(0)

    async def url(self) -> str:
        return f"http://127.0.0.1:{(await self.line('engine.ready'))['port']}"


async def test_with_exit_on_failure_it_tells_the_open_requests_and_exits_with_a_status_that_says_so(
    config: EngineConfig, model_dir: Path, events: list[MutableMapping[str, Any]]
) -> None:
    process = Process(replace(config, exit_on_failure=True), model_dir, events)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 9}
    async with httpx.AsyncClient(base_url=await process.url(), timeout=PATIENCE_S, verify=False) as http:
        whole = asyncio.create_task(http.post("/v1/completions", json=body))
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
            lines = streamed.aiter_lines()
            assert "choices" in await anext(lines)
            while len(process.core.running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            process.core.die()
            rest = "\n".join([line async for line in lines])
        assert '"code":"engine_failed"' in rest
        assert (await whole).json()["error"]["code"] == "engine_failed"
        async with asyncio.timeout(PATIENCE_S):
            assert await process.exit == ExitCode.CORE_DIED
        with pytest.raises(httpx.ConnectError):
            await http.get("/livez")
    assert process.core.is_closed


async def test_without_it_the_process_stays_to_say_that_it_failed(
    config: EngineConfig, model_dir: Path, events: list[MutableMapping[str, Any]]
) -> None:
    process = Process(config, model_dir, events)
    async with httpx.AsyncClient(base_url=await process.url(), timeout=PATIENCE_S, verify=False) as http:
        process.core.die()
        await process.line("core.failed")
        assert (await http.get("/livez")).status_code == 500
        assert not process.exit.done()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.exit == ExitCode.CORE_DIED
