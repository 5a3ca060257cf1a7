"""The command `penstock keys`: create, list, rotate and revoke API keys, or mint one that is kept nowhere.

They are those of a gateway's file, of the Redis that the file names, or of a running gateway that is asked
through its admin listener.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import msgspec
from msgspec import Struct

from shared.cli import terminal
from shared.cli.admin import KEY_VARIABLE
from shared.cli.running import read_running
from shared.cli.service import missing_extra, reach
from shared.process.arguments import Parser, checked
from shared.wire.ids import is_id
from shared.wire.undecodable import UNDECODABLE

ANSWER_S: Final = 30.0
PAGE: Final = "200"
ENV_HELP: Final = "the part of the key before its id (default: live)"
COLUMNS: Final = ("id", "tenant", "state", "expires", "models", "endpoints", "labels")
OPERATORS_COLUMNS: Final = ("id", "state", "expires", "labels")
OF_CALLERS: Final = ("models", "endpoints", "limits", "model_limits", "env")
"""The options of `create` that operators' keys do not have."""


class KeysFailed(Exception):
    """The operation was not done; the message is for the user."""


class Key(Struct, frozen=True):
    """A key as the gateway shows it."""

    id: str
    labels: list[str]
    tenant: str = ""
    """Empty for an operator's key, as the next two."""
    models: list[str] = []
    endpoints: list[str] = []
    expires: datetime | None = None
    disabled: bool = False
    previous_expires: datetime | None = None
    key: str | None = None
    """The whole key, with its secret. None but in the answer to what made it."""


class KeyPage(Struct, frozen=True):
    """A part of the list of keys."""

    data: list[msgspec.Raw]
    next: str | None = None


class Operators(Struct, frozen=True):
    """The list of operators' keys."""

    data: list[msgspec.Raw]


class KeyKeeper(Protocol):
    """The keeper that is asked: a gateway, or its file."""

    def ask(self, operation: str, id_: str, fields: Mapping[str, Any]) -> bytes:
        """The answer in JSON. `id_` is the key's; of a list, the place behind which it begins. Raises
        KeysFailed."""
        ...


# -- the command line -----------------------------------------------------------------------------


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `keys` to the command line."""
    parser = commands.add_parser(
        "keys",
        help="create, list, rotate and revoke API keys",
        description="Create, list, rotate and revoke a gateway's API keys.",
        epilog="Without --config and --admin-url they are those of the `penstock up` that runs here.",
    )
    where = Parser(add_help=False)
    target = where.add_mutually_exclusive_group()
    target.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="the gateway's file: its keys, or those in its Redis"
    )
    target.add_argument(
        "--admin-url",
        metavar="URL",
        type=checked(_url_problem),
        help=f"a running gateway's admin listener; the operator's key is in ${KEY_VARIABLE}",
    )
    where.add_argument("--json", action="store_true", help="answer in JSON, one key per line")
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
    rotate.add_argument("id", metavar="ID", type=checked(_id_problem))
    rotate.add_argument(
        "--overlap-s",
        type=float,
        metavar="SECONDS",
        help="how long the secret that is replaced still works; 0 ends it at once (default: 86400)",
    )
    revoke = actions.add_parser("revoke", parents=[where], help="revoke a key")
    revoke.add_argument("id", metavar="ID", type=checked(_id_problem))
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
    parser.add_argument(
        "--limit",
        metavar="NAME=NUMBER",
        action="append",
        dest="limits",
        type=_limit,
        help="a quota of this key alone, such as requests_per_min=60",
    )
    parser.add_argument(
        "--model-limit",
        metavar="MODEL:NAME=NUMBER",
        action="append",
        dest="model_limits",
        type=_model_limit,
        help="a quota of this key alone for one model, such as qwen3-8b:requests_per_min=60",
    )
    parser.add_argument(
        "--label", metavar="TEXT", action="append", dest="labels", help="a note for operators"
    )
    parser.add_argument("--expires", metavar="TIME", help="when it stops working: 2030-01-31T00:00:00Z")
    parser.add_argument("--env", metavar="NAME", type=checked(_env_problem), help=ENV_HELP)


def _url_problem(url: str) -> str | None:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return "must be a URL like http://127.0.0.1:9090"
    return (
        None
        if parsed.scheme in ("http", "https") and parsed.host
        else "must be a URL like http://127.0.0.1:9090"
    )


def _env_problem(text: str) -> str | None:
    return None if re.fullmatch("[a-z0-9]{1,16}", text) else "must be 1 to 16 of a-z 0-9"


def _id_problem(text: str) -> str | None:
    return None if is_id(text) else "must be 1 to 64 of A-Z a-z 0-9 . _ -"


def _limit(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isascii() or not number.isdigit():
        raise argparse.ArgumentTypeError(f"must be like requests_per_min=60, got {text!r}")
    return name, int(number)


def _model_limit(text: str) -> tuple[str, str, int]:
    """The last colon ends the model's name, which may have others."""
    model, _, limit = text.rpartition(":")
    if not model:
        raise argparse.ArgumentTypeError(f"must be like qwen3-8b:requests_per_min=60, got {text!r}")
    return model, *_limit(limit)


