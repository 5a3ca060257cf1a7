"""The server that has a tenant's keys: a single one, the primary that Sentinels name, or a Cluster node.

Sentinels are asked where the primary is whenever a connection is made, and nodes which slots they have
whenever the links are refreshed. Passwords and certificates that are in files are those of the moment, for
each connection: a renewed one takes no restart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Protocol
from urllib.parse import quote

from redis.crc import key_slot

from gateway.config.redis import RedisConfig, redis_database, redis_hosts
from gateway.config.secret import RenewableSecret
from gateway.redis.link import Address, Command, RedisLink, RedisUnavailable, SlotMoved, ask
from gateway.redis.sentinels import Sentinels
from shared.process.renewable_tls import RenewableTls
from shared.process.setting_values import ConfigError
from shared.process.tls import UnusableTls, client_context
from shared.wire.ids import TenantId

CLIENT_NAME: Final = "penstock-gateway"
CONNECT_S: Final = 1.0
"""The time to connect, in seconds, as the probes do that are made every half second while Redis is down."""
NODES_MAX: Final = 1000
"""The most nodes that are connected to because another one named them: what Redis recommends at most."""
TENANTS_KNOWN_MAX: Final = 16 * 1024
"""Tenants whose slots are not worked out anew for each call."""
TAGS_TRIED_MAX: Final = 100_000
"""Hash tags that are tried to find one of a node: six for each slot there is."""


class Links(Protocol):
    """Connections to where tenants' keys are, one for each server."""

    def of(self, tenant: TenantId) -> RedisLink:
        """The connection to the server of a tenant. Raises RedisUnavailable when no server is known."""
        ...

    def all(self) -> Iterable[RedisLink]:
        """The connections to all servers that are known."""
        ...

    @property
    def is_cluster(self) -> bool:
        """True if the keys of one call must have one hash tag."""
        ...

    def tag_of(self, link: RedisLink) -> str:
        """A hash tag of keys that are on this server."""
        ...

    async def follow(self, moved: SlotMoved, tag: str, probe: Command) -> RedisLink:
        """The connection to the server that has the keys of a hash tag now, up; from then on `of` returns it.
        `probe` is a command that this server answers. Raises `moved` where the server cannot be used within
        a call's time."""
        ...

    async def refresh(self) -> None:
        """Find out which servers there are. Raises RedisUnavailable when none of them tells."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


def links_of(config: RedisConfig, env: Mapping[str, str], one_tag: str | None = None) -> Links:
    """`one_tag`: the hash tag of all keys; None where those of each tenant have their own. Raises ConfigError
    when a password or a certificate cannot be read."""
    assert config.url is not None
    try:
        password = RenewableSecret(config.password, env)
        of_sentinels = RenewableSecret(config.sentinel_password, env)
        tls = None
        if config.url.startswith("rediss:"):
            load = partial(client_context, ca=config.ca, cert=config.cert, key=config.key)
            tls = RenewableTls((config.ca, config.cert, config.key), load, is_server=False)
    except (ValueError, UnusableTls) as error:
        raise ConfigError([f"redis: {error}"]) from None
    servers = _Servers(config, password, of_sentinels, tls)
    return ClusterLinks(servers, one_tag) if config.cluster else OneLink(servers)


def tag_of(tenant: TenantId) -> str:
    """The hash tag of a tenant's keys, without its braces."""
    return quote(tenant, safe="")


class OneLink:
    """A single server, or the primary of a group: all tenants are on it."""

    is_cluster: Final = False

    def __init__(self, servers: _Servers) -> None:
        sentinels = servers.sentinels
        find = servers.first if sentinels is None else sentinels.find
        self._link: Final = RedisLink(find, servers.greeting, **servers.options)

    def of(self, tenant: TenantId) -> RedisLink:
        return self._link

    def all(self) -> tuple[RedisLink, ...]:
        return (self._link,)

    def tag_of(self, link: RedisLink) -> str:
        return "probe"

    async def follow(self, moved: SlotMoved, tag: str, probe: Command) -> RedisLink:
        raise moved

    async def refresh(self) -> None:
        """Nothing: each connection is made to the server that is the right one then."""

    async def aclose(self) -> None:
        await self._link.aclose()


