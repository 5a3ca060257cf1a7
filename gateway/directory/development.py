"""The configuration of a gateway for development: one model, one tenant without limits, one key.

`penstock up` and the benches write it to a file and start a gateway with that.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from gateway.config.accounting import AccountingConfig
from gateway.config.directory import DirectoryConfig
from gateway.config.edge import AdminConfig, ListenConfig, OperatorKeyConfig, TlsConfig
from gateway.config.quotas import QuotaLimits, QuotasConfig
from gateway.config.redis import RedisConfig
from gateway.config.timeouts import TimeoutsConfig
from gateway.config.whole import GatewayConfig, KeyConfig, ModelConfig, TenantConfig
from gateway.identity.keys import hash_key

ID: Final = "development"
"""The id of the tenant, and of its key."""
UNLIMITED: Final = QuotaLimits()
BILLING_LEN_MAX: Final = 16 * 1024 * 1024
"""Bytes of a file of billing lines, of which there are two at most: some 60,000 requests each."""


def development_key() -> str:
    """A new key."""
    return f"sk-penstock-{secrets.token_urlsafe(18)}"


def _admin(port: int, key: str, kept: GatewayConfig | None) -> AdminConfig:
    own = OperatorKeyConfig(ID, hash_key(key))
    others = () if kept is None else kept.admin.keys
    return AdminConfig(
        port=port, keys=(own, *(one for one in others if one.id != ID and own.hash != one.hash))
    )


def development_config(
    *,
    port: int,
    key: str,
    model: str,
    engine_url: str,
    more_engine_urls: Iterable[str] = (),
    aliases: Iterable[str] = (),
    host: str = "127.0.0.1",
    tls: tuple[str, str] | None = None,
    plaintext: bool = False,
    limits: QuotaLimits = UNLIMITED,
    redis: str | None = None,
    drain_s: float = TimeoutsConfig().drain_s,
    admin: tuple[int, str] | None = None,
    billing_file: str | None = None,
    kept: GatewayConfig | None = None,
) -> GatewayConfig:
    """`admin` is the port of the admin listener and the key that opens it; None for no such listener. `tls`
    are the paths of a certificate chain and of its private key, both PEM; `plaintext` is asked for in its
    place where `host` is reached from other machines. `redis` is the URL of the server
    that keeps quotas and further keys; None keeps them in memory and in the file. `kept` is what stood in
    that file, with further keys and tenants. Raises ConfigError."""
    names = tuple(name for name in dict.fromkeys(aliases) if name != model)
    own = KeyConfig(ID, hash_key(key), ID)
    tenants = () if kept is None else kept.tenants
    if ID not in (tenant.id for tenant in tenants):
        tenants = (TenantConfig(ID, limits=limits, service_tier="priority"), *tenants)  # nobody else at first
    keys = () if kept is None else kept.keys
    return GatewayConfig(
        listen=ListenConfig(host, port, None if tls is None else TlsConfig(*tls), plaintext),
        admin=AdminConfig() if admin is None else _admin(*admin, kept),
        timeouts=TimeoutsConfig(drain_s=drain_s),
        models=(ModelConfig(model, (engine_url, *more_engine_urls), aliases=names),),
        tenants=tenants,
        redis=RedisConfig(redis),
        quotas=QuotasConfig("memory" if redis is None else "redis"),
        accounting=AccountingConfig(file=billing_file, file_max=BILLING_LEN_MAX if billing_file else None),
        directory=DirectoryConfig("file" if redis is None else "redis"),
        keys=(own, *(one for one in keys if one.id != ID and one.hash != own.hash)),
    )
