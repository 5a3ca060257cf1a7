"""A request of any API: what the checks that all share ask of its shape.

Policy for fields, as API.md documents it:

- A field that is honoured is typed and bounded in its API's shape, and a bad value is a 400 that names it.
- A field that asks for something that no engine of ours can do (audio, other engines' extensions) is refused,
  by the shape's table `nothing`, or where a part of it can be done by `check_for_ours`; it is never silently
  ignored. Engines of other makes may do what ours cannot, so both are asked only where ours serve.
- Fields that change nothing about the answer (`metadata`, `user`, `store`, ...) are accepted.
- Unknown fields are accepted too, passed on, and named in the `x-penstock-ignored-fields` answer
  header, so that a misspelt name can be seen.

Beyond OpenAI, the common extensions of open engines: `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `min_tokens`, `ignore_eos`, `return_token_ids`, `cache_salt`, `structured_outputs`,
`chat_template_kwargs`, `thinking_token_budget`, `include_reasoning`, `continue_final_message`,
`add_generation_prompt`, a message's `reasoning_content` and `reasoning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Raw

from shared.apis.nothing import INSTEAD, Nothing
from shared.apis.prompt import PromptForm
from shared.wire.shapes import Unshown


class Request(Unshown, kw_only=True):
    path: ClassVar[str]
    """The path at which both services serve it."""
    nothing: ClassVar[Mapping[str, Nothing]]
    """The fields that are refused unless they ask for nothing, with the values that do so beside null."""
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    """The fields to use in place of some that are refused, by these."""
    has_messages: ClassVar[bool] = False
    """True if its field `messages` has OpenAI's shapes: they are looked into for unknown and unsupported
    fields."""

    taken_from: ClassVar[str | None] = None
    """The name of the field that states of how many choices the best `n` are answered. None without one."""

    model: str | None = None
    """The name of the model. None for that of the engine, which has one."""

    @property
    def prompt_form(self) -> PromptForm | None:
        """The prompt in one of the two forms. None where it has none."""
        return None

    @property
    def surplus(self) -> str | None:
        """The field by which more choices would be computed than are answered, which no engine of ours does.
        None where nothing asks for that."""
        name = self.taken_from
        if name is None or getattr(self, name) in (None, getattr(self, "n", None) or 1):
            return None
        return name

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        """Check what of its fields and messages our engines take. It is called where it has any of `nothing`,
        or messages that are more than texts. Raises InvalidRequest, and UnsupportedParameter for what no
        engine of ours does."""

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        """The names of fields that are unknown, within fields that it looks into itself."""
        return []

    def check(self, fields: Mapping[str, Raw]) -> None:
        """Check the relations between its fields. `fields` are those that were sent. Raises
        InvalidRequest."""
