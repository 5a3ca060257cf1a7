"""The acceptance of connections, the same for every TCP listener of both services.

A few are accepted in one turn of the loop. When none can be accepted, as the process may open no more files,
one that nobody misses is closed, and the next accepted in the following turn. Where there is none, or no
memory is left, that is counted and now and then logged; those who connect wait in the kernel, and are
accepted once there is room. uvloop by itself would close them without a word, and asyncio log a traceback for
each.

A TLS handshake that fails is counted by its reason, and but for clients that do not go on a line says so now
and then, for each reason by itself.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from structlog.typing import FilteringBoundLogger

from shared.process import descriptors, handshakes, logs
from shared.process.listening import CLOSE_GRACE_S
from shared.process.metrics import Counter

ACCEPT_MAX: Final = 64
"""Connections that are accepted in one turn of the loop, each of which takes some 15 microseconds."""
PAUSE_S: Final = 1.0
"""The time for which nothing is accepted when none could be, in seconds."""
HANDSHAKES_MAX: Final = 1024
"""TLS handshakes at a time. Above it, the one that has lasted for longest is cut: one that goes on takes a
few turns of the loop, and those that fill the number do not go on."""
HANDSHAKE_S: Final = 10.0
"""How long a TLS handshake may take, in seconds."""
WARN_EVERY_S: Final = 10.0
"""The shortest time between two log lines that say the same of connections, in seconds."""
ACCEPTS_FAILED: Final = Counter(
    "penstock_accepts_failed",
    "Times that no connection could be accepted for a second: no descriptor, or no memory, was left.",
)

DISPLACED: Final = Counter(
    "penstock_connections_displaced",
    "Connections closed as no descriptor was left for another: the oldest of which nothing had come.",
)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)

log = logs.get(__name__)


class Warnings:
    """Warnings that would be many: of each event one line in `WARN_EVERY_S`, or one for each of its kinds."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log: Final = log
        self._told_at_s: Final[dict[tuple[str, str], float]] = {}
        """The time of the last line of each event and kind, in seconds on the loop's clock."""

    def warn(self, event: str, kind: str = "", /, **values: object) -> None:
        """`kind` is one of a few constants: their times are kept for ever."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_at_s.get((event, kind), -math.inf) >= WARN_EVERY_S:
            self._told_at_s[event, kind] = now_s
            self._log.warning(event, **values)


class Accepting:
    """A listening socket, whose connections are set up as they come."""

    def __init__(
        self,
        sock: socket.socket,
        backlog: int,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
        handshake_s: float = HANDSHAKE_S,
        handshakes_max: int = HANDSHAKES_MAX,
        *,
        displace: Callable[[], bool] = lambda: False,
        is_reserved_for: bool = False,
    ) -> None:
        """Begin to accept. `sock` is bound. `handshake_s` is the time limit of a TLS handshake, and
        `handshakes_max` the most of them at a time. `displace` closes a connection that nobody misses, and
        returns whether there was one. `is_reserved_for` is true if the descriptors that are reserved
        (`shared.process.descriptors`) are for this listener."""
        self._loop = asyncio.get_running_loop()
        self._sock: Final = sock
        self._port: Final[int] = sock.getsockname()[1]
        self._protocol: Final = protocol
        self._tls: Final[dict[str, Any]] = {"ssl": tls, "ssl_handshake_timeout": handshake_s} if tls else {}
        self._handshakes_max: Final = handshakes_max
        self._displace: Final = displace
        self._is_reserved_for: Final = is_reserved_for
        self._beginning: Final[dict[asyncio.Task[None], None]] = {}
        """The connections that are being set up, the oldest first. With TLS that takes a handshake."""
        self._warnings: Final = Warnings(log)
        self._is_accepting = False
        self._is_short = False
        """True for `PAUSE_S` after no connection could be accepted."""
        self._is_closed = False
        sock.setblocking(False)
        sock.listen(backlog)
        self._resume()

    async def aclose(self) -> None:
        """Accept no more connections, and set up those that are there, `CLOSE_GRACE_S` at most."""
        self._pause()
        self._is_closed = True
        self._sock.close()
        self._begin_all()
        if self._beginning:
            _, late = await asyncio.wait(self._beginning, timeout=CLOSE_GRACE_S)
            for task in late:
                task.cancel()

    def _has_room(self) -> bool:
        """True if one more connection may be accepted. `_resume` is to be called when it becomes true."""
        return True

    def _are_coming(self) -> bool:
        """True if connections that were accepted are set up within a few turns."""
        return bool(self._beginning) and not self._tls

    def _take(self, sock: socket.socket, host: str) -> None:
        """Take a connection from this address."""
        self._begin(sock)

    def _begin_all(self) -> None:
        """Begin to set up whatever was accepted."""

    def _resume(self) -> None:
        if not (self._is_accepting or self._is_short or self._is_closed):
            self._is_accepting = True
            self._loop.add_reader(self._sock, self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._sock)

    def _accept(self) -> None:
        for _ in range(ACCEPT_MAX):
            if not self._has_room():
                return self._pause()
            try:
                sock, (host, *_) = self._accepted()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            except OSError as error:
                if not self._are_coming():  # they may be the ones to close
                    self._fail(error)
                return None
            sock.setblocking(False)
            self._take(sock, host)
        return None

    def _accepted(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises OSError."""
        try:
            return self._sock.accept()
        except OSError as error:
            if error.errno != errno.EMFILE or not self._is_reserved_for:
                raise
        with descriptors.reserve():
            return self._sock.accept()

    def _fail(self, error: OSError) -> None:
        if error.errno in _NO_DESCRIPTOR and self._displace():
            DISPLACED.inc()
            self._warnings.warn("listener.connection_displaced", port=self._port, error=error.strerror)
            return
        ACCEPTS_FAILED.inc()
        self._warnings.warn("listener.accept_failed", port=self._port, error=error.strerror)
        self._pause()
        self._is_short = True
        self._loop.call_later(PAUSE_S, self._try_again)

    def _try_again(self) -> None:
        self._is_short = False
        self._resume()

    def _begin(self, sock: socket.socket) -> None:
        """Set up a connection that was taken."""
        task = self._loop.create_task(self._set_up(sock))
        self._beginning[task] = None
        task.add_done_callback(self._ended)
        if self._tls and len(self._beginning) > self._handshakes_max:
            self._warnings.warn("listener.handshakes_full", handshakes_max=self._handshakes_max)
            oldest = next(iter(self._beginning))
            self._ended(oldest)
            self._loop.call_soon(oldest.cancel)  # once it has begun: the socket is not its own before

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beginning.pop(task, None)

    async def _set_up(self, sock: socket.socket) -> None:
        host = _host_of(sock) if self._tls else ""
        try:
            await self._loop.connect_accepted_socket(self._protocol, sock, **self._tls)
        except (OSError, RuntimeError) as error:  # its caller has left, it was closed, or TLS failed
            if self._tls:
                self._failed(error, host)

    def _failed(self, error: OSError | RuntimeError, host: str) -> None:
        reason = handshakes.reason_of(error)
        handshakes.FAILED.inc(reason)
        if reason not in (handshakes.LEFT, handshakes.LATE):
            told = {"reason": reason, "problem": handshakes.told_by(error), "address": host}
            self._warnings.warn("listener.handshake_failed", reason, port=self._port, **told)


def _host_of(sock: socket.socket) -> str:
    """The address of a connection's other end; empty where that has left."""
    try:
        host: str = sock.getpeername()[0]
    except OSError:
        return ""
    return host
