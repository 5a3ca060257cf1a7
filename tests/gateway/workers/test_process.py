"""The gateway as a process: its command line, its signals, TLS, and what importing it needs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import trustme

from gateway.identity.keys import hash_key
from tests.gateway.conftest import CHAT, KEY, PATIENCE_S, House, Open
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent.parent
HEADERS = {"authorization": f"Bearer {KEY}"}
START_S = 60.0
"""The time for a process to start, on a machine that is busy with others."""


def toml(url: str, extra: str = "") -> str:
    return f"""
[listen]
port = 0
[[models]]
name = "tiny"
replicas = ["{url}"]
[[tenants]]
id = "acme"
[[keys]]
id = "k1"
hash = "{hash_key(KEY)}"
tenant = "acme"
{extra}
"""


class Process:
    """`python -m gateway`, and the lines that it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.admin_port = 0

    async def until_logged(self, event: str, *others: str) -> dict[str, Any]:
        """The line of this event, once it and the others were logged, in whatever order."""
        assert self.process.stderr is not None
        found: dict[str, dict[str, Any]] = {}
        async with asyncio.timeout(START_S):
            while raw := await self.process.stderr.readline():
                line: dict[str, Any] = msgspec.json.decode(raw)
                found[line["event"]] = line
                if found.keys() >= {event, *others}:
                    return found[event]
        raise AssertionError(f"of {event, *others} only {found.keys()} were logged")


@asynccontextmanager
async def started(config: Path, *options: str) -> AsyncIterator[Process]:
    parent = "--parent-pid", str(os.getpid())
    argv = (sys.executable, "-m", "gateway", "--config", str(config), *parent, *options)
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        gateway = Process(process)
        listening = await gateway.until_logged("gateway.listening")
        gateway.port, gateway.admin_port = listening["port"], listening.get("admin_port", 0)
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # to the end of its log: else the pipe outlives the loop


STREAMS = 50


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_change_and_a_hangup_while_it_starts_are_not_lost(tmp_path: Path, hangs_up: bool) -> None:
    config, env = tmp_path / "gateway.toml", {**os.environ, "PENSTOCK_UNREAD": "1"}
    config.write_text(text := toml("http://127.0.0.1:1"))
    argv = (sys.executable, "-m", "gateway", "--config", str(config), "--parent-pid", str(os.getpid()))
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, env=env, stderr=subprocess.PIPE)
    try:
        gateway = Process(process)
        await gateway.until_logged("environment.unread")  # it has read the file
        if hangs_up:
            process.send_signal(signal.SIGHUP)
        (tmp_path / "new").write_text(text.replace('id = "k1"', 'id = "k1"\ndisabled = true'))
        (tmp_path / "new").rename(config)
        listening = await gateway.until_logged("gateway.listening")
        assert (await gateway.until_logged("keys.revoked"))["keys"] == ["k1"]
        url = f"http://127.0.0.1:{listening['port']}/v1/models"
        async with aiohttp.ClientSession() as client, client.get(url, headers=HEADERS) as answer:
            assert answer.status == 401
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_sigterm_drains_open_streams_and_exits_with_0(tmp_path: Path) -> None:
    """It is not ready from the first moment on, and alive to the last."""
    config, go_on = tmp_path / "gateway.toml", asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        FakeEngine(bundle=byte_bundle()) as engine,
        aiohttp.ClientSession(connector=connector) as client,
    ):
        engine.script = stream(chunk("a"), go_on, chunk("b"))
        config.write_text(toml(engine.url, "[admin]\nport = 0"))
        async with started(config) as gateway, asyncio.timeout(PATIENCE_S):
            url, body = f"http://127.0.0.1:{gateway.port}/v1/chat/completions", {**CHAT, "stream": True}
            asked = (client.post(url, json=body, headers=HEADERS) for _ in range(STREAMS))
            answers = await asyncio.gather(*asked)
            for answer in answers:
                assert await answer.content.readuntil(b"\n\n") == chunk("a")
            gateway.process.send_signal(signal.SIGTERM)
            assert (await gateway.until_logged("gateway.draining"))["live"] == STREAMS
            for path, status in (("readyz", 503), ("livez", 200)):
                async with client.get(f"http://127.0.0.1:{gateway.admin_port}/{path}") as probe:
                    assert probe.status == status
            go_on.set()
            for answer in answers:
                assert await answer.read() == chunk("b") + b"data: [DONE]\n\n"
            for _ in answers:
                assert (await gateway.until_logged("request.completed"))["end_reason"] == "ok"
            assert await gateway.process.wait() == 0


