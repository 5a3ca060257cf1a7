"""The admin listener as the network sees it: its TLS, and what bounds those who have no key.

The victim is monitoring that scrapes on a connection of its own, and a probe on a new one.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import trustme

from gateway.operators import keys, listener, server
from shared import cli
from shared.cli.admin import KEY_VARIABLE
from shared.process.listening import HEADER_LEN_MAX, HEADERS_MAX, LINE_LEN_MAX
from tests.gateway.conftest import PATIENCE_S, House, Open, until
from tests.gateway.listen.test_public_tls import Pki, events, pki
from tests.gateway.operators.test_admin import OPERATOR, operator_keys

__all__ = ["pki"]
SOON_S = 0.2
SCRAPE = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
KNOWN = f"host: 127.0.0.1\r\nauthorization: {OPERATOR['authorization']}\r\n"
"""Headers of an operator's."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
pytestmark = pytest.mark.hop("http2")


def own(pki: Pki) -> dict[str, Any]:
    """The section of an admin listener with a certificate."""
    return {**operator_keys(), "tls": {"cert": pki.path("own.pem"), "key": pki.path("own.pem")}}


def connect(house: House) -> Any:
    return asyncio.open_connection("127.0.0.1", house.gateway.admin_port)


async def scrape(connection: Connection) -> None:
    """Ask for the metrics on this connection, and read them."""
    reader, writer = connection
    writer.write(SCRAPE)
    async with asyncio.timeout(PATIENCE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200 ")
        [length] = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length.partition(b":")[2]))


async def probe(house: House, context: ssl.SSLContext | None = None) -> int:
    """The status of a probe on a new connection."""
    url = f"{'http' if context is None else 'https'}://127.0.0.1:{house.gateway.admin_port}/readyz"
    async with aiohttp.ClientSession() as client, client.get(url, ssl=context or True) as answer:
        return answer.status


async def is_closed(connection: Connection) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            return await connection[0].read() == b""
    return True


# -- TLS ------------------------------------------------------------------------------------------


async def test_its_certificate_is_renewed_and_connections_stay(open_house: Open, pki: Pki) -> None:
    house = await open_house(admin=own(pki))
    old = pki.client()
    kept = await asyncio.open_connection("127.0.0.1", house.gateway.admin_port, ssl=old)
    await scrape(kept)
    pki.server = trustme.CA()
    pki.renew_server()
    await until(lambda: bool(events(house.log, "tls.reloaded")))
    assert await probe(house, pki.client()) == 200
    with pytest.raises(aiohttp.ClientError):  # it does not trust the new certificate
        await probe(house, old)
    with pytest.raises(aiohttp.ClientError):
        await probe(house)
    await scrape(kept)
    kept[1].close()


async def test_whoever_shows_no_certificate_is_let_in_only_where_none_is_required(
    open_house: Open, pki: Pki
) -> None:
    house = await open_house(admin={"port": 0, "tls": pki.settings("required")["tls"]})
    with pytest.raises(aiohttp.ClientError):
        await probe(house, pki.client())
    assert await probe(house, pki.client(pki.clients.issue_cert("operator.test"))) == 200


async def test_the_commands_ask_it_where_its_authority_is_a_private_one(
    open_house: Open, pki: Pki, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house = await open_house(admin=own(pki))
    async with house.chat() as answer:
        await answer.read()
    url = f"https://127.0.0.1:{house.gateway.admin_port}"
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR["authorization"].removeprefix("Bearer "))
    commands = (["keys", "list", "--tenant", "acme"], ["usage"], ["trace", "--slowest", "1"])
    pki.write("own.ca", pki.server.cert_pem.bytes())
    pki.write("no.ca", trustme.CA().cert_pem.bytes())
    for name in ("no.ca", "own.ca"):
        monkeypatch.setenv("SSL_CERT_FILE", pki.path(name))
        for command in commands:
            status = await asyncio.to_thread(cli.main, [*command, "--admin-url", url])
            told = capsys.readouterr()
            assert status == (name == "no.ca"), told
            assert ("CERTIFICATE_VERIFY_FAILED" in told.err) == (name == "no.ca")


# -- bounds ---------------------------------------------------------------------------------------


async def test_connections_are_bounded_and_those_that_say_nothing_go_first(open_house: Open) -> None:
    house = await open_house(admin={"port": 0})
    victim = await connect(house)
    await scrape(victim)
    silent = [await connect(house) for _ in range(2 * listener.CONNECTIONS_MAX)]
    assert await probe(house) == 200
    await scrape(victim)
    for connection in silent[: listener.CONNECTIONS_MAX]:
        assert await is_closed(connection)
    for _, writer in [victim, *silent]:
        writer.close()
    await until(lambda: bool(events(house.log, "gateway.connections_full")))
    async with house.get("/v1/models") as answer:
        assert answer.status == 200, "callers have connections of their own"


async def test_half_a_head_is_closed_after_its_time(open_house: Open) -> None:
    house = await open_house(admin={"port": 0}, timeouts={"head_s": SOON_S, "idle_s": 60})
    victim, half = await connect(house), await connect(house)
    half[1].write(SCRAPE[:-2])
    assert await is_closed(half)
    await scrape(victim)
    for _, writer in (victim, half):
        writer.close()


