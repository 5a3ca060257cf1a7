"""The keeper of a gateway's tenants and keys, as the commands `penstock tenants` and `penstock keys` ask it:
the gateway's file, the Redis that the file names, or a running gateway's admin listener.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import msgspec
from msgspec import Struct

from shared.cli import terminal
from shared.cli.admin import DEFAULT_URL, KEY_VARIABLE, url_problem
from shared.cli.running import read_running
from shared.cli.service import missing_extra, reach
from shared.process.arguments import Parser, checked
from shared.process.tls import client_context
from shared.wire.envelope import ErrorEnvelope
from shared.wire.ids import is_id
from shared.wire.undecodable import UNDECODABLE

ANSWER_S: Final = 30.0
PAGE: Final = "200"
NO_LIMIT: Final = "none"
"""The number of a limit that is taken away."""


class KeeperFailed(Exception):
    """The operation was not done; the message is for the user."""


class EntryPage(Struct, frozen=True):
    """A part of a list."""

    data: list[msgspec.Raw]
    next: str | None = None


class ModelLimitsShown(Struct, frozen=True):
    """The limits of one model."""

    model: str
    limits: dict[str, int | None]


class KeeperAnswer(Struct, frozen=True):
    """An entry or a list in JSON."""

    content: bytes
    etag: str | None = None
    """The name of an entry's content, where one was read."""


class Keeper(Protocol):
    """The keeper of one kind of entries."""

    def ask(
        self, operation: str, id_: str, fields: Mapping[str, Any], if_match: str | None = None
    ) -> KeeperAnswer:
        """Do one operation. `id_` is the entry's; of a list, the place behind which it begins. `if_match` is
        the etag of the entry that a `put` replaces; None makes a new one. Raises KeeperFailed."""
        ...


def target() -> Parser:
    """The options that say which gateway is meant, as a parent of the actions' parsers."""
    where = Parser(add_help=False)
    either = where.add_mutually_exclusive_group()
    either.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="the gateway's file, or the Redis that it names"
    )
    either.add_argument(
        "--admin-url",
        metavar="URL",
        type=checked(partial(url_problem, like=DEFAULT_URL)),
        help=f"a running gateway's admin listener; the operator's key is in ${KEY_VARIABLE}",
    )
    where.add_argument("--json", action="store_true", help="answer in JSON, an entry per line")
    return where


# -- options of several commands ------------------------------------------------------------------


def id_problem(text: str) -> str | None:
    """The problem of an id, for `checked`."""
    return None if is_id(text) else "must be 1 to 64 of A-Z a-z 0-9 . _ -"


def add_limits(parser: Parser, whose: str, *, lifts: bool = False) -> None:
    """Add `--limit` and `--model-limit`. With `lifts` a limit's number may be `none`, which takes it away."""
    parser.add_argument(
        "--limit", metavar="NAME=NUMBER", action="append", dest="limits", type=partial(_limit, lifts),
        help=f"a quota of {whose}, such as requests_per_min=60 or tokens_per_day=1000000",
    )  # fmt: skip
    parser.add_argument(
        "--model-limit", metavar="MODEL:NAME=NUMBER", action="append", dest="model_limits",
        type=partial(_model_limit, lifts),
        help="one for a single model, such as qwen3-8b:requests_per_min=60",
    )  # fmt: skip


def _limit(lifts: bool, text: str) -> tuple[str, int | None]:
    """A limit's name and its number."""
    name, _, number = text.partition("=")
    if lifts and name and number == NO_LIMIT:
        return name, None
    if not name or not number.isascii() or not number.isdigit():
        raise argparse.ArgumentTypeError(f"must be like requests_per_min=60, got {text!r}")
    return name, int(number)


def _model_limit(lifts: bool, text: str) -> tuple[str, str, int | None]:
    """A model, a limit's name and its number. The last colon ends the model's name, which may have others."""
    model, _, limit = text.rpartition(":")
    if not model:
        raise argparse.ArgumentTypeError(f"must be like qwen3-8b:requests_per_min=60, got {text!r}")
    return model, *_limit(lifts, limit)


