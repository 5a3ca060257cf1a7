"""Word by word, against the library."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from shared.text import words
from shared.text.words import _IN_ASCII, WordEncoder

CORPUS = ["The valve's opening lets the water flow; we'll see 2,048 turns.\n\n\tAt 10:45, it'S done!! " * 20]
SPECIALS = ["<s>", "<s>>", "<|im_start|>", "<|im_end|>"]
NEW_LINE, QWEN, LLAMA = _IN_ASCII
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def made(pre: pre_tokenizers.PreTokenizer, **options: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def encoder_of(tokenizer: tokenizers.Tokenizer) -> WordEncoder | None:
    return WordEncoder.of(tokenizer, json.loads(tokenizer.to_str()))


digits = pre_tokenizers.Digits
KNOWN = {
    "gpt2": made(GPT2),
    "qwen": made(pre_tokenizers.Sequence([split(QWEN), BYTES])),
    "llama3": made(pre_tokenizers.Sequence([split(LLAMA), BYTES])),
    "lines": made(pre_tokenizers.Sequence([digits(individual_digits=True), split(NEW_LINE), GPT2])),
    "numbers": made(pre_tokenizers.Sequence([digits(individual_digits=False), GPT2])),
    "bytes": made(BYTES),
}
KNOWN["qwen"].normalizer = normalizers.NFC()
ENCODERS = {name: encoder_of(tokenizer) for name, tokenizer in KNOWN.items()}

PIECES = [
    *SPECIALS,
    *"<>|sStTrRlLdDmvVeE'",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x1f",
    "\x7f",
    "\0",
]
TEXTS = st.lists(
    st.sampled_from([*PIECES, "water", "10", "'s", "'LL", "!?"]) | st.characters(max_codepoint=127)
).map("".join)


@pytest.mark.parametrize("name", KNOWN)
@given(text=TEXTS)
def test_ids_are_the_librarys(name: str, text: str) -> None:
    encoder = ENCODERS[name]
    assert encoder is not None
    expected = KNOWN[name].encode(text, add_special_tokens=False).ids
    assert encoder.encode(text) == expected
    assert encoder.encode(text) == expected, "from what was kept"


def test_what_is_not_certain_is_left_to_the_library() -> None:
    encoder = ENCODERS["qwen"]
    assert encoder is not None
    assert encoder.encode("a" * words.TEXT_LEN_MAX) is not None
    assert encoder.encode("a" * (words.TEXT_LEN_MAX + 1)) is None
    assert encoder.encode("caf\N{LATIN SMALL LETTER E WITH ACUTE}") is None


def normalized(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    tokenizer = made(GPT2)
    tokenizer.normalizer = normalizer
    return tokenizer


def with_token(token: AddedToken) -> tokenizers.Tokenizer:
    tokenizer = made(GPT2)
    tokenizer.add_tokens([token])
    return tokenizer


def processed(post: processors.PostProcessor) -> tokenizers.Tokenizer:
    tokenizer = made(GPT2)
    tokenizer.post_processor = post
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        tokenizers.Tokenizer(models.BPE()),
        made(GPT2, dropout=0.1),
        made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        made(pre_tokenizers.Sequence([split("a+"), GPT2])),
        made(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "removed"), GPT2])),
        made(pre_tokenizers.Sequence([GPT2, pre_tokenizers.Whitespace()])),
        made(pre_tokenizers.Sequence([split(QWEN), GPT2])),
        made(pre_tokenizers.Sequence([split(QWEN), digits(individual_digits=True), BYTES])),
        normalized(normalizers.Lowercase()),
        with_token(AddedToken("<x>", lstrip=True, normalized=False)),
        with_token(AddedToken("<x>", normalized=True)),
        processed(processors.TemplateProcessing(single="$A $A")),
        processed(processors.TemplateProcessing(single="<s>", special_tokens=[("<s>", 0)])),
    ],
)
def test_tokenizers_that_are_not_known_are_left_to_the_library(tokenizer: tokenizers.Tokenizer) -> None:
    assert encoder_of(tokenizer) is None


def test_added_tokens_are_as_the_library_took_them_and_not_as_the_file_has_them() -> None:
    spec = json.loads(made(GPT2).to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    behind_a_gap, of_the_vocabulary, empty, again = ("<x>", 5000), ("w", 7), ("", 5001), ("<x>", 5002)
    for content, token_id in (behind_a_gap, of_the_vocabulary, empty, again):
        spec["added_tokens"].append({"id": token_id, "content": content, **flags})
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    encoder = WordEncoder.of(tokenizer, spec)
    assert encoder is not None
    for text in ("water", "the<x>valve", "<x>w<x>"):
        assert encoder.encode(text) == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "post",
    [
        processors.ByteLevel(trim_offsets=True),
        processors.RobertaProcessing(("<s>", 0), ("<s>>", 1)),
        processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
            ]
        ),
    ],
)
def test_tokens_of_a_post_processor_are_left_out(post: processors.PostProcessor) -> None:
    tokenizer = processed(post)
    encoder = encoder_of(tokenizer)
    assert encoder is not None
    assert encoder.encode("the valve") == tokenizer.encode("the valve", add_special_tokens=False).ids


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_merges": True},
        {"byte_fallback": True, "unk_token": "<s>", "fuse_unk": True},
        {"continuing_subword_prefix": "##", "unk_token": "<s>", "fuse_unk": True},
        {"end_of_word_suffix": "</w>", "unk_token": "<s>"},
    ],
)
def test_the_models_options_are_the_librarys(options: dict[str, Any]) -> None:
    spec = json.loads(made(GPT2).to_str())
    vocabulary, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for token in ("valve", "##v", "w</w>", "<0x51>"):  # "valve" is no merge of others
        vocabulary[token] = len(vocabulary)
    del vocabulary["Q"]
    spec["model"] |= {"merges": [] if "##" in str(options) or "</w>" in str(options) else merges, **options}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    encoder = WordEncoder.of(tokenizer, spec)
    assert encoder is not None
    for text in ("valve", "the valves QQ<s>QwQ w.", "10 v"):
        assert encoder.encode(text) == tokenizer.encode(text).ids


def test_the_cache_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "KEPT_MAX", 8)
    encoder = encoder_of(KNOWN["gpt2"])
    assert encoder is not None
    for text in ("a b c d e f", *"abcdefghijkl", "a b c d e f g h i j k l", "x" * (words.KEPT_LEN_MAX + 1)):
        for _ in range(2):
            assert encoder.encode(text) == KNOWN["gpt2"].encode(text).ids
    for kept in (encoder._words, encoder._pieces):
        assert words.KEPT_MAX // 2 <= len({**kept._old, **kept}.keys() - kept._fixed.keys()) <= words.KEPT_MAX
        assert all(len(text) <= words.KEPT_LEN_MAX for text in [*kept, *kept._old] if text not in kept._fixed)


def test_words_that_nobody_sends_again_take_no_place_from_those_that_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(words, "KEPT_MAX", 8)
    encoder = encoder_of(KNOWN["gpt2"])
    assert encoder is not None
    for junk in range(100):
        encoder.encode(f"z{junk}y")
    for round_ in range(100):
        assert encoder.encode(f"valve q{round_}") == KNOWN["gpt2"].encode(f"valve q{round_}").ids
        assert "valve" in {**encoder._words, **encoder._words._old}
    for added in encoder._pieces._fixed:
        assert added in encoder._pieces