async def unread(house: House, *, is_known: bool) -> asyncio.StreamWriter:
    """A connection whose client reads the head of a large answer, and no more."""
    connection: Connection = await connect(house)
    reader, writer = connection
    if is_known:
        writer.write(f"GET /admin/v1/console/operator HTTP/1.1\r\n{KNOWN}\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"200"
    writer.write(SCRAPE)
    while b"text/plain" not in await reader.readuntil(b"\r\n"):
        pass
    return writer


def make_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the metrics be more than a connection's buffers hold."""
    told = SimpleNamespace(body=b"a" * 16 * 1024 * 1024, content_type="text/plain")
    monkeypatch.setattr(server, "exposition", lambda _: told)


async def test_an_answer_that_is_not_read_holds_its_connection_for_a_bounded_time(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 1)
    make_large(monkeypatch)
    house = await open_house(admin=operator_keys(), timeouts={"slow_client_s": SOON_S})
    writer = await unread(house, is_known=True)
    async with asyncio.timeout(PATIENCE_S):
        while True:  # refused as long as the only place is taken
            with suppress(aiohttp.ClientError):
                assert await probe(house) == 200
                break
    writer.close()


async def test_those_without_a_key_hold_no_place_that_another_needs(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 4)
    make_large(monkeypatch)
    house = await open_house(admin=operator_keys(), timeouts={"slow_client_s": 10 * PATIENCE_S})
    operators = await unread(house, is_known=True)
    strangers = [await unread(house, is_known=False) for _ in range(4)]
    assert await probe(house) == 200
    assert not operators.transport.is_closing()
    for writer in (operators, *strangers):
        writer.transport.abort()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9090", 200),
        ("[::1]:1", 200),
        ("LOCALHOST", 200),
        ("localhost.:80", 200),
        ("", 200),
        ("penstock-admin.ns.svc", 200),
        ("evil.example:9090", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_it_answers_to_no_name_that_it_was_not_given(open_house: Open, host: str, status: int) -> None:
    """Any page may have its own name point here, and a browser lets it read what that name answers."""
    house = await open_house(admin=operator_keys() | {"names": ["penstock-admin.ns.svc"]})
    url = f"http://127.0.0.1:{house.gateway.admin_port}"
    for path in ("/metrics", "/readyz", "/console", "/admin/openapi.json"):
        async with house.client.get(url + path, headers={"host": host}) as answer:
            assert answer.status == status
    headers = {"host": host, "origin": f"http://{host}"} | OPERATOR
    async with house.client.delete(f"{url}/admin/v1/requests/x", headers=headers) as answer:
        assert answer.status == (status if host else 403)


async def test_it_may_be_called_by_any_name(open_house: Open) -> None:
    house = await open_house(admin={"port": 0, "names": ["*"]})
    url = f"http://127.0.0.1:{house.gateway.admin_port}/metrics"
    async with house.client.get(url, headers={"host": "whatever.example"}) as answer:
        assert answer.status == 200


async def test_a_body_that_drips_is_given_up_after_its_time(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keys.BODY_S == 10, "as README says"
    monkeypatch.setattr(keys, "BODY_S", SOON_S)
    house = await open_house(admin=operator_keys())
    victim, (reader, writer) = await connect(house), await connect(house)
    head = (
        f"POST /admin/v1/keys HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: {OPERATOR['authorization']}\r\n"
    )
    writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
    async with asyncio.timeout(PATIENCE_S):
        head_line, _, rest = (await reader.read()).partition(b"\r\n")
    assert head_line.split()[1] == b"408"
    assert b"within 0.2 s" in rest
    assert not events(house.log, "admin.change")
    await scrape(victim)
    for one in (victim[1], writer):
        one.close()


async def test_what_is_no_request_gets_the_error_that_clients_know(open_house: Open) -> None:
    house = await open_house(admin={"port": 0})
    reader, writer = await connect(house)
    writer.write(b"garbage\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"x-request-id" in head.lower()
    assert b"not well-formed HTTP" in body
    writer.close()


async def test_a_change_that_has_begun_is_made_though_its_operator_leaves(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await open_house(admin=operator_keys())
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def reload() -> list[str]:
        begun.set()
        await go_on.wait()
        return []

    monkeypatch.setattr(house.gateway.accounts, "reload", reload)
    _, writer = await connect(house)
    writer.write(f"POST /admin/v1/reload HTTP/1.1\r\n{KNOWN}\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
    writer.transport.abort()
    await probe(house)  # so that the gateway has seen it
    go_on.set()
    await until(lambda: bool(events(house.log, "admin.change")))


@pytest.mark.parametrize(
    "head",
    [
        f"GET /{'x' * LINE_LEN_MAX} HTTP/1.1\r\nhost: a\r\n\r\n",
        f"GET / HTTP/1.1\r\nhost: a\r\nx: {'x' * (HEADER_LEN_MAX + 1)}\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\n" + "x: y\r\n" * HEADERS_MAX + "\r\n",
    ],
    ids=["line", "header", "headers"],
)
async def test_a_head_is_bounded_in_every_way(open_house: Open, head: str) -> None:
    house = await open_house(admin={"port": 0, "names": ["a"]})
    reader, writer = await connect(house)
    writer.write(head.encode())
    status_line = await reader.readline()
    writer.close()
    assert b" 400 " in status_line
