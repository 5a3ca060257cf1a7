"""Streams against the library's `decode` of the whole: genuine U+FFFD, prompts cut anywhere, stray bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from shared.text.token_text import PROMPT_TAIL_LEN
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from tests.effort import drawn
from tests.shared.text.toy_tokenizers import (
    BOTH,
    BYTE_LEVEL,
    HARD,
    SENTENCEPIECE,
    bundle_of,
    byte_level,
    sentencepiece,
    streamed,
)

LOST = "\N{REPLACEMENT CHARACTER}"
GENUINE = [f"{LOST}", f"a{LOST}", f"{LOST}{LOST}नमस्ते", f"नम{LOST} {LOST}{LOST}", f"{LOST}👩‍👩‍👧{LOST}x"]


def pieces_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token for each byte."""
    by_bytes = {tokenizer.piece_bytes(i): i for i in range(tokenizer.vocab_size) if tokenizer.piece_bytes(i)}
    return [by_bytes[bytes([byte])] for byte in data]


@BOTH
@pytest.mark.parametrize("text", GENUINE)
def test_a_replacement_character_that_the_model_wrote_is_text(tokenizer: Tokenizer, text: str) -> None:
    """Byte by byte, at the end too, and however many there are."""
    ids = pieces_of(tokenizer, text.encode())
    assert tokenizer.decode(ids) == text
    parts = streamed(tokenizer, tokenizer.encode("Say:"), ids)
    assert "".join(parts) == text
    assert LOST not in "".join(streamed(tokenizer, [], pieces_of(tokenizer, "é".encode())[:1]))


@BOTH
def test_a_character_leaves_with_its_last_byte(tokenizer: Tokenizer) -> None:
    text = f"é{LOST}水🌊x"
    parts = iter(streamed(tokenizer, tokenizer.encode("Say:"), pieces_of(tokenizer, text.encode())))
    for char in text:
        for _ in char.encode()[:-1]:
            assert next(parts) == ""
        assert next(parts) == char


def with_merges(*pairs: tuple[str, str]) -> Tokenizer:
    """A byte-level tokenizer whose tokens end in the middle of characters and begin there."""
    spec = json.loads(byte_level().to_str())
    vocabulary = spec["model"]["vocab"]
    for left, right in pairs:
        vocabulary.setdefault(left + right, len(vocabulary))
    return Tokenizer(bundle_of(tokenizers.Tokenizer.from_str(json.dumps(spec))))


def crooked(seed: int = 0, count: int = 300) -> Tokenizer:
    """Tokens of one to five bytes of multilingual text, cut anywhere."""
    rng, data = random.Random(seed), (HARD + "日本語 नमस्ते 🏳️‍🌈 Größe").encode()
    alphabet = {value: key for key, value in pre_tokenizer_alphabet().items()}
    spec = json.loads(byte_level().to_str())
    vocabulary = spec["model"]["vocab"]
    for _ in range(count):
        at, length = rng.randrange(len(data)), rng.randint(2, 5)
        vocabulary.setdefault("".join(alphabet[byte] for byte in data[at : at + length]), len(vocabulary))
    return Tokenizer(bundle_of(tokenizers.Tokenizer.from_str(json.dumps(spec))))


def pre_tokenizer_alphabet() -> dict[str, int]:
    from shared.text.words import byte_level_alphabet

    return byte_level_alphabet()


CROOKED = crooked()


