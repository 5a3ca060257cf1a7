"""The accounts: which callers there are, which models they may use and on what terms.

They come from the configuration file, which is read again when it changes, and from a directory
(`gateway.directory`) beside it. A revoked key of the file is refused within five seconds of the change (at
once on SIGHUP) by every gateway that has the file.

Rules:

1. What the file says wins over a tenant or key of the same id in the directory, and over a key of the same
   secret.
2. A request has the tenants that there were when it came. Keys change in place: each is looked up once.
3. Requests that were let in before their key was revoked run on, unless their tenant says otherwise.
4. A file that takes the place of another, by a rename, is whole, and read at the next poll. One that is
   written in place may be half of itself: it is read once it has been the same for `SETTLED_POLLS`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from msgspec import Struct

from gateway.admission.quota import Scope, Subject
from gateway.admission.usage import Payer
from gateway.config.quotas import NO_LIMITS, ModelLimits, QuotaFail, QuotaLimits
from gateway.config.timeouts import TimeoutsConfig
from gateway.config.whole import GatewayConfig, KeyConfig, ModelConfig, TenantConfig, load, timeouts_of
from gateway.identity.bounded import BoundedDict
from gateway.identity.caller import Identity, Principal
from gateway.identity.keys import KeyTable
from gateway.identity.tenant import TenantPolicy
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.files import FileVersion, file_version
from shared.process.setting_values import ConfigError
from shared.wire.ids import KeyId, TenantId

POLL_S: Final = 1.0
SETTLED_POLLS: Final = 2
"""The polls in a row, after the one that sees a change, that find nothing changed since."""
assert POLL_S * (1 + SETTLED_POLLS) <= 4, "a revoked key is refused within five seconds, one of them to read"
OPERATORS: Final = "operators"
AT_ONCE: Final = 1000
"""The number of keys that are replaced before other tasks have their turn."""
TERMS_MAX: Final = 16 * 1024
"""The number of callers and models whose terms are kept; the oldest make room."""
RELOADED: Final = ("keys", "tenants", "issuers", "grants", "certificates")
"""The parts of the configuration that are read again, besides the replicas of models."""
LEFT_SHOWN_MAX: Final = 20
"""The number of settings that the log line about a restart names, and of keys that the one about secrets
does."""

log = logs.get(__name__)

Kind = Literal["tenants", "keys", "admin.keys"]
"""The kinds of entries: those that a directory has, and operators' keys, which the file alone has."""

IdentityOf = Callable[[GatewayConfig, KeyTable, Collection[TenantId]], Identity]
"""A function that makes the `Identity` of a configuration, of all keys and of the ids of all tenants."""


def by_keys(_: GatewayConfig, keys: KeyTable, __: Collection[TenantId]) -> Identity:
    """The identity that keys alone give."""
    return keys


def operators_of(config: GatewayConfig) -> KeyTable:
    """Operators are looked up as callers are. Their tenant is nobody's: it opens no model."""
    return KeyTable(
        KeyConfig(
            key.id,
            key.hash,
            OPERATORS,
            expires=key.expires,
            disabled=key.disabled,
            previous_hash=key.previous_hash,
            previous_expires=key.previous_expires,
        )
        for key in config.admin.keys
    )


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
    is_budgeted: bool
    """True if one of them is a budget: for a day, a month or in all."""
    payer: Payer
    """Where the request is counted."""


@dataclass(frozen=True, slots=True)
class Accounts:
    identity: Identity
    """Names the callers of the public port."""
    operators: KeyTable
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
    _served_without_store: list[bool] = field(default_factory=list, repr=False, compare=False)
    """The answer of `serve_without_store`, once it was asked for."""

    @classmethod
    def of(cls, config: GatewayConfig, tenants: TenantPolicy, identity: Identity) -> Self:
        return cls(identity, operators_of(config), tenants, config.timeouts, config.quotas.fail)

    def changed(self, tenants: TenantPolicy, identity: Identity) -> Accounts:
        """Other accounts, with these tenants and this identity."""
        return Accounts(identity, self.operators, tenants, self.timeouts, self.quota_fail)

    @property
    def serve_without_store(self) -> bool:
        """True if some tenant is served while the quota store cannot be asked: one whose fail mode is local,
        or one that may use a model without any limits. Every tenant is looked at for that, once: whoever asks
        for `/readyz` needs no key."""
        if not self._served_without_store:
            fails = (tenant.quota_fail or self.quota_fail for tenant in self.tenants.all())
            self._served_without_store.append("local" in fails or self.tenants.is_some_without_limits())
        return self._served_without_store[0]

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
        is_budgeted = any(limit is not None for one in subjects for limit in _token_limits(one.limits)[1:])
        terms = Terms(model, tenant, timeouts, subjects, tokens_max, is_budgeted, payer)
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
    """The one per minute, and the budgets."""
    return limits.tokens_per_min, limits.token_budget, limits.tokens_per_day, limits.tokens_per_month


