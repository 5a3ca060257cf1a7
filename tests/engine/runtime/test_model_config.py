"""config.json: what is understood, and what is refused by name rather than served wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.models import families
from engine.runtime.models.decoder_config import parse_model_config, read_model_config
from engine.runtime.models.families import FAMILIES
from engine.runtime.models.spec import DecoderSpec, Llama3, Rope
from engine.runtime.setup.model_errors import ModelUnavailable, UnsupportedModel

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


def parse(model_type: str = "llama", **fields: Any) -> DecoderSpec:
    return parse_model_config(json.dumps({"model_type": model_type} | BASE | fields).encode())


def rope_of(decoder: DecoderSpec) -> Rope:
    """The one of all layers."""
    (rope,) = decoder.ropes
    assert rope is not None
    return rope


def test_a_family_is_a_description_of_few_lines() -> None:
    for path in Path(families.__file__).parent.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name


def test_an_unknown_family_is_named_beside_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse("mamba", architectures=["MambaForCausalLM"])
    assert "mamba" in str(caught.value)
    assert "MambaForCausalLM" in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_an_unknown_family_is_told_what_is_near_and_what_it_has_besides() -> None:
    """Keys that no family knows are pieces that are missing."""
    with pytest.raises(UnsupportedModel, match=r"nearest is cohere2, .* but for use_qk_norm;"):
        parse("cohere", attention_bias=False, logit_scale=0.06, use_qk_norm=False)
    with pytest.raises(UnsupportedModel, match=r"nearest is gemma3_text, which knows its keys;"):
        parse("gemma9", query_pre_attn_scalar=256, final_logit_softcapping=None)
    with pytest.raises(UnsupportedModel, match=r"its text_config is qwen3, .* without images"):
        parse("wide", text_config={"model_type": "qwen3"})


def test_no_model_type_at_all() -> None:
    with pytest.raises(UnsupportedModel, match="model_type null"):
        parse_model_config(json.dumps(BASE | {"architectures": ["LlamaForCausalLM"]}).encode())


@pytest.mark.parametrize("named", [None, [], ["LlamaForCausalLM"], ["Other", "LlamaForCausalLM"]])
def test_architectures_may_be_silent_or_agree(named: list[str] | None) -> None:
    assert parse(architectures=named).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("named", [["MistralForCausalLM"], ["LlamaForSequenceClassification"]])
def test_architectures_that_contradict_the_model_type_are_refused(named: list[str]) -> None:
    """transformers goes by model_type, other servers by architectures."""
    with pytest.raises(UnsupportedModel, match=f"contradicts itself.*{named[0]}"):
        parse("llama", architectures=named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_theta": None}, "rope_theta null"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta NaN"),
        ({"rope_scaling": "linear"}, "rope_scaling linear"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "llama3"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "llama3"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention in layer_types"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"num_key_value_heads": 0}, "no multiple"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"head_dim": 0}, "head_dim 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, "rms_norm_eps inf"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1.0 is no positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0.0 is no positive number"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse(**fields)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"hidden_act.*dynamic"):
        parse(hidden_act="relu", rope_scaling={"type": "dynamic"})


def test_a_missing_size_is_named() -> None:
    fields = {name: value for name, value in BASE.items() if name != "hidden_size"}
    with pytest.raises(UnsupportedModel, match="hidden_size"):
        parse_model_config(json.dumps(fields | {"model_type": "llama"}).encode())


def test_numbers_that_are_none_do_no_harm_where_nothing_reads_them() -> None:
    text = json.dumps({"model_type": "llama"} | BASE | {"attention_dropout": float("nan")})
    assert "NaN" in text
    assert parse_model_config(text.encode()) == parse()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"\xef\xbb\xbf{}"])
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
    assert rope_of(parse(**fields)) == Rope(5e5, Llama3(8.0, 1.0, 4.0, 64))


@pytest.mark.parametrize(
    ("fields", "theta", "original_len"),
    [
        # of two dictionaries, rope_scaling is taken whole
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 7.0}}, 1e4, 64),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "yarn"}, "rope_theta": 9.0}, 9.0, 64),
        ({"rope_scaling": {}, "rope_parameters": LLAMA3 | {"rope_theta": 7.0}}, 7.0, 64),
        ({"rope_scaling": {"rope_theta": 3.0}, "rope_parameters": LLAMA3}, 3.0, None),
        # of two bases, the one inside
        ({"rope_theta": 9.0, "rope_parameters": {"rope_theta": 7.0}}, 7.0, None),
        # of two original lengths, the one outside
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}, 1e4, 16),
        ({"rope_scaling": LLAMA3 | {"type": "linear"}}, 1e4, 64),
    ],
)
def test_contradicting_rotary_embeddings_are_resolved_as_in_transformers(
    fields: dict[str, Any], theta: float, original_len: int | None
) -> None:
    rope = rope_of(parse(**fields))
    assert rope.theta == theta
    assert getattr(rope.scaling, "original_context_len", None) == original_len


def test_a_scaling_that_is_not_implemented_is_refused_wherever_it_stands() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    for other in (None, {}, {"rope_type": "default", "rope_theta": 1e6}):
        with pytest.raises(UnsupportedModel, match=r"dynamic of rope_scaling"):
            parse(rope_scaling=dynamic, rope_parameters=other)


def test_llama3_without_an_original_length_was_made_for_the_whole_one() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if not name.startswith("original")}
    rope = rope_of(parse(rope_scaling=scaling, max_position_embeddings=96))
    assert isinstance(rope.scaling, Llama3)
    assert rope.scaling.original_context_len == 96


def test_keys_without_a_meaning_are_noted_and_ignored() -> None:
    two: dict[str, Any] = {"rope_scaling": {"beta_fast": 32}, "rope_parameters": {"rope_theta": 3.0}}
    config = parse(rope_thetta=5.0, logits_scaling=8.0, **two)
    assert config.unread == ("rope_thetta", "logits_scaling", "rope_scaling.beta_fast", "rope_parameters")
    assert replace(config, unread=()) == parse()
    unknown: dict[str, Any] = {f"key_{i}": i for i in range(1000)} | {"x" * 10_000: 1}
    many = parse(**unknown).unread
    assert len(many) == 21
    assert many[-1] == "and 981 more"
    lines: dict[str, Any] = {"\n" * 10_000: 1}
    assert max(map(len, parse(**lines).unread)) < 100


def test_rotary_defaults() -> None:
    assert rope_of(parse()) == Rope(10_000.0)
    assert rope_of(parse(rope_scaling=None, rope_theta=1e6)) == Rope(1e6)


def test_biases_by_family() -> None:
    def biases(config: DecoderSpec) -> tuple[bool, bool, bool]:
        return config.attention.bias, config.attention.out_bias, config.layers[0].mlp.bias

    declared = {"attention_bias": True, "mlp_bias": True}
    assert biases(parse("llama")) == (False, False, False)
    assert biases(parse("llama", **declared)) == (True, True, True)
    assert biases(parse("mistral", **declared)) == (False, False, False)
    assert biases(parse("qwen2")) == (True, False, False)
    assert biases(parse("qwen3", **declared)) == (True, True, False)
    assert parse("qwen3").attention.qk_norm == "heads"


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("llama", {"sliding_window": 128}, (None, None, None)),
        ("llama", {"layer_types": [FULL] * 3}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING, FULL, FULL]}, (8, None, None)),
        ("mistral", {"sliding_window": 8, "layer_types": None}, (8, 8, 8)),
        ("ministral", {"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL]}, (None, 8, None)),
        ("qwen2", {"sliding_window": 8}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, FULL]},
            (8, None, None),
        ),
    ],
)
def test_windows(model_type: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(model_type, **fields).windows == windows


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        # transformers' forward pass has no window, and its cache has one
        ("llama", {"sliding_window": 8}, "sliding_window 8"),
        ("llama", {"layer_types": [SLIDING, FULL, FULL]}, "sliding_attention in layer_types"),
        ("qwen2", {"layer_types": [SLIDING, FULL, FULL]}, "no sliding_window"),
        ("mistral", {"layer_types": [SLIDING, FULL, FULL], "sliding_window": None}, "no sliding_window"),
        ("mistral", {"sliding_window": 1}, "at least 2"),
    ],
)
def test_windows_without_one_right_answer_are_refused(
    model_type: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse(model_type, **fields)


def test_head_sizes() -> None:
    assert parse().head_dim == 16
    assert parse(head_dim=32).head_dim == 32
    assert parse("qwen3").head_dim == 128
    assert parse(num_key_value_heads=None).kv_heads == 4
    assert parse(num_key_value_heads=1).kv_heads == 1


def test_key_value_heads_where_config_json_is_silent() -> None:
    """Each family has its own number; null is another matter."""
    silent = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}

    def kv_heads(model_type: str, heads: int, **fields: Any) -> int:
        config = {"model_type": model_type, **silent, "num_attention_heads": heads, **fields}
        return parse_model_config(json.dumps(config).encode()).kv_heads

    assert kv_heads("llama", 16) == 16
    assert kv_heads("mistral", 16) == 8
    assert kv_heads("qwen2", 64, head_dim=16) == 32
    assert kv_heads("qwen3", 64, num_key_value_heads=None) == 64
