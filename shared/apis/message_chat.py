"""A conversation of Anthropic's Messages as the one chat form, and what our engines ask of it.

Rules

1. The order is the caller's: nothing is hoisted, merged or moved, and each turn makes messages of its own.
   The ids of a turn's prompt are then a prefix of those of the next.
2. What does not change what is said does not change what is made of it: one block of text is that text; marks
   for a cache, ids and signatures are dropped; so is the system block by which a client tells its version
   (`BILLING`), which changes with every release, and with the request.
3. An assistant's turn is one message, as the model wrote it: its thoughts, its text and its calls. Thoughts
   that were told without text are read from the signature that was told in their place.
4. A user's turn is its texts as a message of the user's, and each result as one of the tool's, in their
   order. A result that is an error begins with `Error: `.
5. A tool that is loaded later is not among the tools of the prompt. A result that refers to it holds its
   definition from there on, so nothing before it changes; only then may it be called.
6. What a template is told of thinking and effort are wishes: one that has no such variable goes without.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shared.apis.chat_messages import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionToolCall,
    ImagePart,
    ImageUrl,
    TextPart,
    ToolCall,
)
from shared.apis.message_blocks import (
    Base64Source,
    Block,
    ContextManagement,
    ImageBlock,
    JsonFormat,
    MessagesTool,
    MessagesToolChoice,
    MessageTurn,
    OutputConfig,
    RedactedThinkingBlock,
    ResultContent,
    System,
    SystemBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from shared.apis.nothing import unsupported
from shared.apis.prompt import ChatPrompt
from shared.apis.structure import Structure, StructureKind, check_schema
from shared.apis.tools import NO_CALLS, FunctionSpec, FunctionTool, ToolChoice, ToolMode
from shared.apis.validation import surplus_fields
from shared.wire.errors import InvalidRequest
from shared.wire.undecodable import UNDECODABLE

NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
BILLING: Final = "x-anthropic-billing-header:"
ERROR: Final = "Error: "
SIGNATURE: Final = "penstock"
"""The signature of thoughts that were told."""
_SEALED: Final = f"{SIGNATURE}."
"""The beginning of one that holds thoughts which were not."""
KEEP_ALL: Final = "clear_thinking_20251015"
_BLOCKS: Final[Mapping[str, tuple[type[Block], ...]]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock, SystemBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""The kinds of blocks of each role's turns."""
_encode: Final = msgspec.json.Encoder().encode


