"""Tools in the shape of OpenAI's chat."""

from __future__ import annotations

from msgspec import Raw

from shared.wire.shapes import Unshown


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


Tool = FunctionTool | CustomTool
