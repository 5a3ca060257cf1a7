"""Several workers with TLS on the public port: all of them serve, ask for client certificates, and take a
renewed certificate while requests run."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.conftest import CHAT
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream
from tests.gateway.listen.test_public_tls import Pki
from tests.gateway.workers.test_process import toml
from tests.gateway.workers.test_workers import STREAMS, Workers, workers
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def config(engine_url: str, pki: Pki) -> str:
    own = pki.path("own.pem")
    tls = (
        f'tls = {{ cert = "{own}", key = "{own}", client_certificates = "required",'
        f' client_ca = "{pki.path("clients.ca")}" }}'
    )
    entry = '[[certificates]]\nid = "by-name"\ndns = "batch.test"\ntenant = "acme"\n'
    return toml(engine_url, entry).replace("port = 0", f"port = 0\n{tls}", 1)


async def chat(gateway: Workers, context: ssl.SSLContext) -> aiohttp.ClientResponse:
    """A stream on a connection of its own: the kernel chooses the worker."""
    url = f"{gateway.url.replace('http:', 'https:')}/v1/chat/completions"
    headers = {"connection": "close"}
    return await gateway.client.post(url, json={**CHAT, "stream": True}, headers=headers, ssl=context)


async def presented(url: str, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    port = int(url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def is_refused(gateway: Workers, context: ssl.SSLContext) -> bool:
    try:
        (await chat(gateway, context)).close()
        return False
    except (aiohttp.ClientError, ssl.SSLError):
        return True


async def test_all_workers_serve_and_take_a_renewed_certificate_without_cutting_a_stream(
    tmp_path: Path,
) -> None:
    pki, go_on = Pki(tmp_path), asyncio.Event()
    known = pki.client(pki.clients.issue_cert("batch.test"))
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = stream(chunk("a"), go_on, chunk("b"))
        async with workers(tmp_path, config(engine.url, pki)) as gateway, asyncio.timeout(PATIENCE_S):
            answers = [await chat(gateway, known) for _ in range(STREAMS)]
            assert {answer.status for answer in answers} == {200}
            for answer in answers:
                assert await answer.content.readuntil(b"\n\n") == chunk("a")
            assert {await is_refused(gateway, pki.client()) for _ in range(STREAMS)} == {True}
            assert len(engine.seen) == STREAMS
            [before] = {await presented(gateway.url, known) for _ in range(STREAMS)}

            pki.renew_server()
            while before in (after := {await presented(gateway.url, known) for _ in range(STREAMS)}):
                await gateway.until_logged("tls.reloaded", 1)
            assert len(after) == 1
            await gateway.until_logged("tls.reloaded", 2)

            go_on.set()
            ends = await asyncio.gather(*(answer.read() for answer in answers))
            assert set(ends) == {chunk("b") + b"data: [DONE]\n\n"}
            lines = await gateway.until_logged("request.completed", STREAMS)
            assert {line["key_id"] for line in lines} == {"by-name"}


async def test_the_supervisors_admin_listener_takes_a_renewed_certificate_too(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    own, client = pki.path("own.pem"), pki.client()
    tls = f'[admin.tls]\ncert = "{own}"\nkey = "{own}"\n'
    async with (
        FakeEngine(bundle=byte_bundle()) as engine,
        workers(tmp_path, toml(engine.url, tls)) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        before = await presented(gateway.admin, client)
        pki.renew_server()
        [line] = await gateway.until_logged("tls.reloaded")
        assert line["logger"] == "shared.process.renewable_tls"
        assert await presented(gateway.admin, client) != before
        gateway.process.send_signal(signal.SIGHUP)
        await gateway.until_logged("tls.reloaded", 2)
        url = f"{gateway.admin.replace('http:', 'https:')}/readyz"
        async with gateway.client.get(url, ssl=client) as answer:
            assert answer.status == 200
