"""The command `penstock keys`: create, list, rotate and revoke API keys, or mint one that is kept nowhere.

They are those of a gateway's file, of the Redis that the file names, or of a running gateway that is asked
through its admin listener.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from shared.cli import admin, terminal
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
from shared.cli.running import read_running
from shared.cli.service import missing_extra, reach
from shared.process.arguments import Parser, checked

ENV_HELP: Final = "the part of the key before its id (default: live)"
COLUMNS: Final = (
    *("id", "tenant", "state", "created", "used", "expires", "limits", "models", "endpoints", "labels"),
)
OPERATORS_COLUMNS: Final = ("id", "state", "created", "expires", "labels")
OF_CALLERS: Final = ("models", "endpoints", "limits", "model_limits", "env")
"""The options of `create` that operators' keys do not have."""


class Key(Struct, frozen=True):
    """A key as the gateway shows it."""

    id: str
    labels: list[str]
    tenant: str = ""
    """Empty for an operator's key, as the next four."""
    models: list[str] = []
    endpoints: list[str] = []
    limits: dict[str, int | None] = {}
    model_limits: list[ModelLimitsShown] = []
    created: datetime | None = None
    expires: datetime | None = None
    disabled: bool = False
    previous_expires: datetime | None = None
    key: str | None = None
    """The whole key, with its secret. None but in the answer to what made it."""


class Operators(Struct, frozen=True):
    """The list of operators' keys."""

    data: list[msgspec.Raw]


class UsesShown(Struct, frozen=True):
    """When keys were used last."""

    since: datetime
    data: dict[str, datetime]


# -- the command line -----------------------------------------------------------------------------


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `keys` to the command line."""
    parser = commands.add_parser(
        "keys",
        help="create, list, rotate and revoke API keys",
        description="Create, list, rotate and revoke a gateway's API keys.",
        epilog="Without --config and --admin-url they are those of the `penstock up` that runs here.",
    )
    where = target()
    where.add_argument(
        "--operator",
        action="store_true",
        help="an operator's key, which opens the admin listener: [[admin.keys]] in the file",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_create(actions.add_parser("create", parents=[where], help="create a key, and show it this once"))
    listing = actions.add_parser("list", parents=[where], help="list keys, without their secrets")
    listing.add_argument("--tenant", metavar="ID", help="only this tenant's")
    rotate = actions.add_parser("rotate", parents=[where], help="replace a key's secret")
    rotate.add_argument("id", metavar="ID", type=checked(id_problem))
    rotate.add_argument(
        "--overlap-s",
        type=float,
        metavar="SECONDS",
        help="how long the secret that is replaced still works; 0 ends it at once (default: 86400)",
    )
    revoke = actions.add_parser("revoke", parents=[where], help="revoke a key")
    revoke.add_argument("id", metavar="ID", type=checked(id_problem))
    revoke.add_argument("--delete", action="store_true", help="also remove it from the list")
    mint = actions.add_parser(
        "mint",
        help="show a new key and its hash, kept nowhere: for files that others write",
    )
    mint.add_argument("--env", metavar="NAME", type=checked(_env_problem), default="live", help=ENV_HELP)
    mint.add_argument("--json", action="store_true", help="answer in JSON")
    parser.set_defaults(run=run)


def _add_create(parser: Parser) -> None:
    parser.add_argument("--tenant", metavar="ID", help="whose key it is; needed unless --operator is given")
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "--model",
        metavar="NAME",
        action="append",
        dest="models",
        help="a model that it may use (default: all of the tenant's)",
    )
    parser.add_argument(
        "--endpoint",
        metavar="PATH",
        action="append",
        dest="endpoints",
        help="an endpoint that it may use, such as /v1/chat/completions (default: all)",
    )
    add_limits(parser, "this key alone")
    parser.add_argument(
        "--label", metavar="TEXT", action="append", dest="labels", help="a note for operators"
    )
    parser.add_argument("--expires", metavar="TIME", help="when it stops working: 2030-01-31T00:00:00Z")
    parser.add_argument("--env", metavar="NAME", type=checked(_env_problem), help=ENV_HELP)


def _env_problem(text: str) -> str | None:
    return None if re.fullmatch("[a-z0-9]{1,16}", text) else "must be 1 to 16 of a-z 0-9"


def run(options: argparse.Namespace) -> int:
    """Do one action. Returns the process's exit code."""
    terminal.prepare()
    if options.action == "create":
        _check_create(options)
    try:
        if options.action == "mint":
            _mint(options)
            return 0
        gateway = _keeper(options)
        match options.action:
            case "create":
                _show_made(gateway.ask("create", "", _fields(options)).content, options)
            case "list":
                _show_list(_listed(gateway, options), options, _uses(options))
            case "rotate":
                overlap = {} if options.overlap_s is None else {"overlap_s": options.overlap_s}
                _show_made(gateway.ask("rotate", options.id, overlap).content, options)
            case _:
                operation = "delete" if options.delete else "patch"
                fields = {} if options.delete else {"disabled": True}
                _show_list([gateway.ask(operation, options.id, fields).content], options, None)
    except KeeperFailed as error:
        sys.stderr.write(f"penstock keys: {terminal.harmless(str(error))}\n")
        return 1
    return 0


