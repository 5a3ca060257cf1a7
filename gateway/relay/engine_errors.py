"""How an engine's error is read: by its status first, and then by its body, in whichever envelope it comes.

The status says whose mistake it is (RFC 9110, 15.5), and `READINGS` says so for each; the body gives the
words and the code. An answer of 200 whose body is an error has the status that its body names. Rules:

1. The caller's mistakes are told in the engine's own words and by its code; where it has none, as in a
   proxy's HTML, in a sentence of ours. What a validator adds (`detail`) is told as place and message: the
   rest of it repeats the prompt.
2. What is wrong between the gateway and the engine (a path, a key, a method) is not told to the caller, but
   to operators.
3. A 429 is Overloaded, whatever its code and body: what is used up is the gateway's own account there, and
   no quota of the caller's, who is not shown what is said of it. Other replicas and fallbacks may have room.
4. A body is looked at up to `ERROR_LEN_MAX`, and words up to `MESSAGE_LEN_MAX`. One that is longer, coded or
   cut off has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from shared.process.clock import SYSTEM_CLOCK
from shared.wire import errors
from shared.wire.errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    UpstreamDeferred,
    UpstreamDenied,
    UpstreamFailed,
    UpstreamRefused,
)
from shared.wire.undecodable import UNDECODABLE

ERROR_LEN_MAX: Final = 64 * 1024
MESSAGE_LEN_MAX: Final = 4096
"""Characters of an engine's message that a caller is shown."""
TEXT_LEN_MAX: Final = 1024
"""Characters of a body that is plain text, and still taken for a message."""
DETAILS_MAX: Final = 8
"""The mistakes of one request that are told, of those that a validator lists."""
RETRY_AFTER_S_MAX: Final = 99_999.0
"""About a day, in seconds: nobody waits for longer."""

READINGS: Final[Mapping[int, type[ApiError]]] = {
    # the caller's mistakes: one attempt, no failure of the replica's
    400: InvalidRequest,
    413: BodyTooLarge,
    422: InvalidRequest,
    451: InvalidRequest,  # hosted APIs' word for a prompt that they will not answer
    # the gateway's own key or account, at this replica: another may be asked
    401: UpstreamDenied,
    402: UpstreamDenied,
    403: UpstreamDenied,
    407: UpstreamDenied,  # a proxy's key
    # not now, or not on this connection: another attempt, no failure of the replica's
    408: UpstreamDeferred,  # the request came too slowly, or its connection had idled
    409: UpstreamDeferred,  # nothing that the caller names can conflict: the model is loaded or changed there
    421: UpstreamDeferred,  # another connection is the right one
    425: UpstreamDeferred,  # TLS's early data may be a replay
    499: UpstreamDeferred,  # a proxy took the gateway for gone; Google's CANCELLED
    # the engine has failed
    424: UpstreamFailed,  # TGI and model hosts: generation failed
    429: Overloaded,
    503: Overloaded,
    529: Overloaded,  # Anthropic's "overloaded"
}
"""The errors that statuses stand for. Any other 4xx is UpstreamRefused (404, 405 and 410: a path that is not
there; 411, 415, 431 and the rest: no request of the gateway's deserves them), which another replica behind
the same proxy would answer as well; any other status is UpstreamFailed. Two are the caller's by what the body
says: a 404 or 410 about the model, and a 403 for what a prompt says."""

_SENTENCES: Final[Mapping[int, str]] = {
    400: "The engine refuses this request as malformed, and does not say why.",
    413: "The request is too large for the engine, or for a proxy before it.",
    422: "The engine refuses a value of this request, and does not say which.",
    451: "The engine refuses this request for what it says.",
}
_FILTERED: Final = "content_filter"
"""The code of a prompt that was refused for what it says, where the engine names none."""
_MODERATES: Final = re.compile(
    r"content.?(filter|policy)|moderat|responsible.?ai|safety|flagged|inspection", re.IGNORECASE
)
_NAMES_MODEL: Final = re.compile(r"\bmodel\b", re.IGNORECASE)
_CODE: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,63}", re.ASCII)
_STATUS: Final = re.compile(r"[45][0-9][0-9]")
_TAKES_NO_MORE: Final = "The engine takes no more requests at the moment."
_FAILED: Final = "The engine failed to answer."
_UNTOLD: Final = (UpstreamFailed, UpstreamDeferred, UpstreamDenied, UpstreamRefused)
"""The errors whose words are for operators."""

_STATUS_OF_TYPE: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "invalid_argument": 400,
    "validation": 422,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "resource_exhausted": 429,
    "overloaded": 503,
    "overloaded_error": 503,
    "unavailable": 503,
}
"""The statuses that the types of OpenAI, vLLM, TGI, Anthropic and Google stand for, where none is named."""