class _Read(Struct, frozen=True):
    """A file that was read, and what it changes."""

    taken: GatewayConfig
    """The configuration with what is read again; all else as it was."""
    left: Sequence[str]
    """The settings of which the file says something else, which takes a restart."""
    changed: Sequence[KeyConfig]
    """The keys that are new or other than before."""
    gone: Sequence[KeyId]
    ids: Mapping[Kind, Set[str]]


def _read(path: Path, env: Mapping[str, str], before: GatewayConfig) -> _Read:
    """Read a file. Raises ConfigError."""
    config = load(path, env)
    admin = replace(before.admin, keys=config.admin.keys)
    models = _with_replicas(before.models, config.models)
    taken = replace(before, admin=admin, models=models, **{name: getattr(config, name) for name in RELOADED})
    gone = {key.id: key for key in before.keys}
    changed = [key for key in taken.keys if gone.pop(key.id, None) != key]
    left = list(_differing(taken, config)) if taken != config else []
    return _Read(taken, left, changed, [key.key_id for key in gone.values()], _ids_of(taken))


def _differing(before: Any, after: Any, prefix: str = "") -> Iterator[str]:
    """The names of the settings in which two configurations, or two of their sections, differ."""
    for name in (one.name for one in fields(before)):
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if is_dataclass(old) and is_dataclass(new):
            yield from _differing(old, new, f"{prefix}{name}.")
        elif name == "models":
            olds, news = ({model.name: model for model in models} for models in (old, new))
            yield from (f"models.{one}" for one in olds | news if olds.get(one) != news.get(one))
        else:
            yield f"{prefix}{name}"


