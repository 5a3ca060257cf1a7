"""The admin listener's bounds and TLS: those of the public listener, for a few operators.

It is of the gateway's own process, or of the supervisor of several workers. Whoever reaches it needs no key
to connect, so it is bounded like the public one (`gateway.listen.listener`), and apart from that: who takes
all of its connections takes none of the callers', and who takes all of a process's descriptors leaves some
for these (`shared.process.descriptors`). An answer that is not read does not hold one for longer than
`slow_client_s`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from gateway.config.whole import GatewayConfig
from gateway.identity.callers import KnownCallers
from gateway.listen.listener import BoundedServer, Handle, listen
from gateway.listen.listener_tls import ListenerTls
from gateway.operators.server import refuse_unparsed
from shared.fairness.fair_turns import FairTurns

CONNECTIONS_MAX: Final = 64
"""Connections, of browsers with the console, of monitoring and of probes: together they hold
54 MiB, each with half a head, large buffers of TLS and a handshake beside it."""


async def listen_for_operators(
    stack: AsyncExitStack, handle: Handle, config: GatewayConfig, tls: ListenerTls | None
) -> int | None:
    """Serve the admin listener until `stack` is closed. Returns its port; None where there is none. Raises
    ListenFailed."""
    admin, timeouts = config.admin, config.timeouts
    if admin.port is None:
        return None
    limits = replace(config.limits, connections_max=CONNECTIONS_MAX, live_max=CONNECTIONS_MAX)
    parts = limits, timeouts, KnownCallers(), FairTurns()
    server = BoundedServer(
        handle, refuse_unparsed, *parts, ends_left=False, times_readers=False, is_for_operators=True
    )
    listening = await listen(
        stack,
        server,
        admin.host,
        admin.port,
        tls=None if tls is None else tls.context,
    )
    return listening.port
