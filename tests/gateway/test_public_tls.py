"""TLS on the public port: a handshake that never comes holds a connection for a bounded time."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from gateway import listener
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
