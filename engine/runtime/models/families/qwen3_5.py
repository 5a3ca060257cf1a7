"""Qwen3.5, 3.6 and 3.8, their dense text: gated delta nets, and attention with an output gate in every fourth
layer. Images are not served: what the checkpoint has for them is not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from engine.runtime.models.dense import FULL_ATTENTION, LINEAR_ATTENTION, SIZE_MAX, DenseKeys
from engine.runtime.models.family import Family, Whole
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import DecoderSpec, DeltaNet, Layer, Names
from shared.text.model_files import KeyMeanings, only

MROPE = "mrope_section", "mrope_interleaved"  # of images: for text alone it is plain
SIZES = tuple(f"linear_{n}" for n in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads"))


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

    also_kinds: ClassVar[tuple[str, ...]] = (LINEAR_ATTENTION,)
    rope_rules: ClassVar[RopeRules] = RopeRules(part=0.25, partial=True, also=MROPE)
    limits: ClassVar[KeyMeanings] = {
        "attn_output_gate": only(True),
        "output_gate_type": only("swish"),
        "mamba_ssm_dtype": only("float32"),
        "mlp_only_layers": only([], None),
    }

    @property
    def kinds(self) -> list[str]:
        numbers, every = range(1, self.num_hidden_layers + 1), self.full_attention_interval
        return self.layer_types or [LINEAR_ATTENTION if i % every else FULL_ATTENTION for i in numbers]

    def contradictions(self) -> Iterator[str]:
        if wrong := [n for n in ("full_attention_interval", *SIZES) if not 1 <= getattr(self, n) <= SIZE_MAX]:
            yield f"{', '.join(wrong)} must be at least 1, and no more than {SIZE_MAX}"
        elif self.linear_num_value_heads < 1 or self.linear_num_value_heads % self.linear_num_key_heads:
            yield "linear_num_value_heads must be a multiple of linear_num_key_heads"
        elif FULL_ATTENTION not in self.kinds:
            yield f"layer_types or full_attention_interval without {FULL_ATTENTION} are not supported"
        else:
            yield from super().contradictions()


def describe(hf: Qwen35Keys) -> DecoderSpec:
    heads, dims = (hf.linear_num_key_heads, hf.linear_num_value_heads), (hf.linear_key_head_dim,)
    delta = DeltaNet(*heads, *dims, hf.linear_value_head_dim, hf.linear_conv_kernel_dim)
    biases = {"bias": hf.attention_bias, "out_bias": hf.attention_bias}
    full = hf.attention(FULL_ATTENTION, qk_norm="heads", output_gate=True, **biases)
    layers = (Layer(full if kind == FULL_ATTENTION else delta, hf.mlp()) for kind in hf.kinds)
    names = Names(foreign=("mtp.", "model.visual."))
    has_mtp = hf.mtp_num_hidden_layers == 1 and not hf.mtp_use_dedicated_embeddings
    mtp = Layer(full, hf.mlp()) if has_mtp else None
    return hf.decoder("Qwen3_5ForCausalLM", layers, norm=hf.norm(offset=1.0), names=names, mtp=mtp)


WHOLE = Whole("qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.")
FAMILY = Family("qwen3_5_text", "Qwen3_5ForCausalLM", Qwen35Keys, describe, whole=WHOLE)
