"""OpenAI's chat: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.generation import FinishReasonName, GenerationRequest, Usage
from shared.apis.messages import ChatMessage
from shared.apis.nothing import EXTENSIONS, FALSE, NONE, Nothing
from shared.apis.prompt import ChatPrompt
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import LOGPROBS_MAX, MESSAGES_MAX, TOKENS_MAX, Unshown


class ResponseFormat(Struct):
    type: str


_NULL: Final = Raw(b"null")


class ChatRequest(GenerationRequest, kw_only=True):
    path: ClassVar[str] = "/v1/chat/completions"
    operation: ClassVar[str] = "chat"
    prompt_param: ClassVar[str] = "messages"
    has_messages: ClassVar[bool] = True
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **EXTENSIONS,
        "response_format": ({"type": "text"},),
        "modalities": ([], ["text"]),
        "audio": NONE,
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "echo": FALSE,
        "add_special_tokens": FALSE,
        "add_generation_prompt": (True,),
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    """The newer name of `max_tokens`, over which it wins."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None

    # accepted when they ask for nothing; `nothing` says when they do
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    parallel_tool_calls: bool | None = None
    functions: Raw = _NULL
    function_call: Raw = _NULL
    response_format: ResponseFormat | None = None
    modalities: Raw = _NULL
    audio: Raw = _NULL
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def prompt_form(self) -> ChatPrompt:
        return ChatPrompt(self.messages)

    def check_own(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(Unshown):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Unshown):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Unshown):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    finish_reason: FinishReasonName
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Unshown):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: FinishReasonName | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    """The usage, with `include_usage`: null on every chunk but the last, which has no choices."""
    prompt_token_ids: list[int] | UnsetType = UNSET
