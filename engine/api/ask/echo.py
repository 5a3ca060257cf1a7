"""A prompt as a completion repeats it (`echo`): its text, and where in the text each token begins.

Rules:

1. A prompt that was given as text is repeated exactly as it was given, special tokens included.
2. `text[start:]` begins with the token; positions count characters of that text. A token that is only part of
   a character begins where the character begins, or the U+FFFD of one that is never finished; one that the
   tokenizer added (such as a beginning of sequence) has no characters.
3. A prompt that was given as ids is decoded in the way that streams are, so that the answer continues where
   the prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.fairness.fair_threads import Slices
from shared.text.prompts import span_slices
from shared.text.tokenizer import Tokenizer


def echoed(tokenizer: Tokenizer, text: str | None, ids: Sequence[int]) -> Slices[tuple[str, list[int]]]:
    """The prompt's text, and for each of its ids the position of its first character. `text` is the
    prompt as it was given; None for a prompt of ids."""
    if text is not None:
        encoded, spans = yield from span_slices(tokenizer, text)
        if encoded == list(ids):
            return text, starts_of(text, spans, [tokenizer.token_bytes(token_id) for token_id in ids])
    stream, parts, starts = tokenizer.decode_stream([]), list[str](), list[int]()
    position = 0
    for token_id in ids:
        lost_len = stream.lost_len
        parts.append(stream.step(token_id))
        starts.append(position + stream.lost_len - lost_len)
        position += len(parts[-1])
    if text is None:
        return "".join(parts), starts
    return text, [min(start, len(text)) for start in starts]


def starts_of(text: str, spans: Sequence[tuple[int, int]], tokens: Sequence[bytes]) -> list[int]:
    """The position of each token's first character in `text`.

    `spans` are the tokenizers library's [start, end) per token, and `tokens` the bytes that each token
    stands for. The library's spans are corrected: for a byte-level token they may leave out the space
    that it begins with, for a token of only spaces all of it, and a token that was added has the empty
    span at 0.
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
