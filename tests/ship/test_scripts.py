"""The scripts that the chart brings into pods: the streamed request of `helm test`, and how the pods of a
group end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from helm.make.values_schema import CHART
from tests.ship.rendering import of_kind, render
from tests.waiting import PATIENCE_S

STREAM, GROUP = CHART / "scripts/stream.py", CHART / "scripts/group.py"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


WHOLE = event("Hel") + event("lo") + b": closing {}\n\ndata: [DONE]\n\n"


@contextmanager
def gateway(status: int, body: bytes) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives one answer, its URL, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            asked.append(
                {
                    "path": self.path,
                    "key": self.headers["authorization"],
                    **json.loads(self.rfile.read(length)),
                }
            )
            self.send_response(status)
            self.send_header("x-request-id", "r1")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stream(url: str, key_file: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"BASE_URL": url, "MODEL": "demo", "TIMEOUT_S": "60", "KEY_FILE": key_file, **variables}
    command = [sys.executable, "-I", str(STREAM)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key").write_text("sk_x\n")
    return str(tmp_path / "key")


def test_a_whole_stream_is_a_success(key_file: str) -> None:
    with gateway(200, WHOLE) as (url, asked):
        done = stream(url, key_file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "3 events, x-request-id r1: 'Hello'\n"
    [request] = asked
    assert (request["path"], request["key"]) == ("/v1/chat/completions", "Bearer sk_x")
    assert (request["model"], request["stream"]) == ("demo", True)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": {}}', "status 401, x-request-id r1"),
        (200, event("Hel") + event("lo"), "the stream was not whole, x-request-id r1"),
        (200, event("") + event("") + b"data: [DONE]\n\n", "the answer was empty, x-request-id r1"),
    ],
)
def test_anything_else_is_a_failure_that_names_the_request(
    status: int, body: bytes, says: str, key_file: str
) -> None:
    with gateway(status, body) as (url, _):
        done = stream(url, key_file)
    assert done.returncode == 1
    assert says in done.stderr


def test_without_a_key_nothing_is_asked() -> None:
    done = stream("http://127.0.0.1:1", "/no/such/file")
    assert done.returncode == 1
    assert "helmTest.keySecret names no Secret" in done.stderr


@pytest.mark.network
def test_the_pod_runs_the_script_with_what_it_needs() -> None:
    [job] = of_kind(render("one-gpu"), "Job")
    spec = job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["BASE_URL"] == "http://r-penstock-gateway:80"
    assert variables["MODEL"] == "qwen3-8b"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(variables["KEY_FILE"]).parent) in mounts
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [script] = [m for m in of_kind(render("one-gpu"), "ConfigMap") if "stream.py" in m["data"]]
    assert script["data"]["stream.py"].strip() == STREAM.read_text().strip()


# -- groups ---------------------------------------------------------------------------------------


def test_a_worker_outlives_its_leader() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    environment = {**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-I", str(GROUP), "worker", str(listener.getsockname()[1])]
    with subprocess.Popen(command, env=environment) as worker:
        listener.settimeout(PATIENCE_S)
        for _ in range(2):
            listener.accept()[0].close()
        assert worker.poll() is None, "it waits while the leader lives"
        listener.close()
        assert worker.wait(PATIENCE_S) == 0


def test_a_worker_whose_leader_has_no_name_any_more_ends_at_once() -> None:
    environment = {**os.environ, "LWS_LEADER_ADDRESS": "no.such.host.invalid"}
    command = [sys.executable, "-I", str(GROUP), "worker", "8002"]
    assert subprocess.run(command, env=environment, timeout=PATIENCE_S).returncode == 0


def test_the_leader_ends_rank_0_and_waits_for_it(tmp_path: Path) -> None:
    """Only rank 0 is told, and the hook ends after it."""
    drains = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print(flush=True); signal.pause()"
    )
    group = {**os.environ, "LWS_LEADER_ADDRESS": str(tmp_path)}  # no other test's
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", drains, "-m", "engine", "serve"],
            env={**group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        with subprocess.Popen([sys.executable, "-I", str(GROUP), "leader", "0"], env=group) as hook:
            assert ranks[0].wait(PATIENCE_S) == 0  # it is gone for good once it was waited for
            assert hook.wait(PATIENCE_S) == 0
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_leader_without_rank_0_has_nothing_to_wait_for(tmp_path: Path) -> None:
    environment = {**os.environ, "LWS_LEADER_ADDRESS": str(tmp_path)}
    command = [sys.executable, "-I", str(GROUP), "leader", "0"]
    assert subprocess.run(command, env=environment, timeout=PATIENCE_S).returncode == 0


@pytest.mark.network
@pytest.mark.parametrize(("gpus", "leads"), [(1, ["penstock", "engine"]), (8, ["torchrun"])])
def test_a_group_is_started_and_ended_by_what_its_ranks_need(gpus: int, leads: list[str]) -> None:
    found = render("multi-node", "1.35", "--set", f"models[0].gpus={gpus}")
    [group] = of_kind(found, "LeaderWorkerSet")
    leader, worker = (
        group["spec"]["leaderWorkerTemplate"][which]["spec"]["containers"][0]
        for which in ("leaderTemplate", "workerTemplate")
    )
    assert leader["command"] == worker["command"] == leads
    assert worker["lifecycle"]["preStop"]["exec"]["command"][1:] == [
        "/etc/penstock/group.py",
        "worker",
        "8002",
    ]
    variables = {variable["name"] for variable in worker["env"]}
    if gpus == 1:
        assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= variables
        assert "sleep" in leader["lifecycle"]["preStop"]
    else:
        assert "RANK" not in variables, "torchrun says it"
        assert "--nproc-per-node=8" in leader["args"]
        assert leader["lifecycle"]["preStop"]["exec"]["command"][1:] == [
            "/etc/penstock/group.py",
            "leader",
            "10",
        ]
