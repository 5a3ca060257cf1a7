"""OpenAI's chat: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.chat_form import chat_prompt, check_chat
from shared.apis.chat_messages import ChatMessage, FunctionToolCall
from shared.apis.generation import ChoicesRequest, FinishReasonName, Usage
from shared.apis.nothing import EXTENSIONS, FALSE, LOOKED_INTO, NONE, Nothing
from shared.apis.prediction import Prediction, check_prediction, known_prediction
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import (
    ChoiceObject,
    Tool,
    ToolChoice,
    ToolMode,
    Tools,
    check_choice,
    chosen,
    known_tools,
)
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import LOGPROBS_MAX, MESSAGES_MAX, TOKENS_MAX, Unshown

_NULL: Final = Raw(b"null")
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's values of `reasoning_effort`."""


class ChatRequest(ChoicesRequest, kw_only=True):
    path: ClassVar[str] = "/v1/chat/completions"
    operation: ClassVar[str] = "chat"
    prompt_param: ClassVar[str] = "messages"
    has_messages: ClassVar[bool] = True
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **EXTENSIONS,
        **dict.fromkeys(("tools", "tool_choice", "reasoning_effort"), LOOKED_INTO),
        **dict.fromkeys(("chat_template_kwargs", "continue_final_message", "prediction"), LOOKED_INTO),
        "modalities": ([], ["text"]),
        "audio": NONE,
        "verbosity": ("medium",),
        "echo": FALSE,
        "add_special_tokens": FALSE,
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    """The newer name of `max_tokens`, over which it wins."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None

    tools: Tools | None = None
    """The functions that the model may call."""
    tool_choice: str | ChoiceObject | None = None
    """`none`, `auto`, `required`, or the function that is to be called. `auto` where there are tools."""
    parallel_tool_calls: bool | None = None
    """False for one call at most."""

    reasoning_effort: str | None = None
    """`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`: a variable of the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, those that the model's operator lets requests set."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=TOKENS_MAX)] | None = None
    """The most tokens of reasoning before the answer; -1 leaves it to the model."""
    include_reasoning: bool | None = None
    """False to leave the reasoning out of the answer."""
    continue_final_message: bool | None = None
    """True to go on where the last message, one of the assistant's, ends."""
    add_generation_prompt: bool | None = None
    """False to end the prompt without the beginning of an assistant's message."""
    prediction: Prediction | None = None
    """The text that most of the answer is expected to be, by which it takes fewer steps."""

    # accepted when they ask for nothing; `nothing` says when they do
    functions: Raw = _NULL
    function_call: Raw = _NULL
    modalities: Raw = _NULL
    audio: Raw = _NULL
    verbosity: str | None = None

    @property
    def prompt_form(self) -> ChatPrompt:
        if (
            self.tools is None
            and self.reasoning_effort is None
            and self.chat_template_kwargs is None
            and self.continue_final_message is None
            and self.add_generation_prompt is None
        ):
            return ChatPrompt(self.messages)
        return chat_prompt(self, self.messages, self.reasoning_effort)

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        check_chat(self, self.messages, fields.get("chat_template_kwargs"))
        check_choice(self.tool_choice, self.tools)
        if self.reasoning_effort not in (None, *EFFORTS):
            message = f"reasoning_effort must be one of {', '.join(EFFORTS)}."
            raise InvalidRequest(message, param="reasoning_effort")
        if self.prediction is not None:
            check_prediction(self.prediction)
        super().check_for_ours(fields)
        outputs, choice = self.structured_outputs, self.tool_choice_asked
        if choice.mode is ToolMode.REQUIRED and outputs is not None and outputs.structure is not None:
            message = "structured_outputs cannot hold where the answer is to call a tool."
            raise InvalidRequest(message, param="structured_outputs")
        if self.continue_final_message and choice.mode is ToolMode.REQUIRED:
            message = "continue_final_message cannot hold where the answer is to call a tool."
            raise InvalidRequest(message, param="continue_final_message")

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        unknown = known_tools(self.tools, fields["tools"])[1] if self.tools else []
        if self.prediction is not None:
            unknown += known_prediction(self.prediction, fields["prediction"])[1]
        return unknown

    @property
    def tools_asked(self) -> Sequence[Tool]:
        return self.tools or ()

    @property
    def tool_choice_asked(self) -> ToolChoice:
        return chosen(self.tool_choice, self.tools)

    @property
    def calls_in_parallel(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def thinking_tokens_max(self) -> int | None:
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def predicted_text(self) -> str | None:
        return None if self.prediction is None else self.prediction.text

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

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
    content: str | None
    """Null where the answer is calls alone."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: tuple[()] = ()
    """The finds of a web search. Our engines search none."""
    reasoning_content: str | UnsetType = UNSET
    """The model's reasoning, where it reasons."""
    reasoning: str | UnsetType = UNSET
    """The newer name of the same."""
    tool_calls: list[FunctionToolCall] | UnsetType = UNSET


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


class FunctionDelta(Unshown):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Unshown):
    """The beginning of a call, which alone has its id, its type and its function's name, or a piece of its
    arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatDelta(Unshown):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    """A piece of the model's reasoning."""
    reasoning: str | UnsetType = UNSET
    """The newer name of the same."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
