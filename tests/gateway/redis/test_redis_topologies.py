"""Quotas and stored responses in a Cluster of three nodes, and in a group whose primary Sentinels replace."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from redis.crc import key_slot

from gateway.admission.guarded_store import GuardedStore
from gateway.admission.quota import StoreUnavailable
from gateway.admission.redis_store import open_store
from gateway.admission.usage import Payer, Totals, Used
from gateway.config.redis import RedisConfig
from gateway.config.responses import ResponsesConfig
from gateway.config.whole import TenantConfig, load
from gateway.directory.accounts import AccountsReader
from gateway.directory.redis_directory import TAG, open_directory
from gateway.redis.link import Address
from gateway.redis.links import CLIENT_NAME, ClusterLinks, links_of, tag_of
from gateway.stored.redis import open_responses
from shared.wire.errors import DirectoryUnavailable, ResponsesUnavailable
from shared.wire.ids import KeyId, TenantId
from tests.bench.services import free_port
from tests.fakes import VirtualClock
from tests.gateway.admission.test_accounting import TODAY, rows
from tests.gateway.admission.test_redis_store import admitted, rid, tenant
from tests.gateway.redis_cluster import Cluster, eventually, formed_cluster
from tests.gateway.redis_server import (
    RedisServer,
    as_words,
    redis_command,
    redis_server,
    redis_store,
    tls_options,
    until_well,
)
from tests.gateway.stored.test_stores import kept
from tests.waiting import PATIENCE_S

SLOTS: Final = 16_384
PRIMARY: Final = "penstock"


# -- a Cluster ------------------------------------------------------------------------------------


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with formed_cluster() as formed:
        yield formed


async def test_tenants_are_counted_on_the_nodes_that_have_their_slots(cluster: Cluster) -> None:
    one = [redis_store(cluster.nodes[0], prefix="test", url=cluster.url, cluster=True) for _ in range(2)]
    async with one[0] as a, one[1] as b:
        for name in cluster.tenants:
            who = tenant(name, concurrent=10)
            asked = (admitted((a, b)[i % 2], f"{name}{i}", who) for i in range(100))
            assert sum(await asyncio.gather(*asked)) == 10
        for node, name in zip(cluster.nodes, cluster.tenants, strict=True):
            assert f"test:{{{name}}}:tenant:{name}" in node.admin.keys("*")


async def test_usage_on_every_node_is_found(cluster: Cluster) -> None:
    async with redis_store(cluster.nodes[0], prefix="test", url=cluster.url, cluster=True) as store:
        names = [TenantId(name) for name in cluster.tenants]
        for number, name in enumerate(names, 1):
            await store.post("gateway", number, name, 30_000, {(KeyId("k"), "m"): Totals(1)})
        assert await store.payers(30_000, 30_000) == set(names)


async def test_stored_responses_are_on_their_tenants_nodes(cluster: Cluster) -> None:
    settings = RedisConfig(url=cluster.url, cluster=True, key_prefix="test")
    store = open_responses(ResponsesConfig("redis"), settings, {})
    await store.begin()
    tenants = [TenantId(name) for name in cluster.tenants]
    for node, tenant_id in zip(cluster.nodes, tenants, strict=True):
        await store.put(tenant_id, kept("resp_1"))
        assert f"test:{{{tenant_id}}}:responses:resp_1" in node.admin.keys("*")
    slot = key_slot(tenants[0].encode())
    cluster.nodes[0].admin.flushall()
    cluster.assign(slot, cluster.nodes[1])
    await store.put(tenants[0], kept("resp_2"))
    assert f"test:{{{tenants[0]}}}:responses:resp_2" in cluster.nodes[1].admin.keys("*")
    cluster.nodes[2].kill()
    with pytest.raises(ResponsesUnavailable):
        await store.get(tenants[2], "resp_1")
    assert await store.get(tenants[1], "resp_1") == kept("resp_1")
    await store.aclose()


async def test_a_node_that_dies_is_down_for_its_own_tenants_alone(cluster: Cluster) -> None:
    async with redis_store(cluster.nodes[0], url=cluster.url, cluster=True) as store:
        cluster.nodes[0].kill()
        dead, *living = cluster.tenants
        with pytest.raises(StoreUnavailable):
            await admitted(store, 0, tenant(dead, concurrent=10))
        for name in living:
            assert await admitted(store, name, tenant(name, concurrent=10))
        assert not store.is_well


async def test_usage_that_a_dead_node_is_owed_waits_by_itself(cluster: Cluster) -> None:
    """The tenants have no limits, so their requests are counted in the gateway and posted."""
    dead, served, _ = map(TenantId, cluster.tenants)
    clock = VirtualClock()
    settings: dict[str, Any] = {"url": cluster.url, "cluster": True, "prefix": "test"}
    async with redis_store(cluster.nodes[0], clock=clock, **settings) as store:
        guarded = GuardedStore(store, clock=clock)
        node = cluster.nodes[0]
        node.kill()
        while store.reaches(dead):
            await guarded.renew([])
        for number in range(1, 4):
            for name in (dead, served):
                reservation = rid(f"{name}-{number}")
                await guarded.reserve(reservation, (), 10, 10, Payer(name, KeyId("k"), "m"))
                await guarded.settle(reservation, Used(prompt=1))
            await guarded.post()
            there = await rows(store, served)
            assert [row.totals for row in there] == [Totals(number, number)], "as other gateways read it"
            assert await rows(guarded, served) == there
            with pytest.raises(StoreUnavailable):
                await rows(guarded, dead)
        assert guarded._unposted == {}, "an outage takes no more memory the longer it lasts"
        node.start()
        await until_well(store)
        assert dead in await guarded.payers(TODAY, TODAY)
        assert [row.totals for row in await rows(guarded, dead)] == [Totals(3, 3)]


async def test_slots_that_move_are_followed(cluster: Cluster) -> None:
    moved = cluster.tenants[0]
    slot = key_slot(moved.encode())
    async with redis_store(cluster.nodes[0], url=cluster.url, cluster=True, prefix="test") as store:
        assert await admitted(store, 1, tenant(moved, concurrent=10))
        assert await store.settle(rid(1), Used()) is not None
        cluster.nodes[0].admin.flushall()
        cluster.assign(slot, cluster.nodes[1])
        who = tenant(moved, concurrent=3)
        assert (
            await asyncio.gather(*(admitted(store, f"m{i}", who) for i in range(9)))
            == [True] * 3 + [False] * 6
        )
        assert store.is_well, "the first call was sent on, so no request met the fail mode"
        assert f"test:{{{moved}}}:tenant:{moved}" in cluster.nodes[1].admin.keys("*")
        assert await admitted(store, 3, tenant(cluster.tenants[2], concurrent=10)), "others are not concerned"
        await store.renew([])
        assert await admitted(store, "m0", who), "a repeated call of a request that has its seat"


async def test_a_settlement_follows_a_slot_that_has_moved(cluster: Cluster) -> None:
    """It is the first call that meets the move, and nobody waits for it."""
    moved = cluster.tenants[0]
    async with redis_store(cluster.nodes[0], url=cluster.url, cluster=True, prefix="test") as store:
        assert await admitted(store, 1, tenant(moved, concurrent=1))
        cluster.nodes[0].admin.flushall()
        cluster.assign(key_slot(moved.encode()), cluster.nodes[1])
        assert await store.settle(rid(1), Used()) is not None
        await store.settled()
        assert not store._held, "the new node has answered that it knows no such reservation"
        assert store.is_well


async def test_slots_that_move_to_a_new_node_are_followed(cluster: Cluster) -> None:
    """One that the store has never heard of: it is connected to within a call's time."""
    moved = cluster.tenants[0]
    slot = key_slot(moved.encode())
    url = f"redis://127.0.0.1:{cluster.nodes[0].port}"
    async with redis_store(cluster.nodes[0], url=url, cluster=True) as store:
        links = store._links
        assert isinstance(links, ClusterLinks)
        new = cluster.nodes[1]
        await links._links.pop(Address("127.0.0.1", new.port)).aclose()
        links._tags.clear()
        links._ranges = [one for one in links._ranges if one[2].port != new.port]
        cluster.assign(slot, new)
        await eventually(lambda: _connections(new) == 0)
        asked = await asyncio.gather(*(admitted(store, i, tenant(moved, concurrent=10)) for i in range(50)))
        assert sum(asked) == 10
        assert _connections(new) == 1, "however many callers follow at once"
        assert store.is_well
        await store.renew([])
        assert {address.port for address in links._links} == {node.port for node in cluster.nodes}