def run(options: argparse.Namespace) -> int:
    """Do one action. Returns the process's exit code."""
    terminal.prepare()
    if options.action == "create":
        _check_create(options)
    try:
        if options.action == "mint":
            _mint(options)
            return 0
        gateway = _gateway(options)
        match options.action:
            case "create":
                _show_made(gateway.ask("create", "", _fields(options)), options)
            case "list":
                _show_list(_listed(gateway, options), options)
            case "rotate":
                overlap = {} if options.overlap_s is None else {"overlap_s": options.overlap_s}
                _show_made(gateway.ask("rotate", options.id, overlap), options)
            case _:
                operation = "delete" if options.delete else "patch"
                fields = {} if options.delete else {"disabled": True}
                _show_list([gateway.ask(operation, options.id, fields)], options)
    except KeysFailed as error:
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


def _require_once(option: str, names: Iterable[str]) -> None:
    """Raises KeysFailed where a limit is given twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise KeysFailed(f"{option} {name} is given {count} times")


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    names = ("tenant", "models", "endpoints", "labels", "expires", "env")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.limits:
        _require_once("--limit", (name for name, _ in options.limits))
        given["limits"] = dict(options.limits)
    if options.model_limits:
        _require_once("--model-limit", (f"{model}:{name}" for model, name, _ in options.model_limits))
        by_model: dict[str, dict[str, int]] = {}
        for model, name, number in options.model_limits:
            by_model.setdefault(model, {})[name] = number
        given["model_limits"] = [{"model": model, "limits": limits} for model, limits in by_model.items()]
    return given


# -- what is asked --------------------------------------------------------------------------------


def _gateway(options: argparse.Namespace) -> KeyKeeper:
    """Raises KeysFailed when it is not clear which gateway is meant."""
    if options.admin_url is not None:
        if options.operator and options.action != "list":
            raise KeysFailed(
                "operators' keys are changed in the gateway's file alone, so that a stolen one makes no "
                "other: name the file by --config"
            )
        return _Remote(options.admin_url, os.environ.get(KEY_VARIABLE) or None, options.operator)
    running = read_running()
    if options.config is None and (running is None or running.config is None):
        raise KeysFailed("no `penstock up` runs here: name the gateway by --config or --admin-url")
    if problem := missing_extra("gateway"):
        raise KeysFailed(problem)
    file = options.config or Path(running.config if running and running.config else "")
    return _Local(file, "operators" if options.operator else "callers")


class _Local:
    """The gateway's file, or the Redis that it names."""

    def __init__(self, file: Path, whose: str) -> None:
        self._file: Final = file
        self._whose: Final = whose

    def ask(self, operation: str, id_: str, fields: Mapping[str, Any]) -> bytes:
        local = reach("gateway.directory.local")
        try:
            answer: bytes = local.call(self._file, operation, id_, fields, os.environ, self._whose)
        except local.LocalFailed as error:
            raise KeysFailed(str(error)) from None
        return answer


