"""Tiny random models that make vectors of texts, as sentence-transformers 6.2 writes them, and what torch and
transformers say of their vectors. `tests.suites.embeddings` compares them with sentence-transformers itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models import make_tiny_model

DENSE_LEN = 48
Kind = tuple[str, tuple[str, ...]]
"""How hidden states are pooled, and the modules behind that: `Normalize`, or the activation of a Dense."""
KINDS: tuple[Kind, ...] = (
    ("lasttoken", ("Normalize",)),
    ("mean", ("Normalize",)),
    ("cls", ()),
    ("mean", ("Tanh", "Normalize")),
    ("lasttoken", ("GELU", "Identity")),
    ("mean", ("Normalize", "ReLU", "SiLU", "Sigmoid")),
)


def make_embedder(family: str, path: Path, kind: Kind = KINDS[0], **overrides: Any) -> Path:
    """Write a model directory that has no head, no `model.` in its names, and the files of the modules."""
    make_tiny_model(family, path, **overrides)
    weights = load_file(path / "model.safetensors")
    body = {name.removeprefix("model."): tensor for name, tensor in weights.items() if "lm_head" not in name}
    save_file(body, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    [architecture] = config["architectures"]
    config["architectures"] = [architecture.replace("ForCausalLM", "Model")]
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    told = tokenizer | {"pad_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    write_modules(path, kind, config["hidden_size"])
    return path


def write_modules(path: Path, kind: Kind, hidden_len: int) -> None:
    pooling, behind = kind
    modules = [("base.modules.transformer.Transformer", "")]
    modules.append(("sentence_transformer.modules.pooling.Pooling", "1_Pooling"))
    _write(path / "1_Pooling", embedding_dimension=hidden_len, pooling_mode=pooling, include_prompt=True)
    length = hidden_len
    for at, name in enumerate(behind, 2):
        if name == "Normalize":
            modules.append(("base.modules.normalize.Normalize", f"{at}_Normalize"))
            _write(path / f"{at}_Normalize", module_input_name="sentence_embedding")
            continue
        modules.append(("base.modules.dense.Dense", f"{at}_Dense"))
        activation = "torch.nn.modules." + ("linear" if name == "Identity" else "activation") + f".{name}"
        directory = path / f"{at}_Dense"
        _write(
            directory,
            in_features=length,
            out_features=DENSE_LEN,
            bias=at % 2 == 0,
            activation_function=activation,
        )
        made = torch.Generator().manual_seed(at)
        tensors = {"linear.weight": torch.randn(DENSE_LEN, length, generator=made) / length**0.5}
        if at % 2 == 0:
            tensors["linear.bias"] = torch.randn(DENSE_LEN, generator=made) / 4
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        length = DENSE_LEN
    listed = [
        {"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.{module}"}
        for at, (module, place) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))


def _write(directory: Path, **config: Any) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
def reference_vectors(path: Path, kind: Kind, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The vectors [length] float32 by transformers' network and torch's operations, one by one."""
    import transformers

    model: Any = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    vectors = []
    for ids in prompts:
        hidden: Tensor = model(torch.tensor([list(ids)])).last_hidden_state[0]
        x = {"lasttoken": hidden[-1], "mean": hidden.mean(dim=0), "cls": hidden[0]}[kind[0]]
        for at, name in enumerate(kind[1], 2):
            if name == "Normalize":
                x = F.normalize(x, dim=0)
            else:
                weights = load_file(path / f"{at}_Dense" / "model.safetensors")
                x = F.linear(x, weights["linear.weight"], weights.get("linear.bias"))
                x = x if name == "Identity" else getattr(torch.nn, name)()(x)
        vectors.append(x)
    return vectors
