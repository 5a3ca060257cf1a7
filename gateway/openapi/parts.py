"""The parts of both descriptions: of the public API (`gateway.openapi.public`) and of the operators'
(`gateway.operators.openapi`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, get_origin

import msgspec
from msgspec import inspect

from gateway.endpoints.dialect import CHUNKS, Dialect
from gateway.endpoints.table import ENDPOINTS
from shared.apis.message_answers import OVERLOADED
from shared.apis.nothing import LOOKED_INTO
from shared.apis.request import Request
from shared.process.build import UNKNOWN, version
from shared.process.docstrings import field_docstrings
from shared.wire.errors import ApiError, InvalidRequest

REF: Final = "#/components/schemas/{name}"
JSON: Final = "application/json"

Json = dict[str, Any]
"""A part of a document."""


def whole(title: str, description: str, paths: Json, schemas: Json, security: Json) -> bytes:
    """A document, as JSON. `security` are the ways of those who may ask, any of which opens it."""
    known = version()
    value = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "0" if known == UNKNOWN else known, "description": description},
        "paths": paths,
        "components": {"schemas": schemas, "headers": HEADERS, "securitySchemes": security},
        "security": [{name: []} for name in security],
    }
    return msgspec.json.encode(value)


# -- schemas --------------------------------------------------------------------------------------


def describe(schema: Json, type_: type) -> None:
    """Complete a schema by what the docstrings of its type say."""
    texts = field_docstrings(type_)
    nothing: Mapping[str, Any] = {}
    schema.pop("title", None)
    if issubclass(type_, Request):
        nothing = type_.nothing
    for name, told in schema.get("properties", {}).items():
        if name in nothing and nothing[name] is not LOOKED_INTO:
            values = [None, *nothing[name]]
            told.clear()
            told |= {"enum": values, "default": None, "description": "Only values that ask for nothing."}
        elif (text := texts.get(name)) is not None:
            told["description"] = text.replace("`", "")


def schemas_of(types: Iterable[Any], told_of: Iterable[Any], own: Mapping[str, type] = {}) -> Json:
    """The schemas of types by name, with descriptions from the docstrings of the classes that `told_of`
    consist of, and of `own`."""
    _, components = msgspec.json.schema_components(dict.fromkeys(types), ref_template=REF)
    found = (one for info in inspect.multi_type_info(told_of) for one in _classes(info, set()))
    classes = {**{one.__name__: one for one in found}, **own}
    for name, schema in components.items():
        if (class_ := classes.get(name.partition("_")[0])) is not None:
            describe(schema, class_)
    return components


def _classes(found: object, seen: set[type]) -> Iterator[type]:
    """The classes with fields that a type consists of."""
    if isinstance(found, inspect.StructType | inspect.DataclassType):
        class_ = get_origin(found.cls) or found.cls
        if class_ in seen:
            return
        seen.add(class_)
        yield class_
        for one in found.fields:
            yield from _classes(one.type, seen)
    for name in ("type", "item_type", "value_type"):
        yield from _classes(getattr(found, name, None), seen) if hasattr(found, name) else ()
    for name in ("types", "item_types"):
        for one in getattr(found, name, ()):
            yield from _classes(one, seen)


# -- paths ----------------------------------------------------------------------------------------


def answered(summary: str, content: Json, headers: Json, errors: Json, *, is_open: bool = False) -> Json:
    """An operation. `content` has the schemas of its answer by type."""
    told = {"description": "The answer.", "content": content, "headers": headers}
    operation: Json = {"summary": summary, "responses": {"200": told} | errors}
    return operation | ({"security": []} if is_open else {})


def probe(path: str) -> Json:
    """The operation of a probe."""
    state = {"type": "object", "properties": {"phase": {"type": "string"}, "ok": {"type": "boolean"}}}
    answer = {"content": {JSON: {"schema": state}}, "headers": headers_of("x-request-id")}
    answers = {"200": {"description": "Yes.", **answer}, "503": {"description": "No.", **answer}}
    if path == "/livez":
        answers["500"] = answers.pop("503")
    return {
        "summary": f"Probe: {path[1:]}.",
        "security": [],
        "responses": answers | errors_of([InvalidRequest]),
    }


def ref(type_: type) -> Json:
    """The schema of a type, by its name."""
    return {"$ref": REF.format(name=type_.__name__)}


def path_parameter(name: str, description: str) -> Json:
    """A part of a path."""
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def query_parameters(shape: type) -> Iterator[Json]:
    """The parameters of a query, with descriptions from its shape's docstrings."""
    _, components = msgspec.json.schema_components([shape], ref_template=REF)
    [whole] = components.values()
    describe(whole, shape)
    for name, told in whole["properties"].items():
        if told.get("default", "") is None:  # a parameter that is left out is not null
            del told["default"]
            [schema] = [one for one in told.pop("anyOf") if one != {"type": "null"}]
            told |= schema
        description = told.pop("description")
        yield {"name": name.removesuffix("_"), "in": "query", "description": description, "schema": told}


