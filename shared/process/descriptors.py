"""The descriptors that this process may open: connections are the most of them.

Shells and systemd begin a process with 1,024, for the sake of programs that could not do with more, and let
it have more: it takes them (`raise_limit`), but for a few, which are for its operators' listener alone
(`reserve`). So probes and metrics are answered while everything else has none left. A connection that was
accepted with one of these gives it back to nobody else, as the kernel takes the lowest that is free.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

RESERVED: Final = 16
"""The descriptors for operators' connections."""
OWN_MAX: Final = 256
"""The descriptors for files, pipes, Redis and operators."""
SHARE: Final = 0.8
"""The part of the others that clients' connections may take: the rest is for connections to engines."""


def raise_limit() -> None:
    """Let the process open what it may, but for `RESERVED`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(1, hard - RESERVED), hard))


@contextmanager
def reserve() -> Iterator[None]:
    """Open something with the descriptors that are reserved, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit() -> int:
    """The most descriptors that the process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def few(connections: int) -> str:
    """The advice to an operator so that as many connections fit."""
    needed = math.ceil(connections / SHARE) + OWN_MAX + RESERVED
    return (
        f"give it {needed} open files (ulimit -Hn {needed}; LimitNOFILE={needed} of systemd; a container's "
        "ulimits), or lower limits.connections_max"
    )


def fitting(connections: int) -> int:
    """So many connections of clients, or as many as the limit has room for."""
    most = limit()
    return min(connections, max(1, int((most - min(OWN_MAX, most // 4)) * SHARE)))
