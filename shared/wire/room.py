"""The tokens that a prompt and its answer may have together, and what bounds them: the model's context, or
the engine's KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from shared.wire.errors import ContextLengthExceeded, InvalidRequest, NeverFits


@dataclass(frozen=True, slots=True)
class Room:
    """The room that an engine has for one sequence."""

    context_len: int
    """The tokens that the model's context holds."""
    kv_tokens: int | None = None
    """The tokens that the engine's whole KV cache holds. None where that is no bound, or not known."""
    most: int = field(init=False, repr=False, compare=False)
    """The most tokens that a prompt and its answer may have together. The last token takes no room in the KV
    cache, because nothing is computed from it."""

    def __post_init__(self) -> None:
        known = self.context_len if self.kv_tokens is None else min(self.context_len, self.kv_tokens + 1)
        object.__setattr__(self, "most", known)

    @classmethod
    def of(cls, most: int | None, context_len: int | None) -> Self | None:
        """The room that an engine tells: `most` tokens for a prompt and its answer, and the context of its
        model. An engine that tells no context, as of another make or version, has no room beyond `most` in
        it. None where it tells nothing."""
        if most is None or context_len is None or context_len <= most:
            return None if most is None else cls(most)
        return cls(context_len, most - 1)

    @property
    def prompt_most(self) -> int:
        """The most tokens that a prompt may have behind which nothing is generated."""
        return self.context_len if self.kv_tokens is None else min(self.context_len, self.kv_tokens)

    def refused(self, tokens: int) -> tuple[type[InvalidRequest], str]:
        """The kind of the error for so many tokens, which are too many, and what it says of the room."""
        assert tokens > self.prompt_most
        if self.kv_tokens is None or tokens > self.context_len:
            return ContextLengthExceeded, f"This model's context holds {self.context_len} tokens"
        return NeverFits, f"The KV cache of this model's engine holds {self.kv_tokens} tokens"
