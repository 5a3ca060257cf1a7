"""The command `penstock tenants`: list and create a gateway's tenants, limit them, delete them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from shared.cli import terminal
from shared.cli.keeper import (
    Keeper,
    KeeperFailed,
    ModelLimitsShown,
    add_limits,
    decoded,
    id_problem,
    keeper_of,
    limits_of,
    limits_shown,
    listed,
    show,
    target,
)
from shared.process.arguments import Parser, checked

COLUMNS: Final = ("id", "tier", "limits", "models")
TIERS: Final = ("flex", "default", "priority")


class Tenant(Struct, frozen=True):
    """A tenant as the gateway shows it."""

    id: str
    models: list[str] = []
    limits: dict[str, int | None] = {}
    model_limits: list[ModelLimitsShown] = []
    service_tier: str = ""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `tenants` to the command line."""
    parser = commands.add_parser(
        "tenants",
        help="list, create, limit and delete tenants",
        description="List, create, limit and delete a gateway's tenants: whom keys belong to.",
        epilog="Without --config and --admin-url they are those of the `penstock up` that runs here.",
    )
    where = target()
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", parents=[where], help="list tenants with their limits")
    create = actions.add_parser("create", parents=[where], help="create a tenant")
    _add_id(create)
    create.add_argument(
        "--model", metavar="NAME", action="append", dest="models",
        help="a model that it may use (default: all)",
    )  # fmt: skip
    create.add_argument(
        "--service-tier", choices=TIERS, help="the highest tier of its requests (default: default)"
    )
    add_limits(create, "all its keys together")
    limit = actions.add_parser("limit", parents=[where], help="change a tenant's limits, and no others of it")
    _add_id(limit)
    add_limits(limit, "all its keys together", lifts=True)
    delete = actions.add_parser(
        "delete",
        parents=[where],
        help="delete a tenant without keys; `keys revoke ID --delete` takes them away",
    )
    _add_id(delete)
    parser.set_defaults(run=run)


def _add_id(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", type=checked(id_problem))


def run(options: argparse.Namespace) -> int:
    """Do one action. Returns the process's exit code."""
    terminal.prepare()
    try:
        keeper = keeper_of(options, "tenants")
        match options.action:
            case "list":
                _show(listed(keeper, {}), options)
            case "create":
                _show([_created(keeper, options)], options)
            case "limit":
                _show([_limited(keeper, options)], options)
            case _:
                _show([keeper.ask("delete", options.id, {}).content], options)
    except KeeperFailed as error:
        sys.stderr.write(f"penstock tenants: {terminal.harmless(str(error))}\n")
        return 1
    return 0


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    named = {"models": options.models, "service_tier": options.service_tier}
    return {**{name: value for name, value in named.items() if value is not None}, **limits_of(options)}


def _created(keeper: Keeper, options: argparse.Namespace) -> bytes:
    """A new tenant. One that is there is left alone. Raises KeeperFailed."""
    try:
        keeper.ask("get", options.id, {})
    except KeeperFailed:  # it is not there, or `put` fails as well, and tells why
        return keeper.ask("put", options.id, _fields(options)).content
    raise KeeperFailed(f"there is a tenant {options.id!r} already: penstock tenants limit changes its limits")


def _limited(keeper: Keeper, options: argparse.Namespace) -> bytes:
    """The tenant with other limits. One that somebody else changes meanwhile is left alone. Raises
    KeeperFailed."""
    changes = limits_of(options)
    if not changes:
        raise KeeperFailed("name a limit: --limit requests_per_min=60, or requests_per_min=none for no limit")
    found = keeper.ask("get", options.id, {})
    tenant: dict[str, Any] = decoded(found.content, dict[str, Any])
    tenant["limits"] = {**tenant["limits"], **changes.get("limits", {})}
    by_model = {one["model"]: one["limits"] for one in tenant["model_limits"]}
    for one in changes.get("model_limits", ()):
        by_model[one["model"]] = {**by_model.get(one["model"], {}), **one["limits"]}
    tenant["model_limits"] = [
        {"model": model, "limits": limits}
        for model, limits in by_model.items()
        if any(number is not None for number in limits.values())
    ]
    return keeper.ask("put", options.id, tenant, found.etag).content


def _show(answers: Iterable[bytes], options: argparse.Namespace) -> None:
    if options.json:
        for answer in answers:
            print(answer.decode())
        return
    show([COLUMNS, *(_row(decoded(answer, Tenant)) for answer in answers)])


def _row(tenant: Tenant) -> tuple[str, ...]:
    limits = limits_shown(tenant.limits, tenant.model_limits)
    return tenant.id, tenant.service_tier, limits, ", ".join(tenant.models)
