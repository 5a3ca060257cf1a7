"""Small tokenizers of the two kinds that are common, trained on the spot."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shared.text.tokenizer import Tokenizer, TokenizerBundle

CORPUS = [
    "The valve opens and the water flows through the penstock to the turbine. " * 20,
    "Größe, façade, naïve — 水力発電 🌊 ночь. " * 20,
    "0123456789 () {} [] <> : ; , . ! ? ' \" \n\n\t" * 20,
]
SPECIALS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte is a character of the vocabulary."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces are written as U+2581, what is unknown falls back to bytes."""
    learned = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=[*SPECIALS, *bytes_], show_progress=False, limit_alphabet=60
    )
    learned.train_from_iterator(CORPUS[:1], trainer)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    made.normalizer = learned.normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def with_bos(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def bundle_of(made: tokenizers.Tokenizer, template: str | None = None) -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=made.to_str(),
        chat_template=template,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


BYTE_LEVEL = Tokenizer(bundle_of(with_bos(byte_level())))
SENTENCEPIECE = Tokenizer(bundle_of(with_bos(sentencepiece())))
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])


HARD = "a✔ é水🌊👩‍👩‍👧 ночь  end"


def streamed(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.decode_stream(prompt_ids, **options)
    return [stream.step(token_id) for token_id in ids]
