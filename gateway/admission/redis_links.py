"""The server that keeps a tenant's quotas: a single one, the primary that Sentinels name, or a Cluster node.

redis-py asks Sentinels and Clusters where servers are whenever a connection is made; then it is closed.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from redis.asyncio.sentinel import Sentinel

from gateway.admission.redis_link import Address, Command, RedisLink
from gateway.quota_config import QuotasConfig, redis_database, redis_hosts
from gateway.secret import read_secret
from shared.config import ConfigError
from shared.ids import TenantId
from shared.tls import UnusableTls, client_context

CLIENT_NAME: Final = "penstock-gateway"


class OneLink:
    """A single server, or the primary of a group: all tenants are on it."""

    def __init__(self, link: RedisLink) -> None:
        self._link: Final = link

    def of(self, tenant: TenantId) -> RedisLink:
        return self._link

    def all(self) -> tuple[RedisLink, ...]:
        return (self._link,)

    async def aclose(self) -> None:
        await self._link.aclose()


def links_of(config: QuotasConfig, env: Mapping[str, str]) -> OneLink:
    """Raises ConfigError when a password or a certificate cannot be read."""
    assert config.url is not None
    try:
        password = read_secret(config.password_env, config.password_file, env)
        tls = client_context(ca=config.ca) if config.url.startswith("rediss:") else None
    except (ValueError, UnusableTls) as error:
        raise ConfigError([f"quotas: {error}"]) from None
    finder = _Finder(config, password, tls)
    link = RedisLink(
        finder.find,
        _greeting(config, password),
        timeout_s=config.timeout_s,
        connect_s=config.connect_s,
        tls=tls,
    )
    return OneLink(link)


def _greeting(config: QuotasConfig, password: str | None) -> list[Command]:
    assert config.url is not None
    commands: list[Command] = []
    if password is not None:
        commands.append(("AUTH", config.username or "default", password))
    if database := redis_database(config.url):
        commands.append(("SELECT", database))
    return [*commands, ("CLIENT", "SETNAME", CLIENT_NAME)]


class _Finder:
    """Where the server is at the moment."""

    def __init__(self, config: QuotasConfig, password: str | None, tls: ssl.SSLContext | None) -> None:
        assert config.url is not None
        self._hosts: Final = redis_hosts(config.url)
        self._sentinel: Final = config.sentinel
        self._timeout_s: Final = config.connect_s

    async def find(self) -> Address:
        """Raises redis.RedisError when no Sentinel knows the primary."""
        if self._sentinel is None:
            return Address(*self._hosts[0])
        sentinel = Sentinel(self._hosts, socket_timeout=self._timeout_s)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self._sentinel)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return Address(host, port)
