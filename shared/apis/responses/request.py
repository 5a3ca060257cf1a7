"""The requests of OpenAI's responses: `/v1/responses`, and `/v1/responses/input_tokens`, which counts.

An engine stores nothing, so it refuses by name what asks for that, or refers to something stored
(`check_unstored`). A gateway that keeps responses (`gateway.stored`) sends it neither: it takes both out of a
request, and puts what the caller refers to in its place. OpenAI stores where `store` is absent; where nothing
is kept that asks for nothing, and the answer says so.

Two fields change nothing, though they may seem to. `truncation: auto` asks for what never happens here:
nothing is dropped, and an input that is too long is refused in either case. `max_tool_calls` is about tools
that a server calls itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from shared.apis.chat import EFFORTS
from shared.apis.generation import GenerationRequest
from shared.apis.nothing import EMPTY, EXTENSIONS, FALSE, LOOKED_INTO, NONE, PROMPT, Nothing, unsupported
from shared.apis.prompt import ChatPrompt
from shared.apis.request import Request
from shared.apis.responses.conversion import InputMessages, conversation
from shared.apis.responses.items import InputItem
from shared.apis.responses.tools import (
    Choosing,
    OfferedTools,
    ResponsesChoice,
    ResponsesTool,
    check_offered,
    chosen_of,
    offered,
)
from shared.apis.structure import Structure, TextFormat, check_text_format
from shared.apis.tools import Tool, ToolChoice
from shared.apis.validation import surplus_fields
from shared.wire.errors import InvalidRequest, NotFound, UnsupportedParameter
from shared.wire.shapes import ITEMS_MAX, LOGPROBS_MAX, TOKENS_MAX, TOOLS_MAX, Unshown

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_OF_OTHERS: Final = frozenset(
    {
        *("web_search_call.results", "web_search_call.action.sources", "file_search_call.results"),
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
        "message.input_image.image_url",
    }
)
"""The values of `include` for items that no answer here has."""
_INCLUDED_MAX: Final = 16
ID_LEN_MAX: Final = 256
_NULL: Final = Raw(b"null")
_COUNT_BEFORE: Final = "count_before"
_PLACE: Final = re.compile(r"input\[(\d+)\]")
Summary = Literal["auto", "concise", "detailed"]
Input = str | Annotated[list[InputItem], Meta(min_length=1, max_length=ITEMS_MAX)]
OfferedList = Annotated[list[ResponsesTool], Meta(max_length=TOOLS_MAX)]


class ReasoningConfig(Unshown, omit_defaults=True):
    effort: str | None = None
    """`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`: a variable of the chat template."""
    summary: Summary | None = None
    """Any value to have the reasoning told as its summary, which is all of it."""
    generate_summary: Summary | None = None
    """The older name of the same."""


class TextConfig(Unshown, omit_defaults=True):
    format: TextFormat | None = None
    """The form of the answer's text: any, a JSON object, or JSON that follows a schema."""
    verbosity: str | None = None
    """`medium`."""


class ResponsesStreamOptions(Unshown):
    include_obfuscation: bool | None = None
    """Accepted. Events are never padded."""
    include_usage: bool | None = None
    """Accepted. The last event always tells the usage."""


class _Prompted:
    """What is made of the fields of a request by which a response's conversation becomes a prompt."""

    input: Input
    instructions: str | None
    tools: list[ResponsesTool] | None
    reasoning: ReasoningConfig | None
    text: TextConfig | None
    conversation: Raw

    @cached_property
    def said(self) -> InputMessages:
        return conversation(self.instructions, self.input)

    @cached_property
    def offers(self) -> OfferedTools:
        return offered(self.tools)

    @cached_property
    def prompt_form(self) -> ChatPrompt:
        effort = None if self.reasoning is None else self.reasoning.effort
        return ChatPrompt(
            self.said.messages,
            "input",
            tools=self.offers.told,
            arguments={} if effort is None else {"reasoning_effort": effort},
            places=self.said.places,
            effort_param="reasoning.effort",
        )

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        found: dict[str, None] = {}
        for name in ("input", "tools", "reasoning", "text", "tool_choice"):
            value = getattr(self, name)
            if isinstance(value, list | Struct):
                found |= dict.fromkeys(surplus_fields(value, fields[name], name, name))
        return [*found]


