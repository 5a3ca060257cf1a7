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

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.config.edge import TlsConfig
from gateway.identity.caller import Revoked
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.files import FileVersion, file_version
from shared.process.renewable_tls import RenewableContext
from shared.process.tls import HTTP1, HTTP2, UnusableTls, server_context

POLL_S: Final = 1.0
"""The time between two looks at the files, in seconds."""
_NOTHING: Final[Revoked] = frozenset()

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The files' contents."""

    context: ssl.SSLContext
    revoked: Revoked


class ListenerTls:
    """The listener's TLS at this moment."""

    def __init__(self, config: TlsConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises UnusableTls, which names every problem."""
        self._config = config
        self._clock = clock
        self._seen = self._versions()
        loaded = _load(config)
        self.context: Final = RenewableContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = loaded.context
        self.revoked = loaded.revoked
        self._asked = False
        """True if the files are to be read at the next look, changed or not."""

    def reload(self) -> None:
        """Have the files read again by `watch`, changed or not."""
        self._asked = True

    async def watch(self) -> None:
        """Look at the files again and again, until cancelled."""
        while True:
            await self._clock.sleep(POLL_S)
            seen = self._versions()
            if seen != self._seen or self._asked:
                self._seen, self._asked = seen, False
                await self._read()

    async def _read(self) -> None:
        try:
            loaded = await asyncio.to_thread(_load, self._config)  # a long revocation list takes a second
        except UnusableTls as error:
            log.error("tls.rejected", problems=str(error).splitlines())
            return
        self.context.current = loaded.context
        self.revoked = loaded.revoked
        log.info("tls.reloaded", revoked=len(loaded.revoked))

    def _versions(self) -> tuple[FileVersion | None, ...]:
        config = self._config
        return tuple(
            file_version(Path(path))
            for path in (config.cert, config.key, config.client_ca, config.crl)
            if path is not None
        )


def tls_of(config: TlsConfig | None, clock: Clock = SYSTEM_CLOCK) -> ListenerTls | None:
    """The TLS of a listener; None where it serves plain text. Raises UnusableTls."""
    return None if config is None else ListenerTls(config, clock)


def _load(config: TlsConfig) -> _Loaded:
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
    return _Loaded(context, revoked)
