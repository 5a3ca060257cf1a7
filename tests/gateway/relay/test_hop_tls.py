"""TLS and mTLS between gateway and engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from engine.api.http.app import HttpServer
from gateway.config.edge import HopConfig
from gateway.config.whole import ModelConfig
from gateway.relay import upstream
from gateway.relay.upstream import Outbound, Upstream
from shared.process.tls import HTTP1, HTTP2, UnusableTls, client_context, server_context
from shared.wire.errors import UpstreamUnreachable
from shared.wire.http import HttpRequest, Responder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Authorities, and what they vouch for."""
    directory = tmp_path_factory.mktemp("tls")
    for name in ("ours", "another"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / f"{name}.ca")
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
            directory / f"{name}.pem"
        )
    return directory


@pytest.fixture
async def engine(files: Path) -> AsyncIterator[str]:
    """An engine that lets only our authority's clients in."""

    async def handle(request: HttpRequest, responder: Responder) -> None:
        await responder.send(200, {"content-type": "text/plain"}, request.path.encode())

    own = str(files / "ours.pem")
    context = server_context(own, own, client_ca=str(files / "ours.ca"), protocols=(HTTP2, HTTP1))
    server = HttpServer(handle, host="127.0.0.1", port=0, keepalive_timeout_s=60.0, tls=context)
    yield f"https://127.0.0.1:{await server.start()}"
    await server.stop()


async def ask(url: str, protocol: str, hop: HopConfig) -> bytes:
    model = ModelConfig("m", (url,), protocol=protocol)  # type: ignore[arg-type]
    hop_end = Upstream(hop, [model])
    try:
        answer = await hop_end.send(model.protocol, url, Outbound("GET", "/hello", ()), 10.0)
        try:
            return await answer.read_all(100)
        finally:
            await answer.aclose()
    finally:
        await hop_end.aclose()


def hop(files: Path, ca: str, cert: str | None) -> HopConfig:
    own = str(files / f"{cert}.pem") if cert is not None else None
    return HopConfig(ca=str(files / f"{ca}.ca"), cert=own, key=own)


@pytest.mark.parametrize("protocol", ["http2", "http1"])
async def test_mutual_tls_between_gateway_and_engine(engine: str, files: Path, protocol: str) -> None:
    assert await ask(engine, protocol, hop(files, "ours", "ours")) == b"/hello"


@pytest.mark.parametrize("protocol", ["http2", "http1"])
async def test_an_engine_with_a_certificate_of_another_authority_is_refused(
    engine: str, files: Path, protocol: str
) -> None:
    with pytest.raises(UpstreamUnreachable):
        await ask(engine, protocol, hop(files, "another", "ours"))


@pytest.mark.parametrize("cert", [None, "another"])
@pytest.mark.parametrize("protocol", ["http2", "http1"])
async def test_a_gateway_without_a_client_certificate_is_refused(
    engine: str, files: Path, protocol: str, cert: str | None
) -> None:
    with pytest.raises(Exception, match=r"reached|broke off|went away"):
        await ask(engine, protocol, hop(files, "ours", cert))


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    path = str(tmp_path / "x.pem")
    with pytest.raises(UnusableTls, match=r"x\.pem"):
        server_context(path, path, protocols=(HTTP1,))
    with pytest.raises(UnusableTls, match=r"x\.pem"):
        client_context(ca=path)
    with pytest.raises(UnusableTls, match=r"missing\.pem"):
        client_context(cert=str(tmp_path / "missing.pem"))


async def test_no_tls_context_is_made_where_none_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str | None] = []

    def make(*, ca: str | None, cert: str | None, key: str | None) -> None:
        made.append(ca)

    monkeypatch.setattr(upstream, "client_context", make)
    plain, secure = (ModelConfig(name, (f"{name}://engine",)) for name in ("http", "https"))
    for hop_, models in (
        (HopConfig(), [plain]),
        (HopConfig(), [plain, secure]),
        (HopConfig(ca="x"), [plain]),
    ):
        await Upstream(hop_, models).aclose()
    assert made == [None, "x", "x"], "for https alone, and to check the files that are named"