def _connections(server: RedisServer) -> int:
    """Gateways' connections to a server."""
    return sum(client["name"] == CLIENT_NAME for client in server.admin.client_list())


async def test_a_call_is_sent_on_once_and_no_further(cluster: Cluster) -> None:
    """Two nodes that each take the other one for the owner, as in the middle of a change."""
    moved = cluster.tenants[0]
    slot = key_slot(moved.encode())
    async with redis_store(cluster.nodes[0], url=cluster.url, cluster=True) as store:
        for node, owner in zip(cluster.nodes, (1, 2, 1), strict=True):
            node.admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(owner))  # type: ignore[no-untyped-call]
        assert cluster.sent_away == 0
        with pytest.raises(StoreUnavailable, match="MOVED"):
            await admitted(store, 1, tenant(moved, concurrent=10))
        assert cluster.sent_away == 2
        assert not store.is_well
        assert await admitted(store, 2, tenant(cluster.tenants[2], concurrent=10)), "others are not concerned"


async def test_a_directory_is_on_one_node_whose_slots_may_move(cluster: Cluster) -> None:
    config = load({"models": [{"name": "tiny", "replicas": ["http://a"]}]}, {})
    own = RedisConfig(cluster.url, cluster=True, key_prefix="test")
    directory = open_directory(own, AccountsReader(config, None), {})
    try:
        await directory.change(TenantConfig, "made", lambda _: TenantConfig("made"), None)
        assert await directory.get("tenants", "made") == TenantConfig("made")
        [holder] = [node for node in cluster.nodes if node.admin.keys("test:{~directory}:*")]
        [other, *_] = [node for node in cluster.nodes if node is not holder]
        holder.admin.flushall()
        move_slot(key_slot(tag_of(TAG).encode()), holder, other, cluster)
        with pytest.raises(DirectoryUnavailable):
            await directory.get("tenants", "made")
        assert await directory.get("tenants", "made") is None, "its slot is followed"
        await directory.change(TenantConfig, "made", lambda _: TenantConfig("made"), None)
        assert other.admin.keys("test:{~directory}:*")
    finally:
        await directory.aclose()


