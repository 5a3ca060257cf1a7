"""Values that keys of config.json can have, sensible and not, and configurations drawn from them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.engine.runtime.config_oracle import Weights

FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3")
ABSENT = object()
"""As a value: the key is taken out."""
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
ROPE: Sequence[Any] = (
    None,
    {},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default"},
    {"type": "default", "rope_theta": 77},
    {"rope_theta": 5000.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "mrope_section": [2, 3, 3]},
    {"factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 300.0, **LLAMA3, **ORIGINAL},
    {"type": "llama3", **LLAMA3, **ORIGINAL},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", "type": "linear", **LLAMA3, **ORIGINAL},
    {"rope_type": "llama3", **LLAMA3, **ORIGINAL, "factor": 0.5},
    {"rope_type": "llama3", **LLAMA3, **ORIGINAL, "low_freq_factor": 4.5},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "longrope", "factor": 2.0, **ORIGINAL, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)
ROPE_NONSENSE: Sequence[Any] = (
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "llama3", **LLAMA3, **ORIGINAL, "factor": None},
    {"rope_type": "llama3", **LLAMA3, **ORIGINAL, "high_freq_factor": 1.0},
    {"rope_type": "llama3", "factor": 2.0, **ORIGINAL},
    {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    {"rope_type": None},
    {FULL: {"rope_type": "default", "rope_theta": 300.0}},
    {FULL: {"rope_type": "linear", "factor": 2.0}, SLIDING: {"rope_type": "default"}},
    "linear",
)
SHAPING: Mapping[str, Sequence[Any]] = {
    "rope_theta": (ABSENT, 300.0, 500, 1e6),
    "rope_scaling": ROPE,
    "rope_parameters": ROPE,
    "original_max_position_embeddings": (8, 16, 64),
    "max_position_embeddings": (64, 128, 48, ABSENT),
    "partial_rotary_factor": (1.0, 0.5, None),
    "tie_word_embeddings": (True, False, ABSENT),
    "layer_types": (
        None,
        [FULL, FULL],
        [SLIDING, FULL],
        [FULL, SLIDING],
        [SLIDING, SLIDING],
        ["attention", FULL],
    ),
    "sliding_window": (ABSENT, None, 1, 5, 12, 40, 64, 4096),
    "use_sliding_window": (True, False, ABSENT),
    "max_window_layers": (0, 1, 2, 28, -1, ABSENT),
    "head_dim": (ABSENT, None, 16),
    "num_key_value_heads": (ABSENT, None, 1, 2),
    "num_hidden_layers": (2, 1),
    "attention_bias": (True, False, ABSENT),
    "mlp_bias": (True, False, ABSENT),
    "hidden_act": ("silu", ABSENT, "swish", "gelu", "relu"),
    "rms_norm_eps": (ABSENT, 1e-6, 1e-2, 0.0, math.nan, math.inf, {"__float__": "NaN"}),
    "model_type": FAMILIES,
    "architectures": (
        ABSENT,
        None,
        [],
        ["LlamaForCausalLM"],
        ["MistralForCausalLM"],
        ["Qwen2ForCausalLM"],
        ["Qwen3ForCausalLM", "LlamaForCausalLM"],
        ["LlamaForSequenceClassification"],
    ),
    "is_causal": (True, False, None),
    "attention_chunk_size": (None, 8),
    "attribute_map": ({}, {"rms_norm_eps": "initializer_range"}),
    "compression_config": (None, {"quant_method": "compressed-tensors"}),
}
"""Keys that change what some family computes, and values that transformers takes."""
NONSENSE: Mapping[str, Sequence[Any]] = {
    "rope_theta": (None, 0, "300", math.nan),
    "rope_scaling": ROPE_NONSENSE,
    "rope_parameters": ROPE_NONSENSE,
    "original_max_position_embeddings": (None, 0),
    "max_position_embeddings": (0, None, 64.0),
    "tie_word_embeddings": (None, "true"),
    "layer_types": ([FULL, "chunked_attention"], [FULL], [], [FULL, 1]),
    "sliding_window": (0, -3, "12"),
    "use_sliding_window": (None, 1),
    "head_dim": (0, 15, 32, "16"),
    "num_key_value_heads": (0, 7),
    "num_attention_heads": (0, 3, ABSENT),
    "num_hidden_layers": (0, 3, 10**12, 2.0),
    "hidden_size": (48, ABSENT, None),
    "vocab_size": (10, 10**15, ABSENT),
    "hidden_act": (None, "no such"),
    "rms_norm_eps": (1, "1e-5", None),
    "model_type": ("mixtral", "no such", ABSENT, None, ["llama"]),
    "architectures": ("LlamaForCausalLM", [None]),
    "is_encoder_decoder": (True,),
    "per_layer_config": ({"0": {"sliding_window": 5}}, {"1": {"rms_norm_eps": 0.5}}),
    "text_config": ({"tie_word_embeddings": False},),
    "decoder": ({"vocab_size": 8},),
    "kv_sharing_modes": (["own", "reuse"],),
    "fusion_config": ({"patch_embeddings": True},),
    "transformers_weights": ("other.safetensors",),
    "configuration_files": (["config.5.0.0.json"],),
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, {}),
}
"""Values that transformers raises on, in most families."""
WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "attention_dropout": (0.0, 0.5, math.nan),
    "bos_token_id": (None, 1, 999),
    "chunk_size_feed_forward": (0, 4),
    "decoder": (None,),
    "dtype": ("float32", "bfloat16"),
    "eos_token_id": (None, 2, [1, 2], 999),
    "fusion_config": (None,),
    "gradient_checkpointing": (False, True),
    "id2label": ({"0": "no"},),
    "initializer_range": (0.02, 0.5),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False, None),
    "kv_sharing_modes": (None,),
    "output_attentions": (False, True),
    "output_hidden_states": (False, True),
    "pad_token_id": (None, 0, 5, -1),
    "per_layer_config": (None,),
    "pretraining_tp": (1, 2),
    "pruned_heads": ({}, {"0": [0]}),
    "quantization_config": (None,),
    "return_dict": (True,),
    "text_config": (None,),
    "tie_encoder_decoder": (False, True),
    "torch_dtype": ("float32", "bfloat16", "float16"),
    "transformers_version": ("4.37.0", "5.23.0"),
    "transformers_weights": (None,),
    "use_cache": (True, False),
}
UNKNOWN: Mapping[str, Sequence[Any]] = {
    "attention_multiplier": (0.1,),
    "attn_logit_softcapping": (50.0,),
    "auto_map": ({"AutoModelForCausalLM": "modeling.Model"},),
    "embedding_multiplier": (12.0,),
    "final_logit_softcapping": (30.0,),
    "hidden_activation": ("gelu",),
    "logit_scale": (0.5,),
    "logits_scaling": (8.0,),
    "n_layer": (1,),
    "norm_epsilon": (0.5,),
    "num_experts": (4,),
    "num_kv_heads": (2,),
    "qk_layernorm": (True,),
    "qkv_bias": (True,),
    "query_pre_attn_scalar": (8,),
    "residual_multiplier": (0.2,),
    "rope_freq_base": (300.0,),
    "rope_scalling": ({"rope_type": "linear", "factor": 2.0},),
    "rope_thetta": (300.0,),
    "slidingwindow": (5,),
    "temperature": (1.0, 0.5),
    "tie_embeddings": (False, True),
    "use_qk_norm": (True, False),
    "window_size": (5,),
}
"""Keys of other families and other files, misspelt ones, and nobody's."""
YARN = {"factor": 4.0, **ORIGINAL}
LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 8.0]}
BY_KIND = {FULL: {"rope_type": "yarn", "rope_theta": 300.0, **YARN}, SLIDING: {"rope_type": "default"}}
EVERYWHERE: Sequence[Mapping[str, Any]] = (
    {},
    {"rope_theta": 300.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 300.0, **LLAMA3, **ORIGINAL}},
    {"partial_rotary_factor": 0.25},
    {"head_dim": ABSENT},
    {"num_key_value_heads": ABSENT},
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"rms_norm_eps": ABSENT},
    {"rms_norm_eps": 0.01},
    {"tie_word_embeddings": ABSENT},
    {"sliding_window": 12},
    {"sliding_window": None},
    {"layer_types": [SLIDING, FULL], "sliding_window": 12},
    {"layer_types": [FULL, FULL]},
    {"architectures": ["LlamaForCausalLM"]},
)
"""What is changed in every family whose tensors transformers names."""
OWN: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "smollm3": (
        *({"no_rope_layers": layers} for layers in ([1, 1], [0, 0], [0, 1], None, [1])),
        {"no_rope_layers": None, "no_rope_layer_interval": 2},
        {"no_rope_layers": None, "no_rope_layer_interval": 0},
        {"use_sliding_window": True, "sliding_window": 12},
        {"use_sliding_window": True, "sliding_window": 12, "layer_types": [SLIDING, FULL]},
        {"mlp_bias": True},
    ),
    "granite": (
        *({name: ABSENT} for name in ("embedding_multiplier", "attention_multiplier", "logits_scaling")),
        {"residual_multiplier": ABSENT},
        {"residual_multiplier": 2},
        {"logits_scaling": 0},
        {"attention_multiplier": math.nan},
    ),
    "granitemoehybrid": (
        {"position_embedding_type": None},
        {"position_embedding_type": "nope"},
        {"layer_types": ["mamba", "attention"]},
        {"layer_types": ABSENT},
        {"num_local_experts": ABSENT},
        {"residual_multiplier": 0.3, "embedding_multiplier": 2.0},
        {"shared_intermediate_size": ABSENT},
    ),
    "gemma3_text": (
        {"query_pre_attn_scalar": ABSENT},
        {"query_pre_attn_scalar": 0},
        {"sliding_window_pattern": ABSENT},
        {"sliding_window_pattern": 1},
        {"rope_local_base_freq": ABSENT},
        {"rope_parameters": BY_KIND},
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}, "rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": 3.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": ABSENT},
        {"hidden_activation": "silu"},
    ),
    "phi3": (
        {"partial_rotary_factor": ABSENT},
        {"partial_rotary_factor": 1.0},
        {"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 16},
        {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 16},
        {"rope_scaling": {"type": "longrope", **LONG}},
        {"rope_scaling": {"type": "longrope", **LONG, "attention_factor": 1.5, **ORIGINAL}},
        {"rope_scaling": {"type": "longrope", **LONG, "short_factor": [1.0]}},
        {"original_max_position_embeddings": 16},
    ),
    "olmo2": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 300.0, **YARN}},),
    "olmo3": (
        {"rope_parameters": BY_KIND},
        {"layer_types": None},
        {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 300.0},
        {"rope_parameters": {FULL: {"rope_type": "yarn", **YARN, "truncate": False}}},
    ),
    "exaone4": (
        {"layer_types": [SLIDING, FULL]},
        {"layer_types": [SLIDING, FULL], "sliding_window_pattern": "LG"},
        {"sliding_window_pattern": "LG"},
        {"sliding_window_pattern": ABSENT},
        {"sliding_window_pattern": None},
        {"sliding_window": None},
        {"sliding_window": None, "layer_types": [FULL, FULL]},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, **ORIGINAL}, "rope_theta": 300.0},
    ),
    "seed_oss": (
        {"attention_out_bias": ABSENT},
        {"attention_bias": False, "attention_out_bias": False},
        {"mlp_bias": True},
    ),
    "arcee": ({"hidden_act": ABSENT}, {"hidden_act": "silu"}, {"mlp_bias": True}),
    "hunyuan_v1_dense": (
        {"rope_scaling": None},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "alpha": "100"}},
        {"rope_scaling": {"rope_type": "dynamic", "alpha": 10, "mscale": 1.0}, "rope_theta": 300.0},
    ),
    "qwen3_5_text": (
        *({name: ABSENT} for name in ("full_attention_interval", "partial_rotary_factor")),
        {"linear_num_value_heads": ABSENT},
        {"layer_types": ["linear_attention", "linear_attention"]},
        {"layer_types": [FULL, "linear_attention"]},
        {"linear_num_key_heads": 3},
        {"linear_conv_kernel_dim": 0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 1]}},
        {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True}},
        {"output_gate_type": "sigmoid"},
        {"mamba_ssm_dtype": "bfloat16"},
        {"attn_output_gate": False},
    ),
    "ernie4_5": ({"use_bias": False}, {"use_bias": None}),
    "glm4": (
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 0.9},
        {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25}},
        {"attention_bias": ABSENT},
    ),
    "cohere2": (
        {"logit_scale": ABSENT},
        {"logit_scale": -1.0},
        {"layer_norm_eps": 0.01},
        {"layer_norm_eps": 0.0},
        {"sliding_window_pattern": ABSENT},
        {"head_dim": 8},
    ),
    "ministral3": (
        {"rope_parameters": ABSENT},
        {"rope_parameters": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.5}},
        {
            "rope_parameters": {
                "type": "yarn",
                "llama_4_scaling_beta": 0.2,
                **YARN,
                "mscale": 1,
                "mscale_all_dim": 2,
            }
        },
    ),
}
"""What is changed in one family, and tells whether its own keys are read."""
PRESETS: Sequence[Mapping[str, Any]] = (
    {},
    {"heads": 4, "kv_heads": 2},
    {"hidden": 64, "heads": 4, "kv_heads": 4},
    {"heads": 8, "kv_heads": 8},  # what Mistral has where config.json is silent
    {"heads": 2, "kv_heads": 2, "head_dim": 128},  # and Qwen 3
)
LIKELY: Mapping[str, int] = {
    "rope_scaling": 8,
    "rope_parameters": 8,
    "rope_theta": 4,
    "layer_types": 6,
    "sliding_window": 6,
    "use_sliding_window": 6,
    "max_window_layers": 3,
    "tie_word_embeddings": 3,
    "original_max_position_embeddings": 3,
    "head_dim": 2,
    "num_key_value_heads": 2,
}
"""How often a key is drawn; others once."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A configuration, and what is odd about it."""

    weights: Weights
    changes: Mapping[str, Any]
    twice: Mapping[str, Any]
    """Keys that the file holds a second time, behind all others."""

    @property
    def text(self) -> str:
        """config.json"""
        pairs = [*(plain(self.weights) | dict(self.changes)).items(), *self.twice.items()]
        return "{" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pairs if v is not ABSENT) + "}"

    @property
    def keys(self) -> set[str]:
        """Those that are not as in a plain configuration."""
        return {*self.changes, *self.twice}

    def __str__(self) -> str:
        changes = {name: "ABSENT" if value is ABSENT else value for name, value in self.changes.items()}
        return f"{self.weights} {changes} {dict(self.twice) or ''}"


def plain(weights: Weights) -> dict[str, Any]:
    """What transformers is content with."""
    config = weights.config()
    return {"sliding_window": 12} | config if weights.model_type == "ministral" else config


def drawn(rng: random.Random) -> Odd:
    preset, head = rng.choice(PRESETS), rng.choice(["own", "none", "none", "tied"])
    weights = Weights(rng.choice(FAMILIES), biases=rng.random() < 0.2, head=head, **preset)
    changes = dict(_drawn(rng) for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5])))
    return Odd(weights, changes, dict([_drawn(rng)]) if rng.random() < 0.1 else {})


def _drawn(rng: random.Random) -> tuple[str, Any]:
    (table,) = rng.choices([SHAPING, NONSENSE, WITHOUT_EFFECT, UNKNOWN], [80, 4, 10, 6])
    names = list(table)
    (name,) = rng.choices(names, [LIKELY.get(name, 1) for name in names])
    return name, rng.choice(table[name])
