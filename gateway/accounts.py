"""The accounts: which callers there are, which models they may use and on what terms.

They come from the configuration file, which is read again when it changes. A revoked key is refused within
`POLL_S` of the change (at once on SIGHUP) by every gateway that has the file. Requests that were let in
before are not cut off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from gateway.admission.quota import Scope, Subject
from gateway.admission.usage import Payer
from gateway.config import (
    GatewayConfig,
    KeyConfig,
    ModelConfig,
    TenantConfig,
    TimeoutsConfig,
    load,
    timeouts_of,
)
from gateway.identity.bounded import BoundedDict
from gateway.identity.caller import Identity, Principal
from gateway.identity.keys import KeyTable
from gateway.identity.tenant import TenantPolicy
from gateway.quota_config import NO_LIMITS, ModelLimits, QuotaFail, QuotaLimits
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.config import ConfigError

POLL_S: Final = 1.0
assert POLL_S <= 5, "a revoked key is refused within five seconds"
OPERATORS: Final = "operators"
TERMS_MAX: Final = 16 * 1024
"""The number of callers and models whose terms are kept; the oldest make room."""
RELOADED: Final = ("keys", "tenants", "tiers", "issuers", "grants", "certificates")
"""The parts of the configuration that are read again."""

log = logs.get(__name__)


IdentityOf = Callable[[GatewayConfig], Identity]
"""A function that makes the `Identity` of a configuration."""


def by_keys(config: GatewayConfig) -> Identity:
    return KeyTable(config.keys)


def operators_of(config: GatewayConfig) -> Identity:
    """Operators are looked up as callers are. Their tenant is nobody's: it opens no model."""
    keys = config.admin.keys
    return KeyTable(KeyConfig(k.id, k.hash, OPERATORS, expires=k.expires, disabled=k.disabled) for k in keys)


class Terms(Struct, frozen=True):
    """The terms on which a caller uses a model."""

    model: ModelConfig
    tenant: TenantConfig
    """The tenant's settings, with unset ones taken from its service class."""
    timeouts: TimeoutsConfig
    subjects: tuple[Subject, ...]
    """The quotas that the request counts against: those of its key and of its tenant, then those that the
    model adds, without those that set no limit. A subject without limits has no usage; one that is given
    limits later starts from none."""
    tokens_max: int | None
    """The tightest of the subjects' limits on tokens, per minute, day or month or in all. None without
    any."""
    payer: Payer
    """Where the request is counted."""


