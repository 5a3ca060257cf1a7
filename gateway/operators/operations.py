"""A request of an operator's on the admin listener, and the operations that are answered.

A handler carries the description of its operation, which stands above it in the code. The routes and
`gateway.operators.openapi`'s document are made of these descriptions, so an operation that is not described
is not served. With several workers, it says whom a supervisor asks, and how it makes one answer of theirs
(`gateway.operators.together`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeVar

from aiohttp import web
from msgspec import Struct

from gateway.identity.caller import Principal
from shared.process.settings import settings_of
from shared.wire.errors import ApiError, InvalidRequest


class OperatorRequest(Struct, frozen=True):
    """A request of an operator's."""

    request: web.BaseRequest
    operator: Principal
    id: str
    """The id in its path. Empty where the path has none."""
    query: Any
    """Its parameters, a value of the operation's `query`."""


Handler = Callable[[OperatorRequest], Awaitable[web.Response]]
"""Answers an operator. Raises ApiError and ConfigError."""
Methods = Mapping[str, Handler]
"""The handlers of a path, by method."""
Table = Mapping[str, Methods]
"""The methods by path, in which `{id}` stands for an id, and `{replica}` for a replica's."""


_ID: Final = "([A-Za-z0-9._-]{1,64})"
_REPLICA: Final = r"([A-Za-z0-9._~:%\[\]-]{1,512})"


def pattern_of(path: str) -> re.Pattern[str]:
    """The paths that a path of a table stands for."""
    return re.compile(path.replace("{id}", _ID).replace("{replica}", _REPLICA))


class Asks(Enum):
    """The workers that are asked."""

    ONE = "one"
    """One: all know the same, or what it is about is its own."""
    CHANGE = "change"
    """One; then the others read what it has changed."""
    EVERY = "every"
    """Every worker: each has a part."""
    UNSHARED = "unshared"
    """Every worker, unless each knows the usage of all."""


class Merge(Enum):
    """The field of an answer, made of those of several workers."""

    FIRST = "first"
    """They are the same, or one worker alone has it."""
    SUM = "sum"
    """Numbers added up, or those of the same name."""
    ANY = "any"
    """True if one is."""
    MOST = "most"
    """The largest: the next page begins where the first worker's part ended."""
    LATEST = "latest"
    """Moments by name: the latest of each."""
    JOIN = "join"
    """The lists in a row; each entry then says which worker it is of."""
    PAGE = "page"
    """The newest entries of all, as many as a page has (`before` says where the next one begins)."""
    ROWS = "rows"
    """Rows of numbers, added up by what they are of."""


SILENT: Final = ("silent_gateways", "silent_workers")
"""The fields of an answer that several give: those who are silent are noted when it is made of theirs."""


@dataclass(frozen=True, slots=True)
class NoQuery:
    """The query of an operation without parameters."""


def query_of(type_: type, given: Mapping[str, str]) -> Any:
    """The parameters in a query string as a value of a dataclass of settings (`shared.process.settings`).
    Raises InvalidRequest, naming the parameter."""
    kinds = {one.name.removesuffix("_"): (one.name, one.kind) for one in settings_of(type_)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in kinds:
            told = f"the parameters {', '.join(kinds)}" if kinds else "no parameters here"
            raise InvalidRequest(f"There are {told}.", param=name[:64])
        field, kind = kinds[name]
        try:
            values[field] = kind.convert(kind.parse(text))
        except ValueError as error:
            raise InvalidRequest(f"{name} {error}.", param=name) from None
    return type_(**values)


@dataclass(frozen=True, slots=True)
class OperationBody:
    """The fields that the body of an operation may have: some of a configuration's."""

    name: str
    type: type
    """A dataclass of the configuration."""
    fields: frozenset[str]
    required: frozenset[str] = frozenset()


_F = TypeVar("_F", bound=Callable[..., Awaitable[web.Response]])


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operator may ask: its method and path, its parameters, its body and its answer. It stands above
    the handler that gives the answer."""

    route: str
    """Its method and path, in which `{id}` stands for an id, and `{replica}` for a replica's."""
    summary: str
    answer: object
    """The type of the answer's JSON."""
    query: type = NoQuery
    """A dataclass of the parameters that it has (`query_of`)."""
    body: OperationBody | None = None
    errors: tuple[type[ApiError], ...] = ()
    """Errors that not every operation has."""
    is_versioned: bool = False
    """True if the answer has an `etag`."""
    takes_version: bool = False
    """True if `if-match` is looked at."""
    takes_absence: bool = False
    """True if `if-none-match` is looked at."""
    is_of_all: bool = False
    """True if the other gateways are asked, too (`gateway.operators.peers`)."""
    is_watched: bool = False
    """True if the answer may have a version that `if-none-match` takes (`gateway.operators.versions`)."""
    asks: Asks = field(kw_only=True)
    merges: Mapping[str, Merge] = field(default_factory=dict)
    """The fields of the answer that are not the first worker's, and all that are lists, where every worker is
    asked."""

    def __call__(self, handler: _F) -> _F:
        """Describe the handler below."""
        handler.__operation__ = self  # type: ignore[attr-defined]
        return handler


def operation_of(handler: Handler) -> Operation:
    """The description of a handler."""
    operation: Operation = handler.__operation__  # type: ignore[attr-defined]
    return operation


def table_of(apis: Iterable[object]) -> Table:
    """The handlers of objects, or of classes, that have some."""
    table: dict[str, dict[str, Handler]] = {}
    for api in apis:
        for name, member in vars(api if isinstance(api, type) else type(api)).items():
            if (operation := getattr(member, "__operation__", None)) is not None:
                method, _, path = operation.route.partition(" ")
                table.setdefault(path, {})[method] = getattr(api, name)
    return table