def test_variables_that_nothing_reads_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_GATEWEY_LOG_LEVEL", "PENSTOCK_PORT", "PENSTOCK_ENGINE_PORT", "PENSTOCK_MY_SECRET"):
        monkeypatch.setenv(name, "1")
    config = tmp_path / "gateway.toml"
    models = '[[models]]\napi_key = "env:PENSTOCK_MY_SECRET"'
    tls = 'tls = { cert = "/no.pem", key = "/no.pem" }'  # for which it ends
    config.write_text(toml("http://127.0.0.1:1").replace("[[models]]", models).replace("= 0", f"= 0\n{tls}"))
    argv = [sys.executable, "-m", "gateway", "--config", str(config)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=60)
    lines = [msgspec.json.decode(line) for line in done.stderr.splitlines() if line.startswith(b"{")]
    assert [line["names"] for line in lines if line["event"] == "environment.unread"] == [
        ["PENSTOCK_GATEWEY_LOG_LEVEL", "PENSTOCK_PORT"]
    ]


async def test_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(toml("http://127.0.0.1:1"))
    async with started(config) as gateway, aiohttp.ClientSession() as client:
        url, headers = f"http://127.0.0.1:{gateway.port}/v1/models", {"authorization": f"Bearer {KEY}"}
        async with client.get(url, headers=headers) as answer:
            assert answer.status == 200
        config.write_text(toml("http://127.0.0.1:1", "disabled = true"))
        gateway.process.send_signal(signal.SIGHUP)
        await gateway.until_logged("config.reloaded")
        async with client.get(url, headers=headers) as answer:
            assert answer.status == 401


@pytest.mark.parametrize(("options", "processes"), [(("--log-level", "debug"), 1), (("--workers", "2"), 3)])
async def test_what_the_command_line_says_holds_when_the_file_is_read_again(
    tmp_path: Path, options: tuple[str, ...], processes: int
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(toml("http://127.0.0.1:1"))
    async with started(config, *options) as gateway:
        gateway.process.send_signal(signal.SIGHUP)
        assert gateway.process.stderr is not None
        seen: list[str] = []
        async with asyncio.timeout(START_S):
            while seen.count("config.reloaded") < processes:
                seen.append(msgspec.json.decode(await gateway.process.stderr.readline())["event"])
        assert "config.restart_needed" not in seen


HANGS_UP = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "gateway.app":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, Finder())
"""


def test_a_hangup_while_it_starts_does_not_end_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS_UP)
    argv = [sys.executable, "-m", "gateway", "--config", "none"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=60, env=env)
    assert done.returncode == 2, "it came to read its configuration"


async def test_sighup_renews_the_certificate_and_keeps_open_connections(tmp_path: Path) -> None:
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    own, config = tmp_path / "own.pem", tmp_path / "gateway.toml"

    def shown(writer: asyncio.StreamWriter) -> bytes:
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return der

    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(own)
    tls = f'tls = {{ cert = "{own}", key = "{own}" }}'
    config.write_text(toml("http://127.0.0.1:1").replace("port = 0", f"port = 0\n{tls}"))
    async with started(config) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trust)
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(own)
        gateway.process.send_signal(signal.SIGHUP)
        await gateway.until_logged("tls.reloaded")
        _, newer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trust)
        assert shown(newer) != shown(writer)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        for end in (writer, newer):
            end.close()


def test_a_wrong_configuration_is_told_and_ends_with_2(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(toml("ftp://x", 'models = ["ghost"]'))
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--config", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "models.tiny: 'ftp://x' is no base URL" in done.stderr
    assert "keys.k1.models: there is no model 'ghost'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["port", "tls"])
def test_a_listener_that_cannot_be_opened_is_told_and_ends_with_1(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "gateway.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen = (
            f"port = {port}" if kind == "port" else 'port = 0\ntls = { cert = "/no.pem", key = "/no.pem" }'
        )
        config.write_text(toml("http://127.0.0.1:1").replace("port = 0", listen))
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "--config", str(config)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert (f"cannot listen on 127.0.0.1:{port}" if kind == "port" else "cannot use /no.pem") in done.stderr
    assert "Traceback" not in done.stderr


async def test_tls(open_house: Open, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    house: House = await open_house(listen={"port": 0, "tls": {"cert": str(cert), "key": str(key)}})
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    url = f"https://127.0.0.1:{house.gateway.port}/v1/models"
    async with house.client.get(url, headers=house.headers, ssl=trust) as answer:
        assert answer.status == 200
    with pytest.raises(aiohttp.ClientError):
        await house.client.get(url.replace("https", "http"))


def test_importing_the_gateway_needs_neither_torch_nor_cryptography() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'engine', 'zmq', 'jwt', 'cryptography'))); "
        "import gateway.app, gateway.__main__"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
