"""Small whole answers in JSON, by aiohttp's own response: probes, lists, errors before an answer has
begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from gateway.endpoints.dialect import CHUNKS, Dialect
from shared.errors import ApiError, error_headers
from shared.listening import SERVER

JSON: Final = "application/json"


def json_response(status: int, body: bytes, headers: Mapping[str, str]) -> web.Response:
    """A response of JSON that is encoded already."""
    return web.Response(status=status, body=body, content_type=JSON, headers={**headers, "server": SERVER})


def error_response(error: ApiError, headers: Mapping[str, str], dialect: Dialect = CHUNKS) -> web.Response:
    """A response with an error in a dialect's envelope, and the headers that belong to the error."""
    return json_response(error.status, dialect.error_body(error), {**headers, **error_headers(error)})