def _check_create(options: argparse.Namespace) -> None:
    """End the process where the options of `create` do not go together."""
    if not options.operator:
        if options.tenant is None:
            options.parser.error("the following arguments are required: --tenant")
        return
    strays = [name for name in ("tenant", *OF_CALLERS) if getattr(options, name) is not None]
    if strays:
        named = strays[0].removesuffix("s").replace("_", "-")
        options.parser.error(f"argument --operator: not allowed with argument --{named}")


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    names = ("tenant", "models", "endpoints", "labels", "expires", "env")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return {**given, **limits_of(options)}


# -- what is asked --------------------------------------------------------------------------------


def _keeper(options: argparse.Namespace) -> Keeper:
    """Raises KeeperFailed when it is not clear which gateway is meant."""
    if options.operator and options.admin_url is not None and options.action != "list":
        raise KeeperFailed(
            "operators' keys are changed in the gateway's file alone, so that a stolen one makes no "
            "other: name the file by --config"
        )
    return keeper_of(options, "operators" if options.operator else "callers")


def _listed(gateway: Keeper, options: argparse.Namespace) -> Iterator[bytes]:
    """The keys that are asked for. Raises KeeperFailed."""
    if not options.operator:
        yield from listed(gateway, {} if options.tenant is None else {"tenant": options.tenant})
    elif options.tenant is not None:
        raise KeeperFailed("operators' keys belong to no tenant: leave --tenant out")
    else:
        yield from map(bytes, decoded(gateway.ask("list", "", {}).content, Operators).data)


def _uses(options: argparse.Namespace) -> UsesShown | None:
    """When keys were used last, as running gateways remember it. None where a file is asked that is not the
    `penstock up`'s that runs here, or none of them answers."""
    ours = read_running()
    is_ours = options.config is None or (ours is not None and ours.config == str(options.config))
    if options.operator or not (options.admin_url or (ours is not None and is_ours)):
        return None
    asked = {} if options.tenant is None else {"tenant": options.tenant}
    try:
        return admin.ask(options.admin_url, "/key_uses", UsesShown, asked)
    except admin.AdminFailed:
        return None  # a gateway of an older version, or one that is just stopped


def _mint(options: argparse.Namespace) -> None:
    """Show a new key. Raises KeeperFailed where the gateway is not installed."""
    if problem := missing_extra("gateway"):
        raise KeeperFailed(problem)
    minted = reach("gateway.identity.keys").mint_key(options.env)
    if options.json:
        print(msgspec.json.encode({"id": minted.id, "hash": minted.hash, "key": minted.text}).decode())
        return
    print(minted.text)
    sys.stderr.write(f'id = "{minted.id}"\nhash = "{minted.hash}"\n')


# -- what is shown --------------------------------------------------------------------------------


def _show_made(answer: bytes, options: argparse.Namespace) -> None:
    made = decoded(answer, Key)
    if options.json:
        print(answer.decode())
        return
    print(made.key)
    whose = "operators" if options.operator else made.tenant
    note = f"Key {made.id} of {whose}. It is shown this once."
    if made.previous_expires is not None:
        note += f" The secret before it works until {made.previous_expires:%Y-%m-%d %H:%M:%S} UTC."
    sys.stderr.write(f"{terminal.harmless(note)}\n")


def _show_list(answers: Iterable[bytes], options: argparse.Namespace, uses: UsesShown | None) -> None:
    if options.json:
        for answer in answers:
            print((answer if uses is None else _with_use(answer, uses)).decode())
        return
    columns = OPERATORS_COLUMNS if options.operator else COLUMNS
    show([columns, *(_row(decoded(answer, Key), columns, uses) for answer in answers)])


def _with_use(answer: bytes, uses: UsesShown) -> bytes:
    """A key's JSON with when it was used last, and since when that is known."""
    fields: dict[str, Any] = decoded(answer, dict[str, Any])
    at = uses.data.get(str(fields.get("id")))
    return msgspec.json.encode({**fields, "last_used": at, "last_used_known_since": uses.since})


def _moment(moment: datetime) -> str:
    """A moment in UTC; one that UTC cannot say, as the gateway gave it."""
    try:
        return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"
    except OverflowError:
        return f"{moment:%Y-%m-%d %H:%M %z}"


def _row(key: Key, columns: Sequence[str], uses: UsesShown | None) -> tuple[str, ...]:
    is_over = key.expires is not None and key.expires <= datetime.now(UTC)
    used = None if uses is None else uses.data.get(key.id)
    unused = "" if uses is None else f"not since {_moment(uses.since)}"
    cells = {
        "id": key.id,
        "tenant": key.tenant,
        "state": "revoked" if key.disabled else "expired" if is_over else "active",
        "created": "" if key.created is None else _moment(key.created),
        "used": unused if used is None else _moment(used),
        "expires": "never" if key.expires is None else _moment(key.expires),
        "limits": limits_shown(key.limits, key.model_limits),
        "models": ", ".join(key.models),
        "endpoints": ", ".join(key.endpoints),
        "labels": ", ".join(key.labels),
    }
    return tuple(cells[column] for column in columns)
