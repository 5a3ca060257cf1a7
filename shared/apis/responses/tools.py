"""The tools that a response's request offers to the model, and which of them it is to call.

The model is told of functions alone, as a chat's are told to it. So what is none of them here is made one: a
custom tool is a function with one text, `input`; the tools of a namespace are functions whose names begin
with its. `Called` says what a call of one is told as.

One shape has the fields of every type of tool that is read here, so that a tool of another type can be
refused by its name and place. `web_search` is dropped: Codex offers it to every server, and asks none to have
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.nothing import unsupported
from shared.apis.tools import (
    NAME,
    AskedFunction,
    FunctionSpec,
    FunctionTool,
    ToolChoice,
    ToolMode,
    check_function,
)
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import TOOLS_MAX, Unshown

DROPPED: Final = "web_search"
CUSTOM_SCHEMA: Final = Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],'
    b'"additionalProperties":false}'
)
"""The schema of the arguments that stand for a custom tool's input."""
_SEPARATOR: Final = "__"
_NULL: Final = b"null"
_MODES: Final[Mapping[str, ToolMode]] = {"auto": ToolMode.AUTO, "required": ToolMode.REQUIRED}


class ResponsesTool(Unshown, omit_defaults=True):
    type: str
    """`function`, `custom` or `namespace`."""
    name: str | None = None
    """1 to 64 of A-Z, a-z, 0-9, _ and -."""
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    """The JSON schema of a function's arguments, which are an object."""
    strict: bool | None = None
    """True to hold the arguments to the schema, which must be one that OpenAI's strict mode takes; null to do
    so where it is such a one."""
    format: Raw | UnsetType = UNSET
    """The form of a custom tool's input: any text."""
    tools: Annotated[list[ResponsesTool], Meta(max_length=TOOLS_MAX)] | None = None
    """The functions and custom tools of a namespace."""


class ChosenTool(Unshown, omit_defaults=True):
    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class ResponsesChoice(Unshown, omit_defaults=True):
    """A choice as an object: one tool, or those that may be called."""

    type: str
    """`function`, `custom` or `allowed_tools`."""
    name: str | None = None
    """The tool to call."""
    namespace: str | None = None
    mode: str | None = None
    """`auto` or `required`, of the tools that may be called."""
    tools: Annotated[list[ChosenTool], Meta(max_length=TOOLS_MAX)] | None = None
    """The tools that may be called."""


class CalledAs(Enum):
    """The item that a call is told as."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"


class Called(Struct, frozen=True):
    """How a call of one tool is told."""

    item: CalledAs
    name: str
    namespace: str | None = None


class OfferedTools(Struct, frozen=True):
    """The tools of one request."""

    told: tuple[FunctionTool, ...] = ()
    """The tools that the model is told of."""
    asked: tuple[FunctionTool, ...] = ()
    """The tools of `told`, with how their arguments are to be held."""
    places: tuple[str, ...] = ()
    """The places of their schemas in the request. Empty where that is none of the caller's."""
    called: Mapping[str, Called] = {}
    """How their calls are told, by the names that the model has for them."""


