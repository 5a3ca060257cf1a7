"""A tokenizer of a few hundred tokens in a model directory, as the API process wants one: no weights."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

EOS = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)
SPECIAL = [EOS, "<|user|>", "<|assistant|>", "<|system|>", "<|developer|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs",
    "hello world, this is a small tokenizer for the tests of the engine",
]


def byte_level() -> tokenizers.Tokenizer:
    """All bytes and some merges; emoji and CJK take several tokens each."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 has it: sentencepiece pieces, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += list("abcdefghijklmnopqrstuvwxyz .,!")
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a")]
    pieces += ["".join(merge) for merge in merges]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_model_dir(directory: Path) -> Path:
    """A directory that `shared.text.tokenizer` and `engine.api.ask.model` can read."""
    tokenizer = byte_level()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": EOS})
    )
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.token_to_id(EOS)})
    )
    (directory / "config.json").write_text("{}")
    return directory
