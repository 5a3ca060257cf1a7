"""TLS of a listener, the public one or the admin one. Certificate, authorities and revocation lists are read
again when their files change, and at SIGHUP.

Rules:

1. A reload makes a new context, and takes it once all files are good; else everything stays as it is, and all
   problems are logged. Connections that are open go on; new ones get the new context. So nothing is ever half
   new, and no session of before the reload can be resumed past it.
2. OpenSSL verifies clients, by their authorities' revocation lists too. It lets in no client of an authority
   without a list, or with one that has expired: what cannot be known to be good is refused.
3. The protocol is HTTP/1.1, whatever else a client speaks. HTTP/2 is agreed on only with one that speaks
   nothing else, and only to tell it so (`gateway.listen.listener`).
"""

from __future__ import annotations

import ssl
from functools import partial
from typing import Final

from gateway.config.edge import TlsConfig
from gateway.identity.caller import Revoked
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.renewable_tls import RenewableTls
from shared.process.tls import HTTP1, HTTP2, UnusableTls, server_context

_NOTHING: Final[Revoked] = frozenset()


class ListenerTls(RenewableTls):
    """The listener's TLS at this moment."""

    def __init__(self, config: TlsConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises UnusableTls, which names every problem."""
        self.revoked = _NOTHING
        files = (config.cert, config.key, config.client_ca, config.crl)
        super().__init__(files, partial(self._read, config), is_server=True, clock=clock)

    def _read(self, config: TlsConfig) -> ssl.SSLContext:
        context, self.revoked = _load(config)  # a long revocation list takes a second
        return context


def tls_of(config: TlsConfig | None, clock: Clock = SYSTEM_CLOCK) -> ListenerTls | None:
    """The TLS of a listener; None where it serves plain text. Raises UnusableTls."""
    return None if config is None else ListenerTls(config, clock)


def _load(config: TlsConfig) -> tuple[ssl.SSLContext, Revoked]:
    """Raises UnusableTls, with a line for each problem."""
    problems: list[str] = []
    revoked = _NOTHING
    try:
        is_required = config.client_certificates == "required"
        context = server_context(
            config.cert,
            config.key,
            client_ca=config.client_ca,
            crl=config.crl,
            is_client_required=is_required,
            protocols=[HTTP1, HTTP2],
        )
    except UnusableTls as error:
        problems += str(error).splitlines()
    if config.crl is not None and config.client_ca is not None:
        named = (config.crl, config.client_ca)
        is_told = any(path in problem for problem in problems for path in named)
        try:
            from gateway.identity.certificates import revoked_in  # as `gateway.identity.callers` does

            revoked = _NOTHING if is_told else revoked_in(config.crl, config.client_ca)
        except UnusableTls as error:
            problems += str(error).splitlines()
    if problems:
        raise UnusableTls("\n".join(problems))
    return context, revoked
