"""The items that a response's input consists of.

One shape has the fields of every type of item that is read here, and another those of every type of part. So
an item of a type that nobody knows is read too, and can be refused by its name and place.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

from shared.wire.shapes import MESSAGES_MAX, Unshown

REASONING_MARK: Final = "penstock:reasoning:"
"""The mark before the text in an `encrypted_content` of ours. It hides nothing: the answer tells the same
text. Clients that keep no state at the server send it back, where they leave out the text."""


class InputPart(Unshown, omit_defaults=True):
    """A part of a message, of a call's output, of reasoning or of its summary."""

    type: str
    """`input_text`, `output_text`, `refusal`, `reasoning_text`, `summary_text`, or, for an engine of another
    make that takes images, `input_image`."""
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    """Where an image is."""
    detail: Annotated[str, Meta(max_length=16)] | None = None
    """The detail in which an image is looked at."""
    annotations: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET


Parts = Annotated[list[InputPart], Meta(max_length=MESSAGES_MAX)]


class InputItem(Unshown, omit_defaults=True):
    """A message, a call, a call's output, or reasoning."""

    type: str | None = None
    """`message`, which is the default, `function_call`, `function_call_output`, `custom_tool_call`,
    `custom_tool_call_output` or `reasoning`."""
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Who says it, for a message."""
    content: str | Parts | None = None
    """The text of a message, or of reasoning."""
    phase: str | None = None
    call_id: str | None = None
    """The id of a call, for the call and its output."""
    name: str | None = None
    """The tool that is called."""
    namespace: str | None = None
    """The namespace of that tool."""
    arguments: str | None = None
    """A JSON object, as text: what a function is called with."""
    input: str | None = None
    """The text that a custom tool is called with."""
    output: str | Parts | None = None
    """The result of a call."""
    summary: Parts | None = None
    """The summary of reasoning."""
    encrypted_content: str | None = None
    """Reasoning as its server gave it away. That of another server is left out."""

    @property
    def kind(self) -> str:
        return self.type or "message"

    @property
    def kept(self) -> str | None:
        """The reasoning in an `encrypted_content` of ours. None without one."""
        given = self.encrypted_content
        if given is None or not given.startswith(REASONING_MARK):
            return None
        return given.removeprefix(REASONING_MARK)
