"""The operations on tenants and keys for a command on the gateway's machine, which has the gateway's file: on
the file itself, or on the Redis that it names. Operators' keys are in the file alone."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from gateway.config.edge import OperatorKeyConfig
from gateway.config.whole import load
from gateway.directory.accounts import AccountsReader
from gateway.directory.entries import PAGE_MAX
from gateway.directory.file_directory import FileDirectory
from gateway.directory.registry import Registry, Shown
from shared.process import logs
from shared.process.setting_values import ConfigError
from shared.wire.errors import ApiError

Operation = Literal["create", "list", "get", "put", "rotate", "patch", "delete"]
Whose = Literal["callers", "operators", "tenants"]
Called = tuple[bytes, str | None]
"""An answer in JSON, and the etag of the entry that it shows."""


class _Asked(Struct, frozen=True):
    whose: Whose
    operation: Operation
    id: str
    fields: Mapping[str, Any]
    if_match: str | None


class LocalFailed(Exception):
    """The operation was not done; the message is for the operator."""


def call(
    file: Path,
    operation: Operation,
    id_: str,
    fields: Mapping[str, Any],
    env: Mapping[str, str],
    whose: Whose = "callers",
    if_match: str | None = None,
) -> Called:
    """Do one operation on keys of callers or of operators, or on tenants. Returns its answer in JSON, as the
    admin listener would give it. A change leaves its audit line on standard error, unless that is a terminal,
    whose user knows what was done. Raises LocalFailed.

    `id_` is the entry's; of a list, the place behind which it begins. `if_match` names the tenant that a
    `put` replaces.
    """
    logs.configure("keys", level="warning", stream=sys.stderr, has_audits=not sys.stderr.isatty())
    try:
        return asyncio.run(_call(file, env, _Asked(whose, operation, id_, fields, if_match)))
    except ConfigError as error:
        raise LocalFailed("\n".join(error.problems)) from None
    except ApiError as error:
        raise LocalFailed(error.message + (f" ({error.detail})" if error.detail else "")) from None
    finally:
        logs.close()


async def _call(file: Path, env: Mapping[str, str], asked: _Asked) -> Called:
    config = load(file, env)
    accounts = AccountsReader(config, file, env=env)
    if config.directory.store == "file" or asked.whose == "operators":
        return await _answer(Registry(FileDirectory(file, accounts, env), accounts), asked)
    from gateway.directory.redis_directory import open_directory  # a file needs no client of Redis

    directory = open_directory(config.redis, accounts, env)
    try:
        return await _answer(Registry(directory, accounts), asked)
    finally:
        await directory.aclose()


async def _answer(registry: Registry, asked: _Asked) -> Called:
    found = await _OPERATIONS[asked.whose, asked.operation](registry, asked, _user())
    if isinstance(found, Shown):
        return msgspec.json.encode(found.view), found.etag
    return msgspec.json.encode(found), None


_OPERATIONS: Final[Mapping[tuple[Whose, Operation], Callable[[Registry, _Asked, str], Awaitable[object]]]] = {
    ("callers", "create"): lambda keeper, asked, by: keeper.create_key(asked.fields, by),
    ("callers", "list"): lambda keeper, asked, _: keeper.page(
        "keys", asked.fields.get("tenant"), asked.id, PAGE_MAX
    ),
    ("callers", "rotate"): lambda keeper, asked, by: keeper.rotate_key(asked.id, asked.fields, by, None),
    ("callers", "patch"): lambda keeper, asked, by: keeper.patch_key(asked.id, asked.fields, by, None),
    ("callers", "delete"): lambda keeper, asked, by: keeper.delete_key(asked.id, by, None),
    ("operators", "create"): lambda keeper, asked, by: keeper.create_operator_key(asked.fields, by),
    ("operators", "list"): lambda keeper, *_: keeper.operators(),
    ("operators", "rotate"): lambda keeper, asked, by: keeper.rotate_operator_key(asked.id, asked.fields, by),
    ("operators", "patch"): lambda keeper, asked, by: keeper.revoke_operator_key(asked.id, by),
    ("operators", "delete"): lambda keeper, asked, by: keeper.delete_key(
        asked.id, by, None, OperatorKeyConfig
    ),
    ("tenants", "list"): lambda keeper, asked, _: keeper.page("tenants", None, asked.id, PAGE_MAX),
    ("tenants", "get"): lambda keeper, asked, _: keeper.get("tenants", asked.id),
    ("tenants", "put"): lambda keeper, asked, by: keeper.put_tenant(
        asked.id, asked.fields, by, asked.if_match
    ),
    ("tenants", "delete"): lambda keeper, asked, by: keeper.delete_tenant(asked.id, by, None),
}


def _user() -> str:
    """The user who runs this command, for audit lines. One without a name, as containers have, is told by its
    number."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return f"os:{name}"
