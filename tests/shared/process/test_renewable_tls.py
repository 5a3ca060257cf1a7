"""Certificates that change while both ends of the hop run: new connections are by the new ones;
files that cannot be used are named, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from shared.process.renewable_tls import POLL_S, RenewableTls
from shared.process.tls import HTTP1, UnusableTls, client_context, server_context
from tests.fakes import VirtualClock, captured_logs
from tests.waiting import PATIENCE_S


class Side:
    """The files of one end: its own certificate and the authority that it trusts."""

    def __init__(self, directory: Path) -> None:
        self.own, self.ca = str(directory / "own.pem"), str(directory / "ca.pem")

    def write(self, authority: trustme.CA, trusted: trustme.CA | None = None) -> None:
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_and_cert_chain_pem.write_to_path(self.own)
        (trusted or authority).cert_pem.write_to_path(self.ca)

    def spoil(self) -> None:
        """Leave half a certificate."""
        Path(self.own).write_text("-----BEGIN CERT")

    def lose(self) -> None:
        """Leave none."""
        Path(self.own).unlink()


@pytest.fixture
def server_side(tmp_path: Path) -> Side:
    (tmp_path / "server").mkdir()
    return Side(tmp_path / "server")


@pytest.fixture
def client_side(tmp_path: Path) -> Side:
    (tmp_path / "client").mkdir()
    return Side(tmp_path / "client")


@pytest.fixture
def said() -> Iterator[list[MutableMapping[str, Any]]]:
    with captured_logs() as lines:
        yield lines


async def until(condition: Callable[[], bool], clock: VirtualClock) -> None:
    """Let the watches look again and again until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            clock.advance(POLL_S)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def echo(tls: RenewableTls) -> AsyncIterator[int]:
    """A server that answers each line with the same. Its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"hello\n")
    async with asyncio.timeout(PATIENCE_S):
        return await reader.readline()


async def test_both_ends_go_over_to_another_authority(
    server_side: Side, client_side: Side, said: list[MutableMapping[str, Any]]
) -> None:
    old, new = trustme.CA(), trustme.CA()
    server_side.write(old)
    client_side.write(old)
    clock = VirtualClock()
    own, ca = server_side.own, server_side.ca
    serving = RenewableTls(
        (own, ca, None),
        partial(server_context, own, own, client_ca=ca, protocols=[HTTP1]),
        is_server=True,
        clock=clock,
    )
    asking = RenewableTls(
        (client_side.ca, client_side.own),
        partial(client_context, ca=client_side.ca, cert=client_side.own),
        is_server=False,
        clock=clock,
    )
    asking.context.set_alpn_protocols([HTTP1])
    watches = [asyncio.create_task(one.watch()) for one in (serving, asking)]
    async with echo(serving) as port:
        connect = partial(asyncio.open_connection, "127.0.0.1", port, ssl=asking.context)
        before = await connect()
        assert await asked(*before) == b"hello\n"
        server_side.write(new)
        await until(lambda: [line["event"] for line in said].count("tls.reloaded") == 1, clock)
        with pytest.raises(OSError):  # only one end has gone over
            await asked(*await connect())
        client_side.write(new)
        await until(lambda: [line["event"] for line in said].count("tls.reloaded") == 2, clock)
        after = await connect()
        assert await asked(*after) == b"hello\n"
        assert await asked(*before) == b"hello\n", "open connections go on"
        for _, writer in (before, after):
            writer.close()
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)


async def test_files_that_do_not_fit_change_nothing(
    server_side: Side, said: list[MutableMapping[str, Any]]
) -> None:
    server_side.write(trustme.CA())
    clock = VirtualClock()
    own = server_side.own
    load = partial(server_context, own, own, protocols=[HTTP1])
    tls = RenewableTls((own,), load, is_server=True, clock=clock)
    before = tls.context.current
    watch = asyncio.create_task(tls.watch())
    server_side.spoil()
    await until(lambda: bool(said), clock)
    assert said[0]["event"] == "tls.rejected"
    assert own in said[0]["problems"][0]
    assert tls.context.current is before
    server_side.lose()
    await until(lambda: len(said) == 2, clock)
    assert tls.context.current is before
    server_side.write(trustme.CA())
    await until(lambda: said[-1]["event"] == "tls.reloaded", clock)
    assert tls.context.current is not before
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


def test_files_that_cannot_be_used_at_first_are_an_error(server_side: Side) -> None:
    own = server_side.own
    with pytest.raises(UnusableTls):
        RenewableTls((own,), partial(server_context, own, own, protocols=[HTTP1]), is_server=True)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate, and its key."""
    own, (cert, key) = trustme.CA().issue_cert("localhost"), (tmp_path / "own.crt", tmp_path / "own.key")
    own.cert_chain_pems[0].write_to_path(cert)
    own.private_key_pem.write_to_path(key)
    return cert, key


def problem(cert: Path, key: Path) -> str:
    with pytest.raises(UnusableTls) as caught:
        server_context(str(cert), str(key), protocols=[HTTP1])
    return str(caught.value)


def test_the_file_that_is_wrong_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = files
    none = tmp_path / "none"
    assert problem(none, key) == f"cannot use {none} with {key}: {none}: No such file or directory"
    assert problem(cert, none) == f"cannot use {cert} with {none}: {none}: No such file or directory"
    assert problem(key, cert).endswith(f": {key} holds no certificate in PEM"), "they are swapped"
    assert problem(cert, cert).endswith(f": {cert} holds no private key in PEM")
    assert problem(tmp_path, key).endswith(f": {tmp_path}: not a regular file")
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(key)
    assert problem(cert, key).endswith(": the key is not that of the certificate")
    trustme.CA().issue_cert("localhost", key_type=trustme.KeyType.RSA).private_key_pem.write_to_path(key)
    assert problem(cert, key).endswith(": the key is not that of the certificate"), "it is of another type"


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(
    files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    cert, key = files
    plain = load_pem_private_key(key.read_bytes(), None)
    own = Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase")
    key.write_bytes(plain.private_bytes(*own))
    assert problem(cert, key) == (
        f"cannot use {key}: it is encrypted, and there is no setting for a passphrase"
    )
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("from_day", "to_day", "problem"),
    [(-9, -1, "certificate has expired"), (1, 9, "certificate is not yet valid"), (-1, 1, None)],
)
def test_a_certificate_that_no_client_takes_is_used_and_warned_of(
    tmp_path: Path, from_day: int, to_day: int, problem: str | None
) -> None:
    days = [datetime.now(UTC) + timedelta(days=day) for day in (from_day, to_day)]
    own = trustme.CA().issue_cert("localhost", not_before=days[0], not_after=days[1])
    cert = tmp_path / "own.pem"
    own.private_key_and_cert_chain_pem.write_to_path(cert)
    with captured_logs() as said:
        server_context(str(cert), str(cert), protocols=[HTTP1])
    told = [(line["event"], line["problem"]) for line in said]
    event = "tls.certificate_not_valid"
    assert told == ([] if problem is None else [(event, f"cannot use {cert}: {problem}")])
