"""The settings of `[redis]`: where the Redis is that gateways share, and how it is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

from msgspec import Meta

from gateway.config.secret import SecretSource
from shared.process.setting_values import ConfigError
from shared.process.settings import Text

PORT: Final = 6379
_URL: Final = re.compile(r"rediss?://(?P<hosts>[^/?#@\s]+)(/\d{0,4})?")


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The Redis of quotas and of the directory, and how it is reached."""

    url: Text | None = None
    """redis://host:port/database, or rediss:// for TLS. Several hosts with commas between are Sentinels, or
    nodes of a Cluster. It holds no user and no password."""
    sentinel: Text | None = None
    """Sentinel's name of the primary: the hosts in url are Sentinels. Unset: they are not."""
    cluster: bool = False
    """True if the hosts in url are nodes of a Cluster."""
    username: Text | None = None
    """ACL user. Unset: the default one."""
    password: SecretSource | None = None
    """Where the password is: env:NAME, a variable, or file:PATH, a file, which is read for each
    connection."""
    sentinel_username: Text | None = None
    """ACL user at the Sentinels. Unset: the default one."""
    sentinel_password: SecretSource | None = None
    """Where the password is that the Sentinels ask for, which is not their primary's: env:NAME, or file:PATH,
    which is read whenever they are asked."""
    ca: Text | None = None
    """File with the authorities that are trusted with rediss://, PEM. Unset: the system's."""
    cert: Text | None = None
    """File with the gateway's own certificate chain, PEM, for servers that ask for one (mTLS)."""
    key: Text | None = None
    """File with its private key, PEM."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=5.0)] = 0.05
    """How long a call may take that a request waits for. The first one that takes longer is the last one that
    is waited for, until a probe succeeds."""
    key_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] = "penstock"
    """The beginning of all keys in Redis."""

    def __post_init__(self) -> None:
        problems = []
        if self.url is not None:
            try:
                hosts = redis_hosts(self.url)
            except ValueError as error:
                problems.append(f"url: {error}")
            else:
                if len(hosts) > 1 and not self.cluster and self.sentinel is None:
                    problems.append("url: several hosts are Sentinels (sentinel) or of a Cluster (cluster)")
        if self.cluster and self.sentinel is not None:
            problems.append("cluster and sentinel exclude each other")
        if self.sentinel is None and (self.sentinel_username, self.sentinel_password) != (None, None):
            problems.append("sentinel_username and sentinel_password need sentinel")
        problems += self._tls_problems()
        if problems:
            raise ConfigError(problems)

    def _tls_problems(self) -> list[str]:
        files = (self.ca, self.cert, self.key)
        has_tls = self.url is not None and self.url.startswith("rediss:")
        problems = ["cert and key need each other"] if (self.cert is None) != (self.key is None) else []
        if not has_tls and any(file is not None for file in files):
            problems.append("ca, cert and key need a url with rediss://")
        return problems


def redis_hosts(url: str) -> tuple[tuple[str, int], ...]:
    """Host and port of each server in a URL like `redis://host:6379,other:6379/0`. Raises ValueError, whose
    message does not show the URL: it may hold a password where none belongs."""
    if "@" in url:
        raise ValueError("user and password are no part of it: see username and password")
    if (match := _URL.fullmatch(url)) is None:
        raise ValueError("must be like redis://host:6379/0 or rediss://host:6379")
    hosts: list[tuple[str, int]] = []
    for text in match["hosts"].split(","):
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, PORT if parts.port is None else parts.port
        except ValueError:  # a port or an IPv6 address that is none
            host, port = None, 0
        if host is None or port == 0:
            raise ValueError("each host must be like redis-0.example:6379")
        hosts.append((host, port))
    return tuple(hosts)


def redis_database(url: str) -> int:
    """The number of the database in a URL; 0 without one."""
    return int(url.rpartition("/")[2] or 0) if url.count("/") > 2 else 0
