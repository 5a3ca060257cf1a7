"""The common part of both services' listeners: the bounds of a request's head, and the socket.

The numbers are given to aiohttp, which keeps them; nothing here imports it.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from shared.process.sockets import SEND_BUFFER_LEN

LINE_LEN_MAX: Final = 8190
"""Bytes of a request line."""
HEADER_LEN_MAX: Final = 8190
"""Bytes of one header."""
HEADERS_MAX: Final = 64
"""Headers of one request."""
LINGER_S: Final = 1.0
"""The time for which an unread body is still read and dropped, in seconds, so that the client sees the answer
and not a reset."""
BACKLOG_LEN: Final = 1024
"""Connections that the kernel holds until they are accepted."""
CLOSE_GRACE_S: Final = 2.0
"""The time for handlers, and for the last bytes of answers, when the server closes, in seconds."""
SERVER: Final = "penstock"
"""The `server` header. aiohttp's own tells its version and Python's."""


def http1_options(keepalive_s: float) -> dict[str, Any]:
    """The keyword arguments of an aiohttp `RequestHandler`. `keepalive_s` is the time for which an idle
    connection is kept, in seconds."""
    return {
        "access_log": None,
        "auto_decompress": False,
        "keepalive_timeout": keepalive_s,
        "lingering_time": LINGER_S,
        "max_line_size": LINE_LEN_MAX,
        "max_field_size": HEADER_LEN_MAX,
        "max_headers": HEADERS_MAX,
    }


def bound_socket(
    host: str,
    port: int,
    send_buffer_len: int = SEND_BUFFER_LEN,
    receive_buffer_len: int | None = None,
    *,
    is_shared: bool = False,
) -> socket.socket:
    """A TCP socket that is bound to the first address of `host`, and does not listen yet. `is_shared` is true
    if other processes of this user may listen on the same port. Raises OSError.

    Connections that it accepts inherit the kernel's bound on what is sent and not read, `send_buffer_len`
    bytes: without it a client that stopped reading would be noticed megabytes later. `receive_buffer_len` is
    the same for what is received and not read yet; None leaves it to the kernel. The bounds are set before
    `listen`, so that the window scales fit.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_len)
        if receive_buffer_len is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_len)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
