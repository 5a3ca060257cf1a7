"""From token ids to text that may leave, one token at a time.

Two things hold text back, and nothing else does:

1. *A character that is not whole.* Byte-level and byte-fallback tokens carry pieces of characters.
   The decode stream gives text only up to the last whole character; what is unfinished when the
   sequence ends is dropped.
2. *A stop string that may have begun.* Exactly the longest suffix that is the beginning of some stop
   string is held. When a stop string completes, the text ends before it; when the sequence ends
   otherwise, what was held is text after all.

Positions are counted in characters of the sequence's decoded text, so that tokens can be matched with
the text they made: token i made the characters `[start, end)`, an unfinished character belongs to the
token that finishes it. One that none finishes is a U+FFFD once that is known. It belongs to the tokens that
began it, and stands before the `start` of the token with which it comes. A token that is no more than part
of a character ends where that character will.

Rules for stop strings, which make the result independent of how the text was cut into tokens: the
stop string that completes first wins; among those that complete on the same character, the longest.
Text made by the first `min_tokens` tokens takes no part in any match.

Where a machine reads the answer (`PartsDetokenizer`), it holds back what may be a marker, and makes parts of
the text, which are counted as if they were written one behind the other. Stop strings are looked for in each
text part alone: none spans reasoning or a call. What the machine held back belongs to the token that releases
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.api.answer.parts import Part, PartKind
from engine.api.answer.stop_strings import StopMatcher, StopStrings


class TextDecoder(Protocol):
    """The decoder of one sequence: takes a token id, returns the characters that are complete with it."""

    lost_len: int
    """The number of characters so far that belong to earlier tokens than the one with which they came."""

    @property
    def is_unfinished(self) -> bool:
        """True if the tokens so far end within a character."""
        ...

    def step(self, token_id: int) -> str: ...


class PartsMachine(Protocol):
    """The reader of one sequence's answer: takes tokens with the text that came with them, returns parts."""

    @property
    def reasoning_tokens(self) -> int: ...

    @property
    def calls(self) -> int: ...

    def feed(self, token_id: int, text: str) -> Sequence[Part]: ...

    def finish(self) -> Sequence[Part]: ...


class Detokenizer:
    __slots__ = (
        "_decoder",
        "_held",
        "_matcher",
        "_min_tokens",
        "_tokens",
        "decoded_len",
        "released_len",
        "stopped",
        "stopped_by",
    )

    def __init__(self, decoder: TextDecoder, stops: StopStrings | None = None, min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._matcher = None if stops is None else StopMatcher(stops)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""
        self.decoded_len = 0
        """Number of characters that were decoded, those that are held back included."""
        self.released_len = 0
        """Number of characters that were released."""
        self.stopped = False
        """True if a stop string has completed. The text then ends at `released_len`, and further
        tokens do not count."""
        self.stopped_by = ""
        """The stop string at which the text ended; empty where none has ended it."""

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens so far that are reasoning."""
        return 0

    @property
    def calls(self) -> int:
        """Number of calls that have begun."""
        return 0

    def push(self, token_id: int) -> str:
        """Take a token. Returns the text that may be sent now."""
        assert not self.stopped
        self._tokens += 1
        return self._take(self._decoder.step(token_id))

    def push_placed(self, token_id: int) -> tuple[str, int, int]:
        """Take a token. Returns the text that may be sent now, and the start and end of the token's own
        text."""
        start = self.decoded_len - self._decoder.lost_len
        text = self.push(token_id)
        start += self._decoder.lost_len
        return text, start, max(self.decoded_len, start + self._decoder.is_unfinished)

    def finish(self) -> str:
        """The text that is still held back, for a sequence that ended without a stop string."""
        assert not self.stopped
        held, self._held = self._held, ""
        return self._release(held)

    def _take(self, text: str) -> str:
        self.decoded_len += len(text)
        if self._matcher is None or self._tokens <= self._min_tokens:
            return self._release(text)
        pending = self._held + text
        match = self._matcher.feed(text)
        if match is None:
            kept_len = len(pending) - self._matcher.held_len
            self._held = pending[kept_len:]
        else:
            taken, stop_len = match
            kept_len = len(self._held) + taken - stop_len
            self.stopped, self._held = True, ""
            self.stopped_by = pending[kept_len : kept_len + stop_len]
        return self._release(pending[:kept_len])

    def _release(self, text: str) -> str:
        self.released_len += len(text)
        return text


class PartsDetokenizer(Detokenizer):
    """A detokenizer of an answer that a machine reads. The text that `push` and `finish` return is that of
    all parts; `cut` makes parts of it."""

    __slots__ = ("_machine", "_runs", "_stops")

    def __init__(
        self,
        decoder: TextDecoder,
        machine: PartsMachine,
        stops: StopStrings | None = None,
        min_tokens: int = 0,
    ) -> None:
        super().__init__(decoder, stops, min_tokens)
        self._machine = machine
        self._stops = stops
        self._runs: list[tuple[Part, int]] = []
        """Runs of text that were released since the last cut: a part for its kind, and their length."""

    @property
    def reasoning_tokens(self) -> int:
        return self._machine.reasoning_tokens

    @property
    def calls(self) -> int:
        return self._machine.calls

    def push(self, token_id: int) -> str:
        assert not self.stopped
        self._tokens += 1
        return self._take_parts(self._machine.feed(token_id, self._decoder.step(token_id)))

    def push_placed(self, token_id: int) -> tuple[str, int, int]:
        start = self.decoded_len
        text = self.push(token_id)
        return text, start, self.decoded_len

    def finish(self) -> str:
        text = self._take_parts(self._machine.finish())
        return text if self.stopped else text + self._let_go()

    def cut(self, text: str) -> list[Part]:
        """The parts of `text`, which is all that was released since the last call."""
        runs, self._runs = self._runs, []
        parts, at = [], 0
        for like, length in runs:
            parts.append(like._replace(text=text[at : at + length]))
            at += length
        assert at == len(text)
        return parts

    def _take_parts(self, parts: Sequence[Part]) -> str:
        released = []
        for part in parts:
            if part.kind is PartKind.TEXT:
                text = self._take(part.text)
                self._note(part, text)
                released.append(text)
                if self.stopped:
                    break
            else:
                released.append(self._let_go())
                self.decoded_len += len(part.text)
                released.append(self._release(part.text))
                self._note(part, part.text)
        return "".join(released)

    def _let_go(self) -> str:
        """The text that was held back and is no stop string, since the text part ends here."""
        held = super().finish()
        self._note(_TEXT, held)
        if self._stops is not None:
            self._matcher = StopMatcher(self._stops)
        return held

    def _note(self, part: Part, text: str) -> None:
        if not text:
            return
        if self._runs and part.kind is not PartKind.CALL:
            last, length = self._runs[-1]
            if (last.kind, last.call) == (part.kind, part.call):
                self._runs[-1] = last, length + len(text)
                return
        self._runs.append((part, len(text)))


_TEXT = Part("")
