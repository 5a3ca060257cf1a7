"""Files of revocation lists that cannot be used are told apart, before anybody is let in by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from cryptography import x509

from gateway.identity.certificates import CRL_LEN_MAX, revoked_in
from shared.process.tls import UnusableTls
from tests.gateway.listen.test_public_tls import Pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def test_a_list_names_whom_its_authority_revokes(pki: Pki) -> None:
    pki.revoke(pki.clients.issue_cert("a.example"), pki.clients.issue_cert("b.example"))
    assert len(revoked_in(pki.path("clients.crl"), pki.path("clients.ca"))) == 2


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"x" * (CRL_LEN_MAX + 1), "larger than"),
        (b"no list", "holds no revocation list"),
        (b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "cannot use"),
        (None, "No such file"),
    ],
    ids=["large", "empty", "broken", "missing"],
)
def test_a_file_that_is_no_list_is_told(pki: Pki, data: bytes | None, told: str) -> None:
    path = Path(pki.path("clients.crl"))
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UnusableTls, match=told):
        revoked_in(str(path), pki.path("clients.ca"))


def test_a_list_of_another_authority_or_by_another_key_is_refused(pki: Pki) -> None:
    other = trustme.CA(organization_name="Clients")
    pki.revoke(signer=other)
    with pytest.raises(UnusableTls, match="no authority"):
        revoked_in(pki.path("clients.crl"), pki.path("clients.ca"))
    pki.revoke()
    pki.trust_clients_of(trustme.CA(organization_name="Others"))
    subject = x509.load_pem_x509_certificate(pki.clients.cert_pem.bytes()).subject.rfc4514_string()
    with pytest.raises(UnusableTls, match=subject.split(",", maxsplit=1)[0].replace("+", r"\+")):
        revoked_in(pki.path("clients.crl"), pki.path("clients.ca"))
