"""Long text cut into slices where a tokenizer cuts it anyway, so that they can be encoded one by one.

    encode(whole) == encode(slice 1) + encode(slice 2) + ...

Encoding a megabyte in one call takes seconds and hundreds of megabytes, and cannot be stopped. In slices it
can be stopped between any two, and needs the memory of one slice.

Theory. A byte-pair encoding merges within pre-tokens only, so it is enough to cut at a place where a
pre-token ends in any context. Two kinds of tokenizer are known here:

- *byte-level*, with pre-tokenizers that `shared.text.words` knows (GPT-2, Llama 3, Qwen): a run of letters or
  digits ends at white space or at CJK punctuation, and what follows is matched without looking back;
- *SentencePiece-like* (Llama 2, Mistral): there are no pre-tokens, spaces are spelt U+2581, and no token of
  the vocabulary has one behind another character, so no merge crosses from a letter into a space.

The cut is behind a letter or digit and before such a character. An added token must not be cut in two: a
tokenizer with an added token whose text could hold a cut counts as unknown.

Rules

1. `Slicer.of` returns None for a tokenizer whose parts are not all known: it is given text in one piece, of
   `WHOLE_LEN_MAX` characters at most.
2. A run of letters longer than `RUN_LEN_MAX` has no cut, and is too long for one call. It is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Final, Self

import tokenizers

from shared.text.words import cuts_words
from shared.wire.errors import InvalidRequest

SLICE_LEN: Final = 16 * 1024
"""Characters of a slice, which takes some milliseconds to encode."""
RUN_LEN_MAX: Final = 256 * 1024
"""The most characters without a place to cut."""
WHOLE_LEN_MAX: Final = 1024 * 1024
"""The most characters of a text for a tokenizer that is not known here, which takes it in one call."""

_SPACE: Final = "\u2581"
_CJK: Final = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
_BYTE_LEVEL_CUT: Final = re.compile(rf"(?<=[^\W_])(?=[\s{_CJK}])")
_SENTENCE_PIECE_CUT: Final = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
"""Exactly one space: the slice behind it begins with a letter, and the tokenizer puts the space back."""


class Slicer:
    """The cuts of text for one tokenizer."""

    __slots__ = ("_cut", "_keeps_space", "longest")

    def __init__(self, cut: re.Pattern[str], *, keeps_space: bool, longest: int) -> None:
        self._cut = cut
        self._keeps_space = keeps_space
        self.longest = longest
        """Characters of the longest text that can be one token, before it is normalized."""

    @classmethod
    def of(cls, raw: tokenizers.Tokenizer, spec: dict[str, Any], vocabulary: Collection[str]) -> Self | None:
        """The slicer for a tokenizer; None where cuts are not certain. `spec` is the tokenizer.json that
        `raw` was made of, and `vocabulary` has all tokens, those that were added included."""
        model = spec["model"]
        if model.get("type") != "BPE" or model.get("dropout"):
            return None
        added = {token.content for token in raw.get_added_tokens_decoder().values()}
        longest = max(map(len, vocabulary), default=1)
        if cuts_words(spec.get("pre_tokenizer") or {}):
            normalizer = (spec.get("normalizer") or {"type": None}).get("type", "?")  # older files have none
            if normalizer not in (None, "NFC") or any(map(_BYTE_LEVEL_CUT.search, added)):
                return None
            composed = 3 if normalizer == "NFC" else 1  # the letters of a Hangul syllable, which NFC composes
            return cls(_BYTE_LEVEL_CUT, keeps_space=True, longest=longest * composed)
        if (keeps_space := _sentence_piece(spec)) is None:
            return None
        if any(token[:1].isalnum() or _SENTENCE_PIECE_CUT.search(token) for token in added):
            return None
        inner = [token for token in vocabulary if _SPACE in token.lstrip(_SPACE)]
        if any(token not in added or raw.model.token_to_id(token) is not None for token in inner):
            return None
        return cls(_SENTENCE_PIECE_CUT, keeps_space=keeps_space, longest=longest)

    def slices(self, text: str, slice_len: int = SLICE_LEN, run_len_max: int = RUN_LEN_MAX) -> Iterator[str]:
        """The slices of a text. Raises InvalidRequest, after the slices before it, where a run without a cut
        is too long."""
        assert slice_len >= 1
        start = 0
        while len(text) - start > slice_len:
            at = self._next_cut(text, start + slice_len, start + run_len_max)
            if at is None:
                break
            yield text[start:at]
            start = at if self._keeps_space else at + 1
        if len(text) - start > run_len_max:
            raise InvalidRequest(f"The prompt has more than {run_len_max} characters without a word's end.")
        yield text[start:]

    def _next_cut(self, text: str, after: int, before: int) -> int | None:
        found = self._cut.search(text, after, before)
        return None if found is None else found.start()


def _sentence_piece(spec: dict[str, Any]) -> bool | None:
    """True if a slice keeps the space that it begins with. None for a tokenizer of another kind."""
    normalizer, pre = spec.get("normalizer"), spec.get("pre_tokenizer")
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    match normalizer, pre:
        case {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": prepended}, last]}, None:
            return False if prepended == _SPACE and last == replaced else None
        case None, {"type": "Metaspace", "replacement": replacement, "split": False} if replacement == _SPACE:
            scheme = pre.get("prepend_scheme") if isinstance(pre, dict) else None
            return {"always": False, "first": False, "never": True}.get(scheme or "")
    return None
