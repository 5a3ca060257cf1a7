"""The settings of quotas: the limits of tenants, keys and models, where usage is counted, and what holds
while it cannot be asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from shared.config import ConfigError
from shared.settings import ModelName, Text, Unit

QUOTA_MAX: Final = 10**9
"""The largest limit of a minute, and of concurrent requests."""
BUDGET_MAX: Final = 10**15
"""The largest budget, in tokens."""
MODEL_LIMITS_MAX: Final = 256
Quota = Annotated[int, Meta(ge=0, le=QUOTA_MAX)]
Budget = Annotated[int, Meta(ge=0, le=BUDGET_MAX), Unit("tokens")]

QuotaFail = Literal["closed", "local"]
"""The answer to requests of a tenant with limits while the store cannot be asked: 503, or what this gateway's
part of the limits allows."""
REDIS_PORT: Final = 6379
_REDIS_URL: Final = re.compile(r"rediss?://(?P<hosts>[^/?#@\s]+)(/\d{0,4})?")


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The quotas of a tenant, a key or a model. None is no limit; 0 lets nothing through."""

    requests_per_min: Annotated[Quota, Unit("requests")] | None = None
    """Requests in a minute. Unset: no limit. 0 lets nothing through, as in each of these."""
    tokens_per_min: Annotated[Quota, Unit("tokens")] | None = None
    """Tokens of prompts and answers in a minute. Unset: no limit."""
    concurrent: Annotated[Quota, Unit("requests")] | None = None
    """Requests in progress. Unset: no limit."""
    token_budget: Budget | None = None
    """Tokens in total, which time does not refill. Unset: no limit."""
    tokens_per_day: Budget | None = None
    """Tokens on a day of the calendar, in UTC. Unset: no limit."""
    tokens_per_month: Budget | None = None
    """Tokens in a month of the calendar, in UTC. Unset: no limit."""


NO_LIMITS: Final = QuotaLimits()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The quotas of a tenant or a key for one model, beside those for all its models."""

    model: ModelName
    """Name (not an alias) of the model."""
    limits: QuotaLimits
    """Quotas of its requests for this model."""


PerModel = Annotated[tuple[ModelLimits, ...], Meta(max_length=MODEL_LIMITS_MAX)]


def model_limit_problems(entries: PerModel, models: Container[str]) -> Iterator[str]:
    """The models that are named twice, or that there are not."""
    for name, count in Counter(entry.model for entry in entries).items():
        if count > 1:
            yield f"model_limits: {name!r} is given {count} times"
        if name not in models:
            yield f"model_limits: there is no model {name!r}"


@dataclass(frozen=True, slots=True)
class QuotasConfig:
    """Where the usage of quotas is counted."""

    store: Literal["memory", "redis"] = "memory"
    """memory: each gateway process counts for itself, and a restart forgets. redis: all gateways count
    together."""
    url: Text | None = None
    """redis://host:port/database, or rediss:// for TLS. Several hosts with commas between are Sentinels, or
    nodes of a Cluster. It holds no user and no password."""
    sentinel: Text | None = None
    """Sentinel's name of the primary: the hosts in url are Sentinels. Unset: they are not."""
    cluster: bool = False
    """True if the hosts in url are nodes of a Cluster."""
    one_node: bool = False
    """True if one node of the Cluster counts for all tenants, as limits of a model over all of them need.
    What was counted before it was set, or unset, is not seen afterwards."""
    username: Text | None = None
    """ACL user. Unset: the default one."""
    password_env: Text | None = None
    """Variable with the password."""
    password_file: Text | None = None
    """File with the password. It is read for each connection."""
    sentinel_username: Text | None = None
    """ACL user at the Sentinels. Unset: the default one."""
    sentinel_password_env: Text | None = None
    """Variable with the password that the Sentinels ask for, which is not their primary's."""
    sentinel_password_file: Text | None = None
    """File with the password that the Sentinels ask for. It is read whenever they are asked."""
    ca: Text | None = None
    """File with the authorities that are trusted with rediss://, PEM. Unset: the system's."""
    cert: Text | None = None
    """File with the gateway's own certificate chain, PEM, for servers that ask for one (mTLS)."""
    key: Text | None = None
    """File with its private key, PEM."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=5.0)] = 0.05
    """How long a call may take. The first one that takes longer is the last one that is waited for, until a
    probe succeeds."""
    connect_s: Annotated[float, Meta(gt=0.0, le=3.0)] = 1.0
    """Connecting, as the probes do that are made every half second while the store is down."""
    fail: QuotaFail = "closed"
    """The answer to requests of tenants with limits while the store is down. closed: 503. local: each gateway
    counts for itself, with its part of each limit."""
    gateways: Annotated[int, Meta(ge=1, le=10_000), Unit("processes")] = 1
    """Gateway processes that share the store: with fail = "local" each allows this part of every limit."""
    key_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] = "penstock"
    """The beginning of all keys in Redis."""

    def __post_init__(self) -> None:
        problems = []
        if self.store == "redis" and self.url is None:
            problems.append('store = "redis" needs url')
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
        if self.one_node and not self.cluster:
            problems.append("one_node: is for a Cluster (cluster)")
        for whose in ("", "sentinel_"):
            variable, file = f"{whose}password_env", f"{whose}password_file"
            if getattr(self, variable) is not None and getattr(self, file) is not None:
                problems.append(f"{variable} and {file} exclude each other")
        asks_sentinels = (self.sentinel_username, self.sentinel_password_env, self.sentinel_password_file)
        if self.sentinel is None and any(setting is not None for setting in asks_sentinels):
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
        raise ValueError("user and password are no part of it: see username, password_env, password_file")
    if (match := _REDIS_URL.fullmatch(url)) is None:
        raise ValueError("must be like redis://host:6379/0 or rediss://host:6379")
    hosts: list[tuple[str, int]] = []
    for text in match["hosts"].split(","):
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, REDIS_PORT if parts.port is None else parts.port
        except ValueError:  # a port or an IPv6 address that is none
            host, port = None, 0
        if host is None or port == 0:
            raise ValueError("each host must be like redis-0.example:6379")
        hosts.append((host, port))
    return tuple(hosts)


def redis_database(url: str) -> int:
    """The number of the database in a URL; 0 without one."""
    return int(url.rpartition("/")[2] or 0) if url.count("/") > 2 else 0