def move_slot(slot: int, holder: RedisServer, other: RedisServer, cluster: Cluster) -> None:
    """A node that imports a slot gets the newest epoch with it. Else what the holder still says of the slot,
    until it is told, could undo the move where it is known already."""

    def set_slot(node: RedisServer, *words: object) -> None:
        node.admin.execute_command("CLUSTER", "SETSLOT", slot, *words)  # type: ignore[no-untyped-call]

    set_slot(other, "IMPORTING", holder.admin.cluster("MYID"))
    for node in (other, *(node for node in cluster.nodes if node is not other)):
        set_slot(node, "NODE", other.admin.cluster("MYID"))


# -- Sentinels ------------------------------------------------------------------------------------


@contextlib.contextmanager
def sentinels(primary_port: int, *lines: str, tls: bool = False) -> Iterator[list[int]]:
    """The ports of three that watch the primary. `lines`: more of their configuration."""
    with watchers(primary_port, *lines, tls=tls) as started:
        yield [one.port for one in started]


@contextlib.contextmanager
def watchers(primary_port: int, *lines: str, tls: bool = False) -> Iterator[list[RedisServer]]:
    """Three Sentinels, as they are started: it may be that none listens yet."""
    with tempfile.TemporaryDirectory(prefix="penstock-sentinel-") as directory, ExitStack() as stack:
        started: list[RedisServer] = []
        for port in [free_port() for _ in range(3)]:
            config = Path(directory) / f"{port}.conf"
            config.write_text(
                f"port {0 if tls else port}\ntls-port {port if tls else 0}\nbind 127.0.0.1\ndir {directory}\n"
                f"sentinel monitor {PRIMARY} 127.0.0.1 {primary_port} 2\n"
                f"sentinel down-after-milliseconds {PRIMARY} 300\n"
                f"sentinel failover-timeout {PRIMARY} 5000\n" + "".join(f"{line}\n" for line in lines)
            )
            command = [redis_command(), str(config), "--sentinel"]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
            started.append(RedisServer.at(port, process))
        yield started


