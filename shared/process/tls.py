"""TLS contexts, for the public edge, for the hop, and between the commands of one machine. No version before
1.2; files are checked at start."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from shared.process import logs
from shared.process.files import read_bytes

HTTP1: Final = "http/1.1"
HTTP2: Final = "h2"
FILE_LEN_MAX: Final = 1024 * 1024
"""Bytes of a file with a certificate chain or a key."""
_FIRST_CERTIFICATE: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_HANDSHAKE_TURNS: Final = 4
_MISFITS: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's words for a key that is another certificate's; the last is for one of another type."""

log = logs.get(__name__)


class UnusableTls(Exception):
    """A certificate or key cannot be used; the message names it, for the operator."""


def server_context(
    cert: str,
    key: str,
    *,
    client_ca: str | None = None,
    crl: str | None = None,
    is_client_required: bool = True,
    protocols: Sequence[str],
) -> ssl.SSLContext:
    """A server's context. With `client_ca`, clients show a certificate of it (mTLS), and where it is required
    only those are let in. With `crl`, a file with the revocation lists of the authorities that sign clients'
    certificates, only those of which that list says nothing. The lists are asked about clients' own
    certificates alone: to ask about the whole chain takes one of every authority in it, and refuses all
    clients while one is missing. Raises UnusableTls, with a line for each problem. A certificate that clients
    will not take, as it has expired, is used, and the log warns of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # the default context is stricter from Python 3.13 on
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(protocols))
    problems = []
    files = [partial(_load_own, context, cert, key)]
    files += [partial(_load_trusted, context, file) for file in (client_ca, crl) if file is not None]
    for load in files:
        try:
            load()
        except UnusableTls as error:
            problems.append(str(error))
    if problems:
        raise UnusableTls("\n".join(problems))
    try:
        names_of(cert, key)
    except UnusableTls as error:
        log.warning("tls.certificate_not_valid", problem=str(error))
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED if is_client_required else ssl.CERT_OPTIONAL
    if crl is not None:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def client_context(
    *, ca: str | None = None, cert: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    """A context for a client: it trusts `ca`, or what the system trusts, and shows `cert` when asked. Raises
    UnusableTls."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        _load_trusted(context, ca)
    else:
        context.load_default_certs()
    if cert is not None:
        _load_own(context, cert, key)
    return context


def pinned_context(cert: str) -> ssl.SSLContext:
    """A context for a client that trusts the server with this very certificate, the first in the file,
    whatever authority signed it and by whatever name the server is reached. Raises UnusableTls."""
    try:
        own = _FIRST_CERTIFICATE.search(Path(cert).read_text("ascii"))
        if own is None:
            raise UnusableTls(f"cannot use {cert}: it holds no certificate in PEM")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusted itself, without its authority
        context.load_verify_locations(cadata=own[0])
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableTls(f"cannot use {cert}: {error}") from error
    return context


def names_of(cert: str, key: str) -> tuple[str, ...]:
    """The host names and addresses that a server's certificate is for, found by a handshake in memory.

    Raises UnusableTls, also for a certificate that is not valid now.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = pinned_context(cert).wrap_bio(to_client, to_server)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_own(own, cert, key)
    server = own.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_HANDSHAKE_TURNS):
            for end in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise UnusableTls(f"cannot use {cert}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise UnusableTls(f"cannot use {cert} with {key}: {error}") from error
    found = (client.getpeercert() or {}).get("subjectAltName", ())
    return tuple(_normal(str(entry[1])) for entry in found if entry[0] in ("DNS", "IP Address"))


def _normal(name: str) -> str:
    """An address as Python spells it; a name as it is."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name.strip()))
    return name


def _load_own(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    own = key or cert

    def passphrase() -> str:
        """OpenSSL would ask for one on the terminal, also while it reads the files again."""
        raise UnusableTls(f"cannot use {own}: it is encrypted, and there is no setting for a passphrase")

    try:
        context.load_cert_chain(cert, key, passphrase)
    except OSError as error:  # ssl's own errors are OSErrors
        raise UnusableTls(f"cannot use {cert} with {own}: {_why_not(cert, own, error)}") from error


def _why_not(cert: str, key: str, error: OSError) -> str:
    """The reason for which a certificate and its key are not loaded. OpenSSL names neither of the files."""
    for file, kind in ((cert, "certificate"), (key, "private key")):
        try:
            text = read_bytes(Path(file), FILE_LEN_MAX)
        except OSError as problem:
            return f"{file}: {problem.strerror}"
        if f"{kind.upper()}-----".encode() not in text:
            return f"{file} holds no {kind} in PEM"
    if isinstance(error, ssl.SSLError) and error.reason in _MISFITS:
        return "the key is not that of the certificate"
    return str(error)


def _load_trusted(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise UnusableTls(f"cannot use {ca}: {error}") from error
