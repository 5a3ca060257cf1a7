"""The operations on keys and tenants, for the admin listener and `penstock keys` alike.

Rules:

1. A change is made whole or not at all, and a refusal names all that is wrong with it.
2. Each change that was made leaves an audit line, `admin.change`: the operator, the action, and the values
   before and after of each field that changed. So does one of which nobody knows whether it was made, with an
   `outcome` that says so. Hashes of secrets are in no line and in no answer.
3. A secret is shown once, in the answer to the change that made it.
4. A model that this gateway does not have cannot be newly named; one that the entry names already may stay.
5. What would replace a whole tenant says which one it has seen; what changes some fields of an entry is made
   on the newest.
6. No request changes operators' keys, on any listener: a change takes the right to write the gateway's file
   (`gateway.directory.local`). A key that could make others, or end others, would let whoever stole it stay
   on after its revocation, and keep out those who would revoke it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from gateway.config.edge import OperatorKeyConfig
from gateway.config.whole import (
    KeyConfig,
    TenantConfig,
    key_problems,
    named_models,
    operator_problems,
    tenant_problems,
)
from gateway.directory.accounts import AccountsReader, Kind
from gateway.directory.entries import (
    NO_VARIABLES,
    OUTCOME_UNKNOWN,
    UNKNOWN,
    AnswerLost,
    Change,
    Directory,
    Edit,
    KeyView,
    OperatorKeyView,
    R,
    Record,
    View,
    etag_of,
    is_named,
    kind_of,
    not_found,
    parse,
    place_of,
    view_of,
)
from gateway.directory.rotation import OPERATORS_ENV, Rotation, rotated
from gateway.identity.keys import mint_key
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.setting_values import ConfigError, load
from shared.wire.errors import ChangeUnknown, Conflict, PreconditionFailed, PreconditionRequired

PATCHABLE: Final = frozenset(
    {"models", "endpoints", "limits", "model_limits", "env", "labels", "expires", "disabled"}
)
"""The fields of a key that can be changed after its creation."""
CREATABLE: Final = (PATCHABLE | {"tenant"}) - {"disabled"}
OPERATORS_CREATABLE: Final = frozenset({"labels", "expires"})
_ACTED_ON: Final = {TenantConfig: "tenant", KeyConfig: "key", OperatorKeyConfig: "operator"}
"""The names of kinds in audit lines."""
_RELATIVE: Final = (".", "..")
"""Ids that clients cannot ask for: they are taken out of a URL (RFC 3986 section 5.2.4)."""


class MintedView(KeyView, frozen=True):
    """A key as it is shown once, with its secret."""

    key: str
    """The whole key, which is kept nowhere."""


class MintedOperatorKey(OperatorKeyView, frozen=True):
    """An operator's key as it is shown once, with its secret."""

    key: str
    """The whole key, which is kept nowhere."""


class OperatorKeysView(Struct, frozen=True):
    """All operators' keys, by their ids."""

    data: list[OperatorKeyView]


K = TypeVar("K", KeyConfig, OperatorKeyConfig)
M = TypeVar("M", MintedView, MintedOperatorKey)
V = TypeVar("V")


class Page(Struct, Generic[V], frozen=True):
    """A part of a list of keys or tenants."""

    data: Sequence[V]
    fixed: Sequence[str]
    """The ids of those that are declared in the gateway's file, where others are kept in Redis: they can be
    changed in the file alone."""
    next: str | None
    """The value of `after` for the next page. None on the last one."""


class Shown(Struct, frozen=True):
    """An entry, with the name of its content."""

    view: View
    etag: str