def _tree(root: type[ApiError]) -> dict[str, type[ApiError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update({code: kind for code, kind in _tree(child).items() if code not in found})
    return found


_UNSAID: Final = (
    *(errors.InternalError, errors.NotFound, errors.RouteNotFound, errors.MethodNotAllowed),
    *(errors.Conflict, errors.PreconditionFailed, errors.PreconditionRequired),
    *(errors.BodyTimeout, errors.SlowClient),
)
"""The errors that are of the gateway's own end, or of no request that it sends: there the status counts."""
_BY_CODE: Final = {
    code: kind
    for code, kind in _tree(ApiError).items()
    if kind is not ApiError and not issubclass(kind, _UNSAID)
}


class _Said(Struct, frozen=True):
    """What an error's body says, as far as it can be read."""

    message: str | None = None
    param: str | None = None
    code: str | None = None
    """A code in words. Of a number it is the status."""
    status: int | None = None
    """The status that the body names."""
    type_status: int | None = None
    """The status that its type stands for."""
    is_moderation: bool = False
    """True if the prompt was refused for what it says."""


_NOTHING: Final = _Said()
_NO_FIELD: Final = msgspec.Raw(b"null")
_EMPTY: Final = (b"null", b"false", b'""', b"{}", b"[]")


def read_back(
    status: int,
    body: bytes,
    media_type: str = "",
    retry_after: str | None = None,
    date: str | None = None,
) -> ApiError:
    """An engine's error as one of ours. `date` is the header that says when it was sent."""
    said = _said(body, media_type)
    told = said.status or (status if status >= HTTPStatus.BAD_REQUEST else said.type_status or status)
    kind = _kind(told, said)
    detail = f"engine answered {status}"
    if said is not _NOTHING:
        detail += f", code {said.code or said.status!r}"
    if kind is NotReady:
        message = said.message or "The engine is not ready."
        return NotReady(message, detail=detail, retry_after_s=_seconds(retry_after, date))
    if kind is Overloaded:
        is_quota = told == HTTPStatus.TOO_MANY_REQUESTS or _is_quota(said)
        message = _TAKES_NO_MORE if is_quota else said.message or _TAKES_NO_MORE
        return Overloaded(message, detail=detail, retry_after_s=_seconds(retry_after, date))
    if kind in _UNTOLD and said.code != kind.code:
        return kind(_FAILED, detail=detail)
    is_mistake = kind.status < HTTPStatus.INTERNAL_SERVER_ERROR
    message = said.message or (_SENTENCES.get(told, _SENTENCES[400]) if is_mistake else _FAILED)
    error = kind(message, param=said.param, detail=detail, retry_after_s=_seconds(retry_after, date))
    if is_mistake:
        is_filtered = said.is_moderation or told == HTTPStatus.UNAVAILABLE_FOR_LEGAL_REASONS
        error.code = said.code or (_FILTERED if is_filtered else error.code)
    return error


def says_error(body: bytes) -> bool:
    """True if the body of an answer, which should have been a stream, is clearly an error."""
    return b'"choices"' not in body and _said(body, "").message is not None


class _Event(msgspec.Struct):
    """The fields of a stream's event by which it is an error."""

    error: msgspec.Raw = _NO_FIELD
    object: msgspec.Raw = _NO_FIELD
    choices: msgspec.Raw = _NO_FIELD
    detail: msgspec.Raw = _NO_FIELD
    message: msgspec.Raw = _NO_FIELD


_decode_event: Final = msgspec.json.Decoder(_Event).decode


def event_is_error(data: bytes) -> bool:
    """True if the data of a stream's first event is an error: an `error` among its fields, wherever it
    stands, vLLM's form without an envelope, or a `detail` or a message without choices."""
    if b'"error"' not in data and b'"detail"' not in data and b'"message"' not in data:  # as nearly all
        return False
    try:
        event = _decode_event(data)
    except UNDECODABLE:  # no object: the last event, say
        return False
    if bytes(event.error) not in _EMPTY or bytes(event.object) == b'"error"':
        return True
    is_told = bytes(event.detail) not in _EMPTY or bytes(event.message)[:1] == b'"'
    return is_told and bytes(event.choices) == b"null"


def _is_quota(said: _Said) -> bool:
    known = _BY_CODE.get(said.code or "")
    return known is not None and known.status == HTTPStatus.TOO_MANY_REQUESTS


def _kind(status: int, said: _Said) -> type[ApiError]:
    """The error that an engine's is, by the status that counts and by the code where it is one of ours."""
    if status == HTTPStatus.TOO_MANY_REQUESTS or _is_quota(said):
        return Overloaded
    if (known := _BY_CODE.get(said.code or "")) is not None:
        is_key = known.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return UpstreamDenied if is_key else known
    if status == HTTPStatus.FORBIDDEN and said.is_moderation:
        return InvalidRequest
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE) and _is_about_the_model(said):
        return ModelNotFound
    if status == HTTPStatus.SERVICE_UNAVAILABLE and said.message is None:  # of a proxy, or a bare server
        return NotReady
    is_4xx = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    return READINGS.get(status, UpstreamRefused if is_4xx else UpstreamFailed)


def _is_about_the_model(said: _Said) -> bool:
    return said.message is not None and (
        said.param == "model" or _NAMES_MODEL.search(said.message) is not None
    )


def _seconds(retry_after: str | None, date: str | None) -> float | None:
    """The time that a `Retry-After` says (RFC 9110, 10.2.3), in seconds, where it is one that somebody
    waits."""
    if retry_after is None:
        return None
    if retry_after.isdecimal() and retry_after.isascii():
        return float(retry_after) if len(retry_after) <= 5 else None
    if (until_s := _wall_s(retry_after)) is None:
        return None
    sent_s = _wall_s(date or "")
    after_s = until_s - (SYSTEM_CLOCK.wall() if sent_s is None else sent_s)
    return max(0.0, after_s) if after_s <= RETRY_AFTER_S_MAX else None


def _wall_s(date: str) -> float | None:
    """An HTTP date as seconds of the wall clock."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):  # it is none, or in no calendar
        return None


# -- bodies -----------------------------------------------------------------------------------------


def _said(body: bytes, media_type: str) -> _Said:
    """What a body says: OpenAI's envelope, Anthropic's, vLLM's without one, TGI's text in one, Google's in a
    list, FastAPI's `detail`, or plain text."""
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE:
        return _said_in_text(body) if media_type in ("", "text/plain") else _NOTHING
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, str):
        return _Said(_shown(value))
    if not isinstance(value, dict):
        return _NOTHING
    error = value.get("error")
    return _said_in(error, value) if isinstance(error, dict) else _said_in(value, value)


