"""Operators' keys, `[[admin.keys]]`: listed by everybody who has one, and changed in the file alone.

Rules:

1. No request changes them, on any listener: a change takes the right to write the gateway's file. A key that
   could make others, or end others, would let whoever stole it stay on after its revocation, and keep out
   those who would revoke it. So what ends one key, in the file, ends all that it can do.
2. `penstock keys ... --operator` makes the change as it makes those of callers' keys in the file: whole or
   not at all, with an audit line, and with a secret that is shown once. The gateways follow the file within
   five seconds, without a restart.
3. A new secret works beside the one before for an overlap. Where a key was stolen, rotate with an overlap of
   0, or revoke it: either counts from the moment in which a gateway has read the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config.edge import OperatorKeyConfig
from gateway.config.whole import GatewayConfig, operator_problems
from gateway.directory.accounts import AccountsReader
from gateway.directory.entries import NO_VARIABLES, OUTCOME_UNKNOWN, UNKNOWN
from gateway.directory.file_directory import FileDirectory
from gateway.directory.rotation import Rotation, rotated
from gateway.identity.keys import mint_key
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.setting_values import ConfigError, load
from shared.wire.errors import ChangeUnknown, Conflict, NotFound

SECTION: Final = "admin.keys"
ENV: Final = "admin"
"""The part of a minted key before its id. It tells a reader, or a scanner for secrets, what the key opens."""
CREATABLE: Final = frozenset({"labels", "expires"})
_Edit = Callable[[OperatorKeyConfig | None, GatewayConfig], OperatorKeyConfig | None]


class OperatorKeyView(Struct, frozen=True):
    """An operator's key, without the hashes of its secrets."""

    id: str
    labels: tuple[str, ...]
    created: datetime | None
    expires: datetime | None
    disabled: bool
    previous_expires: datetime | None
    """When the secret before the last replacement stops working. None without one."""


class MintedOperatorKey(OperatorKeyView, frozen=True):
    """An operator's key as it is shown once, with its secret."""

    key: str
    """The whole key, which is kept nowhere."""


class OperatorKeysView(Struct, frozen=True):
    """All operators' keys, by their ids."""

    data: list[OperatorKeyView]


def operator_keys_of(config: GatewayConfig) -> OperatorKeysView:
    """The keys that a configuration has, as operators see them."""
    return OperatorKeysView([_view(key) for key in sorted(config.admin.keys, key=lambda key: key.id)])


class OperatorKeys:
    """The changes of operators' keys, for whoever has the file. `by` names who makes one."""

    def __init__(self, file: FileDirectory, accounts: AccountsReader, clock: Clock = SYSTEM_CLOCK) -> None:
        self._file: Final = file
        self._accounts: Final = accounts
        self._clock: Final = clock

    def list(self) -> OperatorKeysView:
        return operator_keys_of(self._accounts.config)

    async def create(self, asked: Mapping[str, Any], by: str) -> MintedOperatorKey:
        """Create a key of some of the fields `CREATABLE`. Raises ConfigError."""
        minted = mint_key(ENV)
        created = datetime.fromtimestamp(int(self._clock.wall()), UTC)
        made = {"id": minted.id, "hash": minted.hash, "created": created}
        problems = [f"{name}: cannot be set here" for name in sorted(asked.keys() - CREATABLE)]
        given = {name: value for name, value in asked.items() if name in CREATABLE}
        key = load(OperatorKeyConfig, {**given, **made}, {}, NO_VARIABLES)
        if key.expires is not None and key.expires.timestamp() <= self._clock.wall():
            problems.append("expires: is over already")
        if problems := [*problems, *operator_problems([key])]:
            raise ConfigError(problems)

        def edit(before: OperatorKeyConfig | None, _: GatewayConfig) -> OperatorKeyConfig:
            if before is not None:
                raise Conflict("There is a key of this id already. Try again.")
            return key

        await self._change(key.id, edit, "create", by)
        return _minted(key, minted.text)

    async def rotate(self, id_: str, asked: Mapping[str, Any], by: str) -> MintedOperatorKey:
        """Replace a key's secret. Raises ConfigError, NotFound, and Conflict as `rotated` does."""
        rotation = load(Rotation, asked, {}, NO_VARIABLES)
        text = ""

        def edit(before: OperatorKeyConfig | None, _: GatewayConfig) -> OperatorKeyConfig:
            nonlocal text
            key, text = rotated(_there(before, id_), rotation, ENV, self._clock.wall())
            return key

        after = await self._change(id_, edit, "rotate", by)
        assert after is not None
        return _minted(after, text)

    async def revoke(self, id_: str, by: str) -> OperatorKeyView:
        """Revoke a key, both its secrets. Raises NotFound."""

        def edit(before: OperatorKeyConfig | None, _: GatewayConfig) -> OperatorKeyConfig:
            return replace(_there(before, id_), disabled=True)

        after = await self._change(id_, edit, "revoke", by)
        assert after is not None
        return _view(after)

    async def delete(self, id_: str, by: str) -> OperatorKeyView:
        """Take a key out of the file, which revokes it. Returns it as it was. Raises NotFound."""
        found: OperatorKeyConfig | None = None

        def edit(before: OperatorKeyConfig | None, _: GatewayConfig) -> None:
            nonlocal found
            found = _there(before, id_)

        await self._change(id_, edit, "delete", by)
        assert found is not None
        return _view(found)

    async def _change(self, id_: str, edit: _Edit, action: str, by: str) -> OperatorKeyConfig | None:
        edited = await self._file.edit(SECTION, id_, edit)
        if edited.before != edited.after:
            fields = {"operator": by, "action": f"operator.{action}", "target": id_}
            told = {"from": _told(edited.before), "to": _told(edited.after)}
            outcome = {} if edited.doubt is None else OUTCOME_UNKNOWN
            logs.audit("admin.change", {"logger": __name__, **fields, **told, **outcome})
        if edited.doubt is not None:
            raise ChangeUnknown(UNKNOWN, detail=edited.doubt)
        return edited.after


def _there(key: OperatorKeyConfig | None, id_: str) -> OperatorKeyConfig:
    if key is None:
        raise NotFound(f"There is no operator's key {id_[:64]!r}.")
    return key


def _view(key: OperatorKeyConfig) -> OperatorKeyView:
    return msgspec.convert(key, OperatorKeyView, from_attributes=True)


def _minted(key: OperatorKeyConfig, text: str) -> MintedOperatorKey:
    return MintedOperatorKey(**msgspec.structs.asdict(_view(key)), key=text)


def _told(key: OperatorKeyConfig | None) -> Any:
    return None if key is None else msgspec.to_builtins(_view(key))
