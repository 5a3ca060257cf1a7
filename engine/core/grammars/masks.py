"""The core's side of grammars: which sequences follow one, whose mask is there, and whom to wait for.

    core thread    open, advance, close   -> threads: engine.core.grammars.threads
                   take_filled            <-

A sequence with a grammar samples under a mask: the tokens with which its text may go on. The mask of its
first token follows from the grammar alone, the next one from the token before. So a sequence whose mask is
not there yet has nothing to do (`Hold.MASK`): it sits out a step, and nobody waits for it, but for this:

Rules

1. A plan waits for the masks that are about to come (`Grammars.wait`), for `GRACE_PART` of the last step's
   time and `GRACE_S_MAX` at most; for `GRACE_PART_ALONE` of it where all sequences follow grammars. Those are
   masks that took a moment when they were filled last: what takes longer is filled in a lane that no plan
   waits for. So a stream without a grammar loses a few percent of a step at most, and usually as long as a
   mask takes.
2. When nothing else is due, the loop sleeps until a mask is there or a message comes.
3. A grammar that cannot be compiled, a matcher in error, and a sampled token that it does not take end the
   sequence with `FinishReason.GRAMMAR`. llguidance itself would allow the end alone, which reads as a short
   answer.
4. A matcher that is complete allows the end tokens alone, and the sequence ends by one. Where none of these
   ends it, since its request ignores them, it ends as soon as the matcher is complete.
5. Preemption, pauses and recomputation leave matcher and mask alone: they depend on tokens, not on pages.
6. With a mask may come those behind drafts (`engine.core.drafts`), as far as the grammar allows these and
   goes on behind each; and where it forces a text, as of a key of JSON, the tokens of that are drafts, too.
   Of each is told why it is one: where it is the only token that is allowed, no chance is estimated
   (`engine.core.drafts.price`). A copy of the matcher has taken them in, and the matcher itself takes in what
   comes of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from engine.contract.messages import FinishReason, Want
from engine.core.drafts.price import Sureness
from engine.core.sequence import Sequence as Sequence_

GRACE_PART: Final = 0.125
GRACE_PART_ALONE: Final = 0.5
GRACE_S_MAX: Final = 0.002


class MatcherStanding(Enum):
    """Where a matcher stands after a token."""

    GOES_ON = "goes on"
    COMPLETE = "complete"
    """Nothing may follow but the end."""
    FAILED = "failed"
    """It is in error, or its grammar could not be compiled."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The mask of a sequence's next token."""

    handle: int
    mask: bytes
    """Bit t of little-endian 32-bit words says whether token t is allowed. Never empty unless it failed."""
    standing: MatcherStanding
    seconds: float
    """The time that it took a thread."""
    drafts: Sequence[int] = ()
    """Tokens that may follow one after another."""
    ahead: Sequence[bytes] = ()
    """The mask of the token behind each of them."""
    why: Sequence[Sureness] = ()
    """Why each of them is drafted."""


class Grammars(Protocol):
    """The matchers of sequences, by handle. No call waits for what it starts."""

    def open(self, handle: int, grammar: str, tenant: str) -> None:
        """Begin the answer of a sequence; its first mask comes."""
        ...

    def advance(self, tokens: Iterable[tuple[int, int]], drafts: Mapping[int, Sequence[int]] = {}) -> None:
        """Take in the tokens of sequences, (handle, token) each, whose masks were there, those of one
        sequence in a row; the next masks come. `drafts`: what may follow behind them, by handle, where the
        masks behind that are to come as well; nothing where only what the grammar forces is."""
        ...

    def close(self, handle: int) -> None:
        """Forget a sequence. Nothing more comes of it."""
        ...

    def take_filled(self) -> list[Filled]:
        """The masks that came since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for the masks that are about to come, for so long at most."""
        ...


