"""The parts of an answer: pieces of text that are each of one kind.

Rules

1. Calls come one after another: the parts of call n+1 come behind those of call n, which text may follow.
2. A call begins with one CALL, whose text is the function's name. The texts of its ARGUMENTS, joined, are the
   arguments as JSON; they are `{}` for a call without any, and never empty unless the answer was cut off.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class PartKind(Enum):
    """The kind of a part of an answer."""

    TEXT = "text"
    """The answer itself."""
    REASONING = "reasoning"
    """The thoughts of the model before it answers."""
    CALL = "call"
    """The beginning of a call: the name of the function."""
    ARGUMENTS = "arguments"
    """A piece of the JSON text of a call's arguments."""


class Part(NamedTuple):
    """A piece of an answer that is of one kind."""

    text: str
    kind: PartKind = PartKind.TEXT
    call: int = -1
    """The number of the call that the part belongs to, from 0. -1 for text and reasoning."""
    call_id: str = ""
    """The call's id, with CALL alone."""