class Registry:
    """The keys and tenants, as operators list and change them."""

    def __init__(self, directory: Directory, accounts: AccountsReader, clock: Clock = SYSTEM_CLOCK) -> None:
        self._directory: Final = directory
        self._accounts: Final = accounts
        self._clock: Final = clock
        self._is_beside_file: Final = accounts.config.directory.store != "file"

    # -- reading ----------------------------------------------------------------------------------

    async def page(self, kind: Kind, tenant: str | None, after: str, limit: int) -> Page[View]:
        """At most `limit` entries behind the place `after`, in the order of `place_of`."""
        found = [*await self._directory.page(kind, tenant, after, limit + 1)]
        own: list[Record] = []
        if self._is_beside_file:
            declared: Sequence[Record] = getattr(self._accounts.config, kind)
            own = [record for record in declared if place_of(record) > after]
            own = [r for r in own if tenant is None or not isinstance(r, KeyConfig) or r.tenant == tenant]
        ids = {record.id for record in own}
        both = sorted([*own, *(r for r in found if not self._is_shadowed(kind, r))], key=place_of)
        shown = both[:limit]
        is_last = len(both) <= limit and len(found) <= limit
        next_ = None if is_last else place_of((shown or found)[-1])
        return Page([view_of(record) for record in shown], [r.id for r in shown if r.id in ids], next_)

    async def operators(self) -> OperatorKeysView:
        """The operators' keys of the file that this gateway has read."""
        keys = sorted(self._accounts.config.admin.keys, key=lambda key: key.id)
        return OperatorKeysView([msgspec.convert(key, OperatorKeyView, from_attributes=True) for key in keys])

    async def get(self, kind: Kind, id_: str) -> Shown:
        """One entry. Raises NotFound."""
        record = self._declared(kind, id_) or await self._directory.get(kind, id_)
        if record is None:
            raise not_found(kind, id_)
        return Shown(view_of(record), etag_of(record))

    # -- keys -------------------------------------------------------------------------------------

    async def create_key(self, asked: Mapping[str, Any], by: str) -> MintedView:
        """Create a key of some of the fields `CREATABLE`. Raises ConfigError, Conflict."""
        env = asked.get("env")
        is_env = isinstance(env, str) and re.fullmatch(r"[a-z0-9]{1,16}", env) is not None
        minted = mint_key(str(env) if is_env else "live")
        made: dict[str, Any] = {"id": minted.id, "hash": minted.hash, "created": self._now()}
        key = await self._parsed_key({**asked, **made}, asked.keys() - CREATABLE)

        await self._change(KeyConfig, key.id, lambda now: _new(now, key), None, "create", by)
        return _minted(MintedView, key, minted.text)

    async def create_operator_key(self, asked: Mapping[str, Any], by: str) -> MintedOperatorKey:
        """Create a key of some of the fields `OPERATORS_CREATABLE`. Raises ConfigError, Conflict."""
        minted = mint_key(OPERATORS_ENV)
        made = {"id": minted.id, "hash": minted.hash, "created": self._now()}

        def check(key: OperatorKeyConfig) -> Iterator[str]:
            yield from operator_problems([key])
            yield from self._expiry_problems(key.expires)

        strays = [f"{name}: cannot be set here" for name in sorted(asked.keys() - OPERATORS_CREATABLE)]
        given = {name: value for name, value in asked.items() if name in OPERATORS_CREATABLE}
        key = _parsed(OperatorKeyConfig, {**given, **made}, check, strays)
        await self._change(OperatorKeyConfig, key.id, lambda now: _new(now, key), None, "create", by)
        return _minted(MintedOperatorKey, key, minted.text)

    async def patch_key(self, id_: str, patch: Mapping[str, Any], by: str, if_match: str | None) -> Shown:
        """Change some of the fields `PATCHABLE`, as a JSON merge patch (RFC 7396): null takes a field, or a
        limit, back to its default, and a list takes the place of the one before. Raises ConfigError,
        NotFound, PreconditionFailed."""
        before = await self._key(id_)
        await self._parsed_key(_merged(before, patch), patch.keys() - PATCHABLE, before)

        def edit(now: KeyConfig | None) -> KeyConfig:
            return parse(KeyConfig, _merged(_there(now, "keys", id_), patch))

        action = "revoke" if patch.get("disabled") is True else "change"
        change = await self._change(KeyConfig, id_, edit, if_match, action, by)
        return _shown(change)

    async def rotate_key(
        self, id_: str, asked: Mapping[str, Any], by: str, if_match: str | None
    ) -> MintedView:
        """Replace a key's secret, as `_rotate` does."""
        return _minted(MintedView, *await self._rotate(KeyConfig, id_, asked, by, if_match))

    async def rotate_operator_key(self, id_: str, asked: Mapping[str, Any], by: str) -> MintedOperatorKey:
        """Replace an operator's key's secret, as `_rotate` does."""
        return _minted(MintedOperatorKey, *await self._rotate(OperatorKeyConfig, id_, asked, by, None))

    async def _rotate(
        self, type_: type[K], id_: str, asked: Mapping[str, Any], by: str, if_match: str | None
    ) -> tuple[K, str]:
        """Replace a key's secret. The one before works for `Rotation.overlap_s` longer. Raises ConfigError,
        NotFound, PreconditionFailed, and Conflict while a still older one works, or where none would."""
        rotation = load(Rotation, asked, {}, NO_VARIABLES)
        text = ""

        def edit(now: K | None) -> K:
            nonlocal text
            key, text = rotated(_there(now, kind_of(type_), id_), rotation, self._clock.wall())
            return key

        change = await self._change(type_, id_, edit, if_match, "rotate", by)
        assert isinstance(change.after, type_)
        return change.after, text

    async def revoke_operator_key(self, id_: str, by: str) -> Shown:
        """Revoke an operator's key, both its secrets. Raises NotFound."""

        def edit(now: OperatorKeyConfig | None) -> OperatorKeyConfig:
            return replace(_there(now, "admin.keys", id_), disabled=True)

        return _shown(await self._change(OperatorKeyConfig, id_, edit, None, "revoke", by))

    async def delete_key(
        self, id_: str, by: str, if_match: str | None, type_: type[KeyConfig | OperatorKeyConfig] = KeyConfig
    ) -> Shown:
        """Delete a key, which revokes it. Raises NotFound, PreconditionFailed."""
        return _shown(await self._change(type_, id_, None, if_match, "delete", by))

    # -- tenants ----------------------------------------------------------------------------------

    async def put_tenant(
        self,
        id_: str,
        asked: Mapping[str, Any],
        by: str,
        if_match: str | None,
        if_none_match: str | None = None,
    ) -> Shown:
        """Create a tenant, or replace the one that `if_match` names, and `if_none_match` does not. Raises
        ConfigError, Conflict, PreconditionFailed, and PreconditionRequired."""
        there: Record | None = None
        with contextlib.suppress(Conflict):  # which is replaced as if it were not there
            there = await self._directory.get("tenants", id_)
        models = self._models | (named_models(there) if isinstance(there, TenantConfig) else set[str]())
        stray = [] if asked.get("id", id_) == id_ else ["id: must be that of the path"]
        if id_ in _RELATIVE:
            stray.append(f"id: {id_} stands for another path in a URL")
        tenant = _parsed(TenantConfig, {**asked, "id": id_}, lambda one: tenant_problems(one, models), stray)

        def edit(now: TenantConfig | None) -> TenantConfig:
            if if_none_match is not None and is_named(now, if_none_match):
                raise PreconditionFailed("It is there already, as if-none-match has it.")
            if now is not None and if_match is None:
                raise PreconditionRequired("The tenant exists: send the etag that you have read as if-match.")
            return tenant

        return _shown(await self._change(TenantConfig, id_, edit, if_match, "put", by))

    async def delete_tenant(self, id_: str, by: str, if_match: str | None) -> Shown:
        """Delete a tenant without keys. Raises NotFound, Conflict, PreconditionFailed."""
        return _shown(await self._change(TenantConfig, id_, None, if_match, "delete", by))

    # -- inside -----------------------------------------------------------------------------------

    async def _change(
        self, type_: type[R], id_: str, edit: Edit[R] | None, if_match: str | None, action: str, by: str
    ) -> Change:
        """Make a change, and write its audit line."""
        asked = {"operator": by, "action": f"{_ACTED_ON[type_]}.{action}", "target": id_}
        try:
            change = await self._directory.change(type_, id_, edit, if_match)
        except AnswerLost as lost:
            _audit(asked, lost.change, OUTCOME_UNKNOWN)
            raise ChangeUnknown(UNKNOWN, detail=str(lost)) from None
        if change.before != change.after:
            _audit(asked, change, {})
        return change

    async def _parsed_key(
        self, given: Mapping[str, Any], strays: set[str], before: KeyConfig | None = None
    ) -> KeyConfig:
        """A key of these fields, which contradicts nothing. `strays` are the names of those that cannot be
        given here. Raises ConfigError."""
        tenant = given.get("tenant")
        is_there = isinstance(tenant, str) and await self._has_tenant(tenant)
        known = {tenant} if isinstance(tenant, str) and is_there else set[str]()
        known_models = set[str]() if before is None else named_models(before)

        def check(key: KeyConfig) -> Iterator[str]:
            yield from key_problems(key, self._models | known_models, known)
            is_new = before is None or before.expires != key.expires
            if is_new:
                yield from self._expiry_problems(key.expires)

        known_names = {field.name for field in fields(KeyConfig)}
        told = [f"{name}: cannot be set here" for name in sorted(strays & known_names)]
        return _parsed(KeyConfig, given, check, told)

    def _expiry_problems(self, expires: datetime | None) -> Iterator[str]:
        if expires is None or expires.tzinfo is None:
            return
        if expires.timestamp() <= self._clock.wall():
            yield "expires: is over already"
        try:
            expires.astimezone(UTC)
        except OverflowError:
            yield "expires: must be a moment that UTC can say, before the year 10000"

    async def _has_tenant(self, id_: str) -> bool:
        return bool(self._declared("tenants", id_) or await self._directory.get("tenants", id_))

    async def _key(self, id_: str) -> KeyConfig:
        record = self._declared("keys", id_) or await self._directory.get("keys", id_)
        return _there(record if isinstance(record, KeyConfig) else None, "keys", id_)

    def _declared(self, kind: Kind, id_: str) -> Record | None:
        """The entry of this id in the file. None when there is none."""
        declared: Sequence[Record] = getattr(self._accounts.config, kind)
        return next((record for record in declared if record.id == id_), None)

    def _is_shadowed(self, kind: Kind, record: Record) -> bool:
        return self._is_beside_file and self._accounts.is_in_file(kind, record.id)

    @property
    def _models(self) -> frozenset[str]:
        return frozenset(model.name for model in self._accounts.config.models)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(int(self._clock.wall()), UTC)


