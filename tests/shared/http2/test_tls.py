from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from aiohttp import web

from engine.api.http.http2_server import Http2Server
from engine.api.http.sniff import SniffingProtocol
from gateway.relay.hop_errors import NoConnection
from gateway.relay.http2_client import Http2Transport
from tests.shared.http2.loopback import OverHttp2, echo, hello, listening, serving
from tests.shared.http2.test_interop import run


@dataclass(frozen=True, slots=True)
class Certificates:
    authority: trustme.CA
    server: trustme.LeafCert
    client: trustme.LeafCert

    def serving(self, *, alpn: list[str], mutual: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.server.configure_cert(context)
        context.set_alpn_protocols(alpn)
        if mutual:
            self.authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def calling(self, *, identified: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if identified:
            self.client.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    authority = trustme.CA()
    return Certificates(
        authority, authority.issue_cert("127.0.0.1"), authority.issue_cert("gateway.internal")
    )


def client(context: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=OverHttp2(Http2Transport(ssl_context=context)), timeout=None)


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mtls"])
async def test_large_bodies_over_tls(certificates: Certificates, mutual: bool) -> None:
    tls = certificates.serving(alpn=["h2"], mutual=mutual)
    async with serving(echo, tls=tls) as served, client(certificates.calling(identified=mutual)) as http:
        body = bytes(3_000_000)
        assert (await http.post(served.url, content=body)).content == body


async def test_curl_by_alpn_and_mutual_tls(certificates: Certificates, tmp_path: Path) -> None:
    authority, own, upload = tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "upload"
    certificates.authority.cert_pem.write_to_path(authority)
    certificates.client.private_key_and_cert_chain_pem.write_to_path(own)
    upload.write_bytes(os.urandom(1_000_000))
    curl = ("--http2", "--silent", "--show-error", "--fail", "--cacert", str(authority), "--cert", str(own))
    sent = ("--data-binary", f"@{upload}", "-H", "Expect:")
    version = ("--write-out", "%{http_version}", "--output", os.devnull)
    tls = certificates.serving(alpn=["h2", "http/1.1"], mutual=True)
    async with serving(echo, tls=tls) as served:
        assert await run("curl", *curl, *sent, served.url) == upload.read_bytes()
        assert await run("curl", *curl, *sent, *version, served.url) == b"2"


@pytest.mark.parametrize(
    "calling",
    [lambda certificates: certificates.calling(), lambda certificates: None],
    ids=["we show no certificate", "we do not trust theirs"],
)
async def test_a_tls_handshake_without_a_valid_certificate_is_a_connect_error(
    certificates: Certificates, calling: Callable[[Certificates], ssl.SSLContext | None]
) -> None:
    tls = certificates.serving(alpn=["h2"], mutual=True)
    async with serving(hello, tls=tls) as served, client(calling(certificates)) as http:
        with pytest.raises(NoConnection):
            await http.get(served.url)


@pytest.mark.parametrize("alpn", [["http/1.1"], []])
async def test_a_server_without_h2_is_a_connect_error_that_says_so(
    certificates: Certificates, alpn: list[str]
) -> None:
    async def old(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="HTTP/1.1")

    http1 = web.Server(old)
    tls = certificates.serving(alpn=alpn)
    async with listening(http1, tls=tls) as listener, client(certificates.calling()) as http:
        with pytest.raises(NoConnection, match="by ALPN, and not h2"):
            await http.get(f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    await http1.shutdown(1.0)


async def test_alpn_decides_on_a_port_that_serves_both(certificates: Certificates) -> None:
    async def old(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="old")

    http1, http2 = web.Server(old), Http2Server(hello)
    tls = certificates.serving(alpn=["h2", "http/1.1"])
    async with listening(lambda: SniffingProtocol(http2.protocol, http1), tls=tls) as listener:
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        async with client(certificates.calling()) as http:
            assert (await http.get(url)).content == b"hello from /"
        async with httpx.AsyncClient(verify=certificates.calling()) as http:
            assert (await http.get(url)).content == b"old"
    await http2.close()
    await http1.shutdown(1.0)
