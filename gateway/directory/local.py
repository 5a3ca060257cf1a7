"""The operations on tenants and keys for a command on the gateway's machine, which has the gateway's file: on
the file itself, or on the Redis that it names. Operators' keys are in the file alone."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from gateway.config.edge import OperatorKeyConfig
from gateway.config.whole import load
from gateway.directory.accounts import AccountsReader
from gateway.directory.entries import PAGE_MAX
from gateway.directory.file_directory import FileDirectory
from gateway.directory.registry import Registry
from shared.process import logs
from shared.process.setting_values import ConfigError
from shared.wire.errors import ApiError

Operation = Literal["create", "list", "get", "put", "rotate", "patch", "delete"]
Whose = Literal["callers", "operators", "tenants"]
Called = tuple[bytes, str | None]
"""An answer in JSON, and the etag of the tenant that it shows."""


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
        return asyncio.run(_call(file, operation, id_, fields, env, whose, if_match))
    except ConfigError as error:
        raise LocalFailed("\n".join(error.problems)) from None
    except ApiError as error:
        raise LocalFailed(error.message + (f" ({error.detail})" if error.detail else "")) from None
    finally:
        logs.close()


async def _call(
    file: Path,
    operation: Operation,
    id_: str,
    fields: Mapping[str, Any],
    env: Mapping[str, str],
    whose: Whose,
    if_match: str | None,
) -> Called:
    config = load(file, env)
    accounts = AccountsReader(config, file, env=env)
    if config.directory.store == "file" or whose == "operators":
        registry = Registry(FileDirectory(file, accounts, env), accounts)
        return await _asked(registry, operation, id_, fields, whose, if_match)
    from gateway.directory.redis_directory import open_directory  # a file needs no client of Redis

    directory = open_directory(config.redis, accounts, env)
    try:
        return await _asked(Registry(directory, accounts), operation, id_, fields, whose, if_match)
    finally:
        await directory.aclose()


async def _asked(
    registry: Registry,
    operation: Operation,
    id_: str,
    fields: Mapping[str, Any],
    whose: Whose,
    if_match: str | None,
) -> Called:
    match whose:
        case "callers":
            return await _ask(registry, operation, id_, fields), None
        case "operators":
            return await _ask_of_operators(registry, operation, id_, fields), None
        case "tenants":
            return await _ask_of_tenants(registry, operation, id_, fields, if_match)


async def _ask(registry: Registry, operation: Operation, id_: str, fields: Mapping[str, Any]) -> bytes:
    by = _user()
    match operation:
        case "create":
            return msgspec.json.encode(await registry.create_key(fields, by))
        case "list":
            return msgspec.json.encode(await registry.page("keys", fields.get("tenant"), id_, PAGE_MAX))
        case "rotate":
            return msgspec.json.encode(await registry.rotate_key(id_, fields, by, None))
        case "patch":
            shown = await registry.patch_key(id_, fields, by, None)
        case _:
            assert operation == "delete"
            shown = await registry.delete_key(id_, by, None)
    return msgspec.json.encode(shown.view)


async def _ask_of_operators(
    registry: Registry, operation: Operation, id_: str, fields: Mapping[str, Any]
) -> bytes:
    by = _user()
    match operation:
        case "create":
            return msgspec.json.encode(await registry.create_operator_key(fields, by))
        case "list":
            return msgspec.json.encode(registry.operators())
        case "rotate":
            return msgspec.json.encode(await registry.rotate_operator_key(id_, fields, by))
        case "patch":
            shown = await registry.revoke_operator_key(id_, by)
        case _:
            assert operation == "delete"
            shown = await registry.delete_key(id_, by, None, OperatorKeyConfig)
    return msgspec.json.encode(shown.view)


async def _ask_of_tenants(
    registry: Registry, operation: Operation, id_: str, fields: Mapping[str, Any], if_match: str | None
) -> Called:
    match operation:
        case "list":
            return msgspec.json.encode(await registry.page("tenants", None, id_, PAGE_MAX)), None
        case "get":
            shown = await registry.get("tenants", id_)
        case "put":
            shown = await registry.put_tenant(id_, fields, _user(), if_match)
        case _:
            assert operation == "delete"
            shown = await registry.delete_tenant(id_, _user(), None)
    return msgspec.json.encode(shown.view), shown.etag


def _user() -> str:
    """The user who runs this command, for audit lines. One without a name, as containers have, is told by its
    number."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return f"os:{name}"
