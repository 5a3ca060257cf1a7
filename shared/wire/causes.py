"""The causes of a request's waits: what held it up, in codes and numbers.

The engine finds them (`engine.api.told.attribution`), and its closing comment takes them to the gateway. Both
services' completed lines have them. The sentence that people read is made of them in one place,
`shared.trace.sentences`.

Rules:

1. A request has at most `CAUSES_MAX` causes, and every value of one is bounded, so that a closing comment is.
2. Other tenants appear as counts alone: no id, no name, no text.
3. A code that is not known here comes from another version. It is kept, and told by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

CAUSES_MAX: Final = 8
CODE_LEN_MAX: Final = 24
COUNT_MAX: Final = 10**12

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]


class CauseCode(StrEnum):
    """The causes that this version knows."""

    WAITED_STEP = "waited_step"
    """It came while a step was computed, and the next one took it."""
    WAITED_GRAMMAR = "waited_grammar"
    """Its grammar was compiled."""
    WAITED_SLOTS = "waited_slots"
    """Other sequences held all slots."""
    WAITED_PAGES = "waited_pages"
    """Other sequences held the pages that it needed."""
    WAITED_TURN = "waited_turn"
    """The steps' time and tokens went to others that stood before it."""
    PREFILL = "prefill"
    """Its own prompt was computed."""
    GAP_PROMPTS = "gap_prompts"
    """A step computed prompts of others beside its next token."""
    GAP_COPIES = "gap_copies"
    """A step copied pages of preempted sequences to host memory, or back."""
    GAP_HOST = "gap_host"
    """The host did something else between two steps, such as taking in many requests."""
    GAP_SLOW = "gap_slow"
    """A step took much longer than the same work had taken before."""
    GAP_DECODES = "gap_decodes"
    """A step computed a token for each of many sequences."""
    PREEMPTED_CLASS = "preempted_class"
    """A request of a higher class took its pages."""
    PREEMPTED_SHARE = "preempted_share"
    """A tenant that held less took its pages."""
    PREEMPTED_PAGES = "preempted_pages"
    """Others grew into its pages."""
    STALLED = "stalled"
    """Its client did not read."""
    TOKENIZER = "tokenizer"
    """Its text waited for a thread, or took long to turn into tokens."""
    GRAMMAR = "grammar"
    """Its schema or tools waited for a thread, or took long to turn into a grammar."""
    CORE_SILENT = "core_silent"
    """The core process did not answer the API process: it was stopped, or hung."""
    MASKS = "masks"
    """The core took long to compile its grammar, or for the masks by which it follows it."""


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cause. A count that does not belong to its code is 0."""

    code: Annotated[str, Meta(max_length=CODE_LEN_MAX)]
    ms: Annotated[float, Meta(ge=0.0, le=1e12)]
    """The time that it took, in milliseconds."""
    step: Count = 0
    """The number of the last step in it."""
    steps: Count = 0
    """Steps in it."""
    requests: Count = 0
    """Other sequences: those that held the pages or slots, or whose prompts were computed."""
    prompt_tokens: Count = 0
    """Prompt tokens of others that were computed."""
    own_tokens: Count = 0
    """Tokens of its own that were computed."""
    cached_tokens: Count = 0
    """Tokens of its own that were found in the prefix cache."""
    decodes: Count = 0
    """Sequences of which the step computed the next token."""
    held_percent: Count = 0
    """The part of all pages that others held."""
    higher_class: Count = 0
    """Sequences of a higher class that were taken before it, after it had come."""
    first: Count = 0
    """Other sequences that were."""
    expected_ms: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    """The time that the step would have taken by what earlier ones did, in milliseconds."""
    pages: Count = 0
    """Pages that were copied."""
    swapped: bool = False
    """True if its pages were kept in host memory, and not computed again."""
    shared: bool = False
    """True if the request has other sequences, which may be among those that are counted."""


def most_telling(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """The `CAUSES_MAX` that took longest, in the order in which they were given."""
    given = list(causes)
    if len(given) <= CAUSES_MAX:
        return tuple(given)
    longest = sorted(range(len(given)), key=lambda at: given[at].ms, reverse=True)[:CAUSES_MAX]
    return tuple(given[at] for at in sorted(longest))
