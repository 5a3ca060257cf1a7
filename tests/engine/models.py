"""Tiny random models of every family, with a tokenizer, and what transformers says about them.

transformers is the oracle here and is never imported by the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCAB_SIZE = 320
BOS_ID, EOS_ID = 0, 1
CONTEXT_LEN = 512
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # family: (prefix of transformers' class names, what this family is here to show)
    "llama": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 32}),
}


def make_tiny_model(
    family: str, path: Path, *, shard_bytes: int | None = None, own_head: bool = False, **overrides: Any
) -> Path:
    """Write a model directory that the whole engine can load: weights, config, tokenizer, chat template.

    Two layers, fp32, about 100k parameters; the same seed makes the same weights. Group sizes are 2
    (llama, mistral), 7 (qwen2) and 1 (qwen3). `overrides` go to the transformers config. `own_head`: the
    checkpoint has one, and config.json says that it is tied, as after a fine-tuning that trained it.
    """
    import transformers

    prefix, particular = _ARCHITECTURES[family]
    config = getattr(transformers, f"{prefix}Config")(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_LEN,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        }
        | particular
        | overrides
        | ({"tie_word_embeddings": False} if own_head else {})
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    _enliven(model)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=shard_bytes or "1GB")
    if own_head:
        config_json = path / "config.json"
        config_json.write_text(
            json.dumps(json.loads(config_json.read_text()) | {"tie_word_embeddings": True})
        )
    _write_tokenizer(path)
    return path


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def reference_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[T, vocab], float32: after each token, the distribution of the next."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1)


def reference_greedy(path: Path, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """The n tokens that follow each prompt, by whole forward passes in fp32: no cache to be wrong about."""
    model = reference_model(path)
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(reference_logprobs(model, ids)[-1].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


def not_greedy(path: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[int]:
    """The prompts, by number, whose output is not the reference's greedy one. A forward pass each: if every
    token is the likeliest behind those before it, all are what `reference_greedy` would find."""
    model = reference_model(path)
    found = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        likeliest = reference_logprobs(model, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1)
        if likeliest.tolist() != list(output):
            found.append(number)
    return found


def _enliven(model: Any) -> None:
    """Fresh models are too tame: zero biases, unit norms, and logits so flat that rounding decides."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.15)


def _write_tokenizer(path: Path) -> None:
    """A byte-level BPE with a few merges: every text has tokens, and some characters take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (
        "the water in the pipe turns the wheel, and the gate lets water through when the wheel is to turn "
        "nobody stands below who would rather have dry feet, because a river never asks before it comes "
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID]})
    )
