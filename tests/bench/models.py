"""Random models of Qwen3's shape to measure engines with, and of Qwen3.5's.

    python -m tests.bench.models DIR [0.9M] [29M] [474M] [qwen3.5-0.8B] [qwen3.5-2B]

Speed depends on a model's shape, not on what it says: `0.9M` shows what an engine itself costs, `29M` is
a small model that fits a cache, `474M` is bound by the memory's bandwidth. Weights are bfloat16 and the
same every time. Any engine that reads a Hugging Face directory can load them.

The tokenizer is a byte-level BPE of made-up syllables. The model never says one of its 256 single bytes,
half of which are no character alone: an engine may withhold those, and an event less would be taken for a
slow engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.weights.checkpoint import ALL, TensorPart
from engine.runtime.weights.parameters import read_all

CONTEXT_LEN: Final = 8192
EOS: Final = "<|end|>"


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    is_hybrid: bool = False
    """True if it has Qwen3.5's layers: three of four are delta nets, of 16 heads of 128."""


SHAPES: Final = {
    "0.9M": Shape(2048, 128, 3, 4, 2, 32, 384),
    "29M": Shape(8192, 512, 8, 8, 4, 64, 1536),
    "474M": Shape(32768, 1024, 28, 16, 8, 128, 3072),
    "qwen3.5-0.8B": Shape(248320, 1024, 24, 8, 2, 256, 3584, is_hybrid=True),
    "qwen3.5-2B": Shape(248320, 2048, 24, 8, 2, 256, 6144, is_hybrid=True),
}
HYBRID: Final = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def make_model(directory: Path, shape: Shape, context_len: int = CONTEXT_LEN) -> Path:
    """Write config, tokenizer and weights. A directory that is complete already is left alone."""
    done = directory / "config.json"
    if not done.exists():
        directory.mkdir(parents=True, exist_ok=True)
        eos_id = _write_tokenizer(directory, shape.vocab)
        config = json.dumps(_config(shape, eos_id, context_len), indent=1)
        weights = _hybrid_weights(config) if shape.is_hybrid else _weights(shape)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        done.write_text(config)
    return directory


def _config(shape: Shape, eos_id: int, context_len: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    } | (HYBRID if shape.is_hybrid else {})


def _weights(shape: Shape) -> dict[str, Tensor]:
    """Normal, by fan-in, so that activations keep their size through the layers."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        scale: float = columns**-0.5
        return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()

    def ones(length: int) -> Tensor:
        return torch.ones(length, dtype=torch.bfloat16)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    embedding = normal(shape.vocab, shape.hidden)
    embedding[: len(_byte_tokens()) + 1] = 0.0  # a logit of nought is never the largest
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones(shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": ones(shape.hidden),
            f"{at}post_attention_layernorm.weight": ones(shape.hidden),
            f"{at}self_attn.q_proj.weight": normal(q, shape.hidden),
            f"{at}self_attn.k_proj.weight": normal(kv, shape.hidden),
            f"{at}self_attn.v_proj.weight": normal(kv, shape.hidden),
            f"{at}self_attn.o_proj.weight": normal(shape.hidden, q),
            f"{at}self_attn.q_norm.weight": ones(shape.head_dim),
            f"{at}self_attn.k_norm.weight": ones(shape.head_dim),
            f"{at}mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{at}mlp.up_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{at}mlp.down_proj.weight": normal(shape.hidden, shape.intermediate),
        }
    return weights


class _Hybrid:
    """Asked for each parameter of a model, it makes the tensors up: normal, by fan-in; norms, which have an
    offset, and the decay of states are nought."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        for name, count in zip(names, rows, strict=True):
            if name not in self.tensors:
                self.tensors[name] = self._made(name, count, *columns)
        return torch.zeros(part.shape(rows, columns))

    def _made(self, name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            own = torch.ones if name.endswith("linear_attn.norm.weight") else torch.zeros
            return own(shape, dtype=torch.bfloat16)
        scale: float = shape[-1] ** -0.5
        return (torch.randn(shape, generator=self._generator) * scale).bfloat16()


def _hybrid_weights(config: str) -> dict[str, Tensor]:
    source, model = _Hybrid(), parse_model_config(config.encode())
    read_all(model, source)
    source.tensors[model.names.embedding][: len(_byte_tokens()) + 1] = (
        0.0  # a logit of nought is never the largest
    )
    return source.tensors


def _write_tokenizer(directory: Path, vocab_len: int) -> int:
    """The end, the bytes, then syllables of two, three and four letters. Returns the end's id."""
    merges = list(itertools.islice(_merges(), vocab_len - 1 - len(_byte_tokens())))
    tokens = [EOS, *_byte_tokens(), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    assert tokenizer.get_vocab_size() == vocab_len
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    eos_id = tokens.index(EOS)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id}))
    return eos_id


def _byte_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _merges() -> itertools.chain[tuple[str, str]]:
    """Pairs of letters, a blank in front at times, then what those make together."""
    letters = string.ascii_lowercase
    pairs = [(a, b) for a in "Ġ" + letters for b in letters]
    triples = ((a + b, c) for a, b in pairs for c in letters)
    fours = ((a + b, c + d) for (a, b), (c, d) in itertools.product(pairs, pairs) if c != "Ġ")
    return itertools.chain(pairs, triples, fours)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make random models to measure engines with.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", default=list(SHAPES)[:3], metavar="NAME", help=", ".join(SHAPES))
    options = parser.parse_args()
    for name in options.names:
        sys.stdout.write(f"{make_model(options.directory / name, SHAPES[name])}\n")


if __name__ == "__main__":
    main()
