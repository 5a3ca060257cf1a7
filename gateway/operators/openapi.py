"""The description of the operators' API, as OpenAPI 3.1: `GET /admin/openapi.json`.

It is made of the tables by which the admin listener goes (`gateway.operators.operations`): each handler
carries what it takes and answers, and the shapes are the very types that are encoded and parsed, with their
docstrings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING
from dataclasses import fields as fields_of
from typing import Any, Final, get_type_hints

import msgspec
from msgspec import NODEFAULT

from gateway.openapi.parts import (
    JSON,
    REF,
    Json,
    answered,
    errors_of,
    header,
    headers_of,
    path_parameter,
    probe,
    query_parameters,
    request_header,
    schemas_of,
    whole,
)
from gateway.operators.operations import Operation, OperationBody, Table, operation_of
from shared.process.probes import PROBES
from shared.wire.envelope import ErrorEnvelope
from shared.wire.errors import (
    BodyTimeout,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    PermissionDenied,
    RouteNotFound,
    Unauthenticated,
)

PATH: Final = "/admin/openapi.json"
METRICS: Final = "/metrics"
_EVERYWHERE: Final = (
    InvalidRequest,
    InternalError,
    NotReady,
    Unauthenticated,
    PermissionDenied,
    RouteNotFound,
    MethodNotAllowed,
    BodyTimeout,
    BodyTooLarge,
)
_PARTS: Final[Mapping[str, str]] = {
    "id": "The id of what is asked for.",
    "replica": "The replica's id, as the list shows it; a slash in it is sent as %2F.",
}


def document(table: Table) -> bytes:
    """The description of the operations in a table, as JSON. It takes some tens of milliseconds."""
    operations = [operation_of(one) for methods in table.values() for one in methods.values()]
    bodies = {one.body.name: one.body for one in operations if one.body is not None}
    paths: Json = {path: _described(path, table) for path in sorted(table)}
    for path in PROBES:
        paths[path] = {"get": probe(path)}
    paths[METRICS] = {"get": _open("Scrape the metrics.", "text/plain", {"type": "string"})}
    paths[PATH] = {"get": _open("Describe the operators' API.", JSON, {"type": "object"})}
    types: list[Any] = [*(one.answer for one in operations), *map(_shape, bodies.values()), ErrorEnvelope]
    schemas = schemas_of(types, types, {name: body.type for name, body in bodies.items()})
    security = {"operator": {"type": "http", "scheme": "bearer", "description": "An operator's key."}}
    description = "Requests, replicas, keys, tenants and usage of a gateway."
    return whole("Penstock for operators", description, paths, schemas, security)


# -- schemas --------------------------------------------------------------------------------------


def _shape(body: OperationBody) -> type:
    """The fields of a body as a type of their own. One that may be left out may be null, which means the
    same."""
    hints = get_type_hints(body.type, include_extras=True)
    shape: list[tuple[str, Any, Any]] = []
    for field in fields_of(body.type):
        if field.name in body.required:
            shape.append((field.name, hints[field.name], NODEFAULT))
        elif field.name in body.fields:
            is_required = field.default is MISSING and field.default_factory is MISSING
            default = None if is_required or field.default is MISSING else field.default
            shape.append((field.name, hints[field.name] | None, default))
    doc = {"__doc__": body.type.__doc__}
    return msgspec.defstruct(body.name, shape, kw_only=True, forbid_unknown_fields=True, namespace=doc)


# -- paths ----------------------------------------------------------------------------------------


def _described(path: str, table: Table) -> Json:
    described: Json = {
        method.lower(): _operation(operation_of(handler)) for method, handler in table[path].items()
    }
    if parts := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [path_parameter(part, _PARTS[part]) for part in parts]
    return described


def _operation(operation: Operation) -> Json:
    headers = headers_of("x-request-id")
    parameters = [*query_parameters(operation.query)]
    if operation.is_versioned:
        headers["etag"] = header("The version of what is shown, for if-match.")
    if operation.is_watched:
        headers["etag"] = header("The version of the answer, where it has one.")
        told = "The version that is known already: it is not told again."
        parameters.append(request_header("if-none-match", told, {"type": "string"}))
    if operation.takes_version:
        told = "The etag that was read, or several: another version is not changed."
        parameters.append(request_header("if-match", told, {"type": "string"}))
    if operation.takes_absence:
        told = "* if there must be none yet."
        parameters.append(request_header("if-none-match", told, {"type": "string"}))
    [schema], _ = msgspec.json.schema_components([operation.answer], ref_template=REF)
    content, errors = {JSON: {"schema": schema}}, errors_of((*_EVERYWHERE, *operation.errors))
    described = {**answered(operation.summary, content, headers, errors), "parameters": parameters}
    if operation.is_watched:
        described["responses"]["304"] = {"description": "It is as it was.", "headers": headers}
    if operation.body is not None:
        content = {JSON: {"schema": {"$ref": REF.format(name=operation.body.name)}}}
        described["requestBody"] = {"required": bool(operation.body.required), "content": content}
    return described


def _open(summary: str, type_: str, schema: Json) -> Json:
    """An operation that needs no key."""
    errors = errors_of((InvalidRequest, InternalError, NotReady, MethodNotAllowed))
    content = {type_: {"schema": schema}}
    return answered(summary, content, headers_of("x-request-id"), errors, is_open=True)