def _said_in(fields: dict[str, Any], envelope: dict[str, Any]) -> _Said:
    """What the fields of an error say; `envelope` is around them, or they themselves."""
    message, param = _message(fields)
    inner = fields.get("innererror")
    inner_code = inner.get("code") if isinstance(inner, dict) else None
    metadata = fields.get("metadata")
    details = fields.get("details")
    named: dict[str, Any] = details if isinstance(details, dict) else {}
    code = fields.get("code", envelope.get("code", named.get("error_code")))
    kinds = [fields.get("type"), fields.get("status"), envelope.get("error_type")]
    words = [word for word in (code, inner_code, *kinds) if isinstance(word, str)]
    statuses = [_number(one) for one in (code, fields.get("status"), envelope.get("status"))]
    told = fields.get("param", named.get("param", param))
    return _Said(
        message,
        told if isinstance(told, str) and told else param,
        code if isinstance(code, str) and _CODE.fullmatch(code) else None,
        next((one for one in statuses if one is not None), None),
        next((_STATUS_OF_TYPE[one.lower()] for one in words if one.lower() in _STATUS_OF_TYPE), None),
        any(map(_MODERATES.search, words)) or (isinstance(metadata, dict) and "flagged_input" in metadata),
    )


def _number(value: object) -> int | None:
    """The status that a field names, as a number or in digits."""
    text = str(value) if isinstance(value, int | str) else ""
    return int(text) if _STATUS.fullmatch(text) else None


def _message(fields: dict[str, Any], depth: int = 0) -> tuple[str | None, str | None]:
    """The words of an error, and the place that they are about; `depth` is that of the objects around it."""
    for name in ("message", "detail", "error", "msg", "text", "title"):
        match fields.get(name):
            case str() as text if text:
                return _shown(text), None
            case dict() as inner if depth < 2 and (found := _message(inner, depth + 1))[0] is not None:
                return found
            case list() as mistakes if name == "detail" and mistakes:
                return _sentence(mistakes)
    return None, None


def _sentence(mistakes: list[Any]) -> tuple[str | None, str | None]:
    """A validator's list as a sentence, and the place of the first mistake."""
    told, first = [], None
    for mistake in mistakes[:DETAILS_MAX]:
        if isinstance(mistake, str):
            told.append(mistake)
        elif isinstance(mistake, dict) and isinstance(mistake.get("msg"), str):
            places = mistake.get("loc")
            names = [str(place) for place in places] if isinstance(places, list) else []
            place = ".".join(names[1:] if names[:1] == ["body"] else names)
            first = first or place
            told.append(f"{place}: {mistake['msg']}" if place else mistake["msg"])
    return (_shown("; ".join(told)) if told else None), first or None


def _said_in_text(body: bytes) -> _Said:
    try:
        text = " ".join(body.decode().split())
    except UnicodeDecodeError:
        return _NOTHING
    is_text = text.isprintable() and not text.startswith(("<", "{", "["))
    return _Said(text) if text and is_text and len(text) <= TEXT_LEN_MAX else _NOTHING


def _shown(text: str) -> str:
    return text if len(text) <= MESSAGE_LEN_MAX else f"{text[:MESSAGE_LEN_MAX]}..."
