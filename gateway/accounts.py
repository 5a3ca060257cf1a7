"""Who may call, what they may use and on what terms, as the configuration says; read again when its file
changes.

A revoked key is refused within `POLL_S` of the file's change (or at SIGHUP, at once), everywhere the
file is. Requests that were let in before are not cut off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from gateway.admission.quota import Scope, Subject
from gateway.config import (
    GatewayConfig,
    ModelConfig,
    QuotaLimits,
    TenantConfig,
    TimeoutsConfig,
    load,
    timeouts_of,
)
from gateway.identity.caller import Identity, Principal
from gateway.identity.keys import KeyTable
from gateway.identity.tenant import TenantPolicy
from gateway.quota_config import QuotaFail
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.config import ConfigError

POLL_S: Final = 1.0
assert POLL_S <= 5, "a revoked key is refused within five seconds"
TERMS_MAX: Final = 16 * 1024

log = logs.get(__name__)


IdentityOf = Callable[[GatewayConfig], Identity]
"""How callers are named, by what the configuration says."""


def by_keys(config: GatewayConfig) -> Identity:
    return KeyTable(config.keys)


class Terms(Struct, frozen=True):
    """On which a caller uses a model."""

    model: ModelConfig
    tenant: TenantConfig
    """With what it has from its class."""
    timeouts: TimeoutsConfig
    subjects: tuple[Subject, ...]
    """Whose quotas the request counts against: key and tenant, if they have any. An account without limits
    is not kept; one that gets some starts empty."""
    tokens_max: int | None
    """The tightest of their limits on tokens, per minute or in all; None where there is none."""


@dataclass(frozen=True, slots=True)
class Accounts:
    identity: Identity
    tenants: TenantPolicy
    timeouts: TimeoutsConfig
    """Everybody's."""
    quota_fail: QuotaFail = "closed"
    """The fail mode of tenants that state none."""
    _terms: dict[tuple[Principal, str | None], Terms] = field(default_factory=dict, repr=False)
    """Worked out once: most requests come on terms that others came on before."""
    _subjects: dict[Principal, tuple[Subject, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: GatewayConfig, identity_of: IdentityOf) -> Self:
        tenants = TenantPolicy(config.models, config.tenants, config.tiers)
        return cls(identity_of(config), tenants, config.timeouts, config.quotas.fail)

    @property
    def serve_without_store(self) -> bool:
        """Whether some tenant is served while the quota store cannot be asked: one without limits, or
        one whose fail mode is local."""
        return any(
            tenant.limits == QuotaLimits() or (tenant.quota_fail or self.quota_fail) == "local"
            for tenant in self.tenants.all()
        )

    def terms(self, principal: Principal, model_name: str | None) -> Terms:
        """Raises as `TenantPolicy.resolve`."""
        if (known := self._terms.get((principal, model_name))) is not None:
            return known
        model, tenant = self.tenants.resolve(principal, model_name), self.tenants.tenant(principal)
        timeouts, subjects = timeouts_of(self.timeouts, model, tenant), self.subjects(principal)
        limits = [limit for s in subjects for limit in (s.limits.tokens_per_min, s.limits.token_budget)]
        tokens_max = min((limit for limit in limits if limit is not None), default=None)
        terms = Terms(model, tenant, timeouts, subjects, tokens_max)
        if model_name in model.names and len(self._terms) < TERMS_MAX:  # callers make up names behind a `*`
            self._terms[principal, model_name] = terms
        return terms

    def subjects(self, principal: Principal) -> tuple[Subject, ...]:
        """Key and tenant, if they have limits."""
        if (known := self._subjects.get(principal)) is not None:
            return known
        tenant = self.tenants.tenant(principal)
        fail = tenant.quota_fail or self.quota_fail
        both = (
            Subject(Scope.KEY, principal.key, principal.limits, principal.tenant, fail),
            Subject(Scope.TENANT, principal.tenant, tenant.limits, principal.tenant, fail),
        )
        subjects = tuple(subject for subject in both if subject.limits != QuotaLimits())
        if len(self._subjects) < TERMS_MAX:
            self._subjects[principal] = subjects
        return subjects


class AccountsReader:
    """`now` is the newest accounts that could be read. A file that is wrong changes nothing."""

    def __init__(
        self,
        config: GatewayConfig,
        path: Path | None,
        clock: Clock = SYSTEM_CLOCK,
        identity_of: IdentityOf = by_keys,
    ) -> None:
        self.now = Accounts.of(config, identity_of)
        self._identity_of = identity_of
        self._config = config
        self._path = path
        self._clock = clock
        self._seen = self._version()

    def reload(self) -> None:
        """Read the file again, changed or not."""
        if self._path is None:
            return
        self._seen = self._version()
        try:
            config = load(self._path, os.environ)
        except ConfigError as error:
            log.error("config.rejected", path=self._path, problems=list(error.problems))
            return
        taken = replace(self._config, keys=config.keys, tenants=config.tenants, tiers=config.tiers)
        if taken != config:
            log.warning("config.restart_needed", path=self._path, read="keys, tenants and tiers alone")
        self._config = taken
        self.now = Accounts.of(taken, self._identity_of)
        log.info("config.reloaded", path=self._path, keys=len(config.keys), tenants=len(config.tenants))

    async def watch(self) -> None:
        """Look at the file again and again, until cancelled."""
        while self._path is not None:
            await self._clock.sleep(POLL_S)
            if self._version() != self._seen:
                self.reload()

    def _version(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does, a replaced one too."""
        try:
            stat = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)