def flat_name(namespace: str | None, name: str) -> str:
    """The name that the model has for a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def offered(tools: Sequence[ResponsesTool] | None) -> OfferedTools:
    """The tools as functions. Raises UnsupportedParameter for a tool of another type than those that are read
    here, whoever is to serve it: an engine would call it itself."""
    if not tools:
        return OfferedTools()
    told: list[FunctionTool] = []
    asked: list[FunctionTool] = []
    places: list[str] = []
    called: dict[str, Called] = {}
    for tool, namespace, place in _leaves(tools):
        if len(told) == TOOLS_MAX:
            raise InvalidRequest(f"tools must have at most {TOOLS_MAX} in all namespaces.", param="tools")
        is_custom = tool.type == "custom"
        name = flat_name(namespace, _name(tool, place))
        schema = CUSTOM_SCHEMA if is_custom else tool.parameters
        places.append("" if is_custom else f"{place}.parameters")
        told.append(FunctionTool(FunctionSpec(name, tool.description, schema)))
        strict = None if is_custom else tool.strict
        asked.append(FunctionTool(AskedFunction(name, tool.description, schema, strict)))
        item = CalledAs.CUSTOM if is_custom else CalledAs.FUNCTION
        called.setdefault(name, Called(item, tool.name or "", namespace))
    return OfferedTools(tuple(told), tuple(asked), tuple(places), called)


def check_offered(tools: Sequence[ResponsesTool]) -> None:
    """Check tools for our engines. Raises InvalidRequest, and UnsupportedParameter for a custom tool whose
    input has a form."""
    names: set[str] = set()
    for tool, namespace, place in _leaves(tools):
        parameters = tool.parameters if tool.type == "function" else UNSET
        spec = FunctionSpec(_name(tool, place), parameters=parameters)
        check_function(spec, place, names, flat_name(namespace, spec.name))
        if tool.type == "custom" and not _is_free(tool.format):
            raise unsupported(f"{place}.format", "a function with a schema")


def _leaves(tools: Sequence[ResponsesTool]) -> Iterator[tuple[ResponsesTool, str | None, str]]:
    """The functions and custom tools, each with its namespace and its place."""
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        match tool.type:
            case "function" | "custom":
                yield tool, None, place
            case "namespace":
                namespace = _name(tool, place)
                if NAME.fullmatch(namespace) is None:
                    message = f"{place}.name must be 1 to 64 of A-Z, a-z, 0-9, _ and -."
                    raise InvalidRequest(message, param=f"{place}.name")
                for at, inner in enumerate(tool.tools or ()):
                    if inner.type not in ("function", "custom"):
                        raise unsupported(f"{place}.tools[{at}].type")
                    yield inner, namespace, f"{place}.tools[{at}]"
            case _ if tool.type != DROPPED:
                raise unsupported(f"{place}.type")


def _name(tool: ResponsesTool, place: str) -> str:
    if tool.name is None:
        raise InvalidRequest(f"{place}.name is required.", param=f"{place}.name")
    return tool.name


class _Format(Struct):
    type: str = "text"


def _is_free(given: Raw | UnsetType) -> bool:
    """True if a custom tool's input may be any text."""
    if given is UNSET or bytes(given) == _NULL:
        return True
    try:
        return msgspec.json.decode(given, type=_Format).type == "text"
    except msgspec.ValidationError:
        return False


# -- the choice -----------------------------------------------------------------------------------


class Choosing(Struct, frozen=True):
    """The meaning of a request's choice of tools."""

    choice: ToolChoice
    allowed: frozenset[str] | None = None
    """The names of those that may be called. None for all."""


def chosen_of(choice: str | ResponsesChoice | None, called: Mapping[str, Called]) -> Choosing:
    """The choice of a request among the tools that may be called. Raises InvalidRequest, and
    UnsupportedParameter for tools that a server would call itself."""
    if isinstance(choice, str) or choice is None:
        return _by_mode(choice, called)
    match choice.type:
        case "function" | "custom":
            name = _found(ChosenTool(choice.type, choice.name, choice.namespace), "tool_choice", called)
            return Choosing(ToolChoice(ToolMode.REQUIRED, name))
        case "allowed_tools":
            if (mode := _MODES.get(choice.mode or "auto")) is None:
                message = "tool_choice.mode must be auto or required."
                raise InvalidRequest(message, param="tool_choice.mode")
            if not choice.tools:
                raise InvalidRequest("tool_choice.tools is required.", param="tool_choice.tools")
            allowed = [_found(one, f"tool_choice.tools[{at}]", called) for at, one in enumerate(choice.tools)]
            return Choosing(ToolChoice(mode), frozenset(allowed))
    raise unsupported("tool_choice.type")


def _by_mode(choice: str | None, called: Mapping[str, Called]) -> Choosing:
    if choice not in (None, "none", *_MODES):
        message = "tool_choice must be none, auto, required, or an object that names a tool."
        raise InvalidRequest(message, param="tool_choice")
    if choice == "required" and not called:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    mode = ToolMode.NONE if choice == "none" or not called else _MODES[choice or "auto"]
    return Choosing(ToolChoice(mode))


def _found(tool: ChosenTool, where: str, called: Mapping[str, Called]) -> str:
    """The name that the model has for a tool that is named."""
    if tool.type not in ("function", "custom"):
        raise unsupported(f"{where}.type")
    if tool.name is None:
        raise InvalidRequest(f"{where}.name is required.", param=f"{where}.name")
    if (name := flat_name(tool.namespace, tool.name)) in called:
        return name
    namesakes = [flat for flat, one in called.items() if one.name == tool.name and not tool.namespace]
    if len(namesakes) != 1:
        raise InvalidRequest(f"{where}.name is that of no tool.", param=f"{where}.name")
    return namesakes[0]