@dataclass(frozen=True, slots=True)
class Accounts:
    identity: Identity
    """Names the callers of the public port."""
    operators: Identity
    """Names those of the admin listener who may change something."""
    tenants: TenantPolicy
    timeouts: TimeoutsConfig
    """Everybody's."""
    quota_fail: QuotaFail = "closed"
    """The fail mode of tenants that state none."""
    _terms: BoundedDict[tuple[Principal, str | None], Terms] = field(
        default_factory=lambda: BoundedDict(TERMS_MAX), repr=False
    )
    """Worked out once: most requests come on terms that others came on before."""
    _subjects: BoundedDict[Principal, tuple[Subject, ...]] = field(
        default_factory=lambda: BoundedDict(TERMS_MAX), repr=False
    )

    @classmethod
    def of(cls, config: GatewayConfig, identity_of: IdentityOf) -> Self:
        tenants = TenantPolicy(config.models, config.tenants, config.tiers)
        quota_fail = config.quotas.fail
        return cls(identity_of(config), operators_of(config), tenants, config.timeouts, quota_fail)

    @property
    def serve_without_store(self) -> bool:
        """Whether some tenant is served while the quota store cannot be asked: one whose fail mode is local,
        or one that may use a model without any limits."""
        return any(
            (tenant.quota_fail or self.quota_fail) == "local" or self._has_free_model(tenant)
            for tenant in self.tenants.all()
        )

    def _has_free_model(self, tenant: TenantConfig) -> bool:
        """Whether a tenant without limits may use a model that adds none."""
        limited = {entry.model for entry in tenant.model_limits if entry.limits != NO_LIMITS}
        return tenant.limits == NO_LIMITS and any(
            model.limits == NO_LIMITS and model.name not in limited
            for model in self.tenants.models_of(tenant)
        )

    def terms(self, principal: Principal, model_name: str | None) -> Terms:
        """The terms on which the principal uses the model. Raises the errors of `TenantPolicy.resolve`."""
        if (known := self._terms.get((principal, model_name))) is not None:
            return known
        model, tenant = self.tenants.resolve(principal, model_name), self.tenants.tenant(principal)
        timeouts = timeouts_of(self.timeouts, model, tenant)
        subjects = self.subjects(principal) + self._model_subjects(principal, tenant, model)
        limits = [limit for subject in subjects for limit in _token_limits(subject.limits)]
        tokens_max = min((limit for limit in limits if limit is not None), default=None)
        payer = Payer(principal.tenant, principal.key, model.name)
        terms = Terms(model, tenant, timeouts, subjects, tokens_max, payer)
        if model_name in model.names:  # callers make up names behind a `*`
            self._terms.put((principal, model_name), terms)
        return terms

    def subjects(self, principal: Principal) -> tuple[Subject, ...]:
        """The quotas of the principal's key and tenant, without those that set no limit."""
        if (known := self._subjects.get(principal)) is not None:
            return known
        tenant = self.tenants.tenant(principal)
        fail = tenant.quota_fail or self.quota_fail
        both = (
            Subject(Scope.KEY, principal.key, principal.limits, principal.tenant, fail),
            Subject(Scope.TENANT, principal.tenant, tenant.limits, principal.tenant, fail),
        )
        subjects = tuple(subject for subject in both if subject.limits != NO_LIMITS)
        self._subjects.put(principal, subjects)
        return subjects

    def _model_subjects(
        self, principal: Principal, tenant: TenantConfig, model: ModelConfig
    ) -> tuple[Subject, ...]:
        """The quotas that a model adds to those of the principal's key and tenant."""
        owners = (
            (Scope.KEY_MODEL, f"{principal.key}/{model.name}", principal.model_limits),
            (Scope.TENANT_MODEL, f"{tenant.id}/{model.name}", tenant.model_limits),
            (Scope.MODEL, model.name, (ModelLimits(model.name, model.limits),)),
        )
        fail = tenant.quota_fail or self.quota_fail
        return tuple(
            Subject(scope, id_, entry.limits, principal.tenant, fail)
            for scope, id_, entries in owners
            for entry in entries
            if entry.model == model.name and entry.limits != NO_LIMITS
        )


def _token_limits(limits: QuotaLimits) -> tuple[int | None, ...]:
    return limits.tokens_per_min, limits.token_budget, limits.tokens_per_day, limits.tokens_per_month


class AccountsReader:
    """The accounts, read again when the file changes.

    `now` has the newest that could be read; a file with a mistake changes nothing.
    """

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

    def reload(self) -> list[str]:
        """Read the file again, changed or not. Returns what is wrong with it: then the old one stays."""
        if self._path is None:
            return ["there is no file"]
        self._seen = self._version()
        try:
            config = load(self._path, os.environ)
            admin = replace(self._config.admin, keys=config.admin.keys)
            taken = replace(self._config, admin=admin, **{name: getattr(config, name) for name in RELOADED})
            self.now = Accounts.of(taken, self._identity_of)
        except ConfigError as error:
            log.error("config.rejected", path=self._path, problems=list(error.problems))
            return list(error.problems)
        if taken != config:
            log.warning("config.restart_needed", path=self._path, read=f"{', '.join(RELOADED)} alone")
        self._config = taken
        log.info("config.reloaded", path=self._path, keys=len(config.keys), tenants=len(config.tenants))
        return []

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while self._path is not None:
            await self._clock.sleep(POLL_S)
            if self._version() != self._seen:
                self.reload()

    def _version(self) -> tuple[int, int, int] | None:
        """A value that changes whenever the file does, also when it is replaced. None when there is no
        file."""
        try:
            stat = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)
