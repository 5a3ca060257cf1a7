"""Small whole answers in JSON, by aiohttp's own response: probes, lists, errors before an answer has
begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from gateway.client.connection import path_of
from gateway.endpoints.dialect import CHUNKS, Dialect
from shared.process.listening import SERVER
from shared.process.probes import METHODS, Health, answer_probe
from shared.wire.errors import ApiError, MethodNotAllowed, error_headers
from shared.wire.ids import REQUEST_ID_HEADER, accept_request_id

JSON: Final = "application/json"


def json_response(status: int, body: bytes, headers: Mapping[str, str]) -> web.Response:
    """A response of JSON that is encoded already."""
    return web.Response(status=status, body=body, content_type=JSON, headers={**headers, "server": SERVER})


def error_response(error: ApiError, headers: Mapping[str, str], dialect: Dialect = CHUNKS) -> web.Response:
    """A response with an error in a dialect's envelope, and the headers that belong to the error. `headers`
    have the request's id."""
    request_id = headers.get(REQUEST_ID_HEADER, "")
    return json_response(
        dialect.error_status(type(error)),
        dialect.error_body(error, request_id),
        {**headers, **error_headers(error)},
    )


def probe_response(health: Health, request: web.BaseRequest, *, tells_problems: bool = False) -> web.Response:
    """The answer to a request for one of `PROBES`. What is wrong is told to operators alone."""
    headers = {REQUEST_ID_HEADER: id_of(request)}
    if request.method not in METHODS:
        error = MethodNotAllowed(f"{path_of(request)} takes GET.", allow=", ".join(METHODS))
        return error_response(error, headers)
    status, body = answer_probe(path_of(request), health, tells_problems=tells_problems)
    return json_response(status, body, headers)


def id_of(request: web.BaseRequest) -> str:
    return accept_request_id(request.headers.get(REQUEST_ID_HEADER))
