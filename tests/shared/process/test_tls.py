"""Contexts of TLS: files that cannot be used are named, with the reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from shared.process.tls import HTTP1, UnusableTls, server_context
from tests.fakes import captured_logs


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
