"""A prompt as completions repeat it: its text, and where in it each token begins.

Rules:

1. A prompt that was given as text is repeated as it was given, special tokens and all.
2. `text[start:]` begins with the token, in characters of that text. A token that is a piece of a character
   begins where the character does; one that the tokenizer added (a beginning of sequence) takes no room.
3. A prompt that was given as ids is repeated as streams decode it, so that an answer goes on where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.fair_threads import Slices
from shared.prompts import span_slices
from shared.tokenizer import Tokenizer


def echoed(tokenizer: Tokenizer, text: str | None, ids: Sequence[int]) -> Slices[tuple[str, list[int]]]:
    """The prompt's text, and for each of its ids the position at which it begins. `text`: as it was given;
    None for a prompt of ids."""
    if text is not None:
        encoded, spans = yield from span_slices(tokenizer, text)
        if encoded == list(ids):
            return text, starts_of(text, spans, [tokenizer.token_bytes(token_id) for token_id in ids])
    stream, parts, starts = tokenizer.decode_stream([]), list[str](), list[int]()
    position = 0
    for token_id in ids:
        starts.append(position)
        parts.append(stream.step(token_id))
        position += len(parts[-1])
    if text is None:
        return "".join(parts), starts
    return text, [min(start, len(text)) for start in starts]


def starts_of(text: str, spans: Sequence[tuple[int, int]], tokens: Sequence[bytes]) -> list[int]:
    """From what the library says of each token, [start, end), and from what the token stands for.

    Of a byte-level token it may leave out the space that it begins with, of a space all; a token that was
    added it puts at 0, with nothing in it.
    """
    starts, end = [], 0
    for (first, last), token in zip(spans, tokens, strict=True):
        start = end if first == last else first
        while start > end and text[start - 1].isspace():
            start -= 1
        starts.append(start)
        own = token.decode(errors="ignore")
        end = max(end, last, start + len(own) * text.startswith(own, start))
    return starts
