"""TLS contexts, for the public edge and for the hop. No version before 1.2; files are checked at start."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final

HTTP1: Final = "http/1.1"
HTTP2: Final = "h2"


class UnusableTls(Exception):
    """A certificate or key cannot be used; the message names it, for the operator."""


def server_context(
    cert: str, key: str, *, client_ca: str | None = None, protocols: Sequence[str]
) -> ssl.SSLContext:
    """With `client_ca`, only clients with a certificate of it are let in (mTLS). Raises UnusableTls."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(protocols))
    _load_own(context, cert, key)
    if client_ca is not None:
        _load_trusted(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    *, ca: str | None = None, cert: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    """Trusts `ca`, or what the system trusts; shows `cert` when it is asked for. Raises UnusableTls."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        _load_trusted(context, ca)
    else:
        context.load_default_certs()
    if cert is not None:
        _load_own(context, cert, key)
    return context


def _load_own(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl's own errors are among them
        raise UnusableTls(f"cannot use {cert} with {key or cert}: {error}") from error


def _load_trusted(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise UnusableTls(f"cannot use {ca}: {error}") from error
