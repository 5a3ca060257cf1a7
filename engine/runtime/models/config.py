"""config.json of a Hugging Face directory, read into what a decoder needs to know.

Rule: what we do not implement is refused by name. A checkpoint that loads and answers slightly
wrong is the worst outcome, so every field that changes the arithmetic is read here, and a value we
have no code for ends the load.

Two spellings of rotary embeddings are in use: `rope_theta` beside `rope_scaling` (transformers 4),
and both inside `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.runtime.errors import ModelUnavailable, UnsupportedModel
from engine.runtime.models.quantization import Fp8Scheme, read_fp8_scheme

DEFAULT_ROPE_THETA: Final = 10_000.0
SUPPORTED_ROPE_TYPES: Final = ("default", "llama3")
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies (transformers `_compute_llama3_parameters`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder, fully described. Sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_len: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer: how many of the latest tokens, itself included, a token sees. None: all."""
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fp8: Fp8Scheme | None = None
    """How matrices are stored in the checkpoint. None: in a plain type, all of them."""

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart from the plain dense decoder."""

    qkv_bias: bool | None = False
    """None: as `attention_bias` says, which then holds for the output projection too."""
    mlp_bias: bool | None = False
    """None: as `mlp_bias` says."""
    qk_norm: bool = False
    head_dim: int | None = None
    """Where config.json is silent. None: hidden_size / heads."""
    windows: str = "none"
    """`none`; `all`: every layer slides when `sliding_window` is set; `typed`: only with
    `use_sliding_window`, and only the layers that `layer_types` or `max_window_layers` name."""


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family(windows="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="typed"),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, head_dim=128, windows="typed"),
}


class _Rope(msgspec.Struct, frozen=True):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    full_attention: dict[str, Any] | None = None
    """Present when the parameters differ by layer type, which no supported architecture needs."""
    sliding_attention: dict[str, Any] | None = None


class _HfConfig(msgspec.Struct, frozen=True):
    """The fields that change the arithmetic. Others (dropout, initializer_range, ...) do not matter here."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = 4096  # transformers' default where config.json is silent
    use_sliding_window: bool = False
    max_window_layers: int = 28  # likewise
    layer_types: list[str] | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    quantization_config: dict[str, Any] | None = None


class _Named(msgspec.Struct, frozen=True):
    architectures: list[str] | None = None


def read_model_config(model_dir: Path) -> ModelConfig:
    """Raises ModelUnavailable when there is no config.json, UnsupportedModel when we cannot serve it."""
    try:
        data = (model_dir / "config.json").read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"{model_dir} has no readable config.json") from error
    return parse_model_config(data)


def parse_model_config(data: bytes) -> ModelConfig:
    """`data` is config.json. Raises UnsupportedModel, naming everything that stands in the way."""
    try:
        architecture = (msgspec.json.decode(data, type=_Named).architectures or ["(none named)"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            supported = ", ".join(FAMILIES)
            raise UnsupportedModel(f"architecture {architecture} is not supported; supported are {supported}")
        hf = msgspec.json.decode(data, type=_HfConfig)
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"config.json cannot be read: {error}") from error
    problems = [*_unsupported(hf), *_inconsistent(family, hf)]
    if problems:
        raise UnsupportedModel(f"config.json of this {architecture}: " + "; ".join(problems))
    return _model_config(architecture, family, hf)


def _model_config(architecture: str, family: Family, hf: _HfConfig) -> ModelConfig:
    declared = family.qkv_bias is None
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=_kv_heads(hf),
        head_dim=_head_dim(family, hf),
        norm_eps=hf.rms_norm_eps,
        context_len=hf.max_position_embeddings,
        rope=_rope(hf),
        windows=_windows(family, hf),
        tied_embeddings=hf.tie_word_embeddings,
        qkv_bias=hf.attention_bias if declared else bool(family.qkv_bias),
        output_bias=hf.attention_bias and declared,
        mlp_bias=hf.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        fp8=_fp8_scheme(hf),
    )


def _fp8_scheme(hf: _HfConfig) -> Fp8Scheme | None:
    found = read_fp8_scheme(hf.quantization_config) if hf.quantization_config is not None else None
    assert not isinstance(found, str), "refused before"
    return found