def cut_anywhere(tokenizer: Tokenizer, data: bytes, rng: random.Random) -> list[int]:
    """Tokens whose bytes are `data`, chosen at random among those that fit."""
    by_bytes = {tokenizer.piece_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = []
    while data:
        length = rng.choice([n for n in range(1, 6) if n <= len(data) and data[:n] in by_bytes])
        ids.append(by_bytes[data[:length]])
        data = data[length:]
    return ids


def expected_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """By the library's `decode`: what the whole has beyond the prompt.

    U+FFFD stands there for a character that the prompt began, and is the answer's if that finishes it. The
    one for a character that the answer leaves unfinished is dropped.
    """
    before, after = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    data, more = (b"".join(tokenizer.piece_bytes(i) or b"" for i in part) for part in (prompt, ids))
    begun = beginning(data)
    is_finished = bool(begun) and decodes((begun + more)[: length_of(begun)])
    text = after[len(before) - is_finished :]
    return text[:-1] if beginning(data + more) else text


def beginning(data: bytes) -> bytes:
    """The last bytes, where some ending would make a character of them."""
    for length in range(1, min(3, len(data)) + 1):
        last = data[-length:]
        missing = length_of(last) - length
        endings = (bytes([first, 0x80, 0x80])[:missing] for first in (0x80, 0x90, 0xA0, 0xBF))
        if missing > 0 and any(decodes(last + ending) for ending in endings):
            return last
    return b""


def length_of(data: bytes) -> int:
    """The number of bytes of the character that begins so."""
    return 1 + (data[0] >= 0xC2) + (data[0] >= 0xE0) + (data[0] >= 0xF0)


def decodes(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@settings(max_examples=drawn(100, whole=2000), deadline=None)
@given(seed=st.integers(0, 2**32), text=st.text(max_size=12) | st.sampled_from([HARD, *GENUINE]))
def test_any_cut_between_prompt_and_answer_gives_what_decode_gives(seed: int, text: str) -> None:
    rng = random.Random(seed)
    ids = cut_anywhere(CROOKED, text.encode(), rng)
    cut = rng.randint(0, len(ids))
    for end in {len(ids), rng.randint(cut, len(ids))}:
        found = "".join(streamed(CROOKED, ids[:cut], ids[cut:end]))
        assert found == expected_after(CROOKED, ids[:cut], ids[cut:end])


@settings(max_examples=drawn(100, whole=2000), deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 24))
def test_random_tokens_give_what_decode_gives(seed: int, size: int) -> None:
    """Most of whose bytes are no characters."""
    rng = random.Random(seed)
    ids = [rng.randrange(5, CROOKED.vocab_size) for _ in range(size)]
    cut = rng.randint(0, size)
    assert "".join(streamed(CROOKED, ids[:cut], ids[cut:])) == expected_after(CROOKED, ids[:cut], ids[cut:])


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (b"\xed", b"\xb4x", f"{LOST}x"),  # half a surrogate pair, which is no character
        (b"\xed\xb1", b"x", "x"),
        (b"", b"\xed\xb1", LOST * 2),
        (b"\xe2", b"\x9cx", "x"),  # what there is of the character is the prompt's
        (b"\xef\xbf", b"\xbd", LOST),  # which begins as U+FFFD does
        (b"\xef\xbf", b"\xbe", "\ufffe"),
        (b"\xc0", b"\x80", LOST),
        (b"\xf0\x9f\x91", b"\xa9", "\N{WOMAN}"),
        (b"\xf0\x9f\x91", b"", ""),
        (b"", b"\xf0\x9f\x91", ""),
    ],
)
def test_beginnings_of_characters(prompt: bytes, answer: bytes, text: str) -> None:
    ids = [pieces_of(BYTE_LEVEL, part) for part in (b"Say: " + prompt, answer)]
    assert "".join(streamed(BYTE_LEVEL, *ids)) == text == expected_after(BYTE_LEVEL, *ids)


def test_a_prompt_that_ends_one_character_and_begins_another() -> None:
    """The last prompt token holds the end of 本 and three bytes of U+1D518."""
    tokenizer = with_merges(("æ", "Ĺ"), ("¥", "æ"), ("¬", "ð"), ("¬ð", "Ŀ"), ("¬ðĿ", "Ķ"))
    found = [tokenizer.raw.token_to_id(piece) for piece in ("æĹ", "¥æ", "ľ", "¬ðĿĶ", "ĺ")]
    ids = [id_ for id_ in found if id_ is not None]
    assert ids == found
    assert tokenizer.decode(ids) == "日本\U0001d518"
    assert streamed(tokenizer, ids[:4], ids[4:]) == ["\U0001d518"]
    assert streamed(tokenizer, ids[:3], ids[3:]) == ["本", "\U0001d518"]


def unigram() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("▁water", -2.0), ("s", -3.0), (LOST, -3.0)]
    made = tokenizers.Tokenizer(models.Unigram([*pieces, *((c, -5.0) for c in "thewar.,")], unk_id=0))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


