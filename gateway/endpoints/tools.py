"""Tools in the shape of OpenAI's chat, as engines of another make are sent them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw

from shared.apis.validation import invalid_value
from shared.wire.shapes import Unshown

TOOLS_MAX: Final = 1024
_object: Final = msgspec.json.Decoder(dict[str, Raw] | None)


class FunctionSpec(Unshown, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: Raw = Raw(b"null")
    strict: bool | None = None


class FunctionTool(Unshown, tag_field="type", tag="function"):
    function: FunctionSpec


class CustomSpec(Unshown, omit_defaults=True):
    name: str
    description: str | None = None
    format: Raw = Raw(b"null")


class CustomTool(Unshown, tag_field="type", tag="custom"):
    custom: CustomSpec


class _Tools(Unshown):
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=TOOLS_MAX)] | None


_decode_tools: Final = msgspec.json.Decoder(_Tools).decode
_raw_tools: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_SPECS: Final = {"function": FunctionSpec, "custom": CustomSpec}


def known_tools(raw: Raw, left_out: list[str]) -> Raw:
    """The tools without what their shapes do not have, which is added to `left_out`. Raises InvalidRequest
    for a tool that the engine, or its maker, would call itself."""
    try:
        tools = _decode_tools(b'{"tools":%b}' % bytes(raw)).tools
    except msgspec.ValidationError as error:
        raise invalid_value(str(error), _Tools) from None
    encoded = msgspec.json.encode(tools)
    if tools is None or len(encoded) == len(raw):  # nothing makes it longer, so nothing was left out
        return raw
    surplus: dict[str, None] = {}
    for tool in _raw_tools(raw):
        for name, value in tool.items():
            if name == "type":
                continue
            if (spec := _SPECS.get(name)) is None or f'"{name}"'.encode() != bytes(tool["type"]):
                surplus[f"tools.{name}"] = None
                continue
            known = spec.__struct_fields__
            of_spec = _object.decode(value) or {}
            surplus |= dict.fromkeys(f"tools.{name}.{key}" for key in of_spec if key not in known)
    left_out += surplus
    return Raw(encoded)