def _unsupported(hf: _HfConfig) -> Iterator[str]:
    """What the configuration asks for and we have no code for."""
    if hf.quantization_config is not None:
        scheme = read_fp8_scheme(hf.quantization_config)
        if isinstance(scheme, str):
            yield scheme
    if hf.hidden_act != "silu":
        yield f"hidden_act {hf.hidden_act!r} is not supported, only 'silu'"
    rope_type = _rope_type(hf)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        yield f"rope type {rope_type!r} is not supported, only {', '.join(SUPPORTED_ROPE_TYPES)}"
    if _rope_fields(hf).full_attention is not None or _rope_fields(hf).sliding_attention is not None:
        yield "rope_parameters by layer type are not supported"
    partial = _rope_fields(hf).partial_rotary_factor or hf.partial_rotary_factor
    if partial not in (None, 1.0):
        yield f"partial_rotary_factor {partial} is not supported"
    for layer_type in sorted(set(hf.layer_types or ()) - {FULL_ATTENTION, SLIDING_ATTENTION}):
        yield f"layer type {layer_type!r} is not supported"


def _inconsistent(family: Family, hf: _HfConfig) -> Iterator[str]:
    empty = [name for name in _SIZES if getattr(hf, name) < 1]
    if empty:
        yield f"{', '.join(empty)} must be at least 1"
        return
    if _kv_heads(hf) < 1 or hf.num_attention_heads % _kv_heads(hf):
        yield f"{hf.num_attention_heads} attention heads are no multiple of {_kv_heads(hf)} key-value heads"
    if _head_dim(family, hf) < 2 or _head_dim(family, hf) % 2:
        yield f"head_dim {_head_dim(family, hf)} must be even"
    if hf.layer_types is not None and len(hf.layer_types) != hf.num_hidden_layers:
        yield f"layer_types has {len(hf.layer_types)} entries for {hf.num_hidden_layers} layers"
    if hf.sliding_window is not None and hf.sliding_window < 1:
        yield "sliding_window must be at least 1"
    if _rope_type(hf) == "llama3" and _llama3(_rope_fields(hf)) is None:
        yield (
            "rope type 'llama3' needs factor, low_freq_factor, a larger high_freq_factor and "
            "original_max_position_embeddings"
        )


def _kv_heads(hf: _HfConfig) -> int:
    return hf.num_attention_heads if hf.num_key_value_heads is None else hf.num_key_value_heads


def _head_dim(family: Family, hf: _HfConfig) -> int:
    return hf.head_dim or family.head_dim or hf.hidden_size // hf.num_attention_heads


def _rope_fields(hf: _HfConfig) -> _Rope:
    return hf.rope_parameters or hf.rope_scaling or _Rope()


def _rope_type(hf: _HfConfig) -> str:
    fields = _rope_fields(hf)
    return fields.rope_type or fields.type or "default"


def _rope(hf: _HfConfig) -> RopeConfig:
    fields = _rope_fields(hf)
    theta = fields.rope_theta or hf.rope_theta or DEFAULT_ROPE_THETA
    return RopeConfig(theta, _llama3(fields) if _rope_type(hf) == "llama3" else None)


def _llama3(fields: _Rope) -> Llama3Scaling | None:
    factor, low, high = fields.factor, fields.low_freq_factor, fields.high_freq_factor
    original = fields.original_max_position_embeddings
    if not (factor and low and high and original) or low >= high:
        return None
    return Llama3Scaling(factor, low, high, original)


def _windows(family: Family, hf: _HfConfig) -> tuple[int | None, ...]:
    if family.windows == "all":
        return (hf.sliding_window,) * hf.num_hidden_layers
    if family.windows == "none" or not hf.use_sliding_window or hf.sliding_window is None:
        return (None,) * hf.num_hidden_layers
    sliding = (
        [kind == SLIDING_ATTENTION for kind in hf.layer_types]
        if hf.layer_types is not None
        else [layer >= hf.max_window_layers for layer in range(hf.num_hidden_layers)]
    )
    return tuple(hf.sliding_window if slides else None for slides in sliding)
