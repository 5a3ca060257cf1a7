"""The gateway's configuration: TOML (and environment) to frozen values, read by `shared.config`.

    [listen]            host, port; [listen.tls] cert, key
    [admin]             host, port: metrics, for the operator's network only
    [hop]               ca, cert, key: TLS towards the engines
    [limits]            sizes and counts
    [timeouts]          seconds
    [admission]         unknown_fields, completion_estimate
    [[models]]          name, aliases, replicas, protocol, upstream_model, api_key_env, api_key_file,
                        timeouts, queue_timeout_s, request_timeout_s
    [tiers.flex]        timeouts, queue_timeout_s, request_timeout_s: of a class of tenants, those with this
                        `service_tier`; [tiers.default] and [tiers.priority] the same
    [[tenants]]         id, models, limits, service_tier, timeouts, queue_timeout_s, request_timeout_s
    [[keys]]            id, hash, tenant, models, limits, expires, disabled

Of what bounds a request in time, the most specific setting wins, each by itself: the tenant's, its class's,
the model's, the one in `[timeouts]`.

Keys, tenants and their classes are read again when the file changes; everything else takes a restart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta

from shared import config
from shared.config import ConfigError
from shared.fair_share import FairShare
from shared.holding import memory_max
from shared.ids import KeyId, TenantId
from shared.openai import BODY_LEN_MAX, TOKENS_MAX

ENV_PREFIX: Final = "PENSTOCK_GATEWAY_"
QUOTA_MAX: Final = 10**9
ENTRIES_MAX: Final = 10_000
"""Keys, tenants: they are held in memory, each with its usage."""
REPLICAS_MAX: Final = 256
_S_MAX: Final = 86_400.0
_BASE_URL: Final = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?")

Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0.0, le=_S_MAX)]
Quota = Annotated[int, Meta(ge=0, le=QUOTA_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""Ends up in logs, metrics and a header of the hop."""

KeyHash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]

HASH_PREFIX: Final = "sha256:"
ANY: Final = "*"
ALL_MODELS: Final = (ANY,)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    cert: str
    """Path of the certificate chain, PEM."""
    key: str
    """Path of its private key, PEM."""


@dataclass(frozen=True, slots=True)
class HopConfig:
    """TLS towards replicas whose URLs are `https`."""

    ca: str | None = None
    """Path of the authorities that are trusted, PEM; without it, those of the system."""
    cert: str | None = None
    """Path of the gateway's own certificate chain, PEM, for engines that ask for one (mTLS)."""
    key: str | None = None
    """Path of its private key, PEM."""


@dataclass(frozen=True, slots=True)
class ListenConfig:
    host: str = "127.0.0.1"
    port: Port = 8000
    """0: any free port, named in the `gateway.listening` log line."""
    tls: TlsConfig | None = None


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """A second listener without authentication, for `/metrics` and the probes. Off without a port.

    It is not on the public port because label values name tenants and models.
    """

    host: str = "127.0.0.1"
    port: Port | None = None


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    body_len_max: Annotated[int, Meta(ge=1024, le=BODY_LEN_MAX)] = BODY_LEN_MAX
    request_memory: Annotated[int, Meta(ge=1024 * 1024, le=1024**4)] = 512 * 1024 * 1024
    """Bytes that the bodies of requests and what is made of them may take until they are answered, all
    together; a tenant has three quarters of it at most. Above it a 503, at once."""
    live_max: Annotated[int, Meta(ge=1, le=100_000)] = 4096
    """Requests in progress; above it a 503, at once. A tenant has three quarters of it at most."""
    connections_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 16_384
    """Client connections, idle ones too; above it new ones are closed unanswered."""
    send_buffer_len: Annotated[int, Meta(ge=4096, le=16 * 1024 * 1024)] = 64 * 1024
    """The kernel's send buffer of a client connection (SO_SNDBUF)."""
    write_buffer_len: Annotated[int, Meta(ge=1024, le=16 * 1024 * 1024)] = 16 * 1024
    """Our own: with more than this unsent, the relay stops reading from the engine."""
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64)] = 2


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    body_s: Seconds = 30.0
    """The request body, from its headers to its last byte."""
    connect_s: Seconds = 5.0
    first_token_s: Seconds = 120.0
    """A stream: from dispatch to the first event. A unary answer has no first token on the wire, so
    only `total_s` bounds its wait."""
    inter_token_s: Seconds = 60.0
    """Between any two reads from the engine after the first byte."""
    total_s: Seconds = 1800.0
    """From the request's arrival to the last byte of its answer."""
    slow_client_s: Seconds = 30.0
    """How long a client may leave its connection's buffers full."""
    idle_s: Seconds = 75.0
    """A connection on which no request is in progress, one that is still sending headers too."""
    drain_s: Seconds = 60.0
    """After SIGTERM: how long open requests may take to end."""


