"""Token ids of short ASCII prompts, word by word from a cache.

A byte-level BPE encodes every word that its pre-tokenizer cuts off by itself. So a text's ids are those of
its words in a row, and words come again: they are looked up. The library caches the ids of words too, and
still spends a microsecond on each for its offsets: 22 us for a prompt of 27 tokens, 7 here.

Rules:

1. The ids are those that the library would return (tests/shared/text/test_words.py compares them). Where that
   is not certain, `encode` returns None, and the library is called: for text that is long or not ASCII, where
   letters and digits are more than `A-Za-z0-9`; and for every tokenizer with a part that is not known here.
2. The cache is bounded, in the number and in the length of words, and keeps those that came last: words that
   nobody sends again take no place for long.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Self

import tokenizers

TEXT_LEN_MAX: Final = 4096
"""Characters of the longest text. Longer ones go to threads, where the library lets others run meanwhile."""
KEPT_MAX: Final = 32 * 1024
"""The most words in the cache, and the most pieces."""
KEPT_LEN_MAX: Final = 24

Split = Callable[[str], list[str]]
"""A function that splits a text into pieces, some of them empty."""
Splits = tuple[Split, Split]
"""The two steps of a pre-tokenizer: the first isolates characters, and the second cuts words off what is
between them. Neither looks beyond the piece that it is given."""


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 bytes stand for themselves, the others for U+0100
    onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_SPELLING: Final = {byte: char for char, byte in byte_level_alphabet().items()}
"""The alphabet for `str.translate`: right for ASCII, whose characters are bytes."""

_CASELESS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END: Final = r" ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r" [A-Za-z]++|[A-Za-z]++| ?[0-9]++|'(?:s|t|re|ve|m|ll|d)| ?[^\sA-Za-z0-9]++|\s+(?!\S)|\s+"
"""GPT-2's own pattern tries contractions first. No letter or digit begins one, so those, which are more, go
first here."""
_WHOLE: Final = r"(?s:.+)"
_IN_ASCII: Final = {
    "\n": "\n",
    # Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": rf"{_CASELESS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|{_END}",
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": rf"{_CASELESS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}|{_END}",
}
"""Patterns of tokenizers, with an equivalent for ASCII text. None has a group, so that `split` may add
one."""
_WORDS: Final = frozenset(_IN_ASCII) - {"\n"}
"""The patterns that cut words apart."""
_FLAGS: Final = ("lstrip", "rstrip", "single_word", "normalized")
"""Flags of an added token that is matched in other ways than character by character."""


class WordEncoder:
    """An encoder with the results of `raw.encode(text, add_special_tokens=False)`."""

    __slots__ = ("_cut", "_isolate", "_pieces", "_raw", "_split_added", "_words")

    def __init__(self, raw: tokenizers.Tokenizer, added: dict[str, int], splits: Splits) -> None:
        self._raw = raw
        self._pieces = _Encodings({token: [token_id] for token, token_id in added.items()})
        """The ids of pieces: added tokens, and the short text between them, such as what templates write
        around messages."""
        self._words = _Encodings({})
        longest_first = sorted(added, key=len, reverse=True)
        self._split_added = _split("|".join(map(re.escape, longest_first)) or "(?!)")
        self._isolate, self._cut = splits

    @classmethod
    def of(cls, raw: tokenizers.Tokenizer, spec: dict[str, Any]) -> Self | None:
        """The encoder for a tokenizer; None for one that is not known here. `spec` is the tokenizer.json that
        `raw` was made of."""
        model = spec["model"]
        added = raw.get_added_tokens_decoder()  # from the library, which the file's list may contradict
        changes_ascii = (spec.get("normalizer") or {"type": "NFC"}).get("type") != "NFC"
        plain_tokens = not any(getattr(token, flag) for token in added.values() for flag in _FLAGS)
        splits = _splits(spec.get("pre_tokenizer") or {})
        if model.get("type") != "BPE" or model.get("dropout") or changes_ascii or not plain_tokens:
            return None
        if splits is None or not _keeps_text(spec.get("post_processor") or {}):
            return None
        return cls(raw, {token.content: token_id for token_id, token in added.items()}, splits)

    def encode(self, text: str) -> list[int] | None:
        if len(text) > TEXT_LEN_MAX or not text.isascii():
            return None
        ids: list[int] = []
        for piece in self._split_added(text):
            if piece:
                ids += self._pieces.get(piece) or self._piece_ids(piece)
        return ids

    def _piece_ids(self, piece: str) -> list[int]:
        if (ids := self._pieces.recall(piece)) is not None:
            return ids
        ids = []
        for part in self._isolate(piece):
            for word in self._cut(part):
                ids += self._words.get(word) or self._word_ids(word)
        return self._pieces.keep(piece, ids)

    def _word_ids(self, word: str) -> list[int]:
        if (ids := self._words.recall(word)) is not None:
            return ids
        tokens = self._raw.model.tokenize(word.translate(_SPELLING))
        return self._words.keep(word, [token.id for token in tokens])


class _Encodings(dict[str, list[int]]):
    """Encodings by text, in two generations: the dict has the young ones, and what is not found in it may be
    recalled. When there are half as many as may be kept, those are the old ones, and what was old is gone."""

    __slots__ = ("_fixed", "_old")

    def __init__(self, fixed: dict[str, list[int]]) -> None:
        """`fixed` is always kept, beside the others."""
        super().__init__(fixed)
        self._fixed = fixed
        self._old: dict[str, list[int]] = {}

    def recall(self, text: str) -> list[int] | None:
        """The encoding of a text that is not young, which makes it young again. None where there is none."""
        ids = self._old.get(text)
        return None if ids is None else self.keep(text, ids)

    def keep(self, text: str, ids: list[int]) -> list[int]:
        """Keep `ids` as the encoding of a text, unless that is long. Returns `ids`."""
        if len(text) <= KEPT_LEN_MAX:
            if len(self) - len(self._fixed) >= KEPT_MAX // 2:
                self._old = dict(self)
                self.clear()
                self.update(self._fixed)
            self[text] = ids
        return ids


def _split(pattern: str) -> Split:
    """A function that splits a text into the matches of `pattern` and the text between them."""
    return re.compile(f"({pattern})", re.ASCII).split


def _cut(pattern: str) -> Split:
    """`_split` for a pattern that leaves nothing between its matches, none of which is empty."""
    return re.compile(pattern, re.ASCII).findall


def _keeps_text(post: dict[str, Any]) -> bool:
    """True if the post-processor, without special tokens, leaves a text's ids as they are, and once."""
    match post:
        case {"type": "Sequence", "processors": processors}:
            return all(map(_keeps_text, processors))
        case {"type": "TemplateProcessing", "single": pieces}:
            return sum("Sequence" in piece for piece in pieces) == 1
    return not post or post.get("type") in ("ByteLevel", "RobertaProcessing", "BertProcessing")