class AskedConversation:
    """What is made of the fields of a request that has a conversation."""

    messages: list[MessageTurn]
    system: System | None
    tools: list[MessagesTool] | None
    tool_choice: MessagesToolChoice | None
    thinking: Thinking | None
    output_config: OutputConfig | None
    output_format: JsonFormat | None
    context_management: ContextManagement | None

    @cached_property
    def prompt_form(self) -> ChatPrompt:
        """The chat of the conversation, which was checked."""
        deferred = {tool.name: tool for tool in self.tools or () if tool.defer_loading}
        messages = [*_system(self.system)]
        places = ["system" for _ in messages]
        for index, turn in enumerate(self.messages):
            messages += _messages(turn, deferred)
            places += [f"messages[{index}]"] * (len(messages) - len(places))
        continues = self.messages[-1].role == "assistant"
        return ChatPrompt(
            messages,
            tools=tuple(_function(tool) for tool in self.tools or () if not tool.defer_loading),
            wishes=_wishes(self),
            continues_final=continues,
            opens_answer=not continues,
            places=tuple(places),
            continues_param=_end(self),
        )

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        found: dict[str, None] = {}
        for name in ("messages", "system", "tools", "tool_choice", "thinking", "output_config"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                found |= dict.fromkeys(surplus_fields(value, fields[name], name, name))
        return [*found]


# -- the chat -------------------------------------------------------------------------------------


def _system(system: System | None) -> Iterator[ChatMessage]:
    blocks = [TextBlock(system)] if isinstance(system, str) else system or ()
    parts = [TextPart(block.text) for block in blocks if block.text and not block.text.startswith(BILLING)]
    if parts:
        yield ChatMessage("system", _content(parts))


def _messages(turn: MessageTurn, deferred: Mapping[str, MessagesTool]) -> Iterator[ChatMessage]:
    if isinstance(turn.content, str):
        yield ChatMessage(turn.role, turn.content)
    elif turn.role == "assistant":
        yield _answer(turn.content)
    else:
        yield from _in_order(turn.role, turn.content, deferred)


def _answer(blocks: Sequence[Block]) -> ChatMessage:
    parts: list[TextPart | ImagePart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block:
            case TextBlock():
                parts.append(TextPart(block.text))
            case ThinkingBlock():
                thoughts.append(block.thinking or unsealed(block.signature))
            case ToolUseBlock():
                calls.append(
                    FunctionToolCall(block.id, FunctionCall(block.name, bytes(block.input).decode()))
                )
    return ChatMessage(
        "assistant",
        _content(parts) if parts or not calls else UNSET,
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _in_order(
    role: str, blocks: Sequence[Block], deferred: Mapping[str, MessagesTool]
) -> Iterator[ChatMessage]:
    """The messages of a turn of the user's or the system's."""
    assert role in ("user", "system")
    parts: list[TextPart | ImagePart] = []
    for block in (*blocks, None):
        if isinstance(block, TextBlock):
            parts.append(TextPart(block.text))
            continue
        if isinstance(block, ImageBlock):
            parts.append(_image(block))
            continue
        if parts:
            yield ChatMessage("user" if role == "user" else "system", _content(parts))
            parts = []
        if isinstance(block, ToolResultBlock):
            content = _content(_result(block, deferred))
            yield ChatMessage("tool", content, tool_call_id=block.tool_use_id)
        elif isinstance(block, SystemBlock):
            yield ChatMessage("system", _content([TextPart(one.text) for one in block.content]))
    if not blocks:
        yield ChatMessage("user" if role == "user" else "system", "")


def _result(block: ToolResultBlock, deferred: Mapping[str, MessagesTool]) -> list[TextPart | ImagePart]:
    given = block.content
    blocks: Sequence[ResultContent] = [TextBlock(given)] if isinstance(given, str) else given or ()
    parts: list[TextPart | ImagePart] = []
    for one in blocks:
        match one:
            case TextBlock():
                parts.append(TextPart(one.text))
            case ImageBlock():
                parts.append(_image(one))
            case ToolReferenceBlock():
                tool = deferred.get(one.tool_name)
                parts.append(TextPart(one.tool_name if tool is None else _encode(_function(tool)).decode()))
    if block.is_error:
        text = parts[0].text if parts and isinstance(parts[0], TextPart) else ""
        parts[: 1 if text else 0] = [TextPart(ERROR + text)]
    return parts


def _content(parts: Sequence[TextPart | ImagePart]) -> str | list[ContentPart]:
    if not parts:
        return ""
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else [*parts]


def _image(block: ImageBlock) -> ImagePart:
    source = block.source
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
    return ImagePart(ImageUrl(url))


def _wishes(asked: AskedConversation) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    effort: str | None = None if asked.output_config is None else asked.output_config.effort
    if isinstance(asked.thinking, ThinkingDisabled):
        effort = "none"
    if isinstance(asked.thinking, ThinkingDisabled | ThinkingEnabled):
        thinks = isinstance(asked.thinking, ThinkingEnabled)
        wishes |= {"enable_thinking": thinks, "thinking": thinks}
    return {**wishes, "reasoning_effort": effort} if effort is not None else wishes


# -- thoughts that are not told -------------------------------------------------------------------


def sealed(thoughts: str) -> str:
    """The signature of thoughts that are told without their text. It is no secret: the next turn's prompt has
    the text again, which its caller may as well write itself."""
    return _SEALED + b64encode(thoughts.encode()).decode() if thoughts else SIGNATURE


def unsealed(signature: str) -> str:
    """The thoughts in a signature; none in one of another's."""
    if not signature.startswith(_SEALED):
        return ""
    try:
        return b64decode(signature[len(_SEALED) :], validate=True).decode()
    except ValueError:
        return ""


# -- tools ----------------------------------------------------------------------------------------


def _function(tool: MessagesTool) -> FunctionTool:
    return FunctionTool(FunctionSpec(tool.name, tool.description, tool.input_schema, tool.strict))


def offered(asked: AskedConversation) -> list[tuple[int, FunctionTool]]:
    """The tools that the answer may call, with their places: all but those that no result has loaded."""
    tools = asked.tools or ()
    loaded = {*_referenced(asked.messages)} if any(tool.defer_loading for tool in tools) else set[str]()
    return [
        (index, _function(tool))
        for index, tool in enumerate(tools)
        if not tool.defer_loading or tool.name in loaded
    ]


def _referenced(turns: Sequence[MessageTurn]) -> Iterator[str]:
    for turn in turns:
        for block in turn.content if isinstance(turn.content, list) else ():
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                yield from (one.tool_name for one in block.content if isinstance(one, ToolReferenceBlock))


def choice_of(choice: MessagesToolChoice | None, *, has_tools: bool) -> ToolChoice:
    """The choice of a request that was checked."""
    if not has_tools or (choice is not None and choice.type == "none"):
        return NO_CALLS
    if choice is None or choice.type == "auto":
        return ToolChoice(ToolMode.AUTO)
    return ToolChoice(ToolMode.REQUIRED, choice.name if choice.type == "tool" else None)


def structure_of(asked: AskedConversation) -> Structure | None:
    """The structure of the answer's text, of a request that was checked."""
    for where, format_ in _formats(asked):
        schema = format_.schema
        assert not isinstance(schema, UnsetType)
        return Structure(StructureKind.JSON_SCHEMA, bytes(schema).decode(), param=f"{where}.schema")
    return None


def _formats(asked: AskedConversation) -> Iterator[tuple[str, JsonFormat]]:
    """The formats that it states, with their places."""
    if asked.output_config is not None and asked.output_config.format is not None:
        yield "output_config.format", asked.output_config.format
    if asked.output_format is not None:
        yield "output_format", asked.output_format


# -- checks ---------------------------------------------------------------------------------------


def check_conversation(asked: AskedConversation) -> None:
    """Check that each block is in a turn that can have it. Raises InvalidRequest."""
    for index, turn in enumerate(asked.messages):
        for at, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if not isinstance(block, _BLOCKS[turn.role]):
                where = f"messages[{index}].content[{at}].type"
                raise InvalidRequest(f"{where} is that of no block of the {turn.role}'s.", param=where)
            if isinstance(block, ToolUseBlock) and not bytes(block.input).startswith(b"{"):
                where = f"messages[{index}].content[{at}].input"
                raise InvalidRequest(f"{where} must be an object.", param=where)


def check_conversation_for_ours(asked: AskedConversation) -> None:
    """Check what our engines take. Raises InvalidRequest, and UnsupportedParameter."""
    for index, turn in enumerate(asked.messages):
        for at, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            where = f"messages[{index}].content[{at}]"
            if isinstance(block, ImageBlock):
                raise unsupported(f"{where}.source")
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for inner, one in enumerate(block.content):
                    if isinstance(one, ImageBlock):
                        raise unsupported(f"{where}.content[{inner}].source")
    _check_tools(asked.tools or ())
    _check_choice(asked)
    _check_end(asked)
    formats = [*_formats(asked)]
    for where, format_ in formats:
        check_schema(format_.schema, f"{where}.schema", (b"{",))
    if len(formats) > 1:
        message = "output_format and output_config.format exclude each other."
        raise InvalidRequest(message, param="output_format")
    for at, edit in enumerate((asked.context_management and asked.context_management.edits) or ()):
        where = f"context_management.edits[{at}]"
        if edit.type != KEEP_ALL:
            raise unsupported(f"{where}.type")
        if not _keeps_all(edit.keep):
            raise unsupported(f"{where}.keep", "all")


def _keeps_all(keep: Raw | UnsetType) -> bool:
    if isinstance(keep, UnsetType):
        return False
    try:
        value: object = msgspec.json.decode(keep)
    except UNDECODABLE:
        return False
    return value in ("all", {"type": "all"})


def _check_tools(tools: Sequence[MessagesTool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise unsupported(f"{where}.type")
        if not {*(tool.allowed_callers or ())} <= {"direct"}:
            raise unsupported(f"{where}.allowed_callers", "direct")
        if NAME.fullmatch(tool.name) is None:
            message = f"{where}.name must be 1 to 128 of A-Z, a-z, 0-9, _ and -."
            raise InvalidRequest(message, param=f"{where}.name")
        if tool.name in names:
            raise InvalidRequest(f"{where}.name is that of another tool.", param=f"{where}.name")
        names.add(tool.name)
        if isinstance(tool.input_schema, UnsetType) or not bytes(tool.input_schema).startswith(b"{"):
            message = f"{where}.input_schema must be an object."
            raise InvalidRequest(message, param=f"{where}.input_schema")


def _check_choice(asked: AskedConversation) -> None:
    choice = asked.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return
    tools = [tool.function.name for _, tool in offered(asked)]
    if not tools:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if choice.type == "tool" and choice.name not in tools:
        where = "tool_choice.name"
        raise InvalidRequest(f"{where} is that of no tool, or of one that is not loaded.", param=where)


def _check_end(asked: AskedConversation) -> None:
    """Check the last turn where the answer continues it."""
    last = asked.messages[-1]
    if last.role != "assistant":
        return
    where = _end(asked)
    blocks = last.content if isinstance(last.content, list) else [TextBlock(last.content)]
    if not blocks or not isinstance(blocks[-1], TextBlock) or not blocks[-1].text:
        raise InvalidRequest(f"{where} must end with a text, which the answer continues.", param=where)
    if any(isinstance(block, ToolUseBlock) for block in blocks):
        raise InvalidRequest(f"{where} must have no tool_use where the answer continues it.", param=where)
    if choice_of(asked.tool_choice, has_tools=bool(asked.tools)).mode is ToolMode.REQUIRED:
        message = "tool_choice cannot ask for a call where the answer continues the last message."
        raise InvalidRequest(message, param="tool_choice")


def _end(asked: AskedConversation) -> str:
    """The name of what the last turn says."""
    return f"messages[{len(asked.messages) - 1}].content"
