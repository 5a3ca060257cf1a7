"""Anthropic's Messages: `/v1/messages`, and `/v1/messages/count_tokens`.

What a request says is read in the API's own shapes (`shared.apis.message_blocks`), and made a chat once, when
it is parsed (`shared.apis.message_chat`). Fields that say where and how Anthropic serves are accepted; those
that ask for what no engine of ours does (images, tools that a server runs, other context than the one that
was sent) are refused by name.

Two fields mean something else than in OpenAI's APIs. `max_tokens` is required, and is the most that an answer
may have, not a number that must fit into the context: an answer ends where the context does, and says so. And
an answer goes on where the last message ends, if that is the assistant's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.generation import GenerationRequest
from shared.apis.message_blocks import (
    ContextManagement,
    JsonFormat,
    MessagesMetadata,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    System,
    Thinking,
    ThinkingDisabled,
    ThinkingEnabled,
    Turns,
)
from shared.apis.message_chat import (
    AskedConversation,
    check_conversation,
    check_conversation_for_ours,
    choice_of,
    offered,
    structure_of,
)
from shared.apis.nothing import EMPTY, EXTENSIONS, FALSE, LOOKED_INTO, NONE, Nothing
from shared.apis.request import Request
from shared.apis.structure import Structure
from shared.apis.tools import FunctionTool, ToolChoice
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import STOP_LEN_MAX, STOP_MAX, TOKENS_MAX, TOOLS_MAX

REASONING_KEPT_TOKENS: Final = 16 * 1024
"""The most tokens of reasoning, as far as `max_tokens` goes, for which room is kept where it is told at its
end alone."""

_OTHERS: Final = frozenset({"thinking", "stop_sequences", "response_format", "structured_outputs"})
"""Names in the table of other engines' extensions that are fields here, or that our engines take
elsewhere."""
_NOTHING: Final[Mapping[str, Nothing]] = {
    **{name: nothing for name, nothing in EXTENSIONS.items() if name not in _OTHERS},
    **dict.fromkeys(("messages", "tools", "tool_choice", "thinking"), LOOKED_INTO),
    **dict.fromkeys(("output_config", "output_format", "context_management"), LOOKED_INTO),
    **dict.fromkeys(("response_format", "structured_outputs", "container"), NONE),
    **dict.fromkeys(("max_completion_tokens", "reasoning_effort"), NONE),
    **dict.fromkeys(("stop", "chat_template_kwargs"), EMPTY),
    **dict.fromkeys(("continue_final_message", "logprobs"), FALSE),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "parallel_tool_calls"), (True,)),
    "thinking_token_budget": (-1,),
    "n": (1,),
    **dict.fromkeys(("mcp_servers", "fallbacks"), ([],)),
    "inference_geo": ("global",),
    "speed": ("standard",),
}
_INSTEAD: Final[Mapping[str, str]] = {
    **dict.fromkeys(("response_format", "structured_outputs"), "output_config.format"),
    **dict.fromkeys(("json_schema", "guided_json"), "output_config.format"),
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens", "n_predict"), "max_tokens"),
    **dict.fromkeys(("reasoning_effort", "reasoning"), "output_config.effort"),
    **dict.fromkeys(("enable_thinking", "chat_template_kwargs"), "thinking"),
    "do_sample": "temperature 0",
    "function_call": "tool_choice",
    "functions": "tools",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}


class MessagesRequest(AskedConversation, GenerationRequest, kw_only=True, dict=True):
    path: ClassVar[str] = "/v1/messages"
    operation: ClassVar[str] = "chat"
    prompt_param: ClassVar[str] = "messages"
    prompt_beside: ClassVar[frozenset[str]] = frozenset({"system"})
    thinking_param: ClassVar[str] = "thinking.budget_tokens"
    nothing: ClassVar[Mapping[str, Nothing]] = _NOTHING
    instead: ClassVar[Mapping[str, str]] = _INSTEAD

    messages: Turns
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    """The most tokens of the answer. It ends sooner where the context does."""
    system: System | None = None
    """The system prompt, as a text or as blocks of text."""
    tools: Annotated[list[MessagesTool], Meta(max_length=TOOLS_MAX)] | None = None
    """The tools that the model may call. One with `defer_loading` is not told to it before a result refers to
    it."""
    tool_choice: MessagesToolChoice | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]], Meta(max_length=STOP_MAX)
        ]
        | None
    ) = None
    """Texts that end the answer. It says which."""
    thinking: Thinking | None = None
    """Has the model think or not, for so many tokens at most, and its thoughts shown or not."""
    output_config: OutputConfig | None = None
    """The effort, and the schema of the answer's text."""
    output_format: JsonFormat | None = None
    """The older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # accepted, without effect on the answer
    metadata: MessagesMetadata | None = None
    cache_control: Raw | UnsetType = UNSET

    def check(self, fields: Mapping[str, Raw]) -> None:
        check_conversation(self)
        thinking = self.thinking
        if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= self.max_tokens:
            where = "thinking.budget_tokens"
            raise InvalidRequest(f"{where} must be less than max_tokens, {self.max_tokens}.", param=where)
        assert self.prompt_form is not None  # made here, where bodies are parsed

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        check_conversation_for_ours(self)
        super().check_for_ours(fields)

    @cached_property
    def _offered(self) -> Sequence[tuple[int, FunctionTool]]:
        return offered(self)

    @property
    def tools_asked(self) -> Sequence[FunctionTool]:
        return [tool for _, tool in self._offered]

    @property
    def tool_places(self) -> Sequence[str]:
        return [f"tools[{index}].input_schema" for index, _ in self._offered]

    @property
    def tool_choice_asked(self) -> ToolChoice:
        return choice_of(self.tool_choice, has_tools=bool(self._offered))

    @property
    def calls_in_parallel(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def structure(self) -> Structure | None:
        return structure_of(self)

    @property
    def thinking_tokens_max(self) -> int | None:
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else None

    @property
    def needs_reasoning(self) -> bool:
        return False

    @property
    def shows_reasoning(self) -> bool:
        return not (isinstance(self.thinking, ThinkingDisabled) or self.hides_reasoning)

    @property
    def hides_reasoning(self) -> bool:
        return (
            self.thinking is not None
            and not isinstance(self.thinking, ThinkingDisabled)
            and self.thinking.display == "omitted"
        )

    @property
    def reasoning_kept_tokens(self) -> int:
        return min(self.max_tokens, REASONING_KEPT_TOKENS) if self.hides_reasoning else 0

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop_sequences or ()

    @property
    def output_tokens_max(self) -> int:
        return self.max_tokens

    @property
    def stated_tokens_max(self) -> int | None:
        return None  # it need not fit into the context


class CountTokensRequest(AskedConversation, Request, kw_only=True, dict=True):
    """A request for the number of tokens that a request of Messages has before its answer."""

    path: ClassVar[str] = "/v1/messages/count_tokens"
    nothing: ClassVar[Mapping[str, Nothing]] = _NOTHING
    instead: ClassVar[Mapping[str, str]] = _INSTEAD

    messages: Turns
    system: System | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: Raw | UnsetType = UNSET

    def check(self, fields: Mapping[str, Raw]) -> None:
        check_conversation(self)
        assert self.prompt_form is not None

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        check_conversation_for_ours(self)


class CountTokensResponse(Struct):
    input_tokens: int
