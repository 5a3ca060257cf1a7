"""A request of an operator's on the admin listener, and the table of those that are answered.

A handler carries the description of its operation, which stands above it in the code.
`gateway.operators.openapi` makes a document of all that are in the tables, so an operation that is not
described is not served. With several workers, it says whom a supervisor asks, and how it makes one answer of
theirs (`gateway.operators.together`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as of_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from aiohttp import web
from msgspec import Struct, field

from gateway.identity.caller import Principal
from shared.wire.errors import ApiError, InvalidRequest


class OperatorRequest(Struct, frozen=True):
    """A request of an operator's."""

    request: web.BaseRequest
    operator: Principal
    id: str
    """The id in its path. Empty where the path has none."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that it has, as their schemas say (`query_of`)."""


Handler = Callable[[OperatorRequest], Awaitable[web.Response]]
"""Answers an operator. Raises ApiError and ConfigError."""
Methods = Mapping[str, Handler]
"""The handlers of a path, by method."""
Table = Mapping[str, Methods]
"""The methods by path, in which `{id}` stands for an id, and `{replica}` for a replica's."""


_DIGITS: Final = 16
"""The longest number in a query, in digits."""
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
    JOIN = "join"
    """The lists in a row; each entry then says which worker it is of."""
    PAGE = "page"
    """The newest entries of all, as many as a page has (`before` says where the next one begins)."""
    ROWS = "rows"
    """Rows of usage, added up by what they are of."""


SILENT: Final = {"silent_gateways": Merge.FIRST, "silent_workers": Merge.FIRST}
"""The fields of an answer that several give: those who are silent are noted when it is made of theirs."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query of an operation."""

    name: str
    description: str
    schema: Mapping[str, Any] = of_dataclass(default_factory=lambda: {"type": "string"})
    """JSON Schema."""

    says: str = ""
    """What it must be, in words, where it has a pattern."""

    def read(self, text: str) -> str | int:
        """The value that a query's text stands for. Raises InvalidRequest."""
        name, schema = self.name, self.schema
        if schema.get("type") == "integer":
            least, most = schema["minimum"], schema["maximum"]
            is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
            if not (is_number and least <= int(text) <= most):
                raise InvalidRequest(f"{name} must be a whole number from {least} to {most}.", param=name)
            return int(text)
        least, most = schema.get("minLength", 0), schema.get("maxLength", len(text))
        if not least <= len(text) <= most:
            raise InvalidRequest(f"{name} must have {least} to {most} characters.", param=name)
        if text not in (choices := schema.get("enum", (text,))):
            raise InvalidRequest(f"{name} must be one of {', '.join(choices)}.", param=name)
        if re.fullmatch(schema.get("pattern", ".*"), text, re.DOTALL) is None:
            raise InvalidRequest(f"{name} must be {self.says}.", param=name)
        return text


def query_of(parameters: Sequence[Parameter], given: Mapping[str, str]) -> dict[str, str | int]:
    """The parameters in a query string, each as its schema says. Raises InvalidRequest, naming the
    parameter."""
    known = {one.name: one for one in parameters}
    for name in given:
        if name not in known:
            told = f"the parameters {', '.join(known)}" if known else "no parameters here"
            raise InvalidRequest(f"There are {told}.", param=name[:64])
    return {name: known[name].read(text) for name, text in given.items()}


@dataclass(frozen=True, slots=True)
class OperationBody:
    """The fields that the body of an operation may have: some of a configuration's."""

    name: str
    type: type
    """A dataclass of the configuration."""
    fields: frozenset[str]
    required: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of a handler: its parameters, its body and its answer."""

    summary: str
    answer: object
    """The type of the answer's JSON."""
    parameters: tuple[Parameter, ...] = ()
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
    asks: Asks = of_dataclass(kw_only=True)
    merges: Mapping[str, Merge] = of_dataclass(default_factory=dict)
    """The fields of the answer that are not the first worker's, and all that are lists, where every worker is
    asked."""


_F = TypeVar("_F", bound=Callable[..., Awaitable[web.Response]])


def does(operation: Operation) -> Callable[[_F], _F]:
    """Describe the handler below."""

    def described(handler: _F) -> _F:
        handler.__operation__ = operation  # type: ignore[attr-defined]
        return handler

    return described


def operation_of(handler: Handler) -> Operation:
    """The description of a handler."""
    operation: Operation = handler.__operation__  # type: ignore[attr-defined]
    return operation