class NoGrammars:
    """Implements `Grammars` for an engine whose tokenizer matchers cannot read: every grammar fails."""

    def __init__(self) -> None:
        self._failed: list[Filled] = []

    def open(self, handle: int, grammar: str, tenant: str) -> None:
        self._failed.append(Filled(handle, b"", MatcherStanding.FAILED, 0.0))

    def advance(self, tokens: Iterable[tuple[int, int]], drafts: Mapping[int, Sequence[int]] = {}) -> None:
        assert not tokens, "no mask was there"

    def close(self, handle: int) -> None:
        """Nothing is kept of it."""

    def wait(self, seconds: float) -> None:
        """Nothing is coming."""

    def take_filled(self) -> list[Filled]:
        failed, self._failed = self._failed, []
        return failed


class Masks:
    """The sequences that follow a grammar."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars: Final[Grammars] = NoGrammars() if grammars is None else grammars
        self.sequences: Final[dict[int, Sequence_]] = {}
        """The sequences by handle, until they end. While there is none, nothing here is called."""

    def open(self, sequence: Sequence_, grammar: str) -> None:
        """Begin the answer of a sequence, which is not due until its first mask is there."""
        sequence.mask = None
        self.sequences[sequence.handle] = sequence
        self._grammars.open(sequence.handle, grammar, sequence.tenant)

    def advance(self, sampled: Iterable[tuple[int, int]], drafts: Mapping[int, Sequence[int]] = {}) -> None:
        """Take in sampled tokens, (handle, token) each, of sequences that go on, and what may follow them."""
        self._grammars.advance(sampled, drafts)

    def close(self, handle: int) -> None:
        del self.sequences[handle]
        self._grammars.close(handle)

    def take_filled(self) -> Iterator[tuple[Sequence_, FinishReason | None]]:
        """Give sequences the masks that came. Yields each of them, with the reason if it ends; the caller
        ends it before it asks for the next one."""
        for filled in self._grammars.take_filled():
            sequence = self.sequences.get(filled.handle)
            if sequence is None:
                continue  # it ended meanwhile
            sequence.grammar_s += filled.seconds
            if filled.standing is MatcherStanding.FAILED:
                yield sequence, FinishReason.GRAMMAR
            elif filled.standing is MatcherStanding.COMPLETE and not _may_end(sequence, filled.mask):
                yield sequence, FinishReason.STOP
            else:
                assert sequence.mask is None
                yield sequence, None
                sequence.mask = filled.mask
                if filled.drafts:
                    sequence.foresee(filled.drafts, filled.ahead, filled.why)

    @property
    def first_token_by(self) -> float:
        """The earliest clock at which the first token of one that lacks its first mask is of no use any
        more."""
        lacking = (s.first_token_by for s in self.sequences.values() if s.mask is None and not s.output_len)
        return min(lacking, default=math.inf)

    def of(self, rows: Sequence[Sequence_], wants: Sequence[Want], lengths: Sequence[int]) -> list[bytes]:
        """The masks of the tokens that a plan's rows sample; empty where all of them are free."""
        masks: list[bytes | None] = []
        for row, want, length in zip(rows, wants, lengths, strict=True):
            if want is Want.SAMPLE:
                masks.append(row.mask)
            elif want is Want.VERIFY:
                masks += [row.mask, *row.masks_ahead[: length - 1]] if row.mask else [b""] * length
        assert None not in masks, "a row without its mask"
        return masks if any(masks) else []  # type: ignore[return-value]

    def wait(self, step_s: float, living: int) -> None:
        """Wait for masks that are about to come (rule 1), the last step having taken `step_s`, and so many
        sequences being here."""
        part = GRACE_PART if living > len(self.sequences) else GRACE_PART_ALONE
        self._grammars.wait(min(GRACE_S_MAX, part * step_s))


def _may_end(sequence: Sequence_, mask: bytes) -> bool:
    """True if the mask allows a token that ends the sequence."""
    return any(is_allowed(mask, token) for token in sequence.sampling.stop_token_ids)


def is_single(mask: bytes) -> bool:
    """True if a mask allows one token alone. A hundred thousand take 5 us."""
    return int.from_bytes(mask, "little").bit_count() == 1


def is_allowed(mask: bytes, token: int) -> bool:
    """True if a mask that is not empty allows a token."""
    at, bit = divmod(token, 8)  # bits ascend from byte to byte in little-endian words
    return at < len(mask) and bool(mask[at] >> bit & 1)
