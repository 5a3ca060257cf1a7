"""ERNIE 4.5, its dense models: Llama with a rope of neighbours, and one switch for all biases."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.rope import RopeRules


class ErnieKeys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    tie_word_embeddings: bool = True
    use_bias: bool | None = False

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    rope_rules = RopeRules(theta=500_000.0, interleaved=True)

    @property
    def attention_bias(self) -> bool:
        return bool(self.use_bias)

    mlp_bias = attention_bias
