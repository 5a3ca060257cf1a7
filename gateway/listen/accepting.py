"""The acceptance of connections, in turns that are shared fairly between those who connect.

A connection is accepted as it comes, and set up when its first bytes come, in a turn
(`shared.fairness.fair_turns`): of the tenant whose key they show, else of the address that it comes from. To
accept one takes microseconds. To set it up, to parse its request and to refuse that takes half a millisecond,
so who comes behind hundreds of connections waits for a turn, and not for all of them. uvloop by itself
accepts one connection in each turn of the loop, and asyncio all of them in one, in the order in which they
came.

Rules

1. In one turn of the loop at most `SET_UP_MAX` connections are set up, tenants and addresses one after
   another.
2. A key is looked at and not checked. It names a tenant if a request with the same one was let in of late
   (`gateway.identity.callers`), and decides about nothing but the turn.
3. The address counts where no such key is shown: there is TLS, or the caller is not known. Of IPv6 it is the
   network of 64 bits, which one caller may have to itself. Behind a proxy all these have one address, and go
   in the order in which they came.
4. A connection of which nothing has come is *silent*: in HTTP and in TLS the client speaks first. It holds a
   descriptor and no more, and is closed after the time for which a connection may be idle. The server bounds
   the number of silent ones together with the others (`on_silent`), and says which is closed where no
   descriptor is left for a new one (`displace`).
5. Connections that wait for their turns are bounded. More of them wait in the kernel. None is refused, and
   those that are there when the listener closes are set up.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from typing import Final

from gateway.identity.caller import network_of
from gateway.identity.callers import KnownCallers
from shared.fairness.fair_turns import FairTurns
from shared.process.accepting import HANDSHAKES_MAX, Accepting

SET_UP_MAX: Final = 2
"""Connections that are set up in one turn. The request that comes with one, which begins a few turns later,
takes most of a millisecond; so this bounds the length of turns beside a flood of both."""
WAITING_MAX: Final = 1024
"""Connections that wait for their turns."""
LOOKED_AT_LEN: Final = 2048
"""Bytes of a connection's beginning in which a key is looked for."""
_AUTHORIZATION: Final = re.compile(rb"\r\nauthorization:[ \t]*([^\r\n]*)", re.IGNORECASE)
_API_KEY: Final = re.compile(rb"\r\nx-api-key:[ \t]*([^\r\n]*)", re.IGNORECASE)


class FairAccepting(Accepting):
    """A listening socket, whose connections are set up in turns."""

    def __init__(
        self,
        sock: socket.socket,
        backlog: int,
        protocol: Callable[[], asyncio.BaseProtocol],
        known: KnownCallers,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        silent_s: float,
        on_silent: Callable[[], None],
        handshakes_max: int = HANDSHAKES_MAX,
        *,
        displace: Callable[[], bool] = lambda: False,
        is_reserved_for: bool = False,
    ) -> None:
        """Begin to accept. `sock` is bound. `handshake_s` is the time limit of a TLS handshake, `silent_s`
        that of first bytes. `on_silent` is called when there is one more silent connection. At most
        `handshakes_max` handshakes are under way at a time. `displace` and `is_reserved_for` are as in
        `Accepting`."""
        super().__init__(
            *(sock, backlog, protocol, tls, handshake_s, handshakes_max),
            displace=displace,
            is_reserved_for=is_reserved_for,
        )
        self._known: Final = known
        self._turns: Final = FairTurns(SET_UP_MAX)
        self._silent_s: Final = silent_s
        self._on_silent: Final = on_silent
        self._silent: Final[dict[socket.socket, tuple[str, asyncio.TimerHandle]]] = {}
        """The silent connections, oldest first: their addresses, and the ends of their time."""
        self._waiting: Final[dict[asyncio.Future[None], socket.socket]] = {}
        """Connections by the turns that they wait for."""

    @property
    def silent_count(self) -> int:
        """The number of silent connections."""
        return len(self._silent)

    @property
    def longest_s(self) -> float:
        """How long the oldest of the silent connections, of which there is one, has been so, in seconds."""
        _, late = next(iter(self._silent.values()))
        return self._loop.time() + self._silent_s - late.when()

    def close_first_silent(self) -> None:
        """Close the connection that has been silent for longest."""
        self._close_silent(next(iter(self._silent)))

    def _has_room(self) -> bool:
        return len(self._waiting) < WAITING_MAX

    def _are_coming(self) -> bool:
        return bool(self._waiting) or super()._are_coming()

    def _take(self, sock: socket.socket, host: str) -> None:
        address, begun = network_of(host), _begun(sock)
        if begun is not None:
            return self._wait(sock, begun, address)
        late = self._loop.call_later(self._silent_s, self._close_silent, sock)
        self._silent[sock] = address, late
        self._loop.add_reader(sock, self._hear, sock)
        return self._on_silent()

    def _begin_all(self) -> None:
        for sock in list(self._silent):
            self._wait(sock, b"", self._heard(sock))
        for turn in list(self._waiting):
            self._begin(self._waiting.pop(turn))
            turn.cancel()

    def _hear(self, sock: socket.socket) -> None:
        """Let a connection wait for its turn, as something has come of it. One that its caller has left is
        closed."""
        begun = _begun(sock)
        if begun:
            self._wait(sock, begun, self._heard(sock))
        elif begun is not None:
            self._close_silent(sock)

    def _close_silent(self, sock: socket.socket) -> None:
        self._heard(sock)
        sock.close()

    def _heard(self, sock: socket.socket) -> str:
        """Forget that a connection is silent. Returns its address."""
        address, late = self._silent.pop(sock)
        late.cancel()
        self._loop.remove_reader(sock)
        return address

    def _wait(self, sock: socket.socket, begun: bytes, address: str) -> None:
        turn = self._turns.ask(self._tenant_of(begun) or address)
        if turn is None:
            self._begin(sock)
        else:
            self._waiting[turn] = sock
            turn.add_done_callback(self._begin_in_turn)

    def _begin_in_turn(self, turn: asyncio.Future[None]) -> None:
        if (sock := self._waiting.pop(turn, None)) is not None:
            self._begin(sock)
            self._resume()

    def _tenant_of(self, begun: bytes) -> str | None:
        """The tenant whose key a connection's first bytes show. None where they show none that is known."""
        scheme = ""
        if (found := _AUTHORIZATION.search(begun)) is None:
            scheme, found = "Bearer ", _API_KEY.search(begun)
        return None if found is None else self._known.tenant_of(scheme + found[1].decode("latin-1").rstrip())


def _begun(sock: socket.socket) -> bytes | None:
    """The first bytes of a connection, which stay to be read. None as long as nothing has come."""
    try:
        return sock.recv(LOOKED_AT_LEN, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:  # the caller has left
        return b""