async def test_the_primary_that_sentinels_choose_is_used_after_a_failover() -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(redis_server())
        replica = stack.enter_context(redis_server("--replicaof", "127.0.0.1", str(primary.port)))
        await eventually(lambda: bool(replica.admin.info("replication")["master_link_status"] == "up"))
        ports = stack.enter_context(sentinels(primary.port))
        watchers = [RedisServer.at(port).admin for port in ports]
        await eventually(lambda: all(_knows_all(watcher) for watcher in watchers))
        url = "redis://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        who = tenant(concurrent=2)
        async with redis_store(primary, url=url, sentinel=PRIMARY) as store:
            assert await admitted(store, 1, who)
            await eventually(lambda: bool(replica.admin.keys("*:reservations")))
            primary.kill()
            with pytest.raises(StoreUnavailable):
                await admitted(store, 2, who)
            await until_well(store)
            assert await admitted(store, 3, who)
            assert not await admitted(store, 4, who), "what was replicated still counts"
            assert replica.admin.info("replication")["role"] == "master"


async def test_a_sentinel_that_is_silent_holds_up_no_connection() -> None:
    """One whose machine is gone, or hangs: it is the first of the list, and takes connections."""
    with redis_server() as primary, watchers(primary.port) as three:
        await eventually(lambda: all(_knows_primary(one.admin) for one in three))
        silent = three[0]
        silent.stop_still()
        url = "redis://" + ",".join(f"127.0.0.1:{one.port}" for one in three)
        async with redis_store(primary, url=url, sentinel=PRIMARY) as store:
            assert await admitted(store, 1, tenant(concurrent=2))
            primary.admin.client_kill_filter(_type="normal", skipme=True)  # so it is connected to once more
            await until_well(store)
            assert await admitted(store, 2, tenant(concurrent=2))


async def test_a_password_that_was_renewed_is_used_for_the_next_connection(tmp_path: Path) -> None:
    """By the tenants' counts and by the directory. A file that cannot be used leaves the one before."""
    path = tmp_path / "password"
    path.write_text("before\n")
    with redis_server("--requirepass", "before") as server:
        config = RedisConfig(server.url, password=f"file:{path}")
        tiny = load({"models": [{"name": "tiny", "replicas": ["http://a"]}]}, {})
        directory = open_directory(config, AccountsReader(tiny, None), {})
        admin = redis.Redis(port=server.port, password="before")
        async with redis_store(server, password=f"file:{path}") as store:
            assert await directory.page("keys", None, "", 1) == []
            path.unlink()
            admin.client_kill_filter(_type="normal", skipme=True)
            assert await admitted(store, 1, tenant(concurrent=9))
            admin.config_set("requirepass", "after")
            admin.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(StoreUnavailable, match="WRONGPASS"):
                await admitted(store, 2, tenant(concurrent=9))
            with pytest.raises(DirectoryUnavailable):
                await directory.page("keys", None, "", 1)
            path.write_text("after\n")
            await until_well(store)
            assert await admitted(store, 2, tenant(concurrent=9))
            assert await directory.page("keys", None, "", 1) == []
        await directory.aclose()