def _with_replicas(before: Sequence[ModelConfig], after: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """The models as they were, with the replicas that they are given now."""
    given = {model.name: model.replicas for model in after}
    return tuple(
        replace(model, replicas=given[model.name]) if model.replicas and given.get(model.name) else model
        for model in before
    )


class AccountsReader:
    """The accounts, read again when the file changes, with what the directory adds.

    `now` has the newest that could be read; a file with a mistake changes nothing.
    """

    def __init__(
        self,
        config: GatewayConfig,
        path: Path | None,
        clock: Clock = SYSTEM_CLOCK,
        identity_of: IdentityOf = by_keys,
        *,
        seen: FileVersion | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """`seen` is the version of the file that was read; without it, the present one. `env` has the
        variables that win over it."""
        self.config = config
        """The file as it was read last, with what takes a restart as it was at the start."""
        self.keys: Final = KeyTable(config.keys)
        """All keys."""
        self.on_revoked: Callable[[Collection[KeyId]], None] = lambda _: None
        """Called with the ids of keys that have just been revoked."""
        self.on_models: Callable[[Sequence[ModelConfig]], None] = lambda _: None
        """Called with the models whenever the file was read again: their replicas may be others."""
        self._kept: dict[TenantId, TenantConfig] = {}
        """The directory's tenants, those of the file's ids too."""
        self._identity_of = identity_of
        self._path = path
        self._env: Final = env
        self._clock = clock
        self._seen = seen or self._version()
        self._in_file = _ids_of(config)
        self.keys.declared = self._in_file["keys"]
        self._reading: Final = asyncio.Lock()
        self.now = self._accounts_of(config)

    async def reload(self) -> list[str]:
        """Read the file again, changed or not. Returns what is wrong with it: then the old one stays.

        A file of 10,000 keys takes half a second to read and to check, which another thread does.
        """
        if self._path is None:
            return ["there is no file"]
        async with self._reading:
            self._seen = self._version()
            try:
                read = await asyncio.to_thread(_read, self._path, self._env, self.config)
                self.now = self._accounts_of(read.taken)
            except ConfigError as error:
                log.error("config.rejected", path=self._path, problems=list(error.problems))
                return list(error.problems)
            if read.left:
                log.warning("config.restart_needed", path=self._path, settings=read.left[:LEFT_SHOWN_MAX])
            self.config, self._in_file, self.keys.declared = read.taken, read.ids, read.ids["keys"]
            counts = {"keys": len(read.taken.keys), "tenants": len(read.taken.tenants)}
            log.info("config.reloaded", path=self._path, **counts)
            self.on_models(read.taken.models)
            for at in range(0, len(read.changed), AT_ONCE):
                self._change_keys(read.changed[at : at + AT_ONCE], ())
                await asyncio.sleep(0)
            self._change_keys((), read.gone)
        return []

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until cancelled. One that is written in place is read
        once it has settled (rule 4)."""
        before, settled = self._seen, 0
        while self._path is not None:
            await self._clock.sleep(POLL_S)
            version = self._version()
            settled = settled + 1 if version == before else 0
            if version != self._seen and (settled >= SETTLED_POLLS or _is_other_file(version, before)):
                await self.reload()
            before = version

    # -- the directory's part ---------------------------------------------------------------------

    def is_in_file(self, kind: Kind, id_: str) -> bool:
        """True if the file has a tenant or a key of this id."""
        return id_ in self._in_file[kind]

    def put_tenants(self, tenants: Sequence[TenantConfig], removed: Sequence[TenantId] = ()) -> None:
        """Add, replace and remove tenants of the directory. A removed one has no keys any more."""
        self._kept.update((TenantId(tenant.id), tenant) for tenant in tenants)
        for id_ in removed:
            self._kept.pop(id_, None)
        own = self._in_file["tenants"]
        policy = self.now.tenants.changed(
            [tenant for tenant in tenants if tenant.id not in own], [id_ for id_ in removed if id_ not in own]
        )
        identity = self.now.identity
        if policy.ids != self.now.tenants.ids:
            identity = self._identity_of(self.config, self.keys, policy.ids)
        self.now = self.now.changed(policy, identity)

    def put_keys(self, keys: Sequence[KeyConfig], removed: Sequence[KeyId] = ()) -> None:
        """Add, replace and remove keys of the directory."""
        own = self._in_file["keys"]
        put = [key for key in keys if key.id not in own]
        self._change_keys(put, [id_ for id_ in removed if id_ not in own])
        if contested := [key.id for key in put if self.keys.is_contested(key.key_id)]:
            log.error("directory.same_secret", ids=contested[:LEFT_SHOWN_MAX], count=len(contested))

    # -- inside -----------------------------------------------------------------------------------

    def _accounts_of(self, config: GatewayConfig) -> Accounts:
        own = _ids_of(config)["tenants"]
        kept = [tenant for tenant in self._kept.values() if tenant.id not in own]
        tenants = TenantPolicy(config.models, [*config.tenants, *kept])
        if literal := [entry.id for entry in config.certificates if "*" in (entry.dns or "")]:
            log.warning("certificates.star_is_literal", ids=literal)  # a certificate may have that very name
        return Accounts.of(config, tenants, self._identity_of(config, self.keys, tenants.ids))

    def _change_keys(self, put: Sequence[KeyConfig], removed: Sequence[KeyId]) -> None:
        revoked = {key.key_id for key in put if self.keys.put(key)}
        revoked.update(id_ for id_ in removed if self.keys.remove(id_))
        if revoked:
            self.on_revoked(revoked)

    def _version(self) -> FileVersion | None:
        return None if self._path is None else file_version(self._path)


def _is_other_file(version: FileVersion | None, before: FileVersion | None) -> bool:
    """True if a file has taken another's place."""
    return version is not None and before is not None and version.inode != before.inode


def _ids_of(config: GatewayConfig) -> Mapping[Kind, Set[str]]:
    """The ids of a file's tenants and keys. Certificates have the ids of keys: none may be given twice."""
    keys = {key.id for key in config.keys} | {entry.id for entry in config.certificates}
    return {"tenants": {tenant.id for tenant in config.tenants}, "keys": keys}