def nothing_stored(path: str) -> NotFound | None:
    """The error of whatever is asked of a response that was answered before. None for any other path."""
    id_ = path.removeprefix(f"{ResponsesRequest.path}/")
    if id_ == path:
        return None
    return NotFound(f"There is no response '{id_.split('/')[0][:128]}': none is stored here.", param="id")


def check_unstored(asked: ResponsesRequest | InputTokensRequest) -> None:
    """Refuse what needs responses that are kept. Raises UnsupportedParameter."""
    if asked.previous_response_id is not None:
        raise unsupported("previous_response_id", "input, with the items of the turns before")
    if isinstance(asked, ResponsesRequest) and asked.store:
        raise UnsupportedParameter("store: responses are not kept here.", param="store")


def put_behind(asked: ResponsesRequest | InputTokensRequest, count: int) -> None:
    """Note that the first `count` items of a request's input are those of the conversation that it goes on
    with. What is wrong with the others is told by their places in what the caller sent."""
    said = asked.said
    image = None if said.image is None else _own_place(said.image, count)
    places = tuple([_own_place(place, count) for place in said.places])
    own = vars(asked)
    own |= {"said": InputMessages(said.messages, places, image), _COUNT_BEFORE: count}
    own.pop("prompt_form", None)


def _own_place(place: str, count: int) -> str:
    if (found := _PLACE.match(place)) is None:
        return place
    index = int(found[1]) - count
    return f"input[{index}]{place[found.end() :]}" if index >= 0 else "previous_response_id"


def _check_conversation(asked: _Prompted) -> None:
    if asked.conversation != _NULL:
        raise unsupported("conversation", "input, with the items of the turns before")


def _check_prompt_fields(asked: _Prompted) -> None:
    """Check what our engines take of the fields that make the prompt."""
    if asked.said.image is not None:
        raise unsupported(asked.said.image)
    _check_arguments(asked.input, vars(asked).get(_COUNT_BEFORE, 0))
    if asked.tools:
        check_offered(asked.tools)
    reasoning, text = asked.reasoning, asked.text
    if reasoning is not None and reasoning.effort not in (None, *EFFORTS):
        where = "reasoning.effort"
        raise InvalidRequest(f"{where} must be one of {', '.join(EFFORTS)}.", param=where)
    if text is not None:
        if text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity")
        if text.format is not None:
            check_text_format(text.format)


_decode_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode


def _check_arguments(given: Input, before: int) -> None:
    """Raises InvalidRequest for a call whose arguments are no object: a template is given them as one."""
    for index, item in enumerate(() if isinstance(given, str) else given):
        if item.arguments and item.kind == "function_call":
            try:
                _decode_object(item.arguments)
            except (msgspec.MsgspecError, UnicodeError):
                where = _own_place(f"input[{index}].arguments", before)
                raise InvalidRequest(f"{where} must be a JSON object, as text.", param=where) from None


