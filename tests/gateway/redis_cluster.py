"""A real Redis Cluster for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Final

from redis.crc import key_slot

from gateway.redis.links import tag_of
from shared.wire.ids import TenantId
from tests.bench.services import free_port
from tests.gateway.redis_server import RedisServer, redis_server
from tests.waiting import PATIENCE_S

SLOTS: Final = 16_384


async def eventually(condition: Callable[[], bool]) -> None:
    pause_s = 0.01
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(pause_s)  # between two looks at another process, each of some ms
            pause_s = min(1.2 * pause_s, 0.05)


class Cluster:
    """Three primaries without replicas, each with a third of the slots."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def tenants(self) -> list[str]:
        """The name of a tenant of each node."""
        found: dict[int, str] = {}
        for i in range(100):
            slot = key_slot(tag_of(TenantId(f"t{i}")).encode())
            found.setdefault(slot * 3 // SLOTS, f"t{i}")
        return [found[i] for i in range(3)]

    async def form(self) -> None:
        bounds = [-(-SLOTS * i // 3) for i in range(4)]
        for i, node in enumerate(self.nodes):
            node.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)  # type: ignore[no-untyped-call]
            meet = "CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus_port
            node.admin.execute_command(*meet)  # type: ignore[no-untyped-call]
        await eventually(lambda: all(self._is_formed(node) for node in self.nodes))

    @property
    def sent_away(self) -> int:
        """The number of calls that nodes answered with the name of another one."""
        stats = (node.admin.info("commandstats") for node in self.nodes)
        return sum(one.get("cmdstat_evalsha", {}).get("rejected_calls", 0) for one in stats)

    def node_of(self, slot: int) -> RedisServer:
        """The node that has a slot since the Cluster was formed."""
        return self.nodes[slot * 3 // SLOTS]

    def id_of(self, number: int) -> str:
        return str(self.nodes[number].admin.cluster("MYID"))

    def assign(self, slot: int, to: RedisServer) -> None:
        """Give a slot to a node, and tell all nodes."""
        owner = to.admin.cluster("MYID")
        for node in self.nodes:
            node.admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)  # type: ignore[no-untyped-call]

    def _is_formed(self, node: RedisServer) -> bool:
        info = node.admin.cluster("INFO")
        return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3")


@contextlib.asynccontextmanager
async def formed_cluster() -> AsyncIterator[Cluster]:
    with ExitStack() as stack:
        nodes = []
        for _ in range(3):
            bus_port = free_port()
            options = ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
            options += ["--cluster-node-timeout", "500", "--cluster-require-full-coverage", "no"]
            node = stack.enter_context(redis_server(*options))
            node.bus_port = bus_port
            nodes.append(node)
        formed = Cluster(nodes)
        await formed.form()
        yield formed
