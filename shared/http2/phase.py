"""The phases of an HTTP/2 connection.

OPEN ──> RETIRING ──> CLOSED
  └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class ConnectionPhase(Enum):
    OPEN = "open"
    RETIRING = "retiring"
    """One side has sent GOAWAY: streams that run may finish, no new one begins."""
    CLOSED = "closed"


MOVES: Final[Mapping[ConnectionPhase, frozenset[ConnectionPhase]]] = {
    ConnectionPhase.OPEN: frozenset({ConnectionPhase.RETIRING, ConnectionPhase.CLOSED}),
    ConnectionPhase.RETIRING: frozenset({ConnectionPhase.CLOSED}),
    ConnectionPhase.CLOSED: frozenset(),
}
