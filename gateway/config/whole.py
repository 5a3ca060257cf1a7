"""The gateway's configuration: a TOML file and variables, of which the variables win, to frozen values.

Each field below declares a setting (`shared.process.settings`): `live_max` in `[limits]` is also the variable
`PENSTOCK_GATEWAY_LIMITS__LIVE_MAX`. `penstock settings gateway` prints them all, and an example of the file.

Of the settings that bound a request in time, the most specific one wins, each by itself: the tenant's, the
model's, the one in `[timeouts]`.

Keys, tenants, issuers, grants, certificates and the replicas of models are read again when the file changes;
everything else takes a restart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta

from gateway.config.accounting import AccountingConfig
from gateway.config.directory import DirectoryConfig, KeyEnv
from gateway.config.discovery import DiscoveryConfig
from gateway.config.edge import (
    ENTRIES_MAX,
    ISSUERS_MAX,
    AdminConfig,
    AdmissionConfig,
    AnyKeyConfig,
    HopConfig,
    Id,
    IssuerConfig,
    LimitsConfig,
    ListenConfig,
    Name,
    OperatorKeyConfig,
    Seconds,
    is_base_url,
)
from gateway.config.holders import ALL_MODELS as ALL_MODELS
from gateway.config.holders import ANY as ANY
from gateway.config.holders import CertificateConfig, GrantConfig
from gateway.config.holders import Tier as Tier
from gateway.config.quotas import (
    NO_LIMITS,
    PerModel,
    QuotaFail,
    QuotaLimits,
    QuotasConfig,
    model_limit_problems,
)
from gateway.config.redis import RedisConfig
from gateway.config.responses import ResponsesConfig
from gateway.config.secret import SecretSource
from gateway.config.timeouts import TimeoutOverrides, TimeoutsConfig
from gateway.endpoints.routes import SCOPES
from shared.process import setting_values
from shared.process.setting_values import ConfigError
from shared.process.settings import LogLevel, ModelName, Rule, Unit
from shared.telemetry.tracing import TracingConfig
from shared.wire.ids import KeyId, TenantId
from shared.wire.shapes import TOKENS_MAX

ENV_PREFIX: Final = "PENSTOCK_GATEWAY_"
HEADINGS: Final[Mapping[str, str]] = {}
"""None within the top level: the file has sections."""
MOVED: Final = {f"quotas.{one.name}": f"redis.{one.name}" for one in fields(RedisConfig)}
"""Settings by their former paths: a file or a variable that has one is told the new one."""
_SECRETS: Final = (
    *("models[].api_key", "redis.password", "redis.sentinel_password"),
    *("accounting.webhook_secret", "hop.salt"),
)
_OF_TIERS: Final = [
    f"tiers.{tier}.{name}"
    for tier in get_args(Tier)
    for name in (
        *("hedge", "queue_timeout_s", "request_timeout_s"),
        *(f"timeouts.{one.name}" for one in fields(TimeoutOverrides)),
    )
]
GONE: Final = {
    **{f"{path}_env": f'{path.rpartition(".")[2]} = "env:NAME" now' for path in _SECRETS},
    **{f"{path}_file": f'{path.rpartition(".")[2]} = "file:PATH" now' for path in _SECRETS},
    **dict.fromkeys(("tiers", *_OF_TIERS), "gone: time limits are a model's or a tenant's"),
    "limits.send_buffer_len": "gone: it is 64KiB",
    "limits.write_buffer_len": "gone: it is 16KiB",
    "hop.metrics_interval_s": "gone: it is 1 second",
    "redis.connect_s": "gone: it is 1 second",
    "hop.ping_interval_s": "gone: it is 1 second",
    "hop.ping_timeout_s": "gone: it is 3 seconds",
    "issuers[].skew_s": "gone: it is 30 seconds",
    "issuers[].refresh_s": "gone: it is 300 seconds",
    "issuers[].refetch_s": "gone: it is 1 second",
    "issuers[].stale_s": "gone: it is 3600 seconds",
    **dict.fromkeys(
        ("keys[].key", "admin.keys[].key"), "`hash`, of the key: `penstock keys mint` shows both"
    ),
    **{
        f"models[].discovery.kubernetes.{name}_file": "gone: it is where Kubernetes puts it"
        for name in ("token", "ca", "namespace")
    },
}
"""What became of settings that there are no more, by their paths: a file or a variable with one is told."""
REPLICAS_MAX: Final = 256
FALLBACKS_MAX: Final = 4
PASSED_MAX: Final = 64
FallbackReason = Literal["unavailable", "full"]
WORKERS_MAX: Final = 64


HASH_PREFIX: Final = "sha256:"
ALL_ENDPOINTS: Final = (ANY,)
EndpointScope = Annotated[
    str, Meta(max_length=64), Rule(f"be * or one of {', '.join(SCOPES)}", {ANY, *SCOPES}.__contains__)
]


HopProtocol = Literal["http2", "http1"]
EngineMake = Literal["auto", "penstock", "openai"]
Salted = Literal["auto", "send", "never"]
MaximumField = Literal["asked", "max_tokens", "max_completion_tokens"]
ImageHost = Annotated[
    str,
    Meta(max_length=253),
    Rule("be * or a host in lower case", re.compile(r"\*|[a-z0-9.-]+").fullmatch),
]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model, and the engines that serve it."""

    name: ModelName
    """The name that clients use."""
    replicas: Annotated[tuple[str, ...], Meta(max_length=REPLICAS_MAX)] = ()
    """Base URLs of its engines without /v1, such as http://engine-0:8001, unless discovery finds them."""
    discovery: DiscoveryConfig | None = None
    """Where its engines are found."""
    prefix_owners: Annotated[int, Meta(ge=1, le=16)] | None = None
    """Replicas that cache the same system prompt. Unset: all. 2 where those in use exceed one's cache."""
    protocol: HopProtocol = "http2"
    """The protocol of its engines: HTTP/2 by prior knowledge, as ours speaks, or HTTP/1.1."""
    engine: EngineMake = "auto"
    """Whose its engines are. penstock: ours. openai: another server with OpenAI's API. auto: they are asked,
    and until one answers count as another server where protocol is http1 or they want a key, else as ours."""
    maximum_field: MaximumField = "asked"
    """The field that tells another server the most tokens of a chat. asked: the one that the caller used,
    else max_tokens. Ollama and older llama.cpp ignore max_completion_tokens; OpenAI's reasoning models take
    nothing else."""
    pass_fields: Annotated[tuple[Name, ...], Meta(max_length=PASSED_MAX)] = ()
    """Fields that another server is sent beside those that are known to be harmless. They are counted as
    text, and nothing else about them is known."""
    image_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX), Unit("tokens")] = 2048
    """Tokens that are reserved for each image that another server is sent."""
    image_hosts: Annotated[tuple[ImageHost, ...], Meta(max_length=PASSED_MAX)] = ()
    """Hosts that another server may be told to fetch images from, such as images.example.com; * is any, its
    own network included. Images in data URLs always pass."""
    cache_salt: Salted = "auto"
    """Whether another server is sent a salt for its cached prefixes, which keeps tenants apart there. auto:
    if it says that it is vLLM or SGLang."""
    fallback: Annotated[tuple[Name, ...], Meta(max_length=FALLBACKS_MAX)] = ()
    """Names of models that are asked, one after the other, when none of its engines can answer. Their own
    fallbacks are not followed."""
    fallback_on: tuple[FallbackReason, ...] = ("unavailable",)
    """unavailable: none is ready, or all that were asked failed before they answered. full: the queues of
    those that were asked are full."""
    aliases: tuple[Name, ...] = ()
    """Further names that it answers to; * is any name that no other model has."""
    upstream_model: Name | None = None
    """Its name at the engines. Unset: the same name."""
    limits: QuotaLimits = NO_LIMITS
    """Quotas of all tenants' requests for it together."""
    timeouts: TimeoutOverrides | None = None
    """Time limits of its requests, each of which wins over the one in [timeouts]."""
    queue_timeout_s: Seconds | None = None
    """Time in the engine's queue, for a request that names no limit, and the most that one may name. Unset:
    no limit."""
    request_timeout_s: Seconds | None = None
    """The same for the whole answer, as the engine counts it."""
    api_key: SecretSource | None = None
    """Where the key is that the engines ask for: env:NAME, a variable, or file:PATH, a file, which is read
    again every second."""

    @property
    def names(self) -> tuple[Name, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """A tenant: what it may use, and how much."""

    id: Id
    """Its name in logs, metrics and a header of the hop."""
    models: tuple[Name, ...] = ALL_MODELS
    """Names (not aliases) of the models that it may use; * is all."""
    limits: QuotaLimits = NO_LIMITS
    """Quotas of all its keys together."""
    model_limits: PerModel = ()
    """Quotas of all its keys together for single models."""
    quota_fail: QuotaFail | None = None
    """Wins over fail in [quotas]."""
    service_tier: Tier = "default"
    """The highest tier that its requests may have. Who has priority goes before all others, and takes their
    slots."""
    timeouts: TimeoutOverrides | None = None
    """Time limits of its requests, each of which wins over the model's and the one in [timeouts]."""
    queue_timeout_s: Seconds | None = None
    """Wins over the model's queue_timeout_s."""
    request_timeout_s: Seconds | None = None
    """Wins over the model's request_timeout_s."""
    on_revoke: Literal["finish", "end"] = "finish"
    """The end of a key's requests in progress when the key is revoked. finish: they run on. end: they
    end with the error key_revoked."""


@dataclass(frozen=True, slots=True)
class KeyConfig(AnyKeyConfig):
    """An API key of a tenant."""

    tenant: Id
    """Id of the tenant that it belongs to."""
    models: tuple[Name, ...] = ALL_MODELS
    """Those of the tenant's models that this key may use; * is all."""
    endpoints: tuple[EndpointScope, ...] = ALL_ENDPOINTS
    """The endpoints that this key may use, such as /v1/chat/completions; * is all."""
    limits: QuotaLimits = NO_LIMITS
    """Quotas of this key alone, beside its tenant's."""
    model_limits: PerModel = ()
    """Quotas of this key alone for single models, beside its tenant's."""
    env: KeyEnv = "live"
    """The part of a minted key that comes before its id."""

    @property
    def key_id(self) -> KeyId:
        return KeyId(self.id)

    @property
    def tenant_id(self) -> TenantId:
        return TenantId(self.tenant)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The whole configuration. Raises ConfigError where its parts contradict each other."""

    models: Annotated[tuple[ModelConfig, ...], Meta(min_length=1, max_length=ENTRIES_MAX)]
    """The models that are served."""
    tenants: Annotated[tuple[TenantConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    """The clients that may use them, each with its quotas."""
    keys: Annotated[tuple[KeyConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    """The keys of the tenants."""
    issuers: Annotated[tuple[IssuerConfig, ...], Meta(max_length=ISSUERS_MAX)] = ()
    """The signers of tokens (JWT) that name callers."""
    grants: Annotated[tuple[GrantConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    """The rights of tokens' holders."""
    certificates: Annotated[tuple[CertificateConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    """The client certificates that name callers, and what they may use."""
    listen: ListenConfig = ListenConfig()
    """The public listener."""
    admin: AdminConfig = AdminConfig()
    """A listener for metrics and probes."""
    hop: HopConfig = HopConfig()
    """The connections to engines."""
    limits: LimitsConfig = LimitsConfig()
    """Sizes and counts."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Time limits of every request."""
    redis: RedisConfig = field(default_factory=RedisConfig)
    """The Redis of quotas and of the directory, and how it is reached."""
    quotas: QuotasConfig = field(default_factory=QuotasConfig)
    """Where the usage of quotas is counted."""
    directory: DirectoryConfig = DirectoryConfig()
    """Where tenants and keys are kept that operators change while gateways run."""
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    """Responses that are kept for callers to refer to: text of prompts and answers."""
    accounting: AccountingConfig = field(default_factory=AccountingConfig)
    """Callers' usage: how long it is kept, and to whom it is told."""
    admission: AdmissionConfig = AdmissionConfig()
    """How requests are checked and counted before they are let in."""
    workers: Annotated[int, Meta(ge=1, le=WORKERS_MAX), Unit("processes")] = 1
    """Processes that serve the public port together. More than one count quotas in Redis."""
    tracing: TracingConfig = TracingConfig()
    """Spans of requests, for OpenTelemetry's collectors."""
    log_level: LogLevel = "info"
    """Lowest level that is logged."""

    def __post_init__(self) -> None:
        if problems := list(_contradictions(self)):
            raise ConfigError(problems)


OVERRIDES_KEPT: Final = 1024
"""Combinations that are kept: working one out takes longer than a request's other checks together."""


def load(
    source: Path | Mapping[str, Any], env: Mapping[str, str], options: Mapping[str, object] | None = None
) -> GatewayConfig:
    """The configuration that a TOML file, or what one would hold, the variables and the options of a command
    line make. Raises ConfigError, which lists all that is wrong."""
    return setting_values.load(GatewayConfig, source, env, ENV_PREFIX, options, MOVED, GONE)


def timeouts_of(
    config: TimeoutsConfig, model: ModelConfig, tenant: TenantConfig | None = None
) -> TimeoutsConfig:
    """The most specific setting wins, each by itself, as a route's over its cluster's in Envoy: only so
    can a tenant's be longer than everybody's, too."""
    overrides = (model.timeouts, tenant.timeouts if tenant else None)
    return config if overrides == (None, None) else _overridden(config, *overrides)


@lru_cache(maxsize=OVERRIDES_KEPT)
def _overridden(config: TimeoutsConfig, *overrides: TimeoutOverrides | None) -> TimeoutsConfig:
    for own in overrides:
        if own is not None:
            config = own.over(config)
    return config


def _contradictions(config: GatewayConfig) -> Iterator[str]:
    """The problems that no single setting shows."""
    model_names = {model.name for model in config.models}
    tenant_ids = {tenant.id for tenant in config.tenants}
    yield from _repeated("models", (name for model in config.models for name in model.names))
    yield from _repeated("tenants", (tenant.id for tenant in config.tenants))
    yield from _repeated("issuers", (issuer.id for issuer in config.issuers))
    yield from _repeated("issuers", (issuer.issuer for issuer in config.issuers))
    key_ids = [*(key.id for key in config.keys), *(entry.id for entry in config.certificates)]
    yield from _repeated("keys", key_ids)
    yield from _same("keys", "secret", ((key.id, hash_) for key in config.keys for hash_ in _hashes(key)))
    names = ((entry.id, entry.name) for entry in config.certificates)
    yield from _same("certificates", "name", names)
    yield from operator_problems(config.admin.keys)
    if config.admin.port == config.listen.port != 0 and config.admin.host == config.listen.host:
        yield f"admin.port: {config.admin.port} is the port of [listen]"
    protocols: dict[str, HopProtocol] = {}
    for model in config.models:
        if bool(model.replicas) == (model.discovery is not None):
            yield f"models.{model.name}: needs exactly one of replicas and discovery"
        yield from _fallback_problems(model, model_names)
        for url in model.replicas:
            yield from (f"models.{model.name}: {problem}" for problem in _url_problems(url))
            if protocols.setdefault(url.rstrip("/"), model.protocol) != model.protocol:
                yield f"models.{model.name}: {url!r} has another protocol in another model"
    for tenant in config.tenants:
        yield from (f"tenants.{tenant.id}.{p}" for p in tenant_problems(tenant, model_names))
    by_tenant = config.redis.cluster and not config.quotas.one_node
    if by_tenant and any(model.limits != NO_LIMITS for model in config.models):
        yield "models: limits of a model over all tenants need one node of the Cluster (quotas.one_node)"
    for key in config.keys:
        yield from (f"keys.{key.id}.{p}" for p in key_problems(key, model_names, tenant_ids))
    yield from _unknown_names(config, model_names, tenant_ids)
    if config.workers * config.quotas.gateways > 1 and config.quotas.store == "memory":
        yield from _counted_apart(config)
    if config.workers > 1 and config.responses.store == "memory":
        yield f'responses: {config.workers} workers keep nothing together in memory: set store = "redis"'
    yield from _redis_problems(config)


def _redis_problems(config: GatewayConfig) -> Iterator[str]:
    """The uses of Redis that [redis] does not allow."""
    stores = {
        "quotas": config.quotas.store,
        "directory": config.directory.store,
        "responses": config.responses.store,
    }
    for section, store in stores.items():
        if store == "redis" and config.redis.url is None:
            yield f'{section}: store = "redis" needs url in [redis]'
    if config.quotas.one_node and not config.redis.cluster:
        yield "quotas: one_node: is for a Cluster (redis.cluster)"


def _url_problems(url: str) -> Iterator[str]:
    if not is_base_url(url):
        yield f"{url!r} is no base URL like http://host:port"
    elif url.rstrip("/").endswith("/v1"):
        yield f"leave out the /v1 of {url!r}: the paths that are asked there begin with it"


def _counted_apart(config: GatewayConfig) -> Iterator[str]:
    """The limits that several workers, or gateways, would each count for itself."""
    several = f"{config.workers} workers" if config.workers > 1 else f"{config.quotas.gateways} gateways"
    told = f'{several} cannot count it together in memory: set store = "redis" in [quotas]'
    yield from (f"models.{one.name}.limits: {told}" for one in config.models if one.limits != NO_LIMITS)
    holders: list[tuple[str, TenantConfig | KeyConfig | CertificateConfig | GrantConfig]] = [
        *((f"tenants.{one.id}", one) for one in config.tenants),
        *((f"keys.{one.id}", one) for one in config.keys),
        *((f"certificates.{one.id}", one) for one in config.certificates),
        *((f"grants[{at}]", one) for at, one in enumerate(config.grants)),
    ]
    for where, holder in holders:
        if holder.limits != NO_LIMITS:
            yield f"{where}.limits: {told}"
        if holder.model_limits:
            yield f"{where}.model_limits: {told}"
    if config.directory.store == "redis":
        yield f"directory.store: its tenants and keys may have limits; {told}"


def _fallback_problems(model: ModelConfig, model_names: Container[str]) -> Iterator[str]:
    for name in model.fallback:
        if name == model.name or name not in model_names:
            problem = "is the model itself" if name == model.name else "there is no such model"
            yield f"models.{model.name}.fallback: {name!r}: {problem}"
    if len(set(model.fallback)) < len(model.fallback):
        yield f"models.{model.name}.fallback: names a model twice"


def named_models(holder: TenantConfig | KeyConfig) -> set[str]:
    """The models that a tenant or a key names."""
    return {*holder.models, *(entry.model for entry in holder.model_limits)} - {ANY}


def tenant_problems(tenant: TenantConfig, model_names: Container[str]) -> Iterator[str]:
    """The problems of a tenant that no single setting shows, each as `field: problem`."""
    yield from _unknown(tenant.models, model_names)
    yield from model_limit_problems(tenant.model_limits, model_names)


def key_problems(key: KeyConfig, model_names: Container[str], tenant_ids: Container[str]) -> Iterator[str]:
    """The problems of a key that no single setting shows, each as `field: problem`."""
    yield from _unknown(key.models, model_names)
    yield from model_limit_problems(key.model_limits, model_names)
    if key.tenant not in tenant_ids:
        yield f"tenant: there is no tenant {key.tenant!r}"


def operator_problems(keys: Sequence[OperatorKeyConfig]) -> Iterator[str]:
    """The problems of operators' keys that no single setting shows. A second entry with the id or a secret of
    another would go on to open what the other does not any more."""
    yield from _repeated("admin.keys", (key.id for key in keys))
    yield from _same("admin.keys", "secret", ((key.id, hash_) for key in keys for hash_ in _hashes(key)))


def _hashes(key: AnyKeyConfig) -> set[str]:
    return {key.hash} if key.previous_hash is None else {key.hash, key.previous_hash}


def _same(section: str, what: str, values: Iterable[tuple[str, Hashable]]) -> Iterator[str]:
    """The entries that have the same value as one before, of which only ids are told."""
    holders: dict[Hashable, str] = {}
    for id_, value in values:
        if (holder := holders.setdefault(value, id_)) != id_:
            yield f"{section}: {holder!r} and {id_!r} have the same {what}"


def _unknown_names(config: GatewayConfig, model_names: set[str], tenant_ids: set[str]) -> Iterator[str]:
    """The models, tenants and issuers that certificates and grants name, and that do not exist."""
    issuer_ids = {issuer.id for issuer in config.issuers}
    for at, grant in enumerate(config.grants):
        if grant.issuer not in issuer_ids:
            yield f"grants[{at}]: there is no issuer {grant.issuer!r}"
    tls = config.listen.tls
    if config.certificates and (tls is None or tls.client_certificates == "none"):
        yield "certificates: listen.tls.client_certificates must be optional or required"
    holders: list[tuple[str, CertificateConfig | GrantConfig]] = [
        *((f"certificates.{entry.id}", entry) for entry in config.certificates),
        *((f"grants[{at}]", grant) for at, grant in enumerate(config.grants)),
    ]
    for where, holder in holders:
        yield from (f"{where}.{problem}" for problem in _unknown(holder.models, model_names))
        yield from (f"{where}.{p}" for p in model_limit_problems(holder.model_limits, model_names))
        if holder.tenant is not None and holder.tenant not in tenant_ids:
            yield f"{where}.tenant: there is no tenant {holder.tenant!r}"


def _repeated(section: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{section}: {name!r} is given {count} times"


def _unknown(names: Iterable[str], known: Container[str]) -> Iterator[str]:
    for name in names:
        if name != ANY and name not in known:
            yield f"models: there is no model {name!r}"