class ResponsesRequest(_Prompted, GenerationRequest, kw_only=True, dict=True):
    path: ClassVar[str] = "/v1/responses"
    operation: ClassVar[str] = "chat"
    prompt_param: ClassVar[str] = "input"
    prompt_beside: ClassVar[frozenset[str]] = frozenset({"instructions"})
    keeps_answer: ClassVar[bool] = True
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **EXTENSIONS,
        **dict.fromkeys(("input", "tools", "tool_choice", "reasoning", "text", "include"), LOOKED_INTO),
        **dict.fromkeys(("response_format", "structured_outputs", "reasoning_effort"), NONE),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "moderation"), NONE),
        **dict.fromkeys(("chat_template_kwargs", "context_management"), EMPTY),
        "thinking_token_budget": (-1,),
        "include_reasoning": (True,),
        "continue_final_message": FALSE,
        "add_generation_prompt": (True,),
    }
    instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("response_format", "structured_outputs", "json_schema"), "text.format"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "max_output_tokens"),
        "reasoning_effort": "reasoning.effort",
        "enable_thinking": "reasoning.effort",
        "functions": "tools",
        "function_call": "tool_choice",
        "do_sample": "temperature 0",
    }

    input: Input
    """A text, or the items of the conversation."""
    instructions: str | None = None
    """A system message before all others."""

    tools: OfferedList | None = None
    """The tools that the model may call."""
    tool_choice: str | ResponsesChoice | None = None
    """`none`, `auto`, `required`, the tool that is to be called, or those that may be. `auto` where there are
    tools."""
    parallel_tool_calls: bool | None = None
    """False for one call at most."""

    max_output_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    """The most tokens of the answer, reasoning included."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[str], Meta(max_length=_INCLUDED_MAX)] | None = None
    """Asks for more to be told: `reasoning.encrypted_content`, `message.output_text.logprobs`."""
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """The urgency: `priority` before `default` before `flex`. `auto` and `scale` are `default`."""
    stream_options: ResponsesStreamOptions | None = None

    store: bool | None = None
    """True if the response is to be kept, where a gateway keeps any. True where it is not said."""
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=ID_LEN_MAX)] | None = None
    """A response that is kept, whose conversation this one goes on with."""

    # only values that ask for nothing
    background: bool | None = None
    conversation: Raw = _NULL
    prompt: Raw = _NULL

    # accepted, without effect on the answer
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    metadata: dict[str, str] | None = None
    """Repeated in the answer."""
    user: str | None = None
    safety_identifier: str | None = None
    client_metadata: Raw = _NULL
    prompt_cache_options: Raw = _NULL
    prompt_cache_retention: str | None = None

    @cached_property
    def choosing(self) -> Choosing:
        return chosen_of(self.tool_choice, self.offers.called)

    def check(self, fields: Mapping[str, Raw]) -> None:
        _check_conversation(self)
        if self.background:
            raise unsupported("background", "stream")
        if self.prompt != _NULL:
            raise unsupported("prompt", "instructions and input")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        _ = self.prompt_form  # made here, where work is shared out, and refused by its places

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        check_unstored(self)
        _check_prompt_fields(self)
        for at, name in enumerate(self.include or ()):
            if name not in (LOGPROBS, ENCRYPTED) and name not in _OF_OTHERS:
                raise unsupported(f"include[{at}]")
        _ = self.choosing

    @property
    def tools_asked(self) -> Sequence[Tool]:
        allowed = self.choosing.allowed
        if allowed is None:
            return self.offers.asked
        return [tool for tool in self.offers.asked if tool.function.name in allowed]

    @property
    def tool_places(self) -> Sequence[str]:
        allowed, offers = self.choosing.allowed, self.offers
        if allowed is None:
            return offers.places
        both = zip(offers.asked, offers.places, strict=True)
        return [place for tool, place in both if tool.function.name in allowed]

    @property
    def tool_choice_asked(self) -> ToolChoice:
        return self.choosing.choice

    @property
    def calls_in_parallel(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def structure(self) -> Structure | None:
        return None if self.text is None or self.text.format is None else self.text.format.structure

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_output_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_output_tokens"

    @property
    def logprobs_asked(self) -> int | None:
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    @property
    def tells_summary(self) -> bool:
        """True if reasoning is told as its summary."""
        reasoning = self.reasoning
        return reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)

    @property
    def tells_encrypted(self) -> bool:
        """True if reasoning is told in a form that can be sent back, too."""
        return ENCRYPTED in (self.include or ())


class InputTokensRequest(_Prompted, Request, kw_only=True, dict=True):
    """The fields of a response's request that make the prompt, which is counted."""

    path: ClassVar[str] = "/v1/responses/input_tokens"
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **PROMPT,
        **dict.fromkeys(("input", "tools", "reasoning", "text"), LOOKED_INTO),
    }

    input: Input
    """A text, or the items of the conversation."""
    instructions: str | None = None
    """A system message before all others."""
    tools: OfferedList | None = None
    """The tools that the model may call."""
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=ID_LEN_MAX)] | None = None
    conversation: Raw = _NULL

    # without effect on the prompt
    tool_choice: str | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def check(self, fields: Mapping[str, Raw]) -> None:
        _check_conversation(self)
        _ = self.prompt_form

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        check_unstored(self)
        _check_prompt_fields(self)
