"""Client certificates whose names are of forms that nobody is named by."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, NameOID, ObjectIdentifier

from gateway.holder_config import CertificateConfig
from gateway.identity.certificates import CertificateTable

DAY = timedelta(days=1)
OTHER_FORMS = "3009a507a1050c03782e78", "3004a3023000"
"""An ediPartyName and an x400Address as subject alternative names, in DER."""


def with_names(*extensions: tuple[ObjectIdentifier, str]) -> bytes:
    """A certificate of CN=batch with extensions in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "batch")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, now - DAY, now + DAY)
    for oid, der in extensions:
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, bytes.fromhex(der)), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def twice_named() -> bytes:
    """A certificate whose names are there twice, which no builder makes."""
    names = "30088206782e74657374"
    one, other = ExtensionOID.SUBJECT_ALTERNATIVE_NAME, ExtensionOID.ISSUER_ALTERNATIVE_NAME
    der = with_names((one, names), (other, names))
    return der.replace(bytes.fromhex("551d12"), bytes.fromhex("551d11"))


def test_a_certificate_whose_names_cannot_be_read_names_nobody() -> None:
    """The victim is the holder of a key who shows it, too."""
    entries = [
        CertificateConfig("by-dns", "acme", dns="x.test"),
        CertificateConfig("cn", "acme", subject="CN=batch"),
    ]
    table = CertificateTable(entries, frozenset)
    assert table.check(with_names(), 0) is not None
    names = ExtensionOID.SUBJECT_ALTERNATIVE_NAME
    for der in (*(with_names((names, form)) for form in OTHER_FORMS), twice_named()):
        assert table.check(der, 0) is None