def _parsed(
    type_: type[R],
    given: Mapping[str, Any],
    check: Callable[[R], Iterator[str]],
    problems: Sequence[str],
) -> R:
    """As `parse`, with further problems that are known already."""
    try:
        found = parse(type_, given, check)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError([*problems])
    return found


def _there(record: R | None, kind: Kind, id_: str) -> R:
    if record is None:
        raise not_found(kind, id_)
    return record


def _merged(key: KeyConfig, patch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a key with those of a merge patch. Moments are texts."""
    merged: dict[str, Any] = msgspec.to_builtins(key)
    for name, value in patch.items():
        is_table = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merged[name] | value if is_table else value
    return merged


def _new(now: R | None, key: R) -> R:
    """A new key, where there is none of its id."""
    if now is not None:
        raise Conflict("There is a key of this id already. Try again.")
    return key


def _minted(type_: type[M], key: KeyConfig | OperatorKeyConfig, text: str) -> M:
    return type_(**msgspec.to_builtins(view_of(key), builtin_types=(datetime,)), key=text)


def _shown(change: Change) -> Shown:
    """An entry as a change has left it; one that was deleted, as it was."""
    record = change.after or change.before
    assert record is not None
    return Shown(view_of(record), etag_of(record))


def _audit(asked: Mapping[str, str], change: Change, more: Mapping[str, str]) -> None:
    """Write the audit line of a change, without hashes of secrets (rule 2)."""
    before, after = _differences(change)
    logs.audit("admin.change", {"logger": __name__, **asked, "from": before, "to": after, **more})


def _differences(change: Change) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The fields that a change has changed, before and after. None where there was, or is, no entry."""
    before, after = (None if r is None else _fields(r) for r in (change.before, change.after))
    if before is None or after is None:
        return before, after
    changed = [name for name in after if before[name] != after[name]]
    return {name: before[name] for name in changed}, {name: after[name] for name in changed}


def _fields(record: Record) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(view_of(record))
    return told
