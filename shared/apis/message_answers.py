"""The answers of Anthropic's Messages: whole ones, the events of a stream, and errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from shared.apis.generation import Usage
from shared.wire.errors import ApiError, Overloaded
from shared.wire.shapes import Unshown
from shared.wire.sse import named_event

OVERLOADED: Final = 529
"""The status of a full queue: Anthropic's SDKs know it as `OverloadedError`."""
ID_HEADER: Final = "request-id"
"""The header in which Anthropic's SDKs read a request's id."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# -- usage ----------------------------------------------------------------------------------------


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputDetails(Struct):
    thinking_tokens: int


class DeltaUsage(Struct, kw_only=True):
    """The tokens of an answer, as a stream's end tells them."""

    input_tokens: int
    """The tokens of the prompt that were not found in the cache."""
    cache_creation_input_tokens: int = 0
    """0: keeping a prompt costs nothing."""
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | None
    """The part of `output_tokens` that is thinking, of models that reason."""
    server_tool_use: None = None


class MessageUsage(DeltaUsage, kw_only=True):
    cache_creation: CacheCreation
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


def delta_usage(usage: Usage) -> DeltaUsage:
    """The tokens of an answer, in the API's names."""
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return DeltaUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=None
        if isinstance(details, msgspec.UnsetType)
        else OutputDetails(details.reasoning_tokens),
    )


def message_usage(usage: Usage) -> MessageUsage:
    return MessageUsage(**msgspec.structs.asdict(delta_usage(usage)), cache_creation=CacheCreation())


# -- messages -------------------------------------------------------------------------------------


class AnswerText(Unshown, tag_field="type", tag="text"):
    text: str
    citations: None = None


class AnswerThinking(Unshown, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class DirectCaller(Struct, tag_field="type", tag="direct"):
    """The model itself."""


class AnswerToolUse(Unshown, tag_field="type", tag="tool_use", kw_only=True):
    id: str
    name: str
    input: Raw
    """An object."""
    caller: DirectCaller


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessageAnswer(Unshown, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    """Null at the beginning of a stream."""
    stop_sequence: str | None = None
    """The one of `stop_sequences` that ended the answer."""
    stop_details: None = None
    container: None = None
    usage: MessageUsage


# -- events ---------------------------------------------------------------------------------------


class MessageStart(Unshown, tag_field="type", tag="message_start"):
    message: MessageAnswer


class BlockStart(Unshown, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(Unshown, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Unshown, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Unshown, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Unshown, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockChange = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(Unshown, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockChange


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageChange(Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: MessageChange
    usage: DeltaUsage


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
"""The last event of a whole answer."""

# -- errors ---------------------------------------------------------------------------------------


class ErrorDetails(Struct, omit_defaults=True):
    error_code: str
    """The code that the error has in OpenAI's envelope."""
    param: str | None = None
    """The field of the request that is to be changed."""


class MessagesError(Struct):
    type: str
    message: str
    details: ErrorDetails


class MessagesErrorEnvelope(Struct, tag_field="type", tag="error"):
    error: MessagesError
    request_id: str


_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""The types of errors by their status, where they are neither a mistake of the caller's nor a failure
here."""


def error_status(kind: type[ApiError]) -> int:
    return OVERLOADED if issubclass(kind, Overloaded) else int(kind.status)


def error_body(error: ApiError, request_id: str) -> bytes:
    """The JSON of an error; also the data of an error event."""
    status = error_status(type(error))
    is_mistake = status < HTTPStatus.INTERNAL_SERVER_ERROR
    type_ = _TYPES.get(status, "invalid_request_error" if is_mistake else "api_error")
    if status == OVERLOADED:
        type_ = "overloaded_error"
    told = MessagesError(type_, error.message, ErrorDetails(error.code, error.param))
    return msgspec.json.encode(MessagesErrorEnvelope(told, request_id))


def error_event(error: ApiError, request_id: str) -> bytes:
    return named_event(b"error", error_body(error, request_id))
