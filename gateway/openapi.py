"""The API's description, as OpenAPI 3.1: `GET /openapi.json`.

It is made of what the gateway itself goes by: the endpoint table, the request and answer shapes of
`shared.openai` with their bounds and docstrings, and the tree of errors. So it cannot say what the code does
not.

Two things differ from the shapes. The field that the gateway adds for its own engines is left out, since it
is refused from clients. A field that is refused unless it asks for nothing has exactly the values that do.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, Raw, Struct

from gateway.endpoints import ENDPOINTS, Endpoint
from shared import openai
from shared.docstrings import field_docstrings
from shared.errors import (
    ApiError,
    IdentityUnavailable,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    QuotaUnavailable,
    RouteNotFound,
    Unauthenticated,
)
from shared.fields import values_for_nothing
from shared.openai import AbortResponse, ErrorEnvelope, Model, ModelList
from shared.probes import PROBES
from shared.timeouts import TIMEOUT_S_MAX

PATH: Final = "/openapi.json"
INTERNAL: Final = frozenset({"penstock"})
"""The fields of requests that are the gateway's own."""
_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"

Json = dict[str, Any]
"""A part of the document."""

_EVERYWHERE: Final = (InvalidRequest, InternalError, NotReady, Overloaded)
"""Errors that any request may get; of each class, the codes of its subclasses too."""
_KNOWN_CALLERS: Final = (Unauthenticated, IdentityUnavailable, QuotaUnavailable)


@cache
def document() -> bytes:
    """The description, as JSON. The first call takes some tens of milliseconds."""
    components, paths = _schemas(), _paths()
    value = {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": _version(),
            "description": "OpenAI's API, with some extensions that open engines share.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, or a token (JWT).",
                },
                "certificate": {"type": "mutualTLS", "description": "A client certificate."},
            },
        },
        "security": [{"bearer": []}, {"certificate": []}],
    }
    return msgspec.json.encode(value)


def _version() -> str:
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "0"


# -- schemas --------------------------------------------------------------------------------------


def _schemas() -> Json:
    """The schemas by name, with descriptions from the docstrings."""
    requests = [endpoint.shape for endpoint in ENDPOINTS.values()]
    answers = [endpoint.answer for endpoint in ENDPOINTS.values()]
    events = [endpoint.event for endpoint in ENDPOINTS.values() if endpoint.event is not None]
    types = [*map(_public, requests), *answers, *events, ModelList, Model, AbortResponse, ErrorEnvelope]
    _, components = msgspec.json.schema_components(dict.fromkeys(types), ref_template=_REF)
    for name, schema in components.items():
        _describe(schema, getattr(openai, name))
    return components


