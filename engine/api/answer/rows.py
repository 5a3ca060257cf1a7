"""Tokens with their log-probabilities as completions list them: those of a prompt that is repeated, and those
of the answer behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from engine.api.answer.outputs import Entry
from engine.contract.messages import TokenLogprobs

T = TypeVar("T", covariant=True)


class Sliced(Protocol[T]):
    """A sequence that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[T]: ...


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its completions."""

    text: str
    prompt_ids: list[int]
    starts: list[int] = field(default_factory=list)
    """The position of each prompt token's text in `text`. Empty when log-probabilities are not asked
    for."""


class LogprobRow(NamedTuple):
    """A token with its log-probabilities, as completions list it."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None
    """The token's log-probabilities. None for the first token of a prompt."""


class Rows:
    """The rows of a repeated prompt and of the answer's tokens behind it, made as they are taken: those of a
    long prompt take a tenth of a second."""

    __slots__ = ("_base", "_echo", "_prompt_len", "_scores", "_told")

    def __init__(
        self, echo: Echo | None, scores: Sequence[TokenLogprobs], told: Sequence[Entry], base: int
    ) -> None:
        """`scores` are those of the tokens of `echo` from the second on; `told` are the answer's tokens,
        whose text begins at `base`."""
        self._echo, self._scores, self._told, self._base = echo, scores, told, base
        self._prompt_len = 0 if echo is None else len(echo.prompt_ids)
        assert echo is None or len(echo.starts) == self._prompt_len == len(scores) + 1

    def __len__(self) -> int:
        return self._prompt_len + len(self._told)

    def __getitem__(self, part: slice) -> list[LogprobRow]:
        first, last, _ = part.indices(len(self))
        echo, scores, prompt_len = self._echo, self._scores, self._prompt_len
        rows: list[LogprobRow] = []
        if echo is not None:
            ids, starts = echo.prompt_ids, echo.starts
            of_prompt = range(first, min(last, prompt_len))
            rows += [LogprobRow(ids[at], starts[at], scores[at - 1] if at else None) for at in of_prompt]
        of_answer = self._told[max(first - prompt_len, 0) : max(last - prompt_len, 0)]
        rows += [LogprobRow(entry.token_id, self._base + entry.start, entry.logprobs) for entry in of_answer]
        return rows