async def test_sentinels_with_a_password_of_their_own(tmp_path: Path) -> None:
    of_sentinels, of_primary = tmp_path / "sentinels", tmp_path / "primary"
    of_sentinels.write_text("before\n")
    of_primary.write_text("of-the-primary\n")
    with ExitStack() as stack:
        primary = stack.enter_context(redis_server("--requirepass", "of-the-primary"))
        lines = "requirepass of-the-sentinels", f"sentinel auth-pass {PRIMARY} of-the-primary"
        ports = stack.enter_context(sentinels(primary.port, *lines))
        url = "redis://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        settings: dict[str, Any] = {"url": url, "sentinel": PRIMARY, "password": f"file:{of_primary}"}
        config = RedisConfig(**settings, sentinel_password=f"file:{of_sentinels}")
        store = open_store(config, {})
        with pytest.raises(StoreUnavailable, match="No master found"):
            await store.renew([])
        of_sentinels.write_text("of-the-sentinels\n")
        await until_well(store)
        assert await admitted(store, 1, tenant(concurrent=2))
        await store.aclose()
        strangers = open_store(RedisConfig(**settings), {})
        with pytest.raises(StoreUnavailable, match="No master found"):
            await strangers.renew([])
        await strangers.aclose()


def _knows_primary(watcher: redis.Redis) -> bool:
    with contextlib.suppress(OSError, redis.RedisError):  # it may not listen yet
        return bool(watcher.sentinel_get_master_addr_by_name(PRIMARY))
    return False


def _knows_all(watcher: redis.Redis) -> bool:
    with contextlib.suppress(OSError, redis.RedisError):  # it may not listen yet
        state: Any = watcher.sentinel_master(PRIMARY)
        return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)
    return False


# -- with TLS and ACL users -----------------------------------------------------------------------

USER: Final = "penstock"
RULES: Final = ("~test:*", "+@read", "+@write", "+@scripting", "+time", "+client|setname")
"""What README says that the gateway's user needs."""


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, str]:
    """Options of servers that ask for certificates."""
    return tls_options(tmp_path)


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """Settings of `[redis]` of a client with the certificate and the password that these servers ask for."""
    (tmp_path / "password").write_text("of-the-gateway\n")
    (tmp_path / "another").write_text("of-an-impostor\n")
    ca, own, password = (str(tmp_path / name) for name in ("ca.pem", "own.pem", "password"))
    return {"ca": ca, "cert": own, "key": own, "username": USER, "password": f"file:{password}"}


def of_users(server: RedisServer) -> set[str]:
    """The users of the gateways' connections to a server."""
    return {client["user"] for client in server.admin.client_list() if client["name"] == CLIENT_NAME}


async def test_certificates_that_were_renewed_are_used_for_the_next_connection(tmp_path: Path) -> None:
    options = {**tls_options(tmp_path), "tls-auth-clients": "yes"}
    ca, own = str(tmp_path / "ca.pem"), str(tmp_path / "own.pem")
    with redis_server(*as_words(options), tls=True) as server:
        url = server.url.replace("redis:", "rediss:")
        async with redis_store(server, url=url, ca=ca, cert=own, key=own) as store:
            assert await admitted(store, 1, tenant(concurrent=1))
            server.kill()
            with pytest.raises(StoreUnavailable):
                await admitted(store, 2, tenant(concurrent=1))
            tls_options(tmp_path)  # the authority is another one as well
            server.start()
            await until_well(store)
            assert await admitted(store, 2, tenant(concurrent=1)), "it has begun anew, and knows of none"


