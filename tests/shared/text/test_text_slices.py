"""Slices encoded one by one, against the library's encoding of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from shared.text import text_slices
from shared.text.text_slices import Slicer
from shared.wire.errors import InvalidRequest
from tests.effort import drawn
from tests.shared.text.test_words import GPT2, KNOWN, made, split

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]"]
CORPUS = ["the water flows in 1997 and 20, we'll see. valves  open\n\nwide " * 20]


def sentence_piece(pre: Any = None) -> tokenizers.Tokenizer:
    """Llama 2's kind, or with `pre` its newer spelling. Trained word by word, as SentencePiece does it."""
    learned = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIALS, *bytes_], show_progress=False)
    learned.train_from_iterator(CORPUS, trainer)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    made_ = tokenizers.Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made_.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    if pre is None:
        made_.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made_.pre_tokenizer = pre
    return made_


def metaspace(scheme: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


SLICED = {
    "gpt2": KNOWN["gpt2"],
    "qwen": KNOWN["qwen"],
    "llama3": KNOWN["llama3"],
    "numbers": KNOWN["numbers"],
    "sentencepiece": sentence_piece(),
    "metaspace first": sentence_piece(metaspace("first")),
    "metaspace always": sentence_piece(metaspace("always")),
    "metaspace never": sentence_piece(metaspace("never")),
}


def slicer_of(tokenizer: tokenizers.Tokenizer) -> Slicer | None:
    return Slicer.of(tokenizer, json.loads(tokenizer.to_str()), tokenizer.get_vocab())


PIECES = [
    *(
        "<s>",
        "</s>",
        "<|im_start|>",
        "[INST]",
        "we'll",
        "don't",
        "it'S",
        "x_y",
        "water",
        "valve",
        "1997",
        "20",
    ),
    *(" ", "  ", "   ", "\n", "\r\n", "\t", "\N{NO-BREAK SPACE}", "\u3000", "\x1c", "\x85", "\u2028"),
    *(
        "。",
        "\uff0c",
        "\uff1f",
        "水力",
        "発電",
        "한글",
        "e\N{COMBINING ACUTE ACCENT}",
        "é",
        "नमस्ते",
        "²",
        "Ⅷ",
        "٣",
        "🌊",
        "▁",
    ),
    *(
        "\N{COMBINING ACUTE ACCENT}",
        "\N{HANGUL CHOSEONG KIYEOK}\N{HANGUL JUNGSEONG A}",
        "'",
        "-",
        "...",
        ":",
        "/",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICED)
@settings(max_examples=drawn(37, whole=750), deadline=None)
@given(text=TEXTS, slice_len=st.integers(1, 12))
@example(text="a  b a b  a\nb \nc", slice_len=1)
def test_slices_encode_as_the_whole(name: str, text: str, slice_len: int) -> None:
    tokenizer, slicer = SLICED[name], slicer_of(SLICED[name])
    assert slicer is not None
    ids = [
        token_id
        for piece in slicer.slices(text, slice_len)
        for token_id in tokenizer.encode(piece, add_special_tokens=False).ids
    ]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", SLICED)
def test_ordinary_text_is_cut_often(name: str) -> None:
    slicer = slicer_of(SLICED[name])
    assert slicer is not None
    text = "The valve opens and the water flows.\nIn 1997 it did not. " * 100
    pieces = list(slicer.slices(text, 200))
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 220


def test_a_run_without_a_cut_is_refused_when_it_is_too_long() -> None:
    slicer = slicer_of(SLICED["qwen"])
    assert slicer is not None
    run = "a" * 1000
    assert list(slicer.slices(run, 10, 1000)) == [run]
    with pytest.raises(InvalidRequest, match="1000 characters without"):
        list(slicer.slices(run + "a", 10, 1000))
    with pytest.raises(InvalidRequest):
        list(slicer.slices("some words before it " + " " * 2000, 10, 1000))
    assert len(list(slicer.slices(f"words {run} words {run} words", 10, 1010))) == 3
    with pytest.raises(InvalidRequest):
        list(slicer.slices("a" * (text_slices.RUN_LEN_MAX + 1)))


def spelled(**spec: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps({**json.loads(sentence_piece().to_str()), **spec}))


def with_tokens(tokenizer: tokenizers.Tokenizer, *contents: str) -> tokenizers.Tokenizer:
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in contents])
    return tokenizer


def normalized(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    tokenizer = made(GPT2)
    tokenizer.normalizer = normalizer
    return tokenizer


def crossing() -> tokenizers.Tokenizer:
    """Trained on whole lines, so that its merges go from letters into spaces."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        made(GPT2, dropout=0.1),
        made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        made(pre_tokenizers.Sequence([split("a+"), GPT2])),
        made(BYTES),
        KNOWN["bytes"],
        normalized(normalizers.NFKC()),
        normalized(normalizers.Strip()),
        with_tokens(made(GPT2), "two words"),
        with_tokens(sentence_piece(), "word"),
        sentence_piece(pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
        spelled(normalizer=None),
        crossing(),
    ],
)
def test_tokenizers_that_are_not_known_take_text_whole(tokenizer: tokenizers.Tokenizer) -> None:
    assert slicer_of(tokenizer) is None


def test_no_slice_of_text_can_have_fewer_tokens_than_its_longest_token_allows() -> None:
    for name, tokenizer in SLICED.items():
        slicer = slicer_of(tokenizer)
        assert slicer is not None
        for text in ("the water flows " * 50, "  " * 300, "<|im_start|>" * 40, "각" * 50):
            decomposed = text.replace("각", "\u1100\u1161\u11a8")
            ids = tokenizer.encode(decomposed, add_special_tokens=False).ids
            assert len(ids) >= len(decomposed) // slicer.longest, name


def test_slices_are_some_milliseconds_and_runs_are_bounded() -> None:
    assert text_slices.SLICE_LEN < text_slices.RUN_LEN_MAX <= text_slices.WHOLE_LEN_MAX