General = TypeVar("General", TimeoutsConfig, "TimeoutOverrides")


@dataclass(frozen=True, slots=True)
class TimeoutOverrides:
    """Of `TimeoutsConfig`, those that belong to one request, for one model, one class of tenants or one
    tenant. None leaves the more general setting as it is."""

    connect_s: Seconds | None = None
    first_token_s: Seconds | None = None
    inter_token_s: Seconds | None = None
    total_s: Seconds | None = None
    slow_client_s: Seconds | None = None

    def over(self, general: General) -> General:
        return replace(general, **{name: s for name, s in asdict(self).items() if s is not None})


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    completion_estimate: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 1024
    """Completion tokens that are reserved at least for each choice of a request that states no maximum."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """None is no limit; 0 lets nothing through."""

    requests_per_min: Quota | None = None
    tokens_per_min: Quota | None = None
    concurrent: Quota | None = None
    token_budget: Quota | None = None
    """Tokens in total. Time does not refill it."""


Protocol = Literal["http2", "http1"]
Tier = Literal["flex", "default", "priority"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: Name
    replicas: Annotated[tuple[str, ...], Meta(min_length=1, max_length=REPLICAS_MAX)]
    """Base URLs, as `http://engine-0:8000`."""
    protocol: Protocol = "http2"
    """What the replicas speak: HTTP/2 by prior knowledge, as our engine does, or HTTP/1.1."""
    aliases: tuple[Name, ...] = ()
    """Further names it answers to; `*` is any name that no other model has."""
    upstream_model: Name | None = None
    """What the engine calls it, when that is not `name`."""
    timeouts: TimeoutOverrides | None = None
    """Each wins over the one in `[timeouts]`."""
    queue_timeout_s: Seconds | None = None
    """In the engine's queue: what a caller gets who names no bound, and the most that one may name."""
    request_timeout_s: Seconds | None = None
    """The same for the whole answer, as the engine counts it."""
    api_key_env: Name | None = None
    """The environment variable with the key that the replicas ask for."""
    api_key_file: Name | None = None
    """Or the path of a file with it."""

    @property
    def names(self) -> tuple[Name, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """What a class of tenants has in common: those with this `service_tier`, whatever class a single
    request of theirs asks for."""

    timeouts: TimeoutOverrides | None = None
    """Each wins over the model's and the one in `[timeouts]`, be it shorter or longer."""
    queue_timeout_s: Seconds | None = None
    """Wins over the model's, as the next."""
    request_timeout_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """One for each `Tier`."""

    flex: TierConfig = TierConfig()
    default: TierConfig = TierConfig()
    priority: TierConfig = TierConfig()

    def of(self, tier: Tier) -> TierConfig:
        match tier:
            case "flex":
                return self.flex
            case "default":
                return self.default
            case "priority":
                return self.priority


@dataclass(frozen=True, slots=True)
class TenantConfig:
    id: Id
    models: tuple[Name, ...] = ALL_MODELS
    """Names of models (not aliases) that it may use; `*` is all."""
    limits: QuotaLimits = QuotaLimits()
    service_tier: Tier = "priority"
    """Its class: the highest that its requests may have."""
    timeouts: TimeoutOverrides | None = None
    """Each wins over the one of its class, the model's and the one in `[timeouts]`."""
    queue_timeout_s: Seconds | None = None
    """Wins over the one of its class and the model's, as the next."""
    request_timeout_s: Seconds | None = None

    def as_one_of(self, tier: TierConfig) -> TenantConfig:
        """With the settings of its class where it has none of its own."""
        own, common = self.timeouts, tier.timeouts
        return replace(
            self,
            timeouts=common if own is None else own if common is None else own.over(common),
            queue_timeout_s=self.queue_timeout_s or tier.queue_timeout_s,
            request_timeout_s=self.request_timeout_s or tier.request_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class KeyConfig:
    id: Id
    """The `keyid` of a minted key; any name for a development key."""
    hash: KeyHash = field(repr=False)
    """`sha256:<hex>` of the whole key."""
    tenant: Id
    models: tuple[Name, ...] = ALL_MODELS
    """Of the tenant's models, those that this key may use."""
    limits: QuotaLimits = QuotaLimits()
    expires: datetime | None = None
    disabled: bool = False

    @property
    def key_id(self) -> KeyId:
        return KeyId(self.id)

    @property
    def tenant_id(self) -> TenantId:
        return TenantId(self.tenant)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    models: Annotated[tuple[ModelConfig, ...], Meta(min_length=1, max_length=ENTRIES_MAX)]
    tenants: Annotated[tuple[TenantConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    keys: Annotated[tuple[KeyConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    listen: ListenConfig = ListenConfig()
    admin: AdminConfig = AdminConfig()
    hop: HopConfig = HopConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    tiers: TiersConfig = TiersConfig()
    admission: AdmissionConfig = AdmissionConfig()


OVERRIDES_KEPT: Final = 1024
"""Combinations that are kept: working one out takes longer than a request's other checks together."""


def load(source: Path | Mapping[str, Any], env: Mapping[str, str]) -> GatewayConfig:
    """From a TOML file, or what one would hold. Raises ConfigError, which lists all that is wrong."""
    loaded = config.load(GatewayConfig, source, env, ENV_PREFIX)
    if problems := list(_contradictions(loaded)):
        raise ConfigError(problems)
    return loaded


def timeouts_of(
    config: TimeoutsConfig, model: ModelConfig, tenant: TenantConfig | None = None
) -> TimeoutsConfig:
    """The most specific setting wins, each by itself, as a route's over its cluster's in Envoy: only so
    can a tenant's be longer than everybody's, too. `tenant`: with its class's settings (`as_one_of`)."""
    overrides = (model.timeouts, tenant.timeouts if tenant else None)
    return config if overrides == (None, None) else _overridden(config, *overrides)


@lru_cache(maxsize=OVERRIDES_KEPT)
def _overridden(config: TimeoutsConfig, *overrides: TimeoutOverrides | None) -> TimeoutsConfig:
    for own in overrides:
        if own is not None:
            config = own.over(config)
    return config


def _contradictions(config: GatewayConfig) -> Iterator[str]:
    """What no single value shows."""
    needed = memory_max(config.limits.body_len_max)
    if FairShare(config.limits.request_memory).most < needed:
        yield (
            f"limits: request_memory must be at least {-(-needed * 4 // 3)} bytes, so that a body of "
            f"body_len_max ({config.limits.body_len_max}) bytes fits into one tenant's part of it"
        )
    if (config.hop.cert is None) != (config.hop.key is None):
        yield "hop: cert and key belong together"
    model_names = {model.name for model in config.models}
    tenant_ids = {tenant.id for tenant in config.tenants}
    yield from _repeated("models", (name for model in config.models for name in model.names))
    yield from _repeated("tenants", (tenant.id for tenant in config.tenants))
    yield from _repeated("keys", (key.id for key in config.keys))
    yield from _repeated("keys", (key.hash for key in config.keys))
    protocols: dict[str, Protocol] = {}
    for model in config.models:
        if model.api_key_env is not None and model.api_key_file is not None:
            yield f"models.{model.name}: api_key_env and api_key_file exclude each other"
        for url in model.replicas:
            if not _is_base_url(url):
                yield f"models.{model.name}: {url!r} is no base URL like http://host:port"
            if protocols.setdefault(url.rstrip("/"), model.protocol) != model.protocol:
                yield f"models.{model.name}: {url!r} has another protocol in another model"
    for tenant in config.tenants:
        yield from _unknown(f"tenants.{tenant.id}", tenant.models, model_names)
    for key in config.keys:
        yield from _unknown(f"keys.{key.id}", key.models, model_names)
        if key.tenant not in tenant_ids:
            yield f"keys.{key.id}: there is no tenant {key.tenant!r}"
        if key.expires is not None and key.expires.tzinfo is None:
            yield f"keys.{key.id}: expires must say its offset, as 2030-01-31T00:00:00Z does"


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(_BASE_URL.fullmatch(text) and parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        return False


def _repeated(section: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{section}: {name!r} is given {count} times"


def _unknown(where: str, names: Iterable[str], known: set[str]) -> Iterator[str]:
    for name in names:
        if name != ANY and name not in known:
            yield f"{where}: there is no model {name!r}"
