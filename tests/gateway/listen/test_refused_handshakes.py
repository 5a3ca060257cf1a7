"""TLS handshakes that fail leave a trace: a counter by the reason, and a line now and then."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from shared.process import handshakes
from tests.gateway.conftest import PATIENCE_S, House, Open, until
from tests.gateway.listen.test_public_tls import DAY, Pki, events, status, with_extension

pytestmark = pytest.mark.hop("http2")


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def counted() -> dict[str, float]:
    """The handshakes that have failed, by the reason."""
    return {str(labels[0]): series.value for labels, series in handshakes.FAILED._series.items()}


def since(before: dict[str, float]) -> dict[str, float]:
    return {reason: n - before.get(reason, 0) for reason, n in counted().items() if n != before.get(reason)}


def plain(pki: Pki) -> ssl.SSLContext:
    return pki.client()


def foreign(pki: Pki) -> ssl.SSLContext:
    return pki.client(trustme.CA().issue_cert("a.test"))


def revoked(pki: Pki) -> ssl.SSLContext:
    bad = pki.clients.issue_cert("a.test")
    pki.revoke(bad)
    return pki.client(bad)


def expired(pki: Pki) -> ssl.SSLContext:
    now = datetime.now(UTC)
    return pki.client(pki.clients.issue_cert("a.test", not_before=now - 2 * DAY, not_after=now - DAY))


def early(pki: Pki) -> ssl.SSLContext:
    now = datetime.now(UTC)
    return pki.client(pki.clients.issue_cert("a.test", not_before=now + DAY, not_after=now + 2 * DAY))


def of_a_server(pki: Pki) -> ssl.SSLContext:
    context = pki.client()
    with_extension(pki.clients, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))(context)
    return context


def without_list(pki: Pki) -> ssl.SSLContext:
    other = trustme.CA(organization_name="Listless")
    pki.write("clients.ca", pki.clients.cert_pem.bytes() + other.cert_pem.bytes())
    return pki.client(other.issue_cert("a.test"))


def with_an_old_list(pki: Pki) -> ssl.SSLContext:
    pki.revoke(until=-DAY / 2)
    return pki.client(pki.clients.issue_cert("a.test"))


@pytest.mark.parametrize(
    ("client", "reason", "problem"),
    [
        (plain, "no_certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (foreign, "unknown_authority", "unable to get local issuer certificate"),
        (revoked, "revoked", "certificate revoked"),
        (expired, "expired", "certificate has expired"),
        (early, "not_yet_valid", "certificate is not yet valid"),
        (of_a_server, "wrong_purpose", "purpose"),
        (without_list, "no_revocation_list", "unable to get certificate CRL"),
        (with_an_old_list, "revocation_list_expired", "CRL has expired"),
    ],
)
async def test_a_certificate_that_is_refused_is_counted_and_told_by_its_reason(
    open_house: Open, pki: Pki, client: Callable[[Pki], ssl.SSLContext], reason: str, problem: str
) -> None:
    context = client(pki)
    house = await open_house(listen=pki.settings("required"))
    before = counted()
    for _ in range(3):
        await knock(house, b"", context)
    await until(lambda: since(before) == {reason: 3})
    await until(lambda: bool(told(house)))
    [line] = told(house)
    assert (line["level"], line["reason"]) == ("warning", reason)
    assert (line["port"], line["address"]) == (house.gateway.port, "127.0.0.1")
    assert problem in line["problem"]


async def knock(house: House, sent: bytes, context: ssl.SSLContext | None = None) -> None:
    """Connect, send this, and wait until the gateway closes the connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, ssl=context)
            writer.write(sent)
            if context is None:
                writer.write_eof()
            await reader.read()
            writer.close()


def told(house: House) -> list[dict[str, Any]]:
    return events(house.log, "listener.handshake_failed")


async def test_each_reason_is_told_and_whoever_looks_for_open_ports_is_not(
    open_house: Open, pki: Pki
) -> None:
    house = await open_house(listen=pki.settings("required"))
    before = counted()
    hello = b"\x16\x03\x01\x00\xa5\x01"  # the beginning of one
    for sent in [b"", hello, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 40] * 20:
        await knock(house, sent)
    for context in (foreign(pki), plain(pki)):
        await knock(house, b"", context)
    one_each = {"unknown_authority": 1, "no_certificate": 1}
    await until(lambda: since(before) == {"left": 20, "plain_text": 20, "other": 20, **one_each})
    await until(lambda: len(told(house)) == 4)
    assert {line["reason"] for line in told(house)} == {"plain_text", "other", *one_each}


async def test_an_authority_without_a_list_is_told_when_the_files_are_read(
    open_house: Open, pki: Pki
) -> None:
    without_list(pki)
    house = await open_house(listen=pki.settings())
    await until(lambda: bool(events(house.log, "tls.authorities_without_list")))
    [line] = events(house.log, "tls.authorities_without_list")
    assert line["path"] == pki.path("clients.ca")
    [authority] = line["authorities"]
    assert "O=Listless" in authority


async def test_without_lists_none_is_missed(open_house: Open, pki: Pki) -> None:
    without_list(pki)
    settings = pki.settings()
    del settings["tls"]["crl"]
    house = await open_house(listen=settings)
    assert await status(house, pki.client(), house.headers) == 200
    assert not events(house.log, "tls.authorities_without_list")
