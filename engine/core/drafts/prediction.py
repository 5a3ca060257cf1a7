"""Drafts that the caller sent: what it expects the answer to be (`shared.apis.prediction`), followed token by
token.

While the answer goes on as predicted, the draft is what stands next. Where it does not, the place is lost,
and is looked for by the newest tokens, as `engine.core.drafts.ngrams` does in the sequence itself: the next
place behind the one that was lost, where they stand there, else one before it. So an edit in the middle of a
file costs the tokens of the edit, and a few more. What the sequence's own tokens say is looked up beside it,
and of the two that is drafted which is right more often (`engine.core.drafts.price.Acceptance`).

Rules

1. Of a prediction no more tokens are charged than it has: once as many were verified and wrong, nothing more
   is drafted from it. They are reserved beforehand (`gateway.admission.tokens`).
2. Places are put in once the first is lost, from the end to the beginning, by as many tokens at a time as a
   plan reads (`engine.core.step.drafting`). A search looks at `WALK_MAX` places at most for each length.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import Final, NamedTuple

from engine.core.drafts.drafter import NGramDrafts, Proposal, before_end
from engine.core.drafts.ngrams import LEVELS, LONG, PLACE_LEN, places_for
from engine.core.drafts.price import Acceptance

WALK_MAX: Final = 32
PAUSE_MAX: Final = 4
"""The most tokens that pass from one look that finds nothing to the next."""


class FoundPlace(NamedTuple):
    """Where the newest tokens stand in the prediction."""

    at: int
    """The token behind them."""
    matched: int
    """The number of them."""


class Places:
    """The n-grams of tokens that are all there. Those that share a place in a table are a chain, which begins
    with the earliest that was not passed yet."""

    __slots__ = ("_heads", "_later", "_mask", "_tokens", "unread")

    def __init__(self, tokens: array[int]) -> None:
        heads = places_for(len(tokens))
        self._tokens: Final = tokens
        self._mask: Final = heads - 1
        self._heads: Final = [array("I", bytes(PLACE_LEN * heads)) for _ in LEVELS]
        self._later: Final = [array("I", bytes(PLACE_LEN * len(tokens))) for _ in LEVELS]
        self.unread = len(tokens)
        """The leading tokens that are not put in yet."""

    @staticmethod
    def size_of(length: int) -> int:
        """Bytes of the tables for so many tokens."""
        return len(LEVELS) * PLACE_LEN * (places_for(length) + length)

    def read(self, most: int) -> int:
        """Put in the next tokens, `most` of them at most. Returns their number."""
        end = self.unread
        self.unread = start = max(0, end - most)
        mask = self._mask
        for n, heads, later in zip(LEVELS, self._heads, self._later, strict=True):
            first = max(start, n)
            if first < end:
                own = self._tokens[first - n : end - 1]
                keys = [*map(hash, zip(*(islice(own, i, None) for i in range(n))))]  # noqa: B905
                for at in range(end - 1, first - 1, -1):
                    key = keys[at - first] & mask
                    later[at], heads[key] = heads[key], at
        return end - start

    def find(self, tokens: array[int], behind: int) -> FoundPlace | None:
        """Where the newest of these tokens stand: behind that place, else before it. All must be read."""
        assert not self.unread
        for n, heads, later in zip(LEVELS, self._heads, self._later, strict=True):
            newest = tokens[-n:]
            if len(newest) < n:
                continue
            key = hash(tuple(newest)) & self._mask
            at = heads[key]
            for _ in range(WALK_MAX):
                if not (at < behind and later[at]):
                    break
                at = later[at]
            heads[key] = at
            for _ in range(WALK_MAX):
                if not at:
                    break
                if self._tokens[at - n : at] == newest:
                    return FoundPlace(at, n)
                at = later[at]
        return None


class PredictionDrafts(NGramDrafts):
    """Drafts by what the caller predicts, too."""

    __slots__ = ("_at", "_behind", "_followed", "_left", "_places", "_prediction", "_seen_len")

    def __init__(self, prediction: array[int], prompt_len: int, len_max: int, stops: tuple[int, ...]) -> None:
        super().__init__(len_max, stops)
        self._prediction: Final = prediction
        self._places: Places | None = None
        self._at: int | None = 0
        """The token of the prediction that is expected next; None while its place is lost."""
        self._behind = 0
        """The place that was lost last."""
        self._followed = LONG
        """The newest tokens that stand before that, as far as it was looked at. The beginning is a caller's
        own word."""
        self._seen_len = prompt_len
        """The sequence's tokens along which it was followed."""
        self._left = len(prediction)
        """The number of its tokens that may still be wrong (rule 1)."""

    @property
    def size(self) -> int:
        return super().size + Places.size_of(len(self._prediction))

    @property
    def read_len(self) -> int:
        places = self._places
        return super().read_len + (0 if places is None else len(self._prediction) - places.unread)

    @property
    def has_read(self) -> bool:
        return super().has_read and (self._places is None or not self._places.unread)

    @property
    def pause(self) -> int:
        return min(super().pause, PAUSE_MAX) if self._left else super().pause

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        before = self.read_len
        predicted = self._foretold(tokens, most, read_max) if self._left else None
        own = super().look(tokens, most, read_max - (self.read_len - before))
        if predicted is None or (own is not None and own.chance > predicted.chance):
            return own
        return predicted

    def _foretold(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        """A proposal of the prediction's next tokens."""
        self._follow(tokens)
        if self._at is None:
            self._seek(tokens, read_max)
        if self._at is None:
            return None
        drafts = self._prediction[self._at : self._at + min(most, self._left)].tolist()
        if not (drafts := before_end(drafts, self._stops)):
            return None
        kind = Acceptance.predicted_kind(self._followed)
        chance, is_probe = self.acceptance.chance(kind), self.acceptance.is_probing
        return Proposal(drafts, chance, kind, is_probe, len(drafts))

    def _follow(self, tokens: array[int]) -> None:
        """Go on along the tokens that came since the last look."""
        came, self._seen_len = tokens[self._seen_len :], len(tokens)
        if (at := self._at) is None:
            return
        end = at + len(came)
        if self._prediction[at:end] == came:
            self._at, self._followed = end, min(LONG, self._followed + len(came))
        else:
            self._at, self._behind = None, at

    def _seek(self, tokens: array[int], read_max: int) -> None:
        """Look for the place behind the newest tokens."""
        if self._places is None:
            self._places = Places(self._prediction)
        if self._places.unread:
            self._places.read(read_max)
        if not self._places.unread and (found := self._places.find(tokens, self._behind)) is not None:
            self._at, self._followed = found

    def learn(self, drafts: int, right: int) -> int:
        predicted = super().learn(drafts, right)
        self._left -= max(0, predicted - right)
        return predicted
