"""Certificates, authorities and revocation lists that are renewed again and again beside new connections."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from shared.process import renewable_tls
from tests.gateway.conftest import PATIENCE_S, House, Open, until
from tests.gateway.listen.test_public_tls import ENTRIES, Pki, events, status

RENEWALS = 50
CALLERS = 4
pytestmark = pytest.mark.hop("http2")


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pki:
    monkeypatch.setattr(renewable_tls, "POLL_S", 0.001)
    return Pki(tmp_path)


def renew(pki: Pki) -> bytes:
    """Renew every file, one after the other, as operators do: for a moment certificate and key do not fit.
    Returns the new certificate."""
    leaf = pki.server.issue_cert("127.0.0.1")
    pki.write("own.key", leaf.private_key_pem.bytes())
    pki.write("own.crt", leaf.cert_chain_pems[0].bytes())
    pki.trust_clients_of(pki.clients)
    pki.revoke()
    return ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())


async def presented(house: House, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def test_no_new_connection_fails_while_all_files_are_renewed(open_house: Open, pki: Pki) -> None:
    renew(pki)
    own = {"cert": pki.path("own.crt"), "key": pki.path("own.key")}
    house = await open_house(listen=pki.settings("required", **own), certificates=ENTRIES)
    client, statuses = pki.client(pki.clients.issue_cert("batch.test")), list[int]()

    async def connect() -> None:
        while True:
            statuses.append(await status(house, client))

    async with asyncio.timeout(6 * PATIENCE_S), asyncio.TaskGroup() as group:
        callers = [group.create_task(connect()) for _ in range(CALLERS)]
        for _ in range(RENEWALS):
            newest, count = await asyncio.to_thread(renew, pki), len(statuses)
            while await presented(house, client) != newest:
                await until(lambda: len(statuses) > count)  # noqa: B023
        for caller in callers:
            caller.cancel()
    assert len(statuses) > RENEWALS
    assert set(statuses) == {200}
    await until(lambda: len(events(house.log, "tls.reloaded")) >= RENEWALS)
