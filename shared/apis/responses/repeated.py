"""The fields of its request that a response repeats, and how its items are to be told.

What is repeated is copied out of the request's body, which nothing holds any more when the answer is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct

from shared.apis.responses.answer import ResponseObject, outline
from shared.apis.responses.request import ResponsesRequest
from shared.apis.responses.tools import Called

COPIES: Final = 5
"""The copies of what an answer repeats: as it is held, and in the two events that open a stream, before and
after they are put together."""
_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_objects: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_NULL: Final = Raw(b"null")
_FUNCTION: Final = Raw(b'"function"')
_JSON_SCHEMA: Final = Raw(b'"json_schema"')
_AS_SENT: Final = ("instructions", "tool_choice", "metadata", "user", "safety_identifier", "prompt_cache_key")
_OF_FUNCTION: Final = dict.fromkeys(("description", "parameters", "strict"), _NULL)
_OF_SCHEMA: Final = {"description": _NULL, "strict": Raw(b"false")}
_OF_REASONING: Final = {"effort": _NULL, "summary": _NULL}
_FREE: Final = {"format": Raw(b'{"type":"text"}')}
"""The fields that clients are generated to want, with the values that they have where they were not sent."""


class RepeatedRequest(Struct, frozen=True):
    response: ResponseObject
    """A response with what is repeated."""
    called: Mapping[str, Called]
    """How calls are told, by the names that the model has for them."""
    tells_summary: bool
    tells_encrypted: bool
    held_len: int
    """The most bytes that it takes at any time."""


def repeated(request: ResponsesRequest, fields: Mapping[str, Raw]) -> RepeatedRequest:
    """The part of a checked request that its answers repeat. `fields` are those of its body."""
    sent = {name: Raw(bytes(fields[name])) for name in _AS_SENT if fields.get(name, _NULL) != _NULL}
    if request.tools:
        tools = _objects(fields["tools"])
        told = [_OF_FUNCTION | tool if tool["type"] == _FUNCTION else tool for tool in tools]
        sent["tools"] = Raw(msgspec.json.encode(told))
    if request.reasoning is not None:
        sent["reasoning"] = Raw(msgspec.json.encode(_OF_REASONING | _object(fields["reasoning"])))
    if request.text is not None:
        sent["text"] = _text(_object(fields["text"]))
    response = msgspec.structs.replace(
        outline(sent),
        top_logprobs=request.top_logprobs or 0,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        parallel_tool_calls=request.calls_in_parallel,
    )
    return RepeatedRequest(
        response,
        request.offers.called,
        request.tells_summary,
        request.tells_encrypted,
        COPIES * sum(map(len, sent.values())),
    )


def _text(sent: dict[str, Raw]) -> Raw:
    if (format_ := sent.get("format", _NULL)) != _NULL:
        told = _object(format_)
        if told["type"] == _JSON_SCHEMA:
            told = _OF_SCHEMA | told
        sent["format"] = Raw(msgspec.json.encode(told))
    else:
        sent |= _FREE
    return Raw(msgspec.json.encode(sent))
