"""OpenAI's responses at the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw, Struct

from gateway.endpoints.dialect import CHUNKS, Dialect
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.passing import EXTENSIONS, OPENAI, Nested, stream_options, template_arguments
from shared.apis.responses.answer import InputTokens, ResponseObject, outline
from shared.apis.responses.events import ResponseEvent, failing_events, name_of
from shared.apis.responses.items import InputItem, InputPart
from shared.apis.responses.request import InputTokensRequest, ReasoningConfig, ResponsesRequest, TextConfig
from shared.apis.responses.tools import DROPPED, ResponsesChoice, ResponsesTool
from shared.apis.validation import surplus_fields
from shared.wire import sse
from shared.wire.errors import ApiError, InvalidRequest

_PROMPT: Final = frozenset(
    {
        *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
        *("text", "reasoning", "truncation"),
    }
)
"""The fields that both endpoints have."""
OPENAI_RESPONSES: Final = _PROMPT | {
    *("background", "context_management", "conversation", "image", "include", "max_output_tokens"),
    *("max_tool_calls", "metadata", "moderation", "previous_response_id", "prompt", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
    *("stream", "stream_options", "temperature", "top_logprobs", "top_p", "user"),
}
"""The fields of https://platform.openai.com/docs/api-reference/responses/create."""
WITHHELD: Final = frozenset(
    {
        *("background", "conversation", "moderation", "previous_response_id", "prompt", "store"),
        *("context_management", "image", "prompt_cache_options", "prompt_cache_retention"),
    }
)
"""Those of them that are not sent: they keep a request or send it elsewhere, or cost what nobody counts."""
_SILENT: Final = b"event: response.created\n", b"event: response.in_progress\n"
"""The events that the core's admission of a request brings."""

# -- what an engine of another make is sent -------------------------------------------------------

_USAGE: Final = re.compile(rb'"usage":\{[^{}]*"(?:input|prompt)_tokens":')
_items: Final = msgspec.json.Decoder(str | list[InputItem]).decode
_tools: Final = msgspec.json.Decoder(list[ResponsesTool] | None).decode
_others: Final[Mapping[str, msgspec.json.Decoder[Struct | str | None]]] = {
    "text": msgspec.json.Decoder(TextConfig | None),
    "reasoning": msgspec.json.Decoder(ReasoningConfig | None),
    "tool_choice": msgspec.json.Decoder(str | ResponsesChoice | None),
}


def shaped_items(value: Raw, left_out: list[str]) -> Raw:
    """The input of a request that was read, without what the shapes of its items do not have, and with
    reasoning that only our engines can read as text."""
    items = _items(value)
    if isinstance(items, str):
        return value
    left_out += dict.fromkeys(surplus_fields(items, value, "input", "input"))
    for item in items:
        if (kept := item.kept) is not None:
            item.content, item.encrypted_content = item.content or [InputPart("reasoning_text", kept)], None
    return Raw(msgspec.json.encode(items))


def shaped_tools(value: Raw, left_out: list[str]) -> Raw:
    """The tools of a request that was read, without what their shapes do not have, and without those that its
    server would call itself."""
    if not (tools := _tools(value)):
        return value
    left_out += dict.fromkeys(surplus_fields(tools, value, "tools", "tools"))
    kept = [tool for tool in tools if tool.type != DROPPED]
    return _repeatable("tools", Raw(msgspec.json.encode(kept)))


def _shaped(name: str, value: Raw, left_out: list[str]) -> Raw:
    """Any other field that is an object."""
    held = _others[name].decode(value)
    if not isinstance(held, Struct):
        return value
    left_out += dict.fromkeys(surplus_fields(held, value, name, name))
    return _repeatable(name, Raw(msgspec.json.encode(held)))


def _repeatable(name: str, value: Raw) -> Raw:
    """A field that the answer repeats. A request is charged by the usage that is found in its answer, which
    is looked for and not parsed, so a caller may not send one that could be found there."""
    if _USAGE.search(msgspec.json.encode(msgspec.json.decode(value))) is not None:
        raise InvalidRequest(f"{name} must not hold the usage of a response.", param=name)
    return value


_NESTED: Final[Nested] = (
    ("input", shaped_items),
    ("tools", shaped_tools),
    *((name, partial(_shaped, name)) for name in _others),
)


# -- the endpoints --------------------------------------------------------------------------------


class _Events(Dialect, frozen=True):
    def failing(self, error: ApiError, request_id: str, events: int) -> bytes:
        """An error, and the response as failed, of which the gateway knows nothing else."""
        made = failing_events(error, outline(), request_id)
        for number, event in enumerate(made, events + len(self.silent)):
            event.sequence_number = number
        return b"".join([sse.named_event(name_of(event), msgspec.json.encode(event)) for event in made])


EVENTS: Final = _Events(
    done=sse.DONE,
    limits=CHUNKS.limits,
    described="With `stream`. Each event is a line `event: ` with its type, a line `data: ` with JSON (see"
    " x-event-schema) and an empty line. Behind the last one comes `data: [DONE]`; an error is an event"
    " `error`, which `response.failed` follows, and no [DONE].",
    scanner=partial(sse.NamedScanner, hot=b"event: response.", silent=_SILENT),
    silent=_SILENT,
    ends=("response.completed", "response.incomplete"),
)
RESPONSES: Final = Endpoint(
    shape=ResponsesRequest,
    answer=ResponseObject,
    summary="Answer a conversation.",
    event=ResponseEvent,
    is_optional=True,
    passes=(OPENAI_RESPONSES - WITHHELD) | EXTENSIONS | (OPENAI & {"presence_penalty", "frequency_penalty"}),
    maxima=("max_output_tokens",),
    refers=True,
    sent={"store": False},
    asks_usage=False,
    nested=(*_NESTED, ("stream_options", stream_options), ("chat_template_kwargs", template_arguments)),
    dialect=EVENTS,
)
INPUT_TOKENS: Final = Endpoint(
    shape=InputTokensRequest,
    answer=InputTokens,
    summary="Count the tokens of a conversation.",
    passes=_PROMPT,
    is_optional=True,
    generates=False,
    refers=True,
    maxima=(),
    nested=_NESTED,
)
