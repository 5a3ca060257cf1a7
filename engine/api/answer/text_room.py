"""The memory for the text of an answer that is held to its end.

A token's text is estimated to have `TEXT_BYTES`, as text has that models write. Yet vocabularies have tokens
of a hundred spaces, and a single emoji makes Python store four bytes for each character of a string. Nobody
knows beforehand, so what a text takes beyond its reservation is held with the tenant before it is kept.
"""

from __future__ import annotations

from typing import Final

from shared.apis.holding import CHARACTER_BYTES_MAX, Holding

STEP_LEN: Final = 64 * 1024
"""The bytes that are held at a time."""


class TextRoom:
    __slots__ = ("_chars", "_copies", "_held_len", "_holding", "_is_narrow", "_text_len")

    def __init__(self, holding: Holding, held_len: int, text_len: int, copies: int = 1) -> None:
        """`holding` holds `held_len` bytes, of which `text_len` are for the text and its `copies`."""
        self._copies: Final = copies
        self._holding: Final = holding
        self._held_len = held_len
        self._text_len = text_len
        self._chars = 0
        self._is_narrow = True

    def take(self, text: str) -> None:
        """Hold the memory of more text. Raises Overloaded where the tenant may not have as much."""
        self._chars += len(text)
        self._is_narrow = self._is_narrow and text.isascii()
        char_len = self._copies * (1 if self._is_narrow else CHARACTER_BYTES_MAX)
        lacking_len = self._chars * char_len - self._text_len
        if lacking_len > 0:
            more_len = max(lacking_len, STEP_LEN)
            self._holding.hold(self._held_len + more_len)
            self._held_len += more_len
            self._text_len += more_len
