"""Anthropic's Messages at the gateway: `/v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.endpoints.dialect import Dialect, LimitHeaders
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.passing import Cleaner, Nested
from shared.apis import message_answers
from shared.apis.message_answers import (
    ID_HEADER,
    PING,
    STOP,
    MessageAnswer,
    MessageEvent,
    MessagesErrorEnvelope,
)
from shared.apis.message_blocks import MessagesTool, MessageTurn, System, ThinkingBlock
from shared.apis.message_chat import unsealed
from shared.apis.messages import CountTokensRequest, CountTokensResponse, MessagesRequest
from shared.apis.nothing import unsupported
from shared.apis.validation import surplus_fields
from shared.process.clock import Clock
from shared.wire.errors import ApiError
from shared.wire.sse import NamedScanner

_COUNTED: Final = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
        *("output_format", "cache_control"),
    }
)
"""The fields of https://platform.claude.com/docs/en/api/messages/count_tokens that cost what is counted."""
_PASSES: Final = _COUNTED | {
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences", "metadata"),
}
"""Those of https://platform.claude.com/docs/en/api/messages/create that say neither where the request is
served nor how it is paid."""


def _moment(ms: int, clock: Clock) -> str:
    """The moment in so many milliseconds, as RFC 3339 writes it."""
    moment = datetime.fromtimestamp(clock.wall() + ms / 1000, UTC)
    return f"{moment.isoformat(timespec='seconds').removesuffix('+00:00')}Z"


def _names(of: str) -> tuple[str, str, str]:
    return tuple(f"anthropic-ratelimit-{of}-{what}" for what in ("limit", "remaining", "reset"))  # type: ignore[return-value]


class _Messages(Dialect, frozen=True):
    def error_status(self, kind: type[ApiError]) -> int:
        return message_answers.error_status(kind)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return message_answers.error_body(error, request_id)

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return message_answers.error_event(error, request_id)


MESSAGE_EVENTS: Final = _Messages(
    done=STOP,
    described="With `stream`. Each event has two lines, `event: ` with its type and `data: ` with JSON (see"
    " x-event-schema), and an empty one. The last one is message_stop; after an error it is `error`, with a"
    " MessagesErrorEnvelope. A ping may come at any time behind the first.",
    limits=LimitHeaders(
        _names("requests"), _names("tokens"), _names("tokens-day"), _names("tokens-month"), _moment
    ),
    scanner=partial(NamedScanner, hot=b"event: content_block_"),
    silent=(b"event: message_start\n", PING.partition(b"\n")[0]),
    folds_cached=True,
    id_header=ID_HEADER,
    envelope=MessagesErrorEnvelope,
)


def _shaped(name: str, type_: Any) -> tuple[str, Cleaner]:
    """The cleaner of a field: it leaves out what the field's shapes do not have, and tells as text what our
    engines alone can read."""
    decode: Callable[[Raw], Any] = msgspec.json.Decoder(type_ | None).decode

    def clean(value: Raw, left_out: list[str]) -> Raw:
        shaped = decode(value)
        if shaped is None or isinstance(shaped, str):
            return value
        _refuse_servers(shaped)
        left_out += dict.fromkeys(surplus_fields(shaped, value, name, name))
        _unseal(shaped)
        return Raw(msgspec.json.encode(shaped))

    return name, clean


def _refuse_servers(items: Sequence[object]) -> None:
    """Raises UnsupportedParameter for a tool that the engine would run itself."""
    for index, item in enumerate(items):
        if isinstance(item, MessagesTool) and item.type not in (None, "custom"):
            raise unsupported(f"tools[{index}].type")


def _unseal(items: Sequence[object]) -> None:
    """Tell thoughts that are in their signatures alone."""
    for item in items:
        if isinstance(item, MessageTurn) and not isinstance(item.content, str):
            for block in item.content:
                if isinstance(block, ThinkingBlock) and not block.thinking:
                    block.thinking = unsealed(block.signature)


_NESTED: Final[Nested] = (
    _shaped("messages", list[MessageTurn]),
    _shaped("system", System),
    _shaped("tools", list[MessagesTool]),
)

MESSAGES: Final = Endpoint(
    shape=MessagesRequest,
    answer=MessageAnswer,
    summary="Answer a conversation, by Anthropic's API.",
    event=MessageEvent,
    is_optional=True,
    passes=_PASSES,
    maxima=("max_tokens",),
    asks_usage=False,
    nested=_NESTED,
    dialect=MESSAGE_EVENTS,
)
COUNT_TOKENS: Final = Endpoint(
    shape=CountTokensRequest,
    answer=CountTokensResponse,
    summary="Count the tokens of a conversation.",
    passes=_COUNTED,
    is_optional=True,
    generates=False,
    maxima=(),
    nested=_NESTED,
    dialect=MESSAGE_EVENTS,
)
