"""Against ends that other people wrote.

Debian's packages: `apt-get install curl nghttp2-client`. From PyPI, with the extra `dev`: granian and
httpx[http2]. A tool that is missing is a failure: these tests are the only proof that we speak HTTP/2 and not
a dialect of our own.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from engine.api.http.http2_server import ServerRequest, ServerResponder
from gateway.relay.hop_errors import NoConnection
from gateway.relay.http2_client import Http2Transport
from shared.http2 import limits
from tests.bench.services import free_port
from tests.shared.http2.loopback import (
    EVENTS,
    PATIENCE_S,
    STREAM,
    OverHttp2,
    Silent,
    echo,
    endpoints,
    serving,
    until,
)

EVENT_COUNT = 200
GOT_BY = {
    "curl": "apt-get install curl",
    "nghttp": "apt-get install nghttp2-client",
    "h2load": "apt-get install nghttp2-client",
    "granian": "pip install 'granian>=2.8.4'",
}


def tool(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.fail(f"{name} is missing: {GOT_BY[name]}")
    return path


async def run(name: str, *arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        tool(name), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        out, errors = await process.communicate()
    assert process.returncode == 0, (out[-2_000:], errors)
    return out


async def serve(request: ServerRequest, responder: ServerResponder) -> None:
    if request.path == "/echo":
        await echo(request, responder)
        return
    await responder.start_stream(200, EVENTS)
    for i in range(EVENT_COUNT):
        await responder.write(b"data: %d\n\n" % i)
    await responder.finish()


ALL_EVENTS = b"".join(b"data: %d\n\n" % i for i in range(EVENT_COUNT))


# -- our server, their clients --------------------------------------------------------------------


async def test_curl(tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(os.urandom(2_000_000))
    async with serving(serve) as served:
        curl = ("--http2-prior-knowledge", "--silent", "--show-error", "--fail", "--no-buffer")
        assert await run("curl", *curl, served.url + "/events") == ALL_EVENTS
        sent = ("--data-binary", f"@{upload}", "-H", "Expect:")
        assert await run("curl", *curl, *sent, served.url + "/echo") == upload.read_bytes()
        version = ("--write-out", "%{http_version}", "--output", os.devnull)
        assert await run("curl", *curl, *version, served.url + "/events") == b"2"


async def test_a_disconnect_of_curl_cancels_the_handler() -> None:
    silent = Silent(start=True)
    async with serving(silent) as served:
        process = await asyncio.create_subprocess_exec(
            tool("curl"),
            "--http2-prior-knowledge",
            "--silent",
            "--no-buffer",
            served.url,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b": open\n"
        process.kill()
        await process.communicate()
        await until(lambda: silent.cancelled == 1)


@pytest.mark.parametrize("window_bits", [10, 16, 30])
async def test_nghttp(window_bits: int, tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(bytes(500_000))
    async with serving(serve) as served:
        windows = (f"--window-bits={window_bits}", f"--connection-window-bits={max(16, window_bits)}")
        assert await run("nghttp", *windows, served.url + "/events") == ALL_EVENTS
        assert (
            await run("nghttp", *windows, "--data", str(upload), served.url + "/echo") == upload.read_bytes()
        )
        padded = await run("nghttp", *windows, "--padding=200", "--data", str(upload), served.url + "/echo")
        assert padded == upload.read_bytes()


async def test_h2load() -> None:
    async with serving(serve) as served:
        report = await run("h2load", "-n", "200", "-c", "4", "-m", "100", served.url + "/events")
        assert re.search(rb"200 succeeded, 0 failed, 0 errored", report), report.decode()
        await until(lambda: not served.server.endpoints)


async def test_httpx_with_httpcore() -> None:
    async with serving(serve) as served, httpx.AsyncClient(http1=False, http2=True) as http:
        body = os.urandom(1_000_000)
        answers = await asyncio.gather(*(http.get(served.url + "/events") for _ in range(50)))
        assert {answer.content for answer in answers} == {ALL_EVENTS}
        answer = await http.post(served.url + "/echo", content=body)
        assert (answer.http_version, answer.content) == ("HTTP/2", body)


# -- our client, their server ---------------------------------------------------------------------


@asynccontextmanager
async def granian() -> AsyncIterator[str]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(tool("granian"), "--interface", "asgi", "--http", "2", "--workers", "1"),
        *("--host", "127.0.0.1", "--port", str(port), "--no-ws", "--log-level", "warning", "asgi_app:app"),
        cwd=Path(__file__).parent,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def answering(http: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await http.get(url + "/echo")
            except NoConnection:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.slow
async def test_granian() -> None:
    transport = Http2Transport()
    async with granian() as url, httpx.AsyncClient(transport=OverHttp2(transport), timeout=None) as http:
        await answering(http, url)
        body = os.urandom(3_000_000)
        assert (await http.post(url + "/echo", content=body)).content == body
        events = b"".join(b"data: %0150d\n\n" % i for i in range(20))
        answers = await asyncio.gather(*(http.get(url + "/events") for _ in range(250)))
        assert {answer.content for answer in answers} == {events}
        assert len(endpoints(transport)) == 2, "granian allows 200 streams on a connection"

        stalled = [
            await http.send(http.build_request("GET", url + "/endless"), stream=True) for _ in range(40)
        ]
        async with http.stream("GET", url + "/endless") as answer:
            stream, size = answer.extensions[STREAM], 0
            while size < 3 * limits.STREAM_WINDOW_LEN:
                size += len(await stream.read())
        for one in stalled:
            await one.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while (await http.get(url + "/cancelled")).content != b"41":
                pass
