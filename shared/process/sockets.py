"""Bounds on what the kernel holds for a peer that does not read.

By default that is megabytes, which a token stream fills in minutes: a client that stopped reading would be
noticed after thousands of tokens. With both bounds it is noticed after a few hundred.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

SEND_BUFFER_LEN: Final = 64 * 1024  # the kernel doubles it for its own bookkeeping
UNSENT_LEN_MAX: Final = 16 * 1024
WRITE_BUFFER_LEN: Final = 16 * 1024

assert UNSENT_LEN_MAX <= SEND_BUFFER_LEN


def bound_transport(transport: asyncio.WriteTransport, write_buffer_len: int = WRITE_BUFFER_LEN) -> None:
    """Bound what the transport and the kernel buffer: the kernel accepts more only while less than
    UNSENT_LEN_MAX bytes wait to be sent."""
    transport.set_write_buffer_limits(high=write_buffer_len)
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_LEN_MAX)
