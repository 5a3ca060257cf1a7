"""The shapes of a request of Anthropic's Messages: its turns, the blocks that they are made of, and its
options.

Blocks of a kind that is not here (documents, results of tools that a server runs) are refused with the kinds
that are. Of tools, one kind is Anthropic's clients' own, and all others have types that end with a date; they
are read as far as all tools are alike, and told apart by their type.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.wire.shapes import MESSAGES_MAX, TOKENS_MAX, Unshown

BUDGET_MIN: Final = 1024
"""The least tokens of a thinking budget, as the API has it."""

# -- blocks ---------------------------------------------------------------------------------------


class TextBlock(Unshown, tag_field="type", tag="text", omit_defaults=True):
    text: str
    cache_control: Raw | UnsetType = UNSET
    citations: Raw | UnsetType = UNSET


class Base64Source(Unshown, tag_field="type", tag="base64"):
    media_type: str
    data: str


class UrlSource(Unshown, tag_field="type", tag="url"):
    url: str


class ImageBlock(Unshown, tag_field="type", tag="image", omit_defaults=True):
    source: Base64Source | UrlSource
    cache_control: Raw | UnsetType = UNSET


class ThinkingBlock(Unshown, tag_field="type", tag="thinking", omit_defaults=True):
    thinking: str
    signature: str = ""
    cache_control: Raw | UnsetType = UNSET


class RedactedThinkingBlock(Unshown, tag_field="type", tag="redacted_thinking"):
    """Thoughts in a cipher of Anthropic's, which nobody else can read."""

    data: str


class ToolUseBlock(Unshown, tag_field="type", tag="tool_use", omit_defaults=True):
    id: str
    name: str
    input: Raw
    """An object."""
    caller: Raw | UnsetType = UNSET
    cache_control: Raw | UnsetType = UNSET


class ToolReferenceBlock(Unshown, tag_field="type", tag="tool_reference", omit_defaults=True):
    """A tool that was found: it is one of the request's, with `defer_loading`, and is told from here on."""

    tool_name: str
    cache_control: Raw | UnsetType = UNSET


ResultContent = TextBlock | ImageBlock | ToolReferenceBlock


class ToolResultBlock(Unshown, tag_field="type", tag="tool_result", omit_defaults=True):
    tool_use_id: str
    content: str | Annotated[list[ResultContent], Meta(max_length=MESSAGES_MAX)] | None = None
    is_error: bool | None = None
    cache_control: Raw | UnsetType = UNSET


class SystemBlock(Unshown, tag_field="type", tag="mid_conv_system", omit_defaults=True):
    """The system's words within a user's turn."""

    content: Annotated[list[TextBlock], Meta(max_length=MESSAGES_MAX)]
    cache_control: Raw | UnsetType = UNSET


Block = (
    TextBlock
    | ImageBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SystemBlock
)


class MessageTurn(Unshown):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MESSAGES_MAX)]


Turns = Annotated[list[MessageTurn], Meta(min_length=1, max_length=MESSAGES_MAX)]
System = str | Annotated[list[TextBlock], Meta(max_length=MESSAGES_MAX)]

# -- tools ----------------------------------------------------------------------------------------


class MessagesTool(Unshown, omit_defaults=True):
    name: str
    """1 to 128 of A-Z, a-z, 0-9, _ and -."""
    type: str | None = None
    """`custom`, or absent."""
    description: str | None = None
    input_schema: Raw | UnsetType = UNSET
    """The JSON schema of the input, which is an object."""
    strict: bool | None = None
    """True to hold the input to the schema, which must be one that OpenAI's strict mode takes."""
    defer_loading: bool | None = None
    """True for a tool that the model is not told before a `tool_reference` names it."""
    allowed_callers: list[str] | None = None
    eager_input_streaming: bool | None = None
    cache_control: Raw | UnsetType = UNSET


class MessagesToolChoice(Unshown, omit_defaults=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool to call, for `tool`."""
    disable_parallel_tool_use: bool | None = None
    """True for one call at most."""


# -- options --------------------------------------------------------------------------------------

Display = Literal["summarized", "omitted"]


class ThinkingEnabled(Struct, tag_field="type", tag="enabled", omit_defaults=True):
    budget_tokens: Annotated[int, Meta(ge=BUDGET_MIN, le=TOKENS_MAX)]
    """The most tokens of thinking. A model that does not think keeps within any."""
    display: Display | None = None
    """`omitted` for thinking blocks without text, whose signatures alone hold it."""


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", omit_defaults=True):
    display: Display | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled"):
    """No thinking, where the model's template can switch it off; what it thinks all the same is not shown."""


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class JsonFormat(Unshown, omit_defaults=True):
    type: Literal["json_schema"]
    schema: Raw | UnsetType = UNSET
    """The JSON schema, an object. Required."""


class OutputConfig(Unshown, omit_defaults=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, where that reads it."""
    format: JsonFormat | None = None
    """The structure of the answer's text."""


class ContextEdit(Unshown, omit_defaults=True):
    type: str
    keep: Raw | UnsetType = UNSET


class ContextManagement(Unshown):
    """The parts that are to be left out of a context. Ours leave out nothing: `clear_thinking_20251015` that
    keeps all."""

    edits: Annotated[list[ContextEdit], Meta(max_length=16)] | None = None


class MessagesMetadata(Unshown, omit_defaults=True):
    user_id: str | None = None
