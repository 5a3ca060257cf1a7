"""A response: the object that an answer is, and its items.

Every field is there, null where it says nothing, as clients are generated that want them all. Those that
repeat the request are told as they were sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from shared.apis.chat import TokenLogprob
from shared.apis.generation import Usage
from shared.apis.responses.request import ReasoningConfig, TextConfig
from shared.apis.responses.tools import ResponsesChoice, ResponsesTool
from shared.wire.errors import ApiError
from shared.wire.shapes import Unshown

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Unshown, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob] = []  # noqa: RUF012  msgspec copies it
    """The log-probabilities of its tokens. Empty unless they were asked for."""


class ReasoningText(Unshown, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Unshown, tag_field="type", tag="summary_text"):
    text: str


class OutputMessage(Unshown, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(Unshown, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    """The reasoning, where a summary was asked for."""
    content: list[ReasoningText]
    """The reasoning, where none was."""
    encrypted_content: str | UnsetType = UNSET
    """The reasoning once more, with `include`: what may be sent back in place of the others."""


class OutputFunctionCall(Unshown, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    """The id by which the call's output is sent."""
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    """A JSON object, as text."""


class OutputCustomCall(Unshown, tag_field="type", tag="custom_tool_call", kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    """The id by which the call's output is sent."""
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall


class ResponseFailure(Struct):
    code: str
    """`server_error`, or `invalid_prompt` where it was the caller's doing."""
    message: str

    @classmethod
    def of(cls, error: ApiError) -> ResponseFailure:
        is_ours = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return cls("server_error" if is_ours else "invalid_prompt", error.message)


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Struct):
    cached_tokens: int
    """The tokens that were found in the prefix cache."""
    cache_write_tokens: int = 0
    """What OpenAI charges for besides; nothing is charged for it here."""


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(0 if details is UNSET else details.reasoning_tokens),
            usage.total_tokens,
        )


class ResponseObject(Unshown, kw_only=True):
    id: str = ""
    object: Literal["response"] = "response"
    created_at: int = 0
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str = ""
    usage: ResponseUsage | None = None
    output: list[OutputItem] = []  # noqa: RUF012  it stands before all that is the caller's own JSON
    service_tier: str = "default"
    """The urgency that the request had."""
    store: bool = False
    """True if it is kept, where a gateway keeps responses."""
    background: Literal[False] = False
    previous_response_id: str | None = None
    conversation: None = None
    prompt: None = None
    truncation: Literal["disabled"] = "disabled"
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool = True
    instructions: str | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[ResponsesTool] = []  # noqa: RUF012  msgspec copies it
    tool_choice: str | ResponsesChoice = "auto"
    metadata: dict[str, str] = {}  # noqa: RUF012  msgspec copies it
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_UNSAID: Final[Mapping[str, Any]] = {
    "reasoning": Raw(b'{"effort":null,"summary":null}'),
    "text": Raw(b'{"format":{"type":"text"}}'),
}
"""The values of a response for fields that its request does not have."""


def outline(sent: Mapping[str, Any] | None = None) -> ResponseObject:
    """A response of which nothing is known but fields that were sent, as JSON."""
    return msgspec.structs.replace(ResponseObject(), **{**_UNSAID, **(sent or {})})


class InputTokens(Struct):
    """The tokens that a response's input has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