# -- errors ---------------------------------------------------------------------------------------


def errors_of(classes: Iterable[type[ApiError]], dialect: Dialect = CHUNKS) -> Json:
    """The answers with errors of these classes and those below them, by status."""
    codes: dict[int, dict[str, None]] = {}
    for class_ in classes:
        for one in _with_subclasses(class_):
            codes.setdefault(dialect.error_status(one), {})[one.code] = None
    return {str(status): _error(status, codes[status], dialect) for status in sorted(codes)}


def _with_subclasses(class_: type[ApiError]) -> Iterator[type[ApiError]]:
    yield class_
    for below in class_.__subclasses__():
        yield from _with_subclasses(below)


def _error(status: int, codes: Iterable[str], dialect: Dialect) -> Json:
    names = [*id_headers(dialect), "x-should-retry"]
    if status in _LATER:
        names += ["retry-after", "retry-after-ms"]
    if status == HTTPStatus.UNAUTHORIZED:
        names.append("www-authenticate")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        names.append("allow")
    told = " or ".join(f"`{code}`" for code in codes)
    content = {JSON: {"schema": ref(dialect.envelope)}}
    return {"description": f"The code is {told}.", "content": content, "headers": headers_of(*names)}


def id_headers(dialect: Dialect) -> Iterator[str]:
    """The headers with a request's id."""
    yield from ("x-request-id", dialect.id_header) if dialect.id_header else ("x-request-id",)


# -- headers --------------------------------------------------------------------------------------


def header(description: str, pattern: str | None = None) -> Json:
    return {
        "description": description,
        "schema": {"type": "string"} | ({"pattern": pattern} if pattern else {}),
    }


_LIMITS: Final = dict.fromkeys(
    name
    for limits in (CHUNKS.limits, *(endpoint.dialect.limits for endpoint in ENDPOINTS.values()))
    for name in limits.names
)
_LATER: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, OVERLOADED)
"""The statuses that say when to come again."""
HEADERS: Final[Mapping[str, Json]] = {
    "x-request-id": header("The request's name in both services' logs.", r"^[A-Za-z0-9._-]{1,64}$"),
    "request-id": header("The same, as Anthropic's SDKs read it."),
    "server-timing": header("Milliseconds of each stage until the first byte."),
    "x-penstock-ignored-fields": header(
        "The unknown fields of the request, or those that its engine was not sent."
    ),
    "x-penstock-fallback": header("The model that answered, where it was not the requested one."),
    "x-should-retry": header("Whether a retry can help.", "^(true|false)$"),
    "retry-after": header("Seconds until a retry can help.", "^[0-9]+$"),
    "retry-after-ms": header("The same in milliseconds.", "^[0-9]+$"),
    "www-authenticate": header("How to authenticate."),
    "allow": header("The methods that the path has."),
    **{name: header("Where the key or its tenant has such a limit.") for name in _LIMITS},
}


def headers_of(*names: str) -> Json:
    assert all(name in HEADERS for name in names)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def request_header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}
