"""Tools in the shape of OpenAI's chat: what a request offers to the model, and which of it the model is to
call.

A tool is read in its shape alone, whoever is to serve it. What our engines ask of it beyond that is checked
where they serve it (`check_tools`, `check_choice`): they take functions alone, under names that the format of
every family can write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.nothing import unsupported
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import TOOLS_MAX, Unshown

NAME_LEN_MAX: Final = 64
NAME: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{NAME_LEN_MAX}}}")
"""The names of functions, and of schemas, as OpenAI has them."""
_NULL: Final = b"null"


class FunctionSpec(Unshown, omit_defaults=True):
    name: str
    """1 to 64 of A-Z, a-z, 0-9, _ and -."""
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    """The JSON schema of the arguments, which are an object."""
    strict: bool | None = None
    """True to hold the arguments to the schema, which must be one that OpenAI's strict mode takes."""

    @property
    def schema(self) -> bytes:
        """The schema's JSON. Empty without one."""
        schema = b"" if self.parameters is UNSET else bytes(self.parameters)
        return b"" if schema == _NULL else schema


class AskedFunction(FunctionSpec, omit_defaults=True):
    """A function of an API that holds its arguments to a schema wherever that is one which strict mode takes,
    unless `strict` says otherwise. It is in no request's shape."""


class FunctionTool(Unshown, tag_field="type", tag="function"):
    function: FunctionSpec


class CustomSpec(Unshown, omit_defaults=True):
    name: str
    description: str | None = None
    format: Raw | UnsetType = UNSET


class CustomTool(Unshown, tag_field="type", tag="custom"):
    """A tool whose input is text. Our engines call none."""

    custom: CustomSpec


Tool = FunctionTool | CustomTool
Tools = Annotated[list[Tool], Meta(max_length=TOOLS_MAX)]


class ToolMode(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class ToolChoice(Struct, frozen=True):
    """Which tools an answer calls: none, those that the model chooses, at least one, or the one of a name."""

    mode: ToolMode
    name: str | None = None
    """The function that is to be called. None leaves it to the model; only `REQUIRED` has one."""


class NamedFunction(Unshown):
    name: str


class ChoiceObject(Unshown):
    """A choice as an object: OpenAI's that names a function, or another one, which our engines refuse."""

    type: str = ""
    """`function`."""
    function: NamedFunction | None = None


def chosen(choice: str | ChoiceObject | None, tools: Sequence[Tool] | None) -> ToolChoice:
    """The choice of a request that was checked."""
    if not tools or choice == "none":
        return NO_CALLS
    if isinstance(choice, ChoiceObject):
        assert choice.function is not None
        return ToolChoice(ToolMode.REQUIRED, choice.function.name)
    return _ANY_CALLS if choice == "required" else _AUTO


NO_CALLS: Final = ToolChoice(ToolMode.NONE)
_ANY_CALLS: Final = ToolChoice(ToolMode.REQUIRED)
_AUTO: Final = ToolChoice(ToolMode.AUTO)


# -- what our engines take ------------------------------------------------------------------------


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest, and UnsupportedParameter for a tool that is no function."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, FunctionTool):
            raise unsupported(f"{where}.type")
        check_function(tool.function, f"{where}.function", names, tool.function.name)


def check_function(spec: FunctionSpec, where: str, names: set[str], called: str) -> None:
    """Check one function, which came at `where`. Its name as the model is `called` it is added to `names`.
    Raises InvalidRequest."""
    if NAME.fullmatch(spec.name) is None:
        raise InvalidRequest(
            f"{where}.name must be 1 to 64 of A-Z, a-z, 0-9, _ and -.", param=f"{where}.name"
        )
    if called in names:
        raise InvalidRequest(f"{where}.name is that of another tool.", param=f"{where}.name")
    names.add(called)
    if (schema := spec.schema) and not schema.startswith(b"{"):
        param = f"{where}.parameters"
        raise InvalidRequest(f"{param} must be an object.", param=param)


def check_choice(choice: str | ChoiceObject | None, tools: Sequence[Tool] | None) -> None:
    """Raises InvalidRequest, and UnsupportedParameter for a choice of another kind."""
    match choice:
        case None | "none" | "auto":  # without tools they ask for nothing
            return
        case "required":
            pass
        case ChoiceObject(type="function"):
            if choice.function is None:
                where = "tool_choice.function"
                raise InvalidRequest(f"{where} is required.", param=where)
        case ChoiceObject(type=""):
            raise InvalidRequest("tool_choice.type is required.", param="tool_choice.type")
        case ChoiceObject():
            if choice.type == "allowed_tools":
                raise unsupported("tool_choice.allowed_tools", "tools, with those alone")
            raise unsupported("tool_choice.type")
        case _:
            message = "tool_choice must be none, auto, required, or an object that names a function."
            raise InvalidRequest(message, param="tool_choice")
    if not tools:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if isinstance(choice, ChoiceObject) and choice.function is not None:
        name = choice.function.name
        if not any(isinstance(tool, FunctionTool) and tool.function.name == name for tool in tools):
            where = "tool_choice.function.name"
            raise InvalidRequest(f"{where} is that of no tool.", param=where)


# -- what no shape has ----------------------------------------------------------------------------

_raw_tools: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_object: Final = msgspec.json.Decoder(dict[str, Raw] | None).decode
_SPECS: Final = {"function": FunctionSpec, "custom": CustomSpec}


def known_tools(tools: Sequence[Tool], raw: Raw) -> tuple[Raw, list[str]]:
    """The tools without what their shapes do not have, as JSON, and the names of that. `tools` is what `raw`
    was decoded to."""
    encoded = msgspec.json.encode(tools)
    if len(encoded) == len(raw):  # nothing makes it longer, so nothing was left out
        return raw, []
    surplus: dict[str, None] = {}
    for tool in _raw_tools(raw):
        for name, value in tool.items():
            if name == "type":
                continue
            if (spec := _SPECS.get(name)) is None or f'"{name}"'.encode() != bytes(tool["type"]):
                surplus[f"tools.{name}"] = None
                continue
            known = spec.__struct_fields__
            of_spec = _object(value) or {}
            surplus |= dict.fromkeys(f"tools.{name}.{key}" for key in of_spec if key not in known)
    return Raw(encoded), [*surplus]
