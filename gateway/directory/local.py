"""The operations on keys for a command on the gateway's machine, which has the gateway's file: on the file
itself, or on the Redis that it names. Operators' keys are in the file alone."""

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

Operation = Literal["create", "list", "rotate", "patch", "delete"]
Whose = Literal["callers", "operators"]


class LocalFailed(Exception):
    """The operation was not done; the message is for the operator."""


def call(
    file: Path,
    operation: Operation,
    id_: str,
    fields: Mapping[str, Any],
    env: Mapping[str, str],
    whose: Whose = "callers",
) -> bytes:
    """Do one operation on keys of callers or of operators. Returns its answer in JSON, as the admin listener
    would give it. A change leaves its audit line on standard error. Raises LocalFailed.

    `id_` is the key's; of a list, the place behind which it begins.
    """
    logs.configure("keys", level="warning", stream=sys.stderr)
    try:
        return asyncio.run(_call(file, operation, id_, fields, env, whose))
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
) -> bytes:
    config = load(file, env)
    accounts = AccountsReader(config, file, env=env)
    if config.directory.store == "file" or whose == "operators":
        registry = Registry(FileDirectory(file, accounts, env), accounts)
        ask = _ask if whose == "callers" else _ask_of_operators
        return await ask(registry, operation, id_, fields)
    from gateway.directory.redis_directory import open_directory  # a file needs no client of Redis

    directory = open_directory(config.redis, accounts, env)
    try:
        return await _ask(Registry(directory, accounts), operation, id_, fields)
    finally:
        await directory.aclose()


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
        case "delete":
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
        case "delete":
            shown = await registry.delete_key(id_, by, None, OperatorKeyConfig)
    return msgspec.json.encode(shown.view)


def _user() -> str:
    """The user who runs this command, for audit lines. One without a name, as containers have, is told by its
    number."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return f"os:{name}"