class ClusterLinks:
    """The nodes of a Cluster that have slots: all keys of a tenant are on one of them. Where there is one
    hash tag for all keys, the one that has those of all tenants."""

    def __init__(self, servers: _Servers, one_tag: str | None) -> None:
        self._servers: Final = servers
        self._slot: Final = None if one_tag is None else key_slot(one_tag.encode())
        """The slot of all keys. None where each tenant has its own."""
        self._links: dict[Address, RedisLink] = {}
        self._ranges: list[tuple[int, int, Address]] = []
        """The first slot, the last one, and the node that has them."""
        self._moved: dict[int, Address] = {}
        """The slots that were found to have moved since the nodes were asked, and the nodes that have
        them."""
        self._tags: dict[Address, str] = {}
        """A hash tag of keys that a node has, for each that was asked for."""
        self._joining: dict[Address, asyncio.Task[None]] = {}
        """The first probe of each node that another one has named."""

    @property
    def is_cluster(self) -> bool:
        return self._slot is None

    def of(self, tenant: TenantId) -> RedisLink:
        slot = _slot_of(tenant) if self._slot is None else self._slot
        if self._moved and (owner := self._moved.get(slot)) is not None:
            return self._links[owner]
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return self._links[address]
        raise RedisUnavailable(f"no node is known to have slot {slot}")

    def all(self) -> list[RedisLink]:
        return list(self._links.values())

    def tag_of(self, link: RedisLink) -> str:
        owner = next(address for address, one in self._links.items() if one is link)
        if owner not in self._tags:
            ranges = [(first, last) for first, last, address in self._ranges if address == owner]
            tags = (str(number) for number in range(TAGS_TRIED_MAX))
            fitting = (tag for tag in tags if _is_within(key_slot(tag.encode()), ranges))
            self._tags[owner] = next(fitting, "")
        return self._tags[owner]

    async def follow(self, moved: SlotMoved, tag: str, probe: Command) -> RedisLink:
        owner = moved.owner
        if owner is None or (owner not in self._links and len(self._links) >= NODES_MAX):
            raise moved
        link = self._links.get(owner)
        if link is None:
            link = self._links[owner] = self._servers.link_to(owner)
            self._tags[owner] = tag
        if not link.is_up:
            await self._join(owner, link, probe)
            if not link.is_up:  # the next refresh finds out whether it is a node
                raise moved
        self._moved[moved.slot] = owner
        return link

    async def _join(self, owner: Address, link: RedisLink, probe: Command) -> None:
        """Wait until a node has answered its first probe, no longer than a call may take. There is one probe
        however many callers wait."""
        task = self._joining.get(owner)
        if task is None:
            task = self._joining[owner] = asyncio.create_task(self._probe(owner, link, probe))
        await asyncio.wait({task}, timeout=self._servers.config.timeout_s)

    async def _probe(self, owner: Address, link: RedisLink, probe: Command) -> None:
        try:
            with contextlib.suppress(RedisUnavailable):
                await link.probe(*probe)
        finally:
            del self._joining[owner]

    async def refresh(self) -> None:
        ranges = await self._servers.slots(self._links)
        if (slot := self._slot) is not None:
            ranges = [one for one in ranges if one[0] <= slot <= one[1]]
            if not ranges:
                raise RedisUnavailable(f"no node is known to have slot {slot}")
        owners = {address for _, _, address in ranges}
        gone = [self._links.pop(address) for address in set(self._links) - owners]
        for address in owners - set(self._links):
            self._links[address] = self._servers.link_to(address)
        if ranges != self._ranges:
            self._ranges = ranges
            self._tags.clear()
        self._moved.clear()
        await asyncio.gather(*(link.aclose() for link in gone))

    async def aclose(self) -> None:
        await asyncio.gather(*(link.aclose() for link in self._links.values()))


@lru_cache(TENANTS_KNOWN_MAX)
def _slot_of(tenant: TenantId) -> int:
    return key_slot(tag_of(tenant).encode())


def _is_within(slot: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first <= slot <= last for first, last in ranges)


class _Servers:
    """The servers, as far as they are known, and how they are asked."""

    def __init__(
        self,
        config: RedisConfig,
        password: RenewableSecret,
        sentinel_password: RenewableSecret,
        tls: RenewableTls | None,
    ) -> None:
        assert config.url is not None
        self.config: Final = config
        self.options: Final[dict[str, Any]] = {
            "timeout_s": config.timeout_s,
            "connect_s": CONNECT_S,
            "tls": tls,
        }
        self._password: Final = password
        self._hosts: Final = tuple(Address(*host) for host in redis_hosts(config.url))
        self._tls: Final = tls
        self.sentinels: Sentinels | None = None
        """None where the servers are asked by the addresses in the URL."""
        if config.sentinel is not None:
            user = config.sentinel_username, sentinel_password
            context = None if tls is None else tls.context
            self.sentinels = Sentinels(config.sentinel, self._hosts, *user, context)

    async def greeting(self) -> Sequence[Command]:
        """The commands that are sent first on each connection: with the password of the moment."""
        return _greeting(self.config, await self._password.now())

    def link_to(self, address: Address) -> RedisLink:
        """A connection to this very server."""

        async def find() -> Address:
            return address

        return RedisLink(find, self.greeting, **self.options)

    async def first(self) -> Address:
        """The server that the URL names."""
        return self._hosts[0]

    async def slots(self, known: Iterable[Address]) -> list[tuple[int, int, Address]]:
        """The ranges of slots and the nodes that have them, as the first node says that tells. Raises
        RedisUnavailable when none does."""
        problem, tls = "", None
        if self._tls is not None:
            await self._tls.look()
            tls = self._tls.context
        questions = *await self.greeting(), ("CLUSTER", "SLOTS")
        for server in dict.fromkeys((*known, *self._hosts)):
            try:
                async with asyncio.timeout(CONNECT_S):
                    told = await ask(server, tls, *questions)
                if told:
                    return [(first, last, _address(owner, server.host)) for first, last, owner, *_ in told]
            except (OSError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RedisUnavailable(f"no node tells the Cluster's slots: {problem}"[:200])


def _greeting(config: RedisConfig, password: str | None) -> list[Command]:
    assert config.url is not None
    commands: list[Command] = []
    if password is not None:
        commands.append(("AUTH", config.username or "default", password))
    if database := redis_database(config.url):
        commands.append(("SELECT", database))
    return [*commands, ("CLIENT", "SETNAME", CLIENT_NAME)]


def _address(node: list[Any], asked: str) -> Address:
    """Where a node is. One that does not know its own name is where it was asked."""
    return Address(node[0].decode() if node[0] else asked, node[1])