def word_piece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "the", "water", "##s", "##ing", "turn", ",", ".", "n", "'", "t", LOST]
    made = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return made


def word_ends() -> tokenizers.Tokenizer:
    vocabulary = {
        word: i for i, word in enumerate(["<unk>", "the</w>", "wat", "er</w>", "s</w>", f"{LOST}</w>"])
    }
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.decoder = decoders.BPEDecoder("</w>")
    return made


def bare() -> tokenizers.Tokenizer:
    """No decoder: the library writes spaces between tokens."""
    made = word_ends()
    made.decoder = None
    return made


OTHERS = {
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "word pieces": word_piece,
    "word ends": word_ends,
    "no decoder": bare,
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("seed", range(20))
def test_other_vocabularies_give_what_decode_gives(kind: str, seed: int) -> None:
    tokenizer = Tokenizer(TokenizerBundle(tokenizer_json=OTHERS[kind]().to_str()))
    rng = random.Random(seed)
    # no bytes: what of them is no character is the next test's
    whole = [i for i in range(tokenizer.vocab_size) if tokenizer.piece_bytes(i) is None]
    for _ in range(20):
        ids = rng.choices(whole, k=rng.randint(1, 30))
        cut = rng.randint(0, len(ids))
        before, after = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
        if after.startswith(before):  # a decoder may rewrite the last word when another comes
            assert before + "".join(streamed(tokenizer, ids[:cut], ids[cut:])) == after


@settings(max_examples=drawn(50, whole=1000), deadline=None)
@given(text=st.text(max_size=20) | st.sampled_from([HARD, *GENUINE]), cut=st.integers(0, 60))
def test_characters_that_fall_back_to_bytes_give_what_decode_gives(text: str, cut: int) -> None:
    ids = SENTENCEPIECE.encode(f"the {text} water", add_special_tokens=False)
    cut = min(cut, len(ids))
    found = "".join(streamed(SENTENCEPIECE, ids[:cut], ids[cut:]))
    whole = SENTENCEPIECE.decode(ids)
    assert whole.endswith(found)
    data = b"".join(SENTENCEPIECE.token_bytes(i) for i in ids[cut:])
    assert len(found.encode()) >= len(data) - 3 - (cut == 0)


def test_a_stream_begins_without_a_prompt_as_decode_does() -> None:
    """The space of a first token is not shown, and that of one after bytes is."""
    ids = SENTENCEPIECE.encode("the water", add_special_tokens=False)
    bytes_ = pieces_of(SENTENCEPIECE, "é".encode())
    for sequence in (ids, [*bytes_, *ids], [*ids, *bytes_, *ids]):
        assert "".join(streamed(SENTENCEPIECE, [], sequence)) == SENTENCEPIECE.decode(sequence)


@pytest.mark.parametrize("specials", [1, PROMPT_TAIL_LEN, 3 * PROMPT_TAIL_LEN])
def test_special_tokens_at_the_prompts_end_do_not_hide_its_text(specials: int) -> None:
    """The answer's first token keeps its space, and finishes the character that the prompt has begun."""
    end = SENTENCEPIECE.encode("</s>", add_special_tokens=False)
    prompt, answer = (SENTENCEPIECE.encode(text, add_special_tokens=False) for text in ("the", "water"))
    assert "".join(streamed(SENTENCEPIECE, prompt + specials * end, answer)) == " water"
    ids = SENTENCEPIECE.encode("the 🌊", add_special_tokens=False)
    assert "".join(streamed(SENTENCEPIECE, ids[:-2] + specials * end, ids[-2:])) == "🌊"


def test_a_special_token_in_an_answer_takes_no_part() -> None:
    tokenizer = Tokenizer(bundle_of(with_template(byte_level())))
    ids = pieces_of(tokenizer, "水".encode())
    assert streamed(tokenizer, [], [ids[0], 4, ids[1], 10**6, ids[2]]) == ["", "", "", "", "水"]
    assert "".join(streamed(BYTE_LEVEL, [], [4], skip_special_tokens=False)) == "<|im_end|>"


def with_template(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made