def cuts_words(pre: dict[str, Any]) -> bool:
    """True if `pre` is a byte-level pre-tokenizer that is known here and cuts words apart."""
    return _splits(pre) is not None and any(
        stage.get("use_regex", True) if stage["type"] == "ByteLevel" else _regex_of(stage) in _WORDS
        for stage in _stages(pre)
    )


def _stages(pre: dict[str, Any]) -> list[dict[str, Any]]:
    return pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]


def _regex_of(stage: dict[str, Any]) -> str | None:
    pattern = stage.get("pattern")
    return pattern.get("Regex") if isinstance(pattern, dict) else None


def _splits(pre: dict[str, Any]) -> Splits | None:
    """The steps of a byte-level pre-tokenizer. None if one of its stages is not known here, or comes after
    the one that cuts."""
    stages = _stages(pre)
    if not stages or stages[-1].get("type") != "ByteLevel":
        return None
    isolated: list[str] = []
    cut: str | None = None
    for at, stage in enumerate(stages, 1):
        match stage:
            case {"type": "Digits", "individual_digits": bool(individual)} if cut is None:
                isolated.append("[0-9]" if individual else "[0-9]+")
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} if (
                regex in _IN_ASCII and cut is None
            ):
                if regex in _WORDS:
                    cut = _IN_ASCII[regex]
                else:
                    isolated.append(_IN_ASCII[regex])
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False} if at == len(stages):
                pass
            case {"type": "ByteLevel", "add_prefix_space": False} if at == len(stages) and cut is None:
                cut = _GPT2
            case _:
                return None
    # Sorted, so that a digit alone is tried before several.
    return _split("|".join(sorted(isolated)) or "(?!)"), _cut(cut or _WHOLE)
