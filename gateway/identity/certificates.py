"""Client certificates: the callers that they name, and whether they are still good.

The handshake has verified it by then: the chain, the time, the revocation lists
(`gateway.listen.listener_tls`). But a connection outlives a handshake: so with each request it is looked at
whether the certificate has been revoked or has expired since.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes
from cryptography.x509.oid import ExtensionOID
from msgspec import Struct

from gateway.config.certificate_names import CertificateName, Subject
from gateway.config.holders import CertificateConfig
from gateway.identity.bounded import BoundedDict
from gateway.identity.caller import Principal, Revoked
from shared.process import logs
from shared.process.tls import UnusableTls
from shared.wire.errors import Unauthenticated
from shared.wire.ids import KeyId, TenantId

KNOWN_MAX: Final = 4096
"""Certificates that have been read, of some kilobytes each."""
CRL_LEN_MAX: Final = 4 * 1024 * 1024
"""The largest file of revocation lists, in bytes."""
_CRL: Final = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)

log = logs.get(__name__)


class _Known(Struct, frozen=True, eq=False):
    """A certificate that has been read."""

    issuer: bytes
    """The issuer's name in DER."""
    serial: int
    until_s: float
    """The end of its validity, on the wall clock."""
    principal: Principal | None
    """The caller that it names; None where the table names none."""


class CertificateTable:
    """All client certificates that name callers, at one moment. Immutable but for what it remembers: a reload
    builds another."""

    __slots__ = ("_by_name", "_known", "_revoked")

    def __init__(self, entries: Iterable[CertificateConfig], revoked: Callable[[], Revoked]) -> None:
        """`revoked` gives what is revoked now."""
        self._by_name: Final[dict[CertificateName, tuple[int, Principal]]] = {}
        for at, entry in enumerate(entries):
            principal = Principal(
                KeyId(entry.id),
                TenantId(entry.tenant),
                entry.models,
                entry.limits,
                entry.service_tier,
                model_limits=entry.model_limits,
            )
            self._by_name.setdefault(entry.name, (at, principal))
        self._known: Final = BoundedDict[bytes, _Known](KNOWN_MAX)
        self._revoked: Final = revoked

    def check(self, certificate: bytes, now_s: float) -> Principal | None:
        """The caller that a certificate in DER names; None where the table names none. Raises Unauthenticated
        where it is not good any more."""
        known = self._known.get(certificate)
        if known is None:
            known = self._read(certificate)
            self._known.put(certificate, known)
        if now_s >= known.until_s:
            raise Unauthenticated("The client certificate has expired.", detail="certificate has expired")
        if (known.issuer, known.serial) in self._revoked():
            detail = f"certificate {known.serial:x} is revoked"
            raise Unauthenticated("The client certificate has been revoked.", detail=detail)
        return known.principal

    def _read(self, certificate: bytes) -> _Known:
        try:
            read = x509.load_der_x509_certificate(certificate)
            found = [entry for name in _names_in(read) if (entry := self._by_name.get(name)) is not None]
            until_s = read.not_valid_after_utc.timestamp()
            _, principal = min(found, key=lambda entry: entry[0], default=(0, None))
            return _Known(read.issuer.public_bytes(), read.serial_number, until_s, principal)
        except (
            ValueError,
            TypeError,
            x509.InvalidVersion,
        ) as error:  # OpenSSL took it, and cryptography reads more strictly
            kind = type(error).__name__
            raise Unauthenticated(
                "The client certificate is malformed.", detail=f"certificate: {kind}"
            ) from None


def _names_in(certificate: x509.Certificate) -> list[CertificateName]:
    """All names that it has, as `CertificateConfig.name` gives them. None of a certificate whose other names
    are of forms that are not read here, or that has an extension twice: it is good, and names nobody."""
    names: list[CertificateName] = [("subject", _said_by(certificate.subject))]
    try:
        extension = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME)
    except x509.ExtensionNotFound:
        return names
    except (x509.UnsupportedGeneralNameType, x509.DuplicateExtension):
        return []
    assert isinstance(extension.value, x509.SubjectAlternativeName)
    dns = extension.value.get_values_for_type(x509.DNSName)
    uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    return [*(("dns", name.lower()) for name in dns), *(("uri", uri) for uri in uris), *names]


def _said_by(subject: x509.Name) -> Subject:
    return tuple(
        frozenset((attribute.oid.dotted_string, str(attribute.value)) for attribute in part)
        for part in reversed(subject.rdns)
    )


# -- revocation lists -----------------------------------------------------------------------------


def revoked_in(crl: str, client_ca: str) -> Revoked:
    """The certificates that the lists in a file revoke. Raises UnusableTls where a list is none of the
    authorities'. An authority without a list is logged: none of its clients is let in."""
    try:
        authorities = x509.load_pem_x509_certificates(Path(client_ca).read_bytes())
        lists = list(_lists(crl))
    except (OSError, ValueError) as error:
        raise UnusableTls(f"cannot use {crl} with {client_ca}: {error}") from error
    found: set[tuple[bytes, int]] = set()
    listed: set[x509.Certificate] = set()
    for revocations in lists:
        name = revocations.issuer.rfc4514_string()
        signers = [authority for authority in authorities if _has_signed(authority, revocations)]
        listed.update(signers)
        if not signers:
            raise UnusableTls(f"cannot use {crl}: no authority in {client_ca} has signed the list of {name}")
        if (until := revocations.next_update_utc) is not None and until < datetime.now(UTC):
            log.warning("tls.revocations_expired", path=crl, issuer=name, until=until.isoformat())
        issuer = revocations.issuer.public_bytes()
        found |= {(issuer, revocation.serial_number) for revocation in revocations}
    if without := [one.subject.rfc4514_string() for one in authorities if one not in listed]:
        log.warning("tls.authorities_without_list", path=client_ca, authorities=without)
    return frozenset(found)


def _lists(crl: str) -> Iterator[x509.CertificateRevocationList]:
    """Raises OSError or ValueError."""
    with Path(crl).open("rb") as file:
        data = file.read(CRL_LEN_MAX + 1)
    if len(data) > CRL_LEN_MAX:
        raise ValueError(f"larger than {CRL_LEN_MAX} bytes")
    found = _CRL.findall(data)
    if not found:
        raise ValueError("it holds no revocation list in PEM")
    for pem in found:
        yield x509.load_pem_x509_crl(pem)


def _has_signed(authority: x509.Certificate, revocations: x509.CertificateRevocationList) -> bool:
    if authority.subject != revocations.issuer:
        return False
    try:
        return revocations.is_signature_valid(cast(CertificateIssuerPublicKeyTypes, authority.public_key()))
    except TypeError:  # an authority with a key that signs nothing
        return False
