"""Prompts for the text between a prefix and a suffix, in the tokens that models are trained on for it.

Rules:

1. A model fills in where its tokenizer has all tokens of a known form. They are looked for by their names, as
   no file of a model says which they are.
2. The suffix goes on inside a text: a tokenizer that puts a space before each text gives it none.
3. The special tokens that begin any text of the tokenizer come first. Those that end one do not: the answer
   goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shared.wire.errors import InvalidRequest

SPACE: Final = "\u2581"
BEFORE_SUFFIX: Final = "\u263a"
"""A character that no token has together with others, before a suffix that is to have no space."""


@dataclass(frozen=True, slots=True)
class FillForm:
    """The tokens around prefix and suffix, by their texts."""

    prefix: str
    suffix: str
    middle: str | None
    """The token behind both. None where the prefix comes last, so that the answer follows it."""


FORMS: Final = (
    FillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    FillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM, Granite
    FillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillForm(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek-Coder
    FillForm(f"{SPACE}<PRE>", f"{SPACE}<SUF>", f"{SPACE}<MID>"),  # Code Llama
    FillForm("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


@dataclass(frozen=True, slots=True)
class Fill:
    """The way in which one tokenizer writes a prompt with a suffix."""

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    before: tuple[int, ...]
    """The special tokens that begin a text."""
    led: int
    """The number of tokens of `BEFORE_SUFFIX`, where it goes before the suffix and is taken off again; else
    0."""

    @classmethod
    def of(
        cls,
        id_of: Callable[[str], int | None],
        encode: Callable[[str], list[int]],
        before: list[int],
    ) -> Fill | None:
        """The form of a tokenizer's prompts; None without such tokens. `encode` adds no special tokens."""
        for form in FORMS:
            prefix_id, suffix_id = id_of(form.prefix), id_of(form.suffix)
            middle_id = None if form.middle is None else id_of(form.middle)
            if prefix_id is None or suffix_id is None or (middle_id is None) != (form.middle is None):
                continue
            adds_space = encode("\n")[:1] == [id_of(SPACE)]
            led = len(encode(BEFORE_SUFFIX)) if adds_space else 0
            return cls(prefix_id, suffix_id, middle_id, tuple(before), led)
        return None

    def lead(self, suffix: str) -> str:
        """The suffix as it is to be encoded."""
        return BEFORE_SUFFIX + suffix if self.led else suffix

    def ids(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt, of the ids of the prefix and of what `lead` gave."""
        behind = suffix[self.led :]
        if self.middle_id is None:
            return [*self.before, self.suffix_id, *behind, self.prefix_id, *prefix]
        return [*self.before, self.prefix_id, *prefix, self.suffix_id, *behind, self.middle_id]


def no_fill() -> InvalidRequest:
    message = "This model has no tokens to fill in a text before a suffix."
    return InvalidRequest(message, param="suffix")
