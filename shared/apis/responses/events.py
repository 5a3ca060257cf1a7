"""The events of a response that is streamed. Each says what it is by its type, and of what by the item's id
and its number among the items. `sequence_number` counts all events of a stream.
"""

from __future__ import annotations

import msgspec

from shared.apis.chat import TokenLogprob
from shared.apis.responses.answer import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    SummaryText,
)
from shared.wire.envelope import ErrorBody, error_body
from shared.wire.errors import ApiError
from shared.wire.shapes import Unshown


class StreamEvent(Unshown, tag_field="type", kw_only=True):
    sequence_number: int = 0


# -- the response ---------------------------------------------------------------------------------


class ResponseCreated(StreamEvent, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(StreamEvent, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(StreamEvent, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(StreamEvent, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(StreamEvent, tag="response.failed"):
    response: ResponseObject


class ErrorEvent(StreamEvent, tag="error"):
    """An error, before the event that says that the response has failed."""

    error: ErrorBody


def failing_events(error: ApiError, response: ResponseObject, request_id: str) -> list[StreamEvent]:
    """The events that end the stream of a response that fails."""
    failed = msgspec.structs.replace(response, status="failed", error=ResponseFailure.of(error))
    return [ErrorEvent(error=error_body(error, request_id)), ResponseFailed(response=failed)]


def name_of(event: StreamEvent) -> bytes:
    """The type of an event, which is its name, too."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return name.encode()


# -- its items ------------------------------------------------------------------------------------


class ItemAdded(StreamEvent, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(StreamEvent, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(StreamEvent, kw_only=True):
    item_id: str
    output_index: int


class _OfContent(_OfItem, kw_only=True):
    content_index: int = 0


class PartAdded(_OfContent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfContent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfContent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob] = []  # noqa: RUF012  msgspec copies it


class OutputTextDone(_OfContent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob] = []  # noqa: RUF012  msgspec copies it


class ReasoningDelta(_OfContent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfContent, tag="response.reasoning_text.done"):
    text: str


class _OfSummary(_OfItem, kw_only=True):
    summary_index: int = 0


class SummaryPartAdded(_OfSummary, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(_OfSummary, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryDelta(_OfSummary, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(_OfSummary, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_OfItem, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_OfItem, tag="response.custom_tool_call_input.done"):
    input: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
