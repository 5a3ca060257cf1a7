"""TLS by files that are read again when they change, so that a certificate is renewed while its service runs.

Rules:

1. A reload makes a new context, and takes it once all files are good; else everything stays as it is, and the
   problems are logged. Files that were changed one after the other are so never taken half.
2. Connections that are open go on; each new one gets the context of its moment.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.files import WatchedFiles
from shared.process.tls import UnusableTls, client_context

POLL_S: Final = 1.0
"""The time between two looks at the files, in seconds."""

log = logs.get(__name__)


class RenewableContext(ssl.SSLContext):
    """The context that a listener or a client is given once. Each handshake is by the one that is `current`
    then."""

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a handshake, as event loops do for each connection."""
        return self.current.wrap_bio(*args, **kwargs)

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        """Offer these protocols, until the next renewal."""
        self.current.set_alpn_protocols(alpn_protocols)


class RenewableTls:
    """The TLS of one side at this moment."""

    def __init__(
        self,
        files: Sequence[str | None],
        load: Callable[[], ssl.SSLContext],
        *,
        is_server: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`load` makes a context of the files; those that are None count for nothing. Raises UnusableTls."""
        self._files: Final = WatchedFiles(files)
        self._load: Final = load
        self._clock: Final = clock
        side = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
        self.context: Final = RenewableContext(side)
        self.context.current = load()

    async def watch(self) -> None:
        """Look at the files again and again, until cancelled."""
        while True:
            await self._clock.sleep(POLL_S)
            await self.look()

    async def look(self) -> None:
        """Look at the files, and take them over if they have changed. A look that is cancelled has seen
        nothing."""
        if self._files.changed():
            try:
                await self._renew()
            except BaseException:
                self._files.forget()
                raise

    def reload(self) -> None:
        """Have the files read at the next look, changed or not."""
        self._files.forget()

    async def _renew(self) -> None:
        try:
            self.context.current = await asyncio.to_thread(self._load)
        except UnusableTls as error:
            log.error("tls.rejected", problems=str(error).splitlines())
            return
        log.info("tls.reloaded", files=[str(file) for file in self._files.paths])


class TrustedAuthorities:
    """The authorities that a client trusts. They are read at the first use, on a thread, since reading all of
    a system's takes 40 ms."""

    def __init__(self, ca: str | None) -> None:
        """`ca` is their file; None trusts the system's."""
        self._ca: Final = ca
        self._tls: RenewableTls | None = None

    async def context(self) -> ssl.SSLContext:
        """The context by the file as it is now. Raises UnusableTls where it never could be read."""
        if self._tls is None:
            load = partial(client_context, ca=self._ca)
            self._tls = await asyncio.to_thread(RenewableTls, (self._ca,), load, is_server=False)
        else:
            await self._tls.look()
        return self._tls.context.current
