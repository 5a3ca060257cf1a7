"""The one connection to Redis: what is sent on it, and how often. Counted by a server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import hiredis
import pytest
import redis

from gateway.admission.quota import StoreUnavailable
from gateway.admission.redis_store import RedisStore, open_store
from gateway.admission.usage import Used
from gateway.config.redis import RedisConfig
from gateway.redis.link import TOLD_MAX, Address, RedisLink, SlotMoved, packed
from gateway.redis.links import ClusterLinks
from shared.process import logs
from tests.gateway.admission.test_redis_store import ACME, admitted, rid, tenant
from tests.gateway.conftest import until
from tests.gateway.redis_server import RedisServer, redis_store, until_well

CALLERS: Final = 20
"""Their calls together are shorter than what Redis reads at once."""
RESERVED: Final = 30
WHO: Final = tenant(concurrent=CALLERS, token_budget=1000)


class Counts:
    """What a server has counted since it began, read on a connection that is kept."""

    def __init__(self, server: RedisServer) -> None:
        self.admin: redis.Redis = server.admin

    @property
    def calls(self) -> int:
        """Calls of the script by its name, whatever became of them. Probes call it in full."""
        found: int = self.admin.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        return found

    @property
    def connections(self) -> int:
        found: int = self.admin.info("stats")["total_connections_received"]
        return found

    @property
    def reads(self) -> int:
        """Each look at them is one, too."""
        found: int = self.admin.info("stats")["total_reads_processed"]
        return found

    @property
    def postponed(self) -> set[str]:
        """The connections whose calls were read, and wait for the end of a pause."""
        clients = self.admin.client_list(_type="normal")
        return {client["id"] for client in clients if client["cmd"] == "evalsha"}


async def spent(store: RedisStore) -> int:
    """Tokens that are charged to the budget: those of a lease that still runs are on hold there."""
    refusal = (await store.reserve(rid("asks"), WHO, 1001, 1001)).refusal
    assert refusal is not None
    return 1000 - refusal.remaining


async def sent(store: RedisStore, reserve: asyncio.Task[None]) -> None:
    """Until it has left."""
    link = store._links.of(ACME)
    await until(lambda: len(link._waiting) == 1 and link._wire is not None and not link._unsent)
    assert not reserve.done()


async def reserve(store: RedisStore, name: object) -> None:
    assert (await store.reserve(rid(name), WHO, RESERVED, RESERVED)).refusal is None


async def reserves_that_are_late(store: RedisStore) -> None:
    """One of each caller's, to a server that does not answer."""
    reserves = (store.reserve(rid(name), WHO, RESERVED, RESERVED) for name in range(CALLERS))
    late = await asyncio.gather(*reserves, return_exceptions=True)
    assert {type(one) for one in late} == {StoreUnavailable}


async def test_calls_whose_answers_are_late_are_done_once(own: RedisServer) -> None:
    """A stopped server has them, and finds them when it goes on. redis-py would have sent each eleven
    times."""
    counts = Counts(own)
    async with redis_store(own, timeout_s=0.2) as store:
        for name in range(CALLERS):
            assert await admitted(store, name, WHO)
        assert counts.calls == CALLERS
        own.stop_still()
        await reserves_that_are_late(store)
        own.go_on()
        await until_well(store)
        await until(lambda: counts.calls == 2 * CALLERS)
        for name in range(CALLERS):
            await store.settle(rid(name), Used())
        await store.settled()
        assert counts.calls == 3 * CALLERS


async def test_calls_whose_answers_are_late_are_not_sent_again(own: RedisServer) -> None:
    """A paused server greets, so that they could be. It does them when it goes on if their connection is
    still there, which that of late ones is not."""
    counts = Counts(own)
    async with redis_store(own, timeout_s=0.2) as store:
        assert await admitted(store, "first", WHO)
        counts.admin.client_pause(timeout=60_000, all=False)
        await reserves_that_are_late(store)
        await until(lambda: not counts.postponed)
        counts.admin.client_unpause()
        await until_well(store)
        assert counts.calls == 1


async def test_a_call_that_a_broken_connection_took_is_sent_once_more_and_counts_once(
    own: RedisServer,
) -> None:
    """The server does it twice: the answer to the first has nobody to go to."""
    counts = Counts(own)
    async with redis_store(own) as store:
        assert await admitted(store, 1, WHO)
        own.stop_still()
        asked = asyncio.create_task(reserve(store, 1))
        await sent(store, asked)
        wire = store._links.of(ACME)._wire
        assert wire is not None
        assert wire._transport is not None
        wire._transport.abort()
        own.go_on()
        await asked
        assert counts.calls == 1 + 2
        assert await spent(store) == RESERVED
        await store.settle(rid(1), Used(completion=7))
        assert await spent(store) == 7


async def test_a_call_whose_connection_breaks_twice_is_not_sent_a_third_time(own: RedisServer) -> None:
    counts = Counts(own)
    async with redis_store(own) as store:
        assert await admitted(store, 1, WHO)
        counts.admin.client_pause(timeout=60_000, all=False)  # of writes: what is read is not done
        asked = asyncio.create_task(reserve(store, 1))
        broken: set[str] = set()
        for _ in range(2):
            await until(lambda: bool(counts.postponed - broken))
            broken.update(counts.postponed)
            counts.admin.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable, match="broke twice"):
            await asked
        counts.admin.client_unpause()
        await until_well(store)
        assert counts.calls == 1, "a third one would be done now"


