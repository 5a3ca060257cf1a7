"""The API's description, as OpenAPI 3.1: `GET /openapi.json`.

It is made of what the gateway itself goes by: the table of routes, the request and answer shapes of
`shared.apis` with their bounds and docstrings, and the tree of errors. So it cannot say what the code does
not.

Two things differ from the shapes. The field that the gateway adds for its own engines is left out, since it
is refused from clients. A field that is refused unless it asks for nothing has exactly the values that do.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Final, get_args

import msgspec
from msgspec import NODEFAULT, Raw, Struct

from gateway.endpoints.dialect import CHUNKS
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.routes import ROUTES, Route
from gateway.openapi.parts import (
    JSON,
    Json,
    answered,
    errors_of,
    headers_of,
    id_headers,
    path_parameter,
    probe,
    query_parameters,
    ref,
    request_header,
    schemas_of,
    whole,
)
from shared.process.probes import PROBES
from shared.wire.errors import (
    ApiError,
    IdentityUnavailable,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PermissionDenied,
    QuotaUnavailable,
    RequestAborted,
    RouteNotFound,
    TotalTimeout,
    Unauthenticated,
)
from shared.wire.timeouts import TIMEOUT_S_MAX

INTERNAL: Final = frozenset({"penstock"})
"""The fields of requests that are the gateway's own."""

_EVERYWHERE: Final = (InvalidRequest, InternalError, NotReady, Overloaded)
"""Errors that any request may get; of each class, the codes of its subclasses too."""
_KNOWN_CALLERS: Final = (
    *(Unauthenticated, PermissionDenied, IdentityUnavailable, QuotaUnavailable),
    *(
        RequestAborted,
        TotalTimeout,
    ),  # each has an id by which it can be ended, and a time
)


@cache
def document() -> bytes:
    """The description, as JSON. The first call takes some tens of milliseconds."""
    security = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token (JWT)."},
        "api_key": {
            "type": "apiKey",
            "in": "header",
            "name": "x-api-key",
            "description": "The same, as Anthropic's SDKs send it.",
        },
        "certificate": {"type": "mutualTLS", "description": "A client certificate."},
    }
    description = "OpenAI's API, with some extensions that open engines share."
    return whole("Penstock", description, _paths(), _schemas(), security)


# -- schemas --------------------------------------------------------------------------------------


def _schemas() -> Json:
    """The schemas by name, with descriptions from the docstrings."""
    endpoints = [route.endpoint for route in ROUTES if route.endpoint is not None]
    requests = [endpoint.shape for endpoint in endpoints]
    events = [endpoint.event for endpoint in endpoints if endpoint.event is not None]
    answers = [route.answer for route in ROUTES if route.answer is not None]
    others = [*events, *answers, *dict.fromkeys(endpoint.dialect.envelope for endpoint in endpoints)]
    return schemas_of([*map(_public, requests), *others], [*requests, *others])


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


# -- paths ----------------------------------------------------------------------------------------


def _paths() -> Json:
    paths: Json = {path: {"get": probe(path)} for path in PROBES}
    for route in ROUTES:
        at = paths.setdefault(route.path, {})
        operation = _answered(route) if route.endpoint is None else _proxied(route.endpoint)
        at[route.method.lower()] = operation
        if route.of_id:
            at["parameters"] = [path_parameter("id", route.of_id)]
    return paths


def _proxied(endpoint: Endpoint) -> Json:
    dialect = endpoint.dialect
    content = {JSON: {"schema": ref(endpoint.answer)}}
    if endpoint.event is not None:
        content["text/event-stream"] = {
            "schema": {"description": dialect.described},
            "x-event-schema": _event_schema(endpoint.event),
        }
    own = "x-penstock-ignored-fields", "x-penstock-fallback"
    names = *id_headers(dialect), "server-timing", *own, *dialect.limits.names
    return {
        **answered(endpoint.summary, content, headers_of(*names), errors_of([ApiError], dialect)),
        "parameters": _REQUEST_HEADERS,
        "requestBody": {"required": True, "content": {JSON: {"schema": ref(endpoint.shape)}}},
    }


def _event_schema(event: type[Struct] | UnionType) -> Json:
    """The schema of a stream's events, or of any of them."""
    return ref(event) if isinstance(event, type) else {"anyOf": [*map(ref, get_args(event))]}


def _answered(route: Route) -> Json:
    schema = {"type": "object"} if route.answer is None else ref(route.answer)
    headers: tuple[str, ...] = "x-request-id", "server-timing"
    errors: tuple[type[ApiError], ...] = *_EVERYWHERE, *route.errors
    if not route.is_open:
        headers += CHUNKS.limits.names
        errors += *_KNOWN_CALLERS, RouteNotFound
    content, told = {JSON: {"schema": schema}}, headers_of(*headers)
    operation = answered(route.summary, content, told, errors_of(errors), is_open=route.is_open)
    if route.query is not None:
        operation["parameters"] = [*query_parameters(route.query)]
    return operation


# -- headers --------------------------------------------------------------------------------------


_SECONDS: Final = {"type": "number", "exclusiveMinimum": 0, "maximum": TIMEOUT_S_MAX}
_REQUEST_HEADERS: Final = [
    request_header("x-request-id", "The caller's own name for the request.", {"type": "string"}),
    request_header("x-queue-timeout", "Seconds that the request may wait in the engine's queue.", _SECONDS),
    request_header("x-request-timeout", "Seconds that the whole answer may take.", _SECONDS),
    request_header("traceparent", "W3C trace context.", {"type": "string"}),
]
