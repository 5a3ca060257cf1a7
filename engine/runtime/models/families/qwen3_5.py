"""Qwen3.5, 3.6 and 3.8, dense, text alone: delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from engine.runtime.models.dense import FULL_ATTENTION, LINEAR_ATTENTION, DenseKeys, Whole
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet, Names
from shared.text.model_files import KeyMeanings, only

MROPE = "mrope_section", "mrope_interleaved"  # of images: for text alone it is plain
OF_DELTA = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
SIZES = tuple(f"linear_{name}" for name in OF_DELTA)


class Qwen35Keys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    attention_bias: bool = False
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mtp_num_hidden_layers: int | None = 0
    mtp_use_dedicated_embeddings: bool | None = False

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    whole = Whole("qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.")
    names = Names(foreign=("mtp.", "model.visual."))
    norm_offset = 1.0
    qk_norm = "heads"
    period_key = "full_attention_interval"
    also_kinds = (LINEAR_ATTENTION,)
    also_sizes = ("full_attention_interval", *SIZES)
    rope_rules = RopeRules(part=0.25, partial=True, also=MROPE)
    limits: ClassVar[KeyMeanings] = {
        "attn_output_gate": only(True),
        "output_gate_type": only("swish"),
        "mamba_ssm_dtype": only("float32"),
        "mlp_only_layers": only([], None),
    }

    def contradictions(self) -> Iterator[str]:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            yield "linear_num_value_heads must be a multiple of linear_num_key_heads"
        yield from super().contradictions()

    def attention(self, kind: str, **options: Any) -> Attention | DeltaNet:
        if kind == LINEAR_ATTENTION:
            return DeltaNet(*(getattr(self, name) for name in SIZES))
        return super().attention(kind, output_gate=True, **options)

    def describe(self, **options: Any) -> DecoderSpec:
        has_mtp = self.mtp_num_hidden_layers == 1 and not self.mtp_use_dedicated_embeddings
        return super().describe(mtp=self.layer(FULL_ATTENTION) if has_mtp else None, **options)
