"""The memory that a gateway's container may come to hold, whoever sends what."""

from __future__ import annotations

import re
from typing import Final

from gateway.config.whole import GatewayConfig
from tests.bench.memory_sums import ADMIN, MIB, SOCKET, gateway_memory_max

REST: Final = 192 * MIB
"""Bytes of a gateway's process at rest, with the tokenizer of a large model."""
UNITS: Final = {"m": MIB, "Mi": MIB, "g": 1024 * MIB, "Gi": 1024 * MIB}


def container_max(config: GatewayConfig) -> int:
    """The bytes, the kernel's included."""
    limits = config.limits
    above = gateway_memory_max(
        limits.request_memory,
        limits.live_max,
        limits.tokenizer_threads,
        limits.connections_max,
        has_tls=config.listen.tls is not None,
    )
    admin = 0 if config.admin.port is None else ADMIN
    return admin + config.workers * (REST + above + limits.live_max * SOCKET)


def size(text: str) -> int:
    """The bytes of a limit, such as 2Gi (Kubernetes) or 2g (Compose)."""
    found = re.fullmatch(r"(\d+)(\w+)", text)
    assert found is not None
    return int(found[1]) * UNITS[found[2]]
