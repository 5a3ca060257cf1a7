"""The text of tokens: the bytes of a single one, and the text of an answer token by token.

Rules of a `DecodeStream`:

1. Text comes in whole characters. Whether a character is whole follows from the tokens' bytes: U+FFFD at the
   end of decoded text may be one that the model wrote, or stand for one that is not finished.
2. Bytes that are no character, and never will be, become U+FFFD as soon as that is known. A character that is
   not finished when the answer ends is left out.
   So text may begin with a U+FFFD for the bytes of tokens before the one with which it comes. `lost_len`
   counts these.
3. A prompt may end within a character. An answer that finishes it has the whole character; where the answer
   does not finish it, its first bytes belong to the prompt.

In a byte-level vocabulary every token is bytes, and text is their UTF-8. In one that falls back to bytes some
tokens are a byte each; the text of all others depends on what stands before them (a space, or none), and the
library says what it is, as it does in any other vocabulary.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from shared.text.words import byte_level_alphabet

PROMPT_TAIL_LEN: Final = 8
"""The number of the prompt's last tokens with text that the first tokens of an answer are decoded after."""
PROMPT_TAIL_SEARCHED: Final = 256
"""The number of the prompt's last tokens among which those are looked for. There are many where a prompt ends
with special tokens."""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE_OF: Final = byte_level_alphabet()


class Decoder(Protocol):
    """The part of a `Tokenizer` that a stream uses."""

    def is_textless(self, token_id: int, skip_special_tokens: bool) -> bool:
        """True if decoding passes over this token: a special one, or an id without a token."""
        ...

    def piece_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be a piece of a character. None for a token whose text is whole."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class DecodeStream:
    """The text that follows a prompt, token by token."""

    __slots__ = (
        "_context",
        "_decoder",
        "_is_first",
        "_is_prompts",
        "_skip_special_tokens",
        "_unfinished",
        "lost_len",
    )

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        """The last `PROMPT_TAIL_SEARCHED` of `prompt_ids` are enough."""
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        last = (
            token_id
            for token_id in reversed(prompt_ids[-PROMPT_TAIL_SEARCHED:])
            if not decoder.is_textless(token_id, skip_special_tokens)
        )
        tail = [*islice(last, PROMPT_TAIL_LEN)][::-1]
        pieces = [decoder.piece_bytes(token_id) for token_id in tail]
        last_whole = max((at for at, piece in enumerate(pieces) if piece is None), default=-1)
        self._context = tail[: last_whole + 1]
        """The tokens that the library is to decode the next one after."""
        self._is_first = not tail
        """True if there is no text before the next token."""
        begun = b"".join(piece for piece in pieces[last_whole + 1 :] if piece is not None)
        self._unfinished = _decoded(begun)[1]
        """The first bytes of a character that is not finished."""
        self._is_prompts = bool(self._unfinished)
        """True if the unfinished character began in the prompt."""
        self.lost_len = 0
        """The number of characters so far that stand for bytes of earlier tokens than the one with which they
        came: no token finished them."""

    @property
    def is_unfinished(self) -> bool:
        """True if the tokens so far end within a character."""
        return bool(self._unfinished)

    def step(self, token_id: int) -> str:
        """The whole characters that this token completes."""
        if self._decoder.is_textless(token_id, self._skip_special_tokens):
            return ""
        piece = self._decoder.piece_bytes(token_id)
        if piece is None:
            return self._whole(token_id)
        self._is_first = False
        unfinished = self._unfinished
        data = unfinished + piece
        text, self._unfinished = _decoded(data)
        if unfinished and text and (self._is_prompts or text[0] == REPLACEMENT):
            return self._behind(text, data)
        return text

    def _behind(self, text: str, data: bytes) -> str:
        """The text of `data`, which began with the bytes of an unfinished character."""
        is_finished = _begins_well(data)
        if not self._is_prompts:
            self.lost_len += not is_finished
            return text
        self._is_prompts = False
        return text if is_finished else text[1:]

    def _whole(self, token_id: int) -> str:
        lost = REPLACEMENT if self._unfinished and not self._is_prompts else ""
        self.lost_len += len(lost)
        self._unfinished, self._is_prompts = b"", False
        if not self._context and not self._is_first:
            self._context = [token_id]  # any token will do, so that this one is not the first
        before = self._decode(self._context)
        text = self._decode([*self._context, token_id])
        self._context, self._is_first = [token_id], False
        return lost + (text[len(before) :] if text.startswith(before) else self._decode([token_id]))

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, self._skip_special_tokens)


def _decoded(data: bytes) -> tuple[str, bytes]:
    """The characters in `data`, with U+FFFD for invalid bytes; and its last bytes where they begin a
    character."""
    text, taken = codecs.utf_8_decode(data, "replace", False)
    rest = data[taken:]
    return (text + REPLACEMENT * len(rest), b"") if _is_surrogate(rest) else (text, rest)


def _is_surrogate(data: bytes) -> bool:
    """True if `data` begins with half of a surrogate pair, which is no character: Python's decoder would wait
    for its end."""
    return b"\xed\xa0" <= data < b"\xee"


def _begins_well(data: bytes) -> bool:
    """True if the first bytes are a character, or may become one."""
    if _is_surrogate(data):
        return False
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError as error:
        return error.start > 0
    return True


def piece_spelling(spec: Mapping[str, Any]) -> Callable[[str], bytes | None]:
    """The spelling of bytes in the vocabulary of this tokenizer.json: a function from a token's name to its
    bytes, or to None where its text is whole."""
    decoder = json.dumps(spec.get("decoder"))
    if '"ByteLevel"' in decoder:
        return _byte_level_bytes
    return _fallback_byte if '"ByteFallback"' in decoder else dict[str, bytes]().get


def whole_spelling(spec: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The spelling of tokens whose text is whole: a function from a token's name to the text of that token
    alone, as bytes."""
    decoder = json.dumps(spec.get("decoder"))
    if '"ByteFallback"' in decoder or '"Metaspace"' in decoder or "\\u2581" in decoder:
        return lambda piece: piece.replace("\u2581", " ").encode()
    return lambda piece: piece.encode()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:  # outside the alphabet it stands for itself, as in the library's decoder
        return piece.encode()


def _fallback_byte(piece: str) -> bytes | None:
    """The byte of a token such as `<0x41>`. None for any other token."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return None
    return None
