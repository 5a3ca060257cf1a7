"""A model directory of true shape and random weights: what a download would have left on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.runtime.models.spec import DecoderSpec
from engine.runtime.weights.checkpoint import ALL, TensorPart
from engine.runtime.weights.parameters import read_all

SHARD_BYTES = 4 << 30


class Shapes:
    """A WeightSource that notes what it is asked for."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, ...]] = {}

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        self.found |= {name: (count, *columns) for name, count in zip(names, rows, strict=True)}
        return torch.empty(part.shape(rows, columns), device="meta")


def write_model(config: DecoderSpec, path: Path, device: torch.device) -> Path:
    """bf16, in shards. Numbers are made on `device`."""
    shapes = Shapes()
    read_all(config, shapes)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(hf_config(config)))
    write_tokenizer(config.vocab_size, path)
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    size = number = 0
    for name, shape in shapes.found.items():
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        shard[name] = (weight.normal_(std=0.02) if len(shape) > 1 else weight.fill_(1.0)).cpu()
        weight_map[name] = f"model-{number}.safetensors"
        size += weight.nbytes
        if size > SHARD_BYTES:
            save_file(shard, path / f"model-{number}.safetensors", {"format": "pt"})
            shard, size, number = {}, 0, number + 1
    if shard:
        save_file(shard, path / f"model-{number}.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def hf_config(config: DecoderSpec) -> dict[str, Any]:
    """config.json, as transformers writes it."""
    (rope,) = config.ropes
    assert rope is not None
    return {
        "architectures": [config.architecture],
        "model_type": {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": rope.theta,
        "max_position_embeddings": config.context_len,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write_tokenizer(vocab_size: int, path: Path) -> None:
    """Text is bytes; the other ids mean something, too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *alphabet]
    names += [f"t{i}" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