def limits_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that `--limit` and `--model-limit` make. Raises KeeperFailed where one is given twice."""
    given: dict[str, Any] = {}
    if options.limits:
        _require_once("--limit", (name for name, _ in options.limits))
        given["limits"] = dict(options.limits)
    if options.model_limits:
        _require_once("--model-limit", (f"{model}:{name}" for model, name, _ in options.model_limits))
        by_model: dict[str, dict[str, int | None]] = {}
        for model, name, number in options.model_limits:
            by_model.setdefault(model, {})[name] = number
        given["model_limits"] = [{"model": model, "limits": limits} for model, limits in by_model.items()]
    return given


def _require_once(option: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise KeeperFailed(f"{option} {name} is given {count} times")


# -- what is asked --------------------------------------------------------------------------------


def keeper_of(options: argparse.Namespace, whose: str) -> Keeper:
    """The keeper of the gateway that the options name: of `callers`, `operators` (their keys) or `tenants`.
    Raises KeeperFailed when it is not clear which gateway is meant."""
    if options.admin_url is not None:
        return _Remote(options.admin_url, os.environ.get(KEY_VARIABLE) or None, whose)
    running = read_running()
    if options.config is None and (running is None or running.config is None):
        raise KeeperFailed(
            "no `penstock up` runs here: name the gateway by --config or --admin-url, such as "
            f"--config gateway.toml or --admin-url {DEFAULT_URL}"
        )
    if problem := missing_extra("gateway"):
        raise KeeperFailed(problem)
    file = options.config or Path(running.config if running and running.config else "")
    return _Local(file, whose)


class _Local:
    """The gateway's file, or the Redis that it names."""

    def __init__(self, file: Path, whose: str) -> None:
        self._file: Final = file
        self._whose: Final = whose

    def ask(
        self, operation: str, id_: str, fields: Mapping[str, Any], if_match: str | None = None
    ) -> KeeperAnswer:
        local = reach("gateway.directory.local")
        try:
            called = local.call(self._file, operation, id_, fields, os.environ, self._whose, if_match)
        except local.LocalFailed as error:
            raise KeeperFailed(str(error)) from None
        return KeeperAnswer(*called)


_PATHS: Final = {"callers": "keys", "operators": "operators", "tenants": "tenants"}


class _Remote:
    """A running gateway's admin listener."""

    def __init__(self, url: str, key: str | None, whose: str) -> None:
        if key is None:
            raise KeeperFailed(f"${KEY_VARIABLE} must hold an operator's key")
        self._is_paged: Final = whose != "operators"
        self._url: Final = f"{url.rstrip('/')}/admin/v1/{_PATHS[whose]}"
        self._headers: Final = {"authorization": f"Bearer {key}"}

    def ask(
        self, operation: str, id_: str, fields: Mapping[str, Any], if_match: str | None = None
    ) -> KeeperAnswer:
        method, url, query, body = "GET", f"{self._url}/{id_}", None, dict(fields)
        headers = self._headers if if_match is None else {**self._headers, "if-match": f'"{if_match}"'}
        match operation:
            case "list" if not self._is_paged:
                url, body = self._url, {}
            case "list":
                url, query, body = self._url, {**fields, "after": id_, "limit": PAGE}, {}
            case "create":
                method, url = "POST", self._url
            case "rotate":
                method, url = "POST", f"{url}/rotate"
            case "patch" | "delete" | "put":
                method = operation.upper()
        content = msgspec.json.encode(body) if body or method == "PUT" else None
        try:
            answer = httpx.request(
                method,
                url,
                params=query,
                content=content,
                headers=headers,
                timeout=ANSWER_S,
                trust_env=False,  # no proxy is to see an operator's key
                verify=client_context(),
            )
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise KeeperFailed(f"{self._url} cannot be asked: {str(error) or type(error).__name__}") from None
        if answer.status_code != httpx.codes.OK:
            raise KeeperFailed(_told(answer))
        return KeeperAnswer(answer.content, answer.headers.get("etag", "").strip('"') or None)


def _told(answer: httpx.Response) -> str:
    try:
        return msgspec.json.decode(answer.content, type=ErrorEnvelope).error.message
    except UNDECODABLE:
        return f"{answer.url} answered {answer.status_code}: is it a gateway's admin listener?"


def listed(keeper: Keeper, fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Every entry, page by page. Raises KeeperFailed."""
    after: str | None = ""
    while after is not None:
        page = decoded(keeper.ask("list", after, fields).content, EntryPage)
        yield from map(bytes, page.data)
        after = page.next


def decoded(raw: bytes, type_: Any) -> Any:
    """An answer as a value of a type. Raises KeeperFailed."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except UNDECODABLE:
        raise KeeperFailed("the answer is none of a gateway of this version") from None


# -- what is shown --------------------------------------------------------------------------------


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns, the first of which is the head."""
    safe = [[terminal.harmless(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    for row in safe:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def limits_shown(limits: Mapping[str, int | None], model_limits: Sequence[ModelLimitsShown]) -> str:
    """Limits as the options spell them; empty where there are none."""
    own = [f"{name}={number}" for name, number in limits.items() if number is not None]
    for one in model_limits:
        own += [f"{one.model}:{name}={number}" for name, number in one.limits.items() if number is not None]
    return ", ".join(own)
