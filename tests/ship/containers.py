"""What the images do when they run: `tests/ship/run.sh` builds them and starts this.

Everything is asked from outside, by podman and HTTP. Each line that is printed is something that was seen.
The first thing that is not as it should be ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from gateway.identity.keys import hash_key

ROOT: Final = Path(__file__).parent.parent.parent
ENGINE: Final = "localhost/penstock-engine:dev"
GATEWAY: Final = "localhost/penstock-gateway:dev"
NETWORK: Final = "penstock-ship"
KEY: Final = "sk-ship-only-for-this-run"
PATIENCE_S: Final = 600.0
STREAMS: Final = 50
NO_PROXY: Final = {name: text for name, text in os.environ.items() if "proxy" not in name.lower()}
CONFINED: Final = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", "512"),
    *("--tmpfs", "/tmp:size=64m,mode=1777", "--no-healthcheck"),
)
CONFIG: Final = f"""
[listen]
host = "0.0.0.0"
port = 8000
plaintext = true
[admin]
host = "0.0.0.0"
port = 9090
plaintext = true
[timeouts]
drain_s = 60
[[models]]
name = "demo"
replicas = ["http://ship-engine:8001"]
[[tenants]]
id = "acme"
[[keys]]
id = "k1"
hash = "{hash_key(KEY)}"
tenant = "acme"
"""


def said(text: str) -> None:
    sys.stdout.write(f"  {text}\n")
    sys.stdout.flush()


def podman(*words: str, check: bool = True, timeout_s: float = PATIENCE_S) -> str:
    """podman's answer."""
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def until(condition: Callable[[], bool], what: str) -> float:
    """Wait for it. Returns the seconds that it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < PATIENCE_S, f"never: {what}"
        time.sleep(0.1)
    return time.monotonic() - began_s


@dataclass(frozen=True, slots=True)
class Container:
    """One that runs."""

    name: str

    def exec(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["podman", "exec", self.name, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    def state(self, field: str) -> str:
        return podman("inspect", "--format", f"{{{{.State.{field}}}}}", self.name)

    @property
    def address(self) -> str:
        """Its address on the network of this run."""
        return podman(
            "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", self.name
        )

    def is_ready(self) -> bool:
        return self.exec("python", "-m", "shared.process.probe").returncode == 0

    def lines(self) -> list[dict[str, object]]:
        """Its log."""
        done = subprocess.run(
            ["podman", "logs", self.name], capture_output=True, text=True, timeout=PATIENCE_S
        )
        return [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line[:1] == "{"]


@contextmanager
def container(name: str, image: str, options: Sequence[str], *arguments: str) -> Iterator[Container]:
    podman("rm", "-f", "-i", name, check=False)
    podman("run", "-d", "--name", name, "--network", NETWORK, *CONFINED, *options, image, *arguments)
    try:
        yield Container(name)
    except BaseException:
        done = subprocess.run(["podman", "logs", "--tail", "5", name], capture_output=True, text=True)
        said(f"{name}: {done.stdout}{done.stderr}")
        raise
    finally:
        podman("rm", "-f", "-t", "1", name, check=False)


@contextmanager
def pair(directory: Path) -> Iterator[tuple[Container, Container]]:
    """An engine and a gateway before it, both ready."""
    (directory / "gateway.toml").write_text(CONFIG)
    directory.chmod(0o755)
    mounted = ("-v", f"{directory / 'gateway.toml'}:/etc/penstock/gateway.toml:ro")
    limits = ("--memory", "3g", "--cpus", "2", "--tmpfs", "/var/cache/penstock:size=64m,mode=1777")
    with container("ship-engine", ENGINE, limits) as engine:
        said(f"engine: ready {until(engine.is_ready, 'the engine ready'):.1f} s after its start")
        with container("ship-gateway", GATEWAY, (*mounted, "--memory", "1g", "--cpus", "1")) as gateway:
            said(f"gateway: ready {until(gateway.is_ready, 'the gateway ready'):.1f} s after its start")
            until(
                lambda: any(line["event"] == "tokenizer.loaded" for line in gateway.lines()), "its tokenizer"
            )
            yield engine, gateway


BODY: Final = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
HEADERS: Final = {"authorization": f"Bearer {KEY}"}


def confined(one: Container) -> None:
    """It is nobody, and can write nothing but where it may."""
    assert one.exec("id", "-u").stdout.strip() == "10001"
    for path in ("/x", "/opt/penstock/x", "/etc/x"):
        assert one.exec("touch", path).returncode != 0, path
    assert one.exec("touch", "/tmp/x").returncode == 0
    assert (
        one.exec("python", "-c", "import ctypes,sys; sys.exit(ctypes.CDLL(None).setuid(0) == 0)").returncode
        == 0
    )
    bom = json.loads(one.exec("cat", "/opt/penstock/sbom.cdx.json").stdout)
    packages = len(bom["components"])
    said(f"{one.name}: user 10001, read-only root, no way to root, {packages} packages in its SBOM")


def one_request(engine: Container, gateway: Container) -> None:
    """A stream through both, and its lines by its id."""
    url = f"http://{gateway.address}:8000/v1/chat/completions"
    with httpx.stream("POST", url, json=BODY, headers=HEADERS, timeout=PATIENCE_S, trust_env=False) as answer:
        assert answer.status_code == 200
        text = "".join(answer.iter_text())
        request_id = answer.headers["x-request-id"]
    assert text.count("data: [DONE]") == 1
    for one in (engine, gateway):
        until(lambda one=one: len(completed(one, request_id)) == 1, f"the line of {one.name}")  # type: ignore[misc]
    [front], [back] = completed(gateway, request_id), completed(engine, request_id)
    assert front["trace_id"] == back["trace_id"]
    assert back["parent_span_id"] == front["span_id"]
    said(f"one stream: {text.count('data: ') - 1} events; both lines found by {request_id}, of one trace")


def completed(one: Container, request_id: str) -> list[dict[str, object]]:
    return [
        line
        for line in one.lines()
        if line["event"] == "request.completed" and line.get("request_id") == request_id
    ]


async def streams(url: str, count: int, body: dict[str, object], began: asyncio.Event) -> list[str]:
    """How so many streams at once ended: by `done`, a status, or an error. `began` is set once all run."""
    running = 0

    async def one(http: httpx.AsyncClient) -> str:
        nonlocal running
        is_counted, is_done = False, False
        try:
            async with http.stream("POST", url, json=body, headers=HEADERS) as answer:
                if answer.status_code != 200:
                    return str(answer.status_code)
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and not is_counted:
                        is_counted, running = True, running + 1
                        if running == count:
                            began.set()
                    is_done = is_done or line == "data: [DONE]"
        except httpx.HTTPError as error:
            return type(error).__name__
        return "done" if is_done else "cut"

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
        return await asyncio.gather(*(one(http) for _ in range(count)))


async def stopped_while_streaming(one: Container, url: str) -> None:
    """SIGTERM in the middle of 50 streams cuts none."""
    began = asyncio.Event()
    body = {**BODY, "max_tokens": 150, "ignore_eos": True}
    running = asyncio.create_task(streams(url, STREAMS, body, began))
    await asyncio.wait_for(began.wait(), PATIENCE_S)
    await asyncio.to_thread(podman, "kill", "--signal", "TERM", one.name)
    ends = await running
    assert ends == ["done"] * STREAMS, sorted(set(ends))
    await asyncio.to_thread(until, lambda: one.state("Status") == "exited", f"the end of {one.name}")
    assert one.state("ExitCode") == "0"
    said(f"{one.name}: SIGTERM during {STREAMS} streams cut none, and it exited with 0")


async def flooded() -> None:
    """An engine with little memory and one processor refuses before the kernel kills."""
    options: tuple[str, ...] = ("--memory", "1g", "--memory-swap", "1g", "--cpus", "1")
    options += ("--tmpfs", "/var/cache/penstock:size=16m,mode=1777")
    settings: tuple[str, ...] = (
        "--model",
        "demo",
        "--host",
        "0.0.0.0",
        "--port",
        "8001",
        "--probe-port",
        "8002",
    )
    settings += ("--kv-cache-memory", "128MiB", "--request-memory", "192MiB", "--swap-memory", "32MiB")
    with container("ship-small", ENGINE, options, *settings) as engine:
        until(engine.is_ready, "the small engine ready")
        url = f"http://{engine.address}:8001/v1/chat/completions"
        words = "what was it like to be there " * 50
        body = {
            **BODY,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 64,
            "ignore_eos": True,
        }
        ends = await streams(url, 600, body, asyncio.Event())
        counts = {end: ends.count(end) for end in sorted(set(ends))}
        assert engine.state("OOMKilled") == "false"
        assert engine.state("Status") == "running", engine.state("ExitCode")
        assert counts.get("503", 0) > 0, counts
        assert counts.keys() <= {"done", "503", "429"}, counts
        again = await streams(url, 1, dict(BODY), asyncio.Event())
        assert again == ["done"]
        said(f"an engine with 1 GiB and one processor, asked by 600 at once: {counts}; alive, and answers")


def on_disk() -> None:
    """An engine uses a directory within a volume whose own directory is root's, as volumes' are."""
    volume, pages = "/var/lib/penstock/kv", "/var/lib/penstock/kv/pages"
    options: tuple[str, ...] = ("--memory", "3g", "--cpus", "2", "--tmpfs", f"{volume}:size=64m,mode=1777")
    options += ("--tmpfs", "/var/cache/penstock:size=16m,mode=1777")
    settings = (
        "--model",
        "demo",
        "--probe-port",
        "8002",
        "--kv-disk-dir",
        pages,
        "--kv-disk-bytes",
        "50331648",
    )
    with container("ship-disk", ENGINE, options, *settings) as engine:
        until(engine.is_ready, "the engine with a disk ready")
        until(lambda: any(line["event"] == "core.disk_tier_found" for line in engine.lines()), "its disk")
        assert not [line for line in engine.lines() if line["event"] == "core.disk_tier_off"]
        assert engine.exec("stat", "-c", "%u %a", pages).stdout.strip() == "10001 700"
        said(f"an engine keeps pages in {pages}, which is its own alone")


def single(directory: Path) -> None:
    """Both images by themselves."""
    podman("network", "rm", "-f", NETWORK, check=False)
    podman("network", "create", NETWORK)
    try:
        with pair(directory) as (engine, gateway):
            confined(engine)
            confined(gateway)
            one_request(engine, gateway)
            url = f"http://{gateway.address}:8000/v1/chat/completions"
            asyncio.run(stopped_while_streaming(gateway, url))
        with pair(directory) as (engine, gateway):
            url = f"http://{gateway.address}:8000/v1/chat/completions"
            asyncio.run(stopped_while_streaming(engine, url))
        asyncio.run(flooded())
        on_disk()
    finally:
        podman("network", "rm", "-f", NETWORK, check=False)


SERVICES: Final = ("redis", "prometheus", "engine", "engine-2", "engine-3", "gateway")
GATEWAY_PORT: Final = "18765"
ADMIN_PORT: Final = "18766"


@dataclass(frozen=True, slots=True)
class Told:
    """What `docker compose up` ends with."""

    key: str
    admin_key: str
    console: str
    curl: str


def compose(home: Path) -> None:
    """compose.yaml with three replicas, without Grafana and the trace viewer, which need a registry."""
    env = {
        **os.environ,
        "GATEWAY_CONFIG": "gateway-replicas.toml",
        "GATEWAY_PORT": GATEWAY_PORT,
        "ADMIN_PORT": ADMIN_PORT,
        "ENGINE_MEMORY": "2g",
        "ENGINE_CPUS": "1",
        "PODMAN_COMPOSE_WARNING_LOGS": "false",
    }
    command = [str(home / "tools/bin/podman-compose"), "-f", str(ROOT / "compose.yaml")]
    command += ["--profile", "replicas"]

    def run(*words: str) -> str:
        done = subprocess.run(
            [*command, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    try:
        run("up", "-d", "--no-deps", "--no-build", *SERVICES)
        one = {name: Container(f"penstock_{name}_1") for name in SERVICES}
        for name in SERVICES[2:]:
            until(one[name].is_ready, f"{name} ready")
        made = one["gateway"].exec(
            *(
                "penstock",
                "keys",
                "create",
                "--config",
                "/etc/penstock/gateway.toml",
                "--tenant",
                "demo",
                "--json",
            )
        )
        assert made.returncode == 0, made.stderr
        key = json.loads(made.stdout.splitlines()[-1])["key"]
        said(f"compose: {', '.join(SERVICES)} are up; a key was made in Redis")
        run("up", "-d", "--no-deps", "--no-build", "first-token")
        told = told_how_to_ask()
        asked(one["gateway"], one["prometheus"], key)
        traced(one["gateway"], [one[name] for name in SERVICES[2:5]], told)
    finally:
        run("down", "-v")


def told_how_to_ask() -> Told:
    """What the service that ends compose says, once it has had an answer. Each part of it works."""

    def text() -> str:
        return podman("logs", "penstock_first-token_1", check=False)

    until(lambda: "curl -N" in text(), "the last line of compose")
    said_last = text().strip()
    named = dict(re.findall(r"^  (\w[\w ]*?)  +(\S+)$", said_last, re.MULTILINE))
    told = Told(named["API key"], named["Admin key"], named["Console"], said_last.splitlines()[-1])
    done = subprocess.run(
        ["bash", "-c", told.curl], capture_output=True, text=True, timeout=PATIENCE_S, env=NO_PROXY
    )
    assert "data: [DONE]" in done.stdout, done
    origin = f"http://127.0.0.1:{ADMIN_PORT}"
    assert told.console == f"{origin}/console"
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
        assert "<html" in http.get(told.console, follow_redirects=True).text
        headers = {"authorization": f"Bearer {told.admin_key}"}
        assert http.get(f"{origin}/admin/v1/replicas").status_code == 401
        assert http.get(f"{origin}/admin/v1/replicas", headers=headers).status_code == 200
    assert named["Grafana"].startswith("http://127.0.0.1:")
    said("compose: its last line, run as it stands, streamed an answer; its admin key opens the console")
    return told


def asked(gateway: Container, prometheus: Container, key: str) -> None:
    """Requests reach all replicas, and Prometheus has them."""
    url, headers = f"http://127.0.0.1:{GATEWAY_PORT}/v1/chat/completions", {"authorization": f"Bearer {key}"}

    def ask(number: int) -> int:
        messages = [
            {"role": "system", "content": f"You are number {number}."},
            {"role": "user", "content": "Hi"},
        ]
        body = {"model": "demo", "messages": messages, "max_tokens": 8}
        return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False).status_code

    until(lambda: ask(0) == 200, "the first answer")
    assert [ask(number) for number in range(30)] == [200] * 30
    code = "import sys,urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    scraped = gateway.exec("python", "-c", code, "http://127.0.0.1:9090/metrics").stdout
    replicas = [line for line in scraped.splitlines() if 'attempts_total{outcome="connected"' in line]
    assert len(replicas) == 3, replicas
    said(f"compose: 31 requests by replica: {[line.split('replica=')[1] for line in replicas]}")

    def known() -> bool:
        found = prometheus.exec(
            *("wget", "-q", "-O", "-"),
            "http://127.0.0.1:9090/api/v1/query?query=sum(penstock_gateway_requests_total)",
        )
        result = json.loads(found.stdout or "{}").get("data", {}).get("result", [])
        return bool(result) and float(result[0]["value"][1]) >= 31

    until(known, "the requests in Prometheus")
    said("compose: Prometheus has scraped them")


def traced(gateway: Container, engines: Sequence[Container], told: Told) -> None:
    """A stream is found by its id, by the gateway's operators and in the log of the engine that served it."""
    url, headers = (
        f"http://127.0.0.1:{GATEWAY_PORT}/v1/chat/completions",
        {"authorization": f"Bearer {told.key}"},
    )
    with httpx.stream("POST", url, json=BODY, headers=headers, timeout=PATIENCE_S, trust_env=False) as answer:
        text = "".join(answer.iter_text())
    request_id = answer.headers["x-request-id"]
    assert text.count("data: [DONE]") == 1
    until(lambda: any(completed(engine, request_id) for engine in engines), "the line of an engine")
    [line] = [line for engine in engines for line in completed(engine, request_id)]
    shown = gateway.exec(
        "env", f"PENSTOCK_ADMIN_KEY={told.admin_key}", "penstock", "trace", request_id, "--json"
    )
    assert shown.returncode == 0, shown.stderr
    assert str(line["trace_id"]) in shown.stdout
    said(f"compose: `penstock trace {request_id}` tells of its stages, with the trace of the engine's line")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("part", nargs="?", choices=("single", "compose"))
    options = parser.parse_args()
    if options.part != "compose":
        with tempfile.TemporaryDirectory(dir=options.home) as directory:
            single(Path(directory))
    if options.part != "single":
        compose(options.home)
    said("all was as it should be")


if __name__ == "__main__":
    main()
