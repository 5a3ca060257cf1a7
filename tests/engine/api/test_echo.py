"""Positions of prompt tokens: the text from there on begins with the token."""

from __future__ import annotations

import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from engine.api.ask import echo
from engine.api.ask.echo import starts_of
from shared.text import prompts, text_slices
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from tests.shared.text.test_prompts import finish
from tests.shared.text.toy_tokenizers import HARD, byte_level, sentencepiece, with_bos


def echoed(tokenizer: Tokenizer, text: str | None, ids: list[int]) -> tuple[str, list[int]]:
    found: tuple[str, list[int]] = finish(echo.echoed(tokenizer, text, ids))[0]
    return found


def loaded(made: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(TokenizerBundle(tokenizer_json=made.to_str()))


def trimming() -> tokenizers.Tokenizer:
    """As GPT-2's: the library says of a token that it begins behind its space."""
    made = byte_level()
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def ending() -> tokenizers.Tokenizer:
    made = byte_level()
    special = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return made


TOKENIZERS = {
    "byte-level": loaded(with_bos(byte_level())),
    "sentencepiece": loaded(with_bos(sentencepiece())),
    "trimmed spans, NFC": loaded(trimming()),
    "an end behind": loaded(ending()),
}
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
TEXTS = ["the water opens", "<|im_start|>hi the<|im_end|>  you", " a\n b", HARD, "<s>x</s>", ""]


def check(tokenizer: Tokenizer, text: str, found: str, starts: list[int]) -> None:
    """Every token whose text is whole stands where it is said to."""
    ids = tokenizer.encode(text)
    assert found == text
    assert len(starts) == len(ids)
    assert starts == sorted(starts)
    assert all(0 <= start <= len(text) for start in starts)
    for token_id, start, end in zip(ids, starts, [*starts, len(text)][1:], strict=bool(ids)):
        own = tokenizer.token_bytes(token_id).decode(errors="ignore")
        rest = text[start:]  # a tokenizer either composes characters or leaves them as they are
        is_whole = own.encode() == tokenizer.token_bytes(token_id)
        if is_whole and start < end:
            is_own = own, own.removeprefix(" ")  # the space before a first word is not in the text
            assert rest.startswith(is_own) or unicodedata.normalize("NFC", rest).startswith(is_own)


@ALL
@pytest.mark.parametrize("text", TEXTS)
def test_positions_are_in_the_text_as_it_was_given(tokenizer: Tokenizer, text: str) -> None:
    check(tokenizer, text, *echoed(tokenizer, text, tokenizer.encode(text)))


@ALL
@given(text=st.text(max_size=20))
def test_whatever_the_text(tokenizer: Tokenizer, text: str) -> None:
    check(tokenizer, text, *echoed(tokenizer, text, tokenizer.encode(text)))


def test_special_tokens_of_the_text_have_their_room() -> None:
    """As OpenAI has it: each is where it stands, and what was added in front is nowhere."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("<|im_start|>hi")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b"<|im_start|>", b"h", b"i"]
    assert echoed(tokenizer, "<|im_start|>hi", ids) == ("<|im_start|>hi", [0, 0, 12, 13])


def test_text_that_is_normalised_is_counted_as_it_was() -> None:
    tokenizer = TOKENIZERS["trimmed spans, NFC"]
    text = unicodedata.normalize("NFD", "né é") + " the"
    ids = tokenizer.encode(text)
    _, starts = echoed(tokenizer, text, ids)
    assert " the" in [text[start:] for start in starts]
    assert starts[:2] == [0, 1]


def test_a_space_belongs_to_the_token_that_begins_with_it() -> None:
    tokenizer = TOKENIZERS["trimmed spans, NFC"]
    ids = tokenizer.encode("the water")
    (at,) = (i for i, token_id in enumerate(ids) if tokenizer.token_bytes(token_id).startswith(b" "))
    assert tokenizer.encode_spans("the water")[1][at][0] == 4
    assert echoed(tokenizer, "the water", ids)[1][at] == 3


def test_ids_are_repeated_as_streams_decode_them() -> None:
    """A character that the prompt leaves unfinished is the answer's."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("<|im_start|>é✔", add_special_tokens=False)
    text, starts = echoed(tokenizer, None, ids[:-1])
    assert (text, starts[0], starts[-1]) == ("é", 0, 1)
    assert tokenizer.decode_stream(ids[:-1]).step(ids[-1]) == "✔"


def test_ids_that_are_not_the_texts_still_have_places_in_it() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text, starts = echoed(tokenizer, "the", tokenizer.encode("the water"))
    assert text == "the"
    assert max(starts) == 3


@pytest.mark.parametrize(
    ("text", "spans", "tokens", "starts"),
    [
        ("", [], [], []),
        ("the water", [(0, 0), (0, 3), (4, 9)], [b"<s>", b"the", b" water"], [0, 0, 3]),
        ("\u00e9!", [(0, 1), (0, 1), (1, 2)], [b"\xc3", b"\xa9", b"!"], [0, 0, 1]),
        ("the", [(0, 3), (0, 0)], [b"the", b"</s>"], [0, 3]),
        ("e\u0301 the", [(0, 1), (3, 6)], ["\u00e9".encode(), b" the"], [0, 2]),  # normalised
        ("e\u0301x", [(0, 1), (2, 3)], ["\u00e9".encode(), b"x"], [0, 2]),
        (" a  b", [(0, 0), (1, 2), (3, 3), (4, 4), (4, 5)], [b" ", b"a", b" ", b" ", b"b"], [0, 1, 2, 3, 4]),
        ("<s>x", [(0, 0), (0, 3), (3, 4)], [b"<s>", b"<s>", b"x"], [0, 0, 3]),
    ],
)
def test_starts(text: str, spans: list[tuple[int, int]], tokens: list[bytes], starts: list[int]) -> None:
    assert starts_of(text, spans, tokens) == starts


@ALL
def test_positions_in_a_text_that_is_encoded_in_slices(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the water opens and the valve, 水力。 flows  open\n\nthe water <s> opens the valve " * 5
    whole = echoed(tokenizer, text, tokenizer.encode(text))
    monkeypatch.setattr(prompts, "SLICE_LEN", 10)
    monkeypatch.setattr(text_slices, "SLICE_LEN", 10)
    (sliced, count) = finish(prompts.span_slices(tokenizer, text))
    assert sliced[0] == tokenizer.encode(text)
    assert echoed(tokenizer, text, tokenizer.encode(text)) == whole
    assert count > 1 or tokenizer.slicer is None
