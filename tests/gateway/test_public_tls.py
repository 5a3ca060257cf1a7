"""TLS on the public port: a handshake that never comes holds a connection for a bounded time, and who calls
may be told by the client's certificate."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from gateway import app, listener
from gateway.config import GatewayConfig, QuotaLimits
from gateway.identity.caller import Caller, Identity, Principal
from shared.errors import Unauthenticated
from shared.ids import KeyId, TenantId
from tests.gateway.conftest import PATIENCE_S, Open


async def test_a_silent_handshake_is_cut_and_holds_up_nobody(
    open_house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    own = tmp_path / "own.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(own)
    house = await open_house(listen={"port": 0, "tls": {"cert": str(own), "key": str(own)}})
    silent, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    url = f"https://127.0.0.1:{house.gateway.port}/v1/models"
    async with house.client.get(url, headers=house.headers, ssl=trust) as answer:
        assert answer.status == 200
    assert await asyncio.wait_for(silent.read(), PATIENCE_S) == b""
    writer.close()


class ByCertificate:
    """An identity that names callers by their certificates alone, and waits a turn of the event loop."""

    async def identify(self, caller: Caller, now_s: float) -> Principal:
        await asyncio.sleep(0)
        if (certificate := caller.certificate) is None:
            raise Unauthenticated("A client certificate is needed.")
        assert b"the client" in certificate
        return Principal(KeyId("certificate"), TenantId("acme"), ("*",), QuotaLimits())


async def test_an_identity_may_wait_and_sees_the_clients_certificate(
    open_house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, own = trustme.CA(), tmp_path / "own.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(own)
    serves = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serves.load_cert_chain(own)
    serves.verify_mode = ssl.CERT_OPTIONAL
    authority.configure_trust(serves)
    monkeypatch.setattr(app, "_public_tls", lambda _: serves)

    def identity_of(config: GatewayConfig) -> Identity:
        return ByCertificate()

    house = await open_house(identity_of=identity_of)
    url = f"https://127.0.0.1:{house.gateway.port}/v1/models"
    nameless, known = ssl.create_default_context(), ssl.create_default_context()
    authority.configure_trust(nameless)
    authority.configure_trust(known)
    authority.issue_cert("client.test", common_name="the client").configure_cert(known)
    async with house.client.get(url, ssl=nameless, headers=house.headers) as answer:
        assert answer.status == 401, "the key is no longer asked for"
    async with house.client.get(url, ssl=known) as answer:
        assert answer.status == 200
    assert (await house.lines(2))[1]["key_id"] == "certificate"
