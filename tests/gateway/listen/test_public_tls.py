"""TLS on the public port: a handshake that never comes holds a connection for a bounded time; client
certificates name callers; certificates, authorities and revocation lists are renewed while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.serialization import Encoding
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated

from gateway.client import connection
from gateway.config.edge import TlsConfig
from gateway.config.holders import CertificateConfig
from gateway.config.quotas import QuotaLimits
from gateway.identity.caller import Caller, Principal
from gateway.identity.certificates import CertificateTable
from gateway.listen import listener
from gateway.listen.listener_tls import ListenerTls
from shared.process import renewable_tls
from shared.process.tls import UnusableTls
from shared.wire.errors import Unauthenticated
from shared.wire.ids import KeyId, TenantId
from tests.fakes import VirtualClock
from tests.gateway.conftest import PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import chunk, stream
from tests.gateway.identity.issuers import AUDIENCE, ISS, Key, jwk_set

DAY = timedelta(days=1)
URI = "spiffe://prod/billing"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pki:
    """An authority for the server, one for clients, and their files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server, self.clients = trustme.CA(), trustme.CA(organization_name="Clients")
        self.renew_server()
        self.trust_clients_of(self.clients)
        self.revoke()

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def renew_server(self) -> None:
        self.write("own.pem", self.server.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())

    def trust_clients_of(self, authority: trustme.CA) -> None:
        self.write("clients.ca", authority.cert_pem.bytes())

    def revoke(
        self, *certificates: trustme.LeafCert, signer: trustme.CA | None = None, until: timedelta = DAY
    ) -> None:
        """Write the list of the clients' authority, good for `until` from now; `signer` signs it in its
        place."""
        own = x509.load_pem_x509_certificate(self.clients.cert_pem.bytes())
        private = (signer or self.clients).private_key_pem.bytes()
        now = datetime.now(UTC)
        revocations = x509.CertificateRevocationListBuilder(own.subject, now - DAY, now + until)
        for certificate in certificates:
            serial = read(certificate).serial_number
            entry = x509.RevokedCertificateBuilder(serial, now).build()
            revocations = revocations.add_revoked_certificate(entry)
        key: Any = serialization.load_pem_private_key(private, None)
        self.write("clients.crl", revocations.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def settings(self, mode: str = "optional", **more: str) -> dict[str, Any]:
        tls = {"cert": self.path("own.pem"), "key": self.path("own.pem"), "client_certificates": mode}
        tls |= {"client_ca": self.path("clients.ca"), "crl": self.path("clients.crl")} | more
        return {"port": 0, "tls": tls}

    def client(self, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.server.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        return context

    def write(self, name: str, data: bytes) -> None:
        """Replaced at once, as an operator should."""
        (self.directory / "new").write_bytes(data)
        (self.directory / "new").rename(self.directory / name)


def read(certificate: trustme.LeafCert) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate.cert_chain_pems[0].bytes())


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pki:
    monkeypatch.setattr(renewable_tls, "POLL_S", 0.01)
    return Pki(tmp_path)


def url(house: House, path: str = "/v1/models") -> str:
    return f"https://127.0.0.1:{house.gateway.port}{path}"


async def status(house: House, context: ssl.SSLContext, headers: dict[str, str] | None = None) -> int:
    """The answer's status over a new connection."""
    async with aiohttp.ClientSession() as client, client.get(url(house), ssl=context, headers=headers) as it:
        await it.read()
        return it.status


async def test_a_silent_handshake_is_cut_and_holds_up_nobody(
    open_house: Open, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    own = pki.path("own.pem")
    house = await open_house(listen={"port": 0, "tls": {"cert": own, "key": own}})
    silent, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    assert await status(house, pki.client(), house.headers) == 200
    assert await asyncio.wait_for(silent.read(), PATIENCE_S) == b""
    writer.close()


async def test_connections_whose_tls_keeps_much_are_bounded_and_whoever_sends_little_keeps_its_own(
    open_house: Open, pki: Pki
) -> None:
    house = await open_house(listen=pki.settings(), limits={"live_max": 2})

    async def ask(text_len: int, *, again: Connection | None = None) -> Connection:
        body = json.dumps({"model": "unknown", "prompt": "a" * text_len}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n"
        head += f"authorization: {house.headers['authorization']}\r\n\r\n"
        at = "127.0.0.1", house.gateway.port
        reader, writer = again or await asyncio.open_connection(*at, ssl=pki.client())
        writer.write(head.encode() + body)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404 ")
        return reader, writer

    victim, *large = [await ask(text_len) for text_len in (10, 100_000, 100_000)]
    victim, large[0] = await ask(10, again=victim), await ask(100_000, again=large[0])
    large += [await ask(100_000)]
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            assert await large[0][0].read() == b""
    for kept in (victim, *large[1:]):
        await ask(10, again=kept)
        kept[1].transport.abort()
    await until(lambda: house.log.getvalue().count("gateway.large_connections_full") == 1)


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [(["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), ([], None), (["http/1.0"], None)],
)
async def test_whoever_speaks_http_1_1_gets_it(
    open_house: Open, pki: Pki, offered: list[str], agreed: str | None
) -> None:
    house = await open_house(listen=pki.settings())
    context = pki.client()
    context.set_alpn_protocols(offered)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, ssl=context)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == agreed
    writer.write(b"GET /livez HTTP/1.1\r\nhost: here\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_client_that_speaks_http_2_alone_is_told_that_http_1_1_is_required(
    open_house: Open, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    house = await open_house(listen=pki.settings())
    context = pki.client()
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, ssl=context)
    peer = H2Connection()
    peer.initiate_connection()
    peer.send_headers(
        1, [(":method", "GET"), (":path", "/livez"), (":scheme", "https"), (":authority", "h")], True
    )
    writer.write(peer.data_to_send())
    async with asyncio.timeout(PATIENCE_S):
        events = peer.receive_data(await reader.read())
    [end] = [event for event in events if isinstance(event, ConnectionTerminated)]
    assert (end.error_code, end.last_stream_id) == (ErrorCodes.HTTP_1_1_REQUIRED, 0)
    writer.close()
    assert await status(house, pki.client(), house.headers) == 200
    assert '"endpoint":"unparsed"' not in house.log.getvalue(), "its frames are not read as a request"
    await house.at_rest()


class ByCertificate:
    """An identity that names callers by their certificates alone, and waits a turn of the event loop."""

    async def identify(self, caller: Caller, now_s: float) -> Principal:
        await asyncio.sleep(0)
        if (certificate := caller.certificate) is None:
            raise Unauthenticated("A client certificate is needed.")
        assert b"the client" in certificate
        return Principal(KeyId("certificate"), TenantId("acme"), ("*",), QuotaLimits())


async def test_an_identity_may_wait_and_sees_the_clients_certificate(open_house: Open, pki: Pki) -> None:
    house = await open_house(identity_of=lambda *_: ByCertificate(), listen=pki.settings())
    known = pki.clients.issue_cert("client.test", common_name="the client")
    assert await status(house, pki.client(), house.headers) == 401, "the key is no longer asked for"
    assert await status(house, pki.client(known)) == 200
    assert (await house.lines(2))[1]["key_id"] == "certificate"


ENTRIES = [
    {"id": "by-dns", "dns": "Batch.Test", "tenant": "acme"},
    {"id": "by-uri", "uri": URI, "tenant": "other", "models": ["tiny"], "limits": {"requests_per_min": 1}},
]


def named(pki: Pki, *names: str, common_name: str | None = None) -> ssl.SSLContext:
    """The context of a client whose certificate has these names."""
    return pki.client(pki.clients.issue_cert(*names, common_name=common_name))


def with_uri(authority: trustme.CA, uri: str) -> Callable[[ssl.SSLContext], None]:
    return with_extension(authority, x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]))


def with_extension(authority: trustme.CA, extension: x509.ExtensionType) -> Callable[[ssl.SSLContext], None]:
    """What gives a context a certificate with an extension that trustme cannot issue."""
    template = authority.issue_cert("uri.test")
    old, signer = read(template), authority.private_key_pem.bytes()
    key: Any = serialization.load_pem_private_key(signer, None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(old.not_valid_after_utc)
        .add_extension(extension, critical=True)
    )
    signed = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def configure(context: ssl.SSLContext) -> None:
        with trustme.Blob(template.private_key_pem.bytes() + signed).tempfile() as path:
            context.load_cert_chain(path)

    return configure


async def test_a_certificate_names_its_caller_by_dns_name_uri_or_subject(open_house: Open, pki: Pki) -> None:
    legacy, of_uri = pki.clients.issue_cert("x.test", common_name="legacy"), pki.client()
    with_uri(pki.clients, URI)(of_uri)
    subject = read(legacy).subject.rfc4514_string()
    assert "CN=legacy" in subject
    entries = [*ENTRIES, {"id": "by-subject", "subject": subject, "tenant": "acme"}]
    house = await open_house(listen=pki.settings(), certificates=entries)
    cases = [
        (named(pki, "batch.test"), 200, "by-dns"),
        (of_uri, 200, "by-uri"),
        (pki.client(legacy), 200, "by-subject"),
        (named(pki, "x.test", common_name="legacy"), 401, None),  # the subject has more than that name
        (named(pki, "nobody.test"), 401, None),
        (named(pki, "*.test"), 401, None),
        (pki.client(), 401, None),
    ]
    for at, (context, expected, key_id) in enumerate(cases):
        assert await status(house, context) == expected
        assert (await house.lines(at + 1))[at].get("key_id") == key_id


async def test_a_certificates_quota_is_its_own(open_house: Open, pki: Pki) -> None:
    house = await open_house(listen=pki.settings(), certificates=ENTRIES)
    of_uri, chat = pki.client(), {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    with_uri(pki.clients, URI)(of_uri)
    statuses = []
    for context in (of_uri, of_uri, named(pki, "batch.test")):
        address = url(house, "/v1/chat/completions")
        async with house.client.post(address, json=chat, ssl=context) as answer:
            statuses.append(answer.status)
    assert statuses == [200, 429, 200]


async def test_a_browser_shows_a_certificate_for_no_page_of_another_site(open_house: Open, pki: Pki) -> None:
    house = await open_house(listen=pki.settings(), certificates=ENTRIES)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    for more, status in ((headers, 400), ({"content-type": "text/plain"}, 200)):
        address, context = url(house, "/v1/chat/completions"), named(pki, "batch.test")
        async with house.client.post(address, data=body, headers=more, ssl=context) as answer:
            assert answer.status == status


async def test_the_order_is_key_or_token_then_certificate_and_what_is_wrong_does_not_fall_back(
    open_house: Open, pki: Pki
) -> None:
    signer = Key("k")
    (pki.directory / "keys.json").write_bytes(jwk_set(signer))
    idp = {"id": "idp", "issuer": ISS, "audiences": [AUDIENCE], "algorithms": ["ES256"]}
    house = await open_house(
        listen=pki.settings(),
        certificates=ENTRIES,
        issuers=[idp | {"jwks_file": pki.path("keys.json")}],
        grants=[{"issuer": "idp", "tenant": "other"}],
    )
    context, now_s = named(pki, "batch.test"), time.time()
    cases = [
        (house.headers["authorization"], 200, "k1"),
        (f"Bearer {signer.token(now_s)}", 200, "idp:"),
        (None, 200, "by-dns"),
        ("Bearer wrong", 401, ""),
        (f"Bearer {Key('k', number=1).token(now_s)}", 401, ""),
        ("Bearer a.b.c", 401, ""),
        ("Basic a", 401, ""),
    ]
    for at, (authorization, expected, key_id) in enumerate(cases):
        headers = {} if authorization is None else {"authorization": authorization}
        assert await status(house, context, headers) == expected
        assert (await house.lines(at + 1))[at].get("key_id", "").startswith(key_id)


async def test_a_required_certificate_is_required_of_everybody(open_house: Open, pki: Pki) -> None:
    house = await open_house(listen=pki.settings("required"), certificates=ENTRIES)
    for context in (pki.client(), pki.client(trustme.CA().issue_cert("batch.test"))):
        with pytest.raises(aiohttp.ClientError):
            await status(house, context, house.headers)
    assert await status(house, named(pki, "nobody.test"), house.headers) == 200


async def test_another_authoritys_certificate_is_no_certificate(open_house: Open, pki: Pki) -> None:
    house = await open_house(listen=pki.settings(), certificates=ENTRIES)
    with pytest.raises(aiohttp.ClientError):
        await status(house, pki.client(trustme.CA().issue_cert("batch.test")))


async def test_a_version_before_1_2_is_refused(open_house: Open, pki: Pki) -> None:
    house = await open_house(listen=pki.settings())
    assert house.gateway._tls is not None
    assert house.gateway._tls.context.current.minimum_version is ssl.TLSVersion.TLSv1_2
    old = pki.client()
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(aiohttp.ClientError):
        await status(house, old, house.headers)


def events(log: io.StringIO, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if line["event"] == event]


async def test_a_revoked_certificate_opens_nothing_any_more_also_on_its_open_connection(
    open_house: Open, pki: Pki
) -> None:
    house = await open_house(listen=pki.settings(), certificates=ENTRIES)
    bad, good = (pki.clients.issue_cert("batch.test") for _ in range(2))
    contexts = pki.client(bad), pki.client(good)
    for context in contexts:  # connections that are kept
        async with house.client.get(url(house), ssl=context) as answer:
            assert answer.status == 200
    pki.revoke(bad)
    await until(lambda: bool(events(house.log, "tls.reloaded")))
    for context, expected in zip(contexts, (401, 200), strict=True):
        async with house.client.get(url(house), ssl=context) as answer:
            assert answer.status == expected
        async with house.client.get(url(house), ssl=context, headers=house.headers) as answer:
            assert answer.status == expected, "whatever else is shown"
    with pytest.raises(aiohttp.ClientError):
        await status(house, contexts[0], house.headers)
    assert await status(house, contexts[1]) == 200
    assert any("is revoked" in line.get("error_detail", "") for line in await house.lines(7))


async def test_an_expired_list_lets_in_no_certificate_and_everybody_else(open_house: Open, pki: Pki) -> None:
    pki.revoke(until=-DAY / 2)
    house = await open_house(listen=pki.settings(), certificates=ENTRIES)
    await until(lambda: bool(events(house.log, "tls.revocations_expired")))
    with pytest.raises(aiohttp.ClientError):
        await status(house, named(pki, "batch.test"))
    assert await status(house, pki.client(), house.headers) == 200


def test_a_certificate_expires_on_an_open_connection_too(pki: Pki) -> None:
    leaf = pki.clients.issue_cert("batch.test", not_after=datetime.now(UTC) + DAY)
    der = read(leaf).public_bytes(Encoding.DER)
    table = CertificateTable([CertificateConfig("by-dns", "acme", dns="batch.test")], frozenset)
    end_s = read(leaf).not_valid_after_utc.timestamp()
    first = table.check(der, end_s - 1)
    assert first is not None
    assert table.check(der, end_s - 1) is first, "read once"
    with pytest.raises(Unauthenticated, match="expired"):
        table.check(der, end_s)
    with pytest.raises(Unauthenticated, match="malformed"):
        table.check(der[:-1], end_s - 1)


def test_the_first_entry_that_fits_counts(pki: Pki) -> None:
    der = read(pki.clients.issue_cert("b.test", "a.test")).public_bytes(Encoding.DER)
    entries = [CertificateConfig(f"of-{name}", "acme", dns=f"{name}.test") for name in ("a", "b", "a")]
    principal = CertificateTable(entries, frozenset).check(der, 0)
    assert principal is not None
    assert principal.key == "of-a"


def shake(client: ssl.SSLContext, server: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLObject:
    """The client's end of a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (near, far):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return near


async def test_no_session_is_resumed_past_a_reload(pki: Pki, log: io.StringIO) -> None:
    tls, client = ListenerTls(TlsConfig(**pki.settings()["tls"])), named(pki, "batch.test")
    client.maximum_version = ssl.TLSVersion.TLSv1_2  # whose sessions are there at once
    session = shake(client, tls.context, None).session
    assert shake(client, tls.context, session).session_reused
    tls.reload()
    await tls.look()
    assert not shake(client, tls.context, session).session_reused


async def test_everything_is_renewed_while_a_stream_runs(open_house: Open, pki: Pki) -> None:
    house = await open_house(listen=pki.settings(), certificates=ENTRIES)
    old = pki.client(pki.clients.issue_cert("batch.test"))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    gate = asyncio.Event()
    house.engine.script = stream(chunk("a"), gate, chunk("b"))
    async with house.client.post(url(house, "/v1/chat/completions"), json=chat, ssl=old) as answer:
        first = await answer.content.readline()
        pki.server, pki.clients = trustme.CA(), trustme.CA(organization_name="New")
        pki.renew_server()
        pki.trust_clients_of(pki.clients)
        pki.revoke()
        renewed = pki.client(pki.clients.issue_cert("batch.test"))
        await until(lambda: bool(events(house.log, "tls.reloaded")))
        assert await status(house, renewed) == 200
        with pytest.raises(aiohttp.ClientError):  # it does not trust the new certificate, nor is it trusted
            await status(house, old)
        gate.set()
        assert first.startswith(b"data:")
        assert (await answer.read()).rstrip().endswith(b"data: [DONE]")


def context_of(tls: ListenerTls) -> ssl.SSLContext:
    return tls.context.current


async def test_bad_files_change_nothing_and_every_problem_is_told(pki: Pki, log: io.StringIO) -> None:
    clock = VirtualClock()
    tls = ListenerTls(TlsConfig(**pki.settings()["tls"]), clock)
    before = context_of(tls)
    watching = asyncio.create_task(tls.watch())

    async def look(event: str) -> list[str]:
        """The problems that the next look at the files finds."""
        count = len(events(log, event))
        await until(lambda: clock.sleeping == 1)
        clock.advance(renewable_tls.POLL_S)
        await until(lambda: len(events(log, event)) > count)
        problems: list[str] = events(log, event)[-1].get("problems", [])
        return problems

    for name in ("own.pem", "clients.ca", "clients.crl"):
        (pki.directory / name).write_text("nothing")
    problems = await look("tls.rejected")
    assert len(problems) == 3
    for name, problem in zip(("own.pem", "clients.ca", "clients.crl"), problems, strict=True):
        assert name in problem
    assert context_of(tls) is before
    pki.renew_server()
    pki.trust_clients_of(pki.clients)
    pki.revoke(signer=trustme.CA())
    assert ["no authority" in line for line in await look("tls.rejected")] == [True]
    pki.revoke()
    assert await look("tls.reloaded") == []
    assert context_of(tls) is not before
    again = context_of(tls)
    tls.reload()  # as SIGHUP does, though nothing has changed
    assert await look("tls.reloaded") == []
    assert context_of(tls) is not again
    watching.cancel()


def test_a_start_names_every_bad_file(pki: Pki) -> None:
    for name in ("own.pem", "clients.crl"):
        (pki.directory / name).write_text("nothing")
    with pytest.raises(UnusableTls) as caught:
        ListenerTls(TlsConfig(**pki.settings()["tls"]))
    assert all(name in str(caught.value) for name in ("own.pem", "clients.crl"))
    assert len(str(caught.value).splitlines()) == 2
