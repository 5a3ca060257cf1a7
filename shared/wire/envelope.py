"""Errors in OpenAI's envelope."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shared.wire.errors import ApiError


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str | UnsetType = UNSET
    """The request's id, in a stream's event: the headers, which have it in any other answer, SDKs do not show
    with an event's error."""


class ErrorEnvelope(Struct):
    error: ErrorBody


def error_body(error: ApiError, request_id: str = "") -> ErrorBody:
    """An error, with the request's id unless that is empty."""
    return ErrorBody(error.message, error.type, error.param, error.code, request_id or UNSET)


def error_envelope(error: ApiError, _request_id: str = "") -> bytes:
    """The JSON body of an error, as OpenAI's SDKs expect it. Other APIs' envelopes name the request, this one
    does not."""
    return msgspec.json.encode(ErrorEnvelope(error_body(error)))


def event_envelope(error: ApiError, request_id: str) -> bytes:
    """The data of an error within a stream: the envelope, with the request's id."""
    return msgspec.json.encode(ErrorEnvelope(error_body(error, request_id)))