class _Remote:
    """A running gateway's admin listener."""

    def __init__(self, url: str, key: str | None, is_operators: bool) -> None:
        if key is None:
            raise KeysFailed(f"${KEY_VARIABLE} must hold an operator's key")
        self._is_operators: Final = is_operators
        self._url: Final = f"{url.rstrip('/')}/admin/v1/{'operators' if is_operators else 'keys'}"
        self._headers: Final = {"authorization": f"Bearer {key}"}

    def ask(self, operation: str, id_: str, fields: Mapping[str, Any]) -> bytes:
        method, url, query, body = "GET", f"{self._url}/{id_}", None, dict(fields)
        match operation:
            case "list" if self._is_operators:
                url, body = self._url, {}
            case "list":
                url, query, body = self._url, {**fields, "after": id_, "limit": PAGE}, {}
            case "create":
                method, url = "POST", self._url
            case "rotate":
                method, url = "POST", f"{url}/rotate"
            case "patch" | "delete":
                method = operation.upper()
        content = msgspec.json.encode(body) if body else None
        try:
            with httpx.Client(timeout=ANSWER_S, headers=self._headers) as client:
                answer = client.request(method, url, params=query, content=content)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise KeysFailed(f"{self._url} cannot be asked: {str(error) or type(error).__name__}") from None
        if answer.status_code != httpx.codes.OK:
            raise KeysFailed(_told(answer))
        return answer.content


class _Error(Struct):
    message: str


class _Refused(Struct):
    error: _Error


def _told(answer: httpx.Response) -> str:
    try:
        return msgspec.json.decode(answer.content, type=_Refused).error.message
    except UNDECODABLE:
        return f"{answer.url} answered {answer.status_code}: is it a gateway's admin listener?"


def _listed(gateway: KeyKeeper, options: argparse.Namespace) -> Iterator[bytes]:
    """The keys that are asked for. Raises KeysFailed."""
    if not options.operator:
        yield from _all(gateway, options.tenant)
    elif options.tenant is not None:
        raise KeysFailed("operators' keys belong to no tenant: leave --tenant out")
    else:
        yield from map(bytes, _decoded(gateway.ask("list", "", {}), Operators).data)


def _all(gateway: KeyKeeper, tenant: str | None) -> Iterator[bytes]:
    """Every key, page by page."""
    after: str | None = ""
    while after is not None:
        fields = {} if tenant is None else {"tenant": tenant}
        page = _decoded(gateway.ask("list", after, fields), KeyPage)
        yield from map(bytes, page.data)
        after = page.next


def _decoded(raw: bytes, type_: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=type_)
    except UNDECODABLE:
        raise KeysFailed("the answer is none of a gateway of this version") from None


def _mint(options: argparse.Namespace) -> None:
    """Show a new key. Raises KeysFailed where the gateway is not installed."""
    if problem := missing_extra("gateway"):
        raise KeysFailed(problem)
    minted = reach("gateway.identity.keys").mint_key(options.env)
    if options.json:
        print(msgspec.json.encode({"id": minted.id, "hash": minted.hash, "key": minted.text}).decode())
        return
    print(minted.text)
    sys.stderr.write(f'id = "{minted.id}"\nhash = "{minted.hash}"\n')


# -- what is shown --------------------------------------------------------------------------------


def _show_made(answer: bytes, options: argparse.Namespace) -> None:
    made = _decoded(answer, Key)
    if options.json:
        print(answer.decode())
        return
    print(made.key)
    whose = "operators" if options.operator else made.tenant
    note = f"Key {made.id} of {whose}. It is shown this once."
    if made.previous_expires is not None:
        note += f" The secret before it works until {made.previous_expires:%Y-%m-%d %H:%M:%S} UTC."
    sys.stderr.write(f"{terminal.harmless(note)}\n")


def _show_list(answers: Iterator[bytes] | Sequence[bytes], options: argparse.Namespace) -> None:
    if options.json:
        for answer in answers:
            print(answer.decode())
        return
    columns = OPERATORS_COLUMNS if options.operator else COLUMNS
    rows = [columns, *(_row(_decoded(answer, Key), columns) for answer in answers)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _moment(moment: datetime) -> str:
    """A moment in UTC; one that UTC cannot say, as the gateway gave it."""
    try:
        return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"
    except OverflowError:
        return f"{moment:%Y-%m-%d %H:%M %z}"


def _row(key: Key, columns: Sequence[str]) -> tuple[str, ...]:
    is_over = key.expires is not None and key.expires <= datetime.now(UTC)
    cells = {
        "id": key.id,
        "tenant": key.tenant,
        "state": "revoked" if key.disabled else "expired" if is_over else "active",
        "expires": "never" if key.expires is None else _moment(key.expires),
        "models": ", ".join(key.models),
        "endpoints": ", ".join(key.endpoints),
        "labels": ", ".join(key.labels),
    }
    return tuple(terminal.harmless(cells[column]) for column in columns)