def _public(shape: type[Struct]) -> type[Struct]:
    """The shape as clients may use it, under the same name."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(shape):
        if field.name in INTERNAL:
            continue
        is_open = field.type is Raw
        default = None if is_open else field.default
        if default is NODEFAULT:
            fields.append((field.name, field.type, NODEFAULT))
        else:
            fields.append((field.name, Any if is_open else field.type, default))
    return msgspec.defstruct(shape.__name__, fields, kw_only=True, namespace={"__doc__": shape.__doc__})


def _describe(schema: Json, type_: type[Struct]) -> None:
    texts = field_docstrings(type_)
    nothing = values_for_nothing(type_)
    schema.pop("title", None)
    if (tag := type_.__struct_config__.tag_field) is not None:
        schema["required"].remove(tag)  # where one shape alone is possible, it is told without its tag
    for name, told in schema.get("properties", {}).items():
        if name in nothing:
            values = [None, *nothing[name]]
            told.clear()
            told |= {"enum": values, "default": None, "description": "Only values that ask for nothing."}
        elif (text := texts.get(name)) is not None:
            told["description"] = text.replace("`", "")


# -- paths ----------------------------------------------------------------------------------------


def _paths() -> Json:
    paths: Json = {endpoint.path: {"post": _proxied(endpoint)} for endpoint in ENDPOINTS.values()}
    one = _path_parameter("id", "A model's name or one of its aliases.")
    paths["/v1/models"] = {"get": _read("List the models that the caller may use.", ModelList)}
    paths["/v1/models/{id}"] = {"get": _read("Describe a model.", Model, ModelNotFound), "parameters": [one]}
    named = _path_parameter("id", "The x-request-id of the requests.")
    ends = _read("End the caller's requests that carry this id.", AbortResponse)
    paths["/v1/requests/{id}"] = {"delete": ends, "parameters": [named]}
    for path in PROBES:
        paths[path] = {"get": _probe(path)}
    shown = {"description": "This document.", "content": {_JSON: {"schema": {"type": "object"}}}}
    answers = {"200": {**shown, "headers": _headers("x-request-id")}} | _errors(_EVERYWHERE)
    paths[PATH] = {"get": {"summary": "Describe the API.", "security": [], "responses": answers}}
    return paths


def _proxied(endpoint: Endpoint) -> Json:
    content = {_JSON: {"schema": _ref(endpoint.answer)}}
    if endpoint.event is not None:
        content["text/event-stream"] = {
            "schema": {
                "description": "With `stream`. Each event is a line `data: ` with JSON (see x-event-schema)"
                " and an empty line. The last one is `data: [DONE]`; after an error it is `data: ` with an"
                " ErrorEnvelope, and no [DONE] follows.",
            },
            "x-event-schema": _ref(endpoint.event),
        }
    names = "x-request-id", "server-timing", "x-penstock-ignored-fields", *_RATE_LIMITS
    whole = {"description": "The answer.", "content": content, "headers": _headers(*names)}
    return {
        "summary": endpoint.summary,
        "parameters": _REQUEST_HEADERS,
        "requestBody": {"required": True, "content": {_JSON: {"schema": _ref(endpoint.shape)}}},
        "responses": {"200": whole} | _errors([ApiError]),
    }


def _read(summary: str, answer: type[Struct], *more: type[ApiError]) -> Json:
    whole = {"description": "The answer.", "content": {_JSON: {"schema": _ref(answer)}}}
    headers = _headers("x-request-id", "server-timing", *_RATE_LIMITS)
    errors = _errors((*_EVERYWHERE, *_KNOWN_CALLERS, *more, RouteNotFound))
    return {"summary": summary, "responses": {"200": {**whole, "headers": headers}} | errors}


def _probe(path: str) -> Json:
    state = {"type": "object", "properties": {"phase": {"type": "string"}, "ok": {"type": "boolean"}}}
    answer = {"content": {_JSON: {"schema": state}}, "headers": _headers("x-request-id")}
    answers = {"200": {"description": "Yes.", **answer}, "503": {"description": "No.", **answer}}
    if path == "/livez":
        answers["500"] = answers.pop("503")
    return {
        "summary": f"Probe: {path[1:]}.",
        "security": [],
        "responses": answers | _errors([InvalidRequest]),
    }


def _ref(type_: type[Struct]) -> Json:
    return {"$ref": _REF.format(name=type_.__name__)}


def _path_parameter(name: str, description: str) -> Json:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


# -- errors ---------------------------------------------------------------------------------------


def _errors(classes: Iterable[type[ApiError]]) -> Json:
    """The answers with errors of these classes and those below them, by status."""
    codes: dict[int, dict[str, None]] = {}
    for class_ in classes:
        for one in _with_subclasses(class_):
            codes.setdefault(int(one.status), {})[one.code] = None
    return {str(status): _error(status, codes[status]) for status in sorted(codes)}


def _with_subclasses(class_: type[ApiError]) -> Iterator[type[ApiError]]:
    yield class_
    for below in class_.__subclasses__():
        yield from _with_subclasses(below)


def _error(status: int, codes: Iterable[str]) -> Json:
    names = ["x-request-id", "x-should-retry"]
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        names += ["retry-after", "retry-after-ms"]
    if status == HTTPStatus.UNAUTHORIZED:
        names.append("www-authenticate")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        names.append("allow")
    told = " or ".join(f"`{code}`" for code in codes)
    content = {_JSON: {"schema": _ref(ErrorEnvelope)}}
    return {"description": f"`error.code` is {told}.", "content": content, "headers": _headers(*names)}


# -- headers --------------------------------------------------------------------------------------


def _header(description: str, pattern: str | None = None) -> Json:
    return {
        "description": description,
        "schema": {"type": "string"} | ({"pattern": pattern} if pattern else {}),
    }


_RATE_LIMITS: Final = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
_HEADERS: Final[Mapping[str, Json]] = {
    "x-request-id": _header("The request's name in both services' logs.", r"^[A-Za-z0-9._-]{1,64}$"),
    "server-timing": _header("Milliseconds of each stage until the first byte."),
    "x-penstock-ignored-fields": _header("The unknown fields of the request."),
    "x-penstock-fallback": _header("The model that answered, where it was not the requested one."),
    "x-should-retry": _header("Whether a retry can help.", "^(true|false)$"),
    "retry-after": _header("Seconds until a retry can help.", "^[0-9]+$"),
    "retry-after-ms": _header("The same in milliseconds.", "^[0-9]+$"),
    "www-authenticate": _header("How to authenticate."),
    "allow": _header("The methods that the path has."),
    **{name: _header("Where the key or its tenant has such a limit.") for name in _RATE_LIMITS},
}


def _headers(*names: str) -> Json:
    assert all(name in _HEADERS for name in names)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _request_header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_SECONDS: Final = {"type": "number", "exclusiveMinimum": 0, "maximum": TIMEOUT_S_MAX}
_REQUEST_HEADERS: Final = [
    _request_header("x-request-id", "The caller's own name for the request.", {"type": "string"}),
    _request_header("x-queue-timeout", "Seconds that the request may wait in the engine's queue.", _SECONDS),
    _request_header("x-request-timeout", "Seconds that the whole answer may take.", _SECONDS),
    _request_header("traceparent", "W3C trace context.", {"type": "string"}),
]
