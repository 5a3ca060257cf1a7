"""Errors in OpenAI's envelope."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shared.wire.errors import ApiError


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct):
    error: ErrorBody


def error_envelope(error: ApiError, _request_id: str = "") -> bytes:
    """The JSON body of an error, as OpenAI's SDKs expect it; also the data of an SSE error event. Other APIs'
    envelopes name the request, this one does not."""
    body = ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorEnvelope(body))