async def test_a_cluster_with_certificates_and_an_acl_user(
    certificates: dict[str, str], guarded: dict[str, str], tmp_path: Path
) -> None:
    """The nodes name each other's TLS ports, also in their redirections."""
    with ExitStack() as stack:
        nodes, tls_ports = [], [free_port() for _ in range(3)]
        for port in tls_ports:
            bus_port = free_port()
            cluster = {"cluster-enabled": "yes", "cluster-port": str(bus_port), "tls-cluster": "yes"}
            options = {**cluster, "cluster-require-full-coverage": "no", "tls-port": str(port)}
            node = stack.enter_context(redis_server(*as_words({**options, **guarded})))
            node.bus_port = bus_port
            node.admin.execute_command(  # type: ignore[no-untyped-call]
                *("ACL", "SETUSER", USER, "on", ">of-the-gateway", *RULES, "+cluster|slots")
            )
            nodes.append(node)
        formed = Cluster(nodes)
        await formed.form()
        settings: dict[str, Any] = {
            "url": "rediss://" + ",".join(f"127.0.0.1:{port}" for port in tls_ports),
            "cluster": True,
            **certificates,
        }
        password = tmp_path / "password"
        password.write_text("before\n")
        links = links_of(RedisConfig(**settings), {})
        password.write_text("of-the-gateway\n")
        await links.refresh()
        await links.aclose()
        async with redis_store(nodes[0], prefix="test", **settings) as store:
            for node, name in zip(nodes, formed.tenants, strict=True):
                assert await admitted(store, name, tenant(name, concurrent=1))
                assert not await admitted(store, f"{name}-too", tenant(name, concurrent=1))
                assert of_users(node) == {USER}
            assert await store.payers(0, 20_000) == set(), "the user may ask for names"
            moved = formed.tenants[0]
            nodes[0].admin.flushall()
            formed.assign(key_slot(moved.encode()), nodes[1])
            assert await admitted(store, "moved", tenant(moved, concurrent=1))
            assert store.is_well
        await refused(certificates, url=settings["url"], cluster=True)


@pytest.mark.slow
async def test_sentinels_and_a_primary_with_certificates_and_acl_users(
    certificates: dict[str, str], guarded: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "of-sentinels").write_text("of-the-sentinels\n")
    tls = {**guarded, "tls-replication": "yes"}
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        primary = stack.enter_context(redis_server(*as_words({**tls, "tls-port": str(ports[0])})))
        follows = "--replicaof", "127.0.0.1", str(ports[0])
        replica = stack.enter_context(redis_server(*as_words({**tls, "tls-port": str(ports[1])}), *follows))
        for server in (primary, replica):
            server.admin.execute_command("ACL", "SETUSER", USER, "on", ">of-the-gateway", *RULES)  # type: ignore[no-untyped-call]
        await eventually(lambda: bool(replica.admin.info("replication")["master_link_status"] == "up"))
        lines = [f"{name} {value}" for name, value in tls.items()]
        lines.append(f"user {USER} on >of-the-sentinels allchannels -@all +sentinel|masters")
        asked = stack.enter_context(sentinels(ports[0], *lines, tls=True))
        await eventually(lambda: all(_knows_all(watcher_with(certificates, port)) for port in asked))
        settings: dict[str, Any] = {
            "url": "rediss://" + ",".join(f"127.0.0.1:{port}" for port in asked),
            "sentinel": PRIMARY,
            **certificates,
        }
        of_sentinels: dict[str, Any] = {
            "sentinel_username": USER,
            "sentinel_password": f"file:{tmp_path / 'of-sentinels'}",
        }
        who = tenant(concurrent=2)
        async with redis_store(primary, prefix="test", **settings, **of_sentinels) as store:
            assert await admitted(store, 1, who)
            assert of_users(primary) == {USER}
            await eventually(lambda: bool(replica.admin.keys("*:reservations")))
            primary.kill()
            with pytest.raises(StoreUnavailable):
                await admitted(store, 2, who)
            await until_well(store)
            assert [await admitted(store, 3, who), await admitted(store, 4, who)] == [True, False]
            assert of_users(replica) == {USER}
        await refused(certificates, **of_sentinels, url=settings["url"], sentinel=PRIMARY)


def watcher_with(settings: dict[str, str], port: int) -> redis.Redis:
    own: dict[str, Any] = {"ssl_certfile": settings["cert"], "ssl_keyfile": settings["key"]}
    return redis.Redis(
        "127.0.0.1", port, ssl=True, ssl_ca_certs=settings["ca"], **own, socket_timeout=PATIENCE_S
    )


async def refused(settings: dict[str, Any], **places: Any) -> None:
    """Whoever has no certificate, or another password, is no client of these servers."""
    strangers = {name: text for name, text in settings.items() if name not in ("cert", "key")}
    impostors = {**settings, "password": f"file:{Path(settings['ca']).with_name('another')}"}
    for theirs in (strangers, impostors):
        store = open_store(RedisConfig(**theirs, **places, key_prefix="test"), {})
        with pytest.raises(StoreUnavailable):
            await store.renew([])
        await store.aclose()
