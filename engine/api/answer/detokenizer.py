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
"""

from __future__ import annotations

from typing import Protocol

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
        return self._release(pending[:kept_len])

    def _release(self, text: str) -> str:
        self.released_len += len(text)
        return text
