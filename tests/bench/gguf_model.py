"""A model of `tests.bench.models` or `tests.bench.draft_model` as a GGUF file, for llama.cpp: the same
weights, the same tokens.

Matrices are bfloat16 as they are, float32, or Q8_0: 8 bits with a scale for each 32 of a row. Norms and
filters are float32, as llama.cpp wants them. Of a Llama it turns neighbours in a head by one angle, where
Hugging Face's layout has one half of the head beside the other. Of Qwen3.5, norms have their offset in them,
and the decay of states its exponential; its value heads would have another order in llama.cpp where a key
head has several, so that there must be as many of both. Needs the package `gguf` from PyPI.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

Format = Literal["bf16", "q8_0", "f32"]

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HYBRID_LAYER = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_BARE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
"""Names without `.weight` behind them."""
_MROPE_SECTIONS = [11, 11, 10, 0]
"""What llama.cpp asks for; of text all sections have the same positions."""
_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


_NAMES = {"llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
"""llama.cpp's by Hugging Face's."""


def write_gguf(model: Path, form: Format) -> Path:
    """Write MODEL/FORM.gguf, unless it is there, and return it."""
    path = model / f"{form}.gguf"
    if path.exists():
        return path
    gguf: Any = importlib.import_module("gguf")  # no dependency of the project's
    config = json.loads((model / "config.json").read_text())
    part = path.with_suffix(".part")
    is_hybrid = config["model_type"] == "qwen3_5_text"
    writer = gguf.GGUFWriter(str(part), _NAMES[config["model_type"]])
    _add_config(writer, config)
    if is_hybrid:
        _add_hybrid_config(writer, config)
    _add_tokenizer(gguf, writer, json.loads((model / "tokenizer.json").read_text()), config["eos_token_id"])
    for name, tensor in load_file(model / "model.safetensors").items():
        own = of_hybrid(name, tensor) if is_hybrid else tensor
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            own = of_rotated(tensor, config["head_dim"])
        _add_tensor(gguf, writer, gguf_name(name, is_hybrid=is_hybrid), own, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def gguf_name(name: str, *, is_hybrid: bool = False) -> str:
    """A tensor's name in GGUF."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in _BARE:
        return f"blk.{layer}.{_BARE[rest]}"
    names = _HYBRID_LAYER if is_hybrid else _LAYER
    return f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"


def of_hybrid(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of Qwen3.5 as llama.cpp wants it."""
    if name.endswith(".A_log"):
        return -tensor.float().exp()
    if name.endswith(".conv1d.weight"):
        return tensor.float()[:, 0]
    has_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return tensor.float() + 1 if has_offset else tensor


def of_rotated(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Queries' or keys' weights of a Llama as llama.cpp wants them: of a head, its halves' rows in turns."""
    rows, columns = tensor.shape
    halves = tensor.view(rows // head_dim, 2, head_dim // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("bench")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_hybrid_config(writer: Any, config: dict[str, Any]) -> None:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    assert key_heads == value_heads
    writer.add_rope_dimension_count(
        int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    )
    writer.add_rope_dimension_sections(_MROPE_SECTIONS)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * value_heads)


def _add_tokenizer(gguf: Any, writer: Any, tokenizer: dict[str, Any], eos_id: int) -> None:
    """The byte-level BPE. Prompts are token ids: what it makes of text does not matter, its pieces do."""
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[eos_id] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(eos_id)
    writer.add_eos_token_id(eos_id)
    writer.add_add_bos_token(False)


def _add_tensor(gguf: Any, writer: Any, name: str, tensor: torch.Tensor, form: Format) -> None:
    kinds = gguf.GGMLQuantizationType
    if tensor.ndim == 1 or "conv" in name or form == "f32":
        writer.add_tensor(name, tensor.float().numpy(), raw_dtype=kinds.F32)
    elif form == "bf16":
        rows = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, rows, raw_dtype=kinds.BF16)
    else:
        writer.add_tensor(
            name, gguf.quants.quantize(tensor.float().numpy(), kinds.Q8_0), raw_dtype=kinds.Q8_0
        )
