"""config.json: what is understood, and what is refused by name rather than served wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.errors import ModelUnavailable, UnsupportedModel
from engine.runtime.models.config import (
    FAMILIES,
    Llama3Scaling,
    ModelConfig,
    parse_model_config,
    read_model_config,
)

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelConfig:
    return parse_model_config(json.dumps({"architectures": [architecture]} | BASE | fields).encode())


def test_an_unknown_architecture_is_named_beside_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse("MambaForCausalLM")
    assert "MambaForCausalLM" in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


@pytest.mark.parametrize("architectures", [None, []])
def test_no_architecture_at_all(architectures: list[str] | None) -> None:
    with pytest.raises(UnsupportedModel, match="not supported"):
        parse_model_config(json.dumps(BASE | {"architectures": architectures}).encode())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "llama3"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "llama3"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"num_key_value_heads": 0}, "no multiple"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse(**fields)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"hidden_act.*yarn"):
        parse(hidden_act="relu", rope_scaling={"type": "yarn"})


def test_a_missing_size_is_named() -> None:
    fields = {name: value for name, value in BASE.items() if name != "hidden_size"}
    with pytest.raises(UnsupportedModel, match="hidden_size"):
        parse_model_config(json.dumps(fields | {"architectures": ["LlamaForCausalLM"]}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
def test_not_json(data: bytes) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        parse_model_config(data)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {
            "rope_theta": 5e5,
            "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()},
        },
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
)
def test_both_spellings_of_rotary_embeddings(fields: dict[str, Any]) -> None:
    rope = parse(**fields).rope
    assert rope.theta == 5e5
    assert rope.llama3 == Llama3Scaling(8.0, 1.0, 4.0, 64)


def test_rotary_defaults() -> None:
    assert parse().rope.theta == 10_000.0
    assert parse(rope_scaling=None, rope_theta=1e6).rope.theta == 1e6


def test_biases_by_family() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.mlp_bias

    declared = {"attention_bias": True, "mlp_bias": True}
    assert biases(parse("LlamaForCausalLM")) == (False, False, False)
    assert biases(parse("LlamaForCausalLM", **declared)) == (True, True, True)
    assert biases(parse("MistralForCausalLM", **declared)) == (False, False, False)
    assert biases(parse("Qwen2ForCausalLM")) == (True, False, False)
    assert biases(parse("Qwen3ForCausalLM", **declared)) == (True, True, False)
    assert parse("Qwen3ForCausalLM").qk_norm


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (8, None, None),
        ),
    ],
)
def test_windows(architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(architecture, **fields).windows == windows


def test_head_sizes() -> None:
    assert parse().head_dim == 16
    assert parse(head_dim=32).head_dim == 32
    assert parse("Qwen3ForCausalLM").head_dim == 128
    assert parse(num_key_value_heads=None).kv_heads == 4
    assert parse(num_key_value_heads=1).group_size == 4