async def test_the_calls_of_one_turn_of_the_loop_leave_in_one_write(own: RedisServer) -> None:
    counts = Counts(own)
    async with redis_store(own) as store:
        connections, reads = counts.connections, counts.reads

        def read() -> int:
            """Since it was asked last, without its own look."""
            nonlocal reads
            before, reads = reads, counts.reads
            return reads - before - 1

        assert read() == 0
        assert all(await asyncio.gather(*(admitted(store, name, WHO) for name in range(CALLERS))))
        assert read() == 1
        await asyncio.gather(*(reserve(store, name) for name in range(CALLERS)))
        assert read() == 1
        for name in range(CALLERS):
            await store.settle(rid(name), Used())
        await store.settled()
        assert read() == 1
        assert counts.connections == connections
        assert counts.calls == 3 * CALLERS


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
async def test_a_server_that_may_evict_is_named_in_the_log(
    own: RedisServer, log: io.StringIO, policy: str
) -> None:
    own.admin.config_set("maxmemory-policy", policy)
    async with redis_store(own):
        pass
    logs.close()
    lines = map(json.loads, log.getvalue().splitlines())
    told = [line["policy"] for line in lines if line["event"] == "redis.may_evict"]
    assert told == ([] if policy == "noeviction" else [policy])


async def test_a_user_who_may_not_ask_whether_a_server_evicts_is_served(
    own: RedisServer, log: io.StringIO, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("correct-horse")
    commands = ["+@all", "-info"]
    own.admin.acl_setuser(
        "penstock", enabled=True, passwords=["+correct-horse"], keys=["*"], commands=commands
    )
    own.admin.config_set("maxmemory-policy", "allkeys-lru")
    async with redis_store(own, username="penstock", password=f"file:{tmp_path / 'password'}") as store:
        assert await admitted(store, 1, WHO)
    logs.close()
    assert "may_evict" not in log.getvalue()


async def test_a_server_that_was_never_up_is_told_of_with_each_reason_once(
    own: RedisServer, log: io.StringIO
) -> None:
    own.admin.config_set("requirepass", "correct-horse")
    store = open_store(RedisConfig(own.url), {})

    async def asked() -> None:
        for _ in range(3):
            with contextlib.suppress(StoreUnavailable):
                await store.renew([])

    await asked()
    own.kill()
    await asked()
    await store.aclose()
    logs.close()
    lines = map(json.loads, log.getvalue().splitlines())
    told = [line["problem"] for line in lines if line["event"] == "redis.down"]
    assert [problem.partition(":")[0] for problem in told] == ["ConnectionError", "ConnectionRefusedError"]
    assert "NOAUTH" in told[0]


async def test_of_servers_that_fail_in_ever_other_ways_a_few_are_told(
    own: RedisServer, log: io.StringIO
) -> None:
    store = open_store(RedisConfig(own.url), {})
    link = store._links.of(ACME)
    for number in range(2 * TOLD_MAX):
        link._down(f"fault {number}")
    await store.aclose()
    logs.close()
    assert log.getvalue().count("redis.down") == TOLD_MAX


async def test_calls_that_wait_are_bounded(own: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.redis.link.WAITING_MAX", 2)
    async with redis_store(own) as store:
        await reserve(store, "first")
        asked = (store.reserve(rid(name), WHO, 1, 1) for name in range(3))
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in told if isinstance(one, Exception)] == [StoreUnavailable]


async def test_nodes_that_others_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.redis.links.NODES_MAX", 1)
    servers: Any = SimpleNamespace(link_to=lambda _: SimpleNamespace(is_up=True))
    links = ClusterLinks(servers, None)
    for number, is_taken in ((1, True), (2, False), (1, True)):
        moved = SlotMoved(f"MOVED 7 node:{number}")
        with contextlib.nullcontext() if is_taken else pytest.raises(SlotMoved):
            await links.follow(moved, "a", (b"PING",))


class Demoted:
    """A server whose first `replicas` connections are to one that has become a replica, as behind an address
    that a failover moves; those after them are to the primary."""

    def __init__(self, replicas: int) -> None:
        self.replicas: Final = replicas
        self.connections = 0
        self.written: list[int] = []
        """The connection of each write, refused or not."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        mine, commands = self.connections, hiredis.Reader()
        with contextlib.closing(writer):
            while data := await reader.read(65_536):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    writer.write(self._reply(mine, command[0]))

    def _reply(self, mine: int, name: bytes) -> bytes:
        if name == b"WRITE":
            self.written.append(mine)
            if mine <= self.replicas:
                return b"-READONLY You can't write against a read only replica.\r\n"
        return {b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n0\r\n", b"INFO": b"$0\r\n\r\n"}.get(
            name, b"*1\r\n:1000\r\n"
        )


@pytest.mark.parametrize("replicas", [1, 2])
async def test_calls_that_a_replica_refuses_are_sent_once_more_on_the_next_connection(replicas: int) -> None:
    """It has done nothing. A failover takes time: what is refused twice has failed."""
    fake = Demoted(replicas)
    async with await asyncio.start_server(fake.serve, "127.0.0.1", 0) as server:
        address = Address(*server.sockets[0].getsockname())

        async def find() -> Address:
            return address

        async def greeting() -> list[tuple[str]]:
            return [("HELLO",)]

        link = RedisLink(find, greeting, timeout_s=20.0, connect_s=20.0)
        await link.probe("PING")
        calls = [link.call(packed(("WRITE",))) for _ in range(2)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        is_served = replicas == 1
        assert [isinstance(outcome, list) for outcome in outcomes] == [is_served] * 2
        assert link.is_up is is_served
        assert is_served or "READONLY" in link.problem
        assert fake.written == [1, 1, 2, 2]
        await link.aclose()
