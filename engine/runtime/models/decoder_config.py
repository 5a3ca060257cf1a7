"""Reads config.json of a Hugging Face directory into a `DecoderConfig`, the description that networks compute
by.

Rules:

1. The model is computed as transformers computes it (5.23, loaded by its Auto classes); settings that are not
   implemented are refused by name. A checkpoint that loads and answers slightly wrong is the worst outcome.
2. Every key has a meaning in `keys.py`, or is named in the log.
3. `model_type` decides the family, as in transformers. `architectures`, which other servers read, must agree.

tests/engine/runtime/test_config_matrix.py compares the outcomes, key by key and in odd combinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from engine.runtime.models.keys import CONFIG_KEYS
from engine.runtime.models.quantization import Fp8Scheme, read_fp8_scheme
from engine.runtime.models.rope import RopeConfig, UnsupportedRope, read_rope, unread_rope_keys
from engine.runtime.setup.model_errors import ModelUnavailable, UnsupportedModel
from shared.process.files import read_bytes
from shared.text.model_files import FILE_LEN_MAX, BadModelFile, parse_object, refusals, shown, unexplained

SIZE_MAX: Final = 2**31 - 1
LAYERS_MAX: Final = 4096
WINDOW_MIN: Final = 2
"""The least window, in tokens: with a window of one, transformers' generation differs from its forward
pass."""
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
class DecoderConfig:
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
    """Per layer, the number of latest tokens that a token sees, itself included. None: all."""
    tied_embeddings: bool
    """True if the embedding is also the head. A checkpoint with a head of its own overrides config.json
    (`engine.runtime.start.starting.checked_checkpoint`)."""
    activation: str = "silu"
    """The function of the MLP's gate, by config.json's name."""
    norm: str = "rms"
    """`rms`: x / sqrt(mean(x^2) + norm_eps), times a weight that is used as it is stored."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if the heads of queries and keys are normed before they are rotated."""
    fp8: Fp8Scheme | None = None
    """The checkpoint's scheme for matrices in fp8. None: all are stored in a plain type."""
    unread: tuple[str, ...] = ()
    """Keys of config.json that are ignored, and are not known to have no effect, for the log."""

    @property
    def layers(self) -> int:
        return len(self.windows)


class WindowRule(Enum):
    """A family's rule for the layers that have a sliding window."""

    NONE = "none"
    ALL = "all"
    """Every layer, where `sliding_window` is set."""
    TYPED = "typed"
    """The layers that `layer_types` names; without it every layer, where `sliding_window` is set."""
    SWITCHED = "switched"
    """TYPED, but only with `use_sliding_window`; without `layer_types`, the layers from `max_window_layers`
    on."""


@dataclass(frozen=True, slots=True)
class Family:
    """The settings of one `model_type`: its differences from the plain dense decoder."""

    architecture: str
    also_named: tuple[str, ...] = ()
    """Other names that `architectures` may have."""
    qkv_bias: bool | None = False
    """None: `attention_bias` of config.json decides, for the output projection, too."""
    mlp_bias: bool | None = False
    """None: `mlp_bias` of config.json decides."""
    qk_norm: bool = False
    head_dim: int | None = None
    """The head size where config.json has none. None: hidden_size / heads."""
    kv_heads: int | None = None
    """The number of key-value heads where config.json has none. None: the number of query heads, which is
    also the meaning of null in every family."""
    windows: WindowRule = WindowRule.NONE

    @property
    def slides(self) -> bool:
        return self.windows is not WindowRule.NONE


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, mlp_bias=None),
    "ministral": Family(
        "MinistralForCausalLM", ("MistralForCausalLM",), kv_heads=8, windows=WindowRule.TYPED
    ),
    "mistral": Family("MistralForCausalLM", kv_heads=8, windows=WindowRule.ALL),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, kv_heads=32, windows=WindowRule.SWITCHED),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qkv_bias=None,
        qk_norm=True,
        head_dim=128,
        kv_heads=32,
        windows=WindowRule.SWITCHED,
    ),
}
"""The families that are implemented, by `model_type`."""


class _Named(msgspec.Struct, frozen=True):
    model_type: str | None = None
    architectures: list[str] | None = None


class _HfConfig(msgspec.Struct, frozen=True):
    """The keys that are used, except those of rotary embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | UnsetType | None = UNSET
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28  # transformers' default where config.json is silent
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


_DEFAULT_WINDOW: Final = 4096
"""The window, in tokens, of every family that slides, where config.json is silent."""


def read_model_config(model_dir: Path) -> DecoderConfig:
    """The directory's model. Raises ModelUnavailable without a config.json, UnsupportedModel where it is
    refused."""
    try:
        data = read_bytes(model_dir / "config.json", FILE_LEN_MAX)
    except OSError as error:
        raise ModelUnavailable(f"{model_dir} has no readable config.json") from error
    return parse_model_config(data)


def parse_model_config(data: bytes) -> DecoderConfig:
    """The model that `data`, a config.json, describes. Raises UnsupportedModel, naming all that is
    unsupported."""
    try:
        fields = parse_object(data)
        family = _family(fields)
        hf = msgspec.convert(fields, _HfConfig)
    except BadModelFile as error:
        raise UnsupportedModel(f"config.json {error}") from error
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"config.json cannot be read: {error}") from error
    return _model_config(family, fields, hf)


def _family(fields: Mapping[str, Any]) -> Family:
    """The family that config.json names. Raises UnsupportedModel, and ValidationError where a name is no
    string."""
    named = msgspec.convert(fields, _Named)
    architectures = ", ".join(map(shown, named.architectures or ["none named"]))
    family = FAMILIES.get(named.model_type or "")
    if named.model_type == "mistral" and "layer_types" in fields:  # as transformers' AutoConfig has it
        family = FAMILIES["ministral"]
    if family is None:
        supported = ", ".join(f"{name} ({own.architecture})" for name, own in FAMILIES.items())
        raise UnsupportedModel(
            f"model_type {shown(named.model_type)} (architectures: {architectures}) is not supported; "
            f"supported are {supported}"
        )
    expected = {family.architecture, *family.also_named}
    if named.architectures and not expected.intersection(named.architectures):
        raise UnsupportedModel(
            f"config.json contradicts itself: model_type {named.model_type} is {family.architecture}, and "
            f"architectures says {architectures}"
        )
    return family


def _model_config(family: Family, fields: Mapping[str, Any], hf: _HfConfig) -> DecoderConfig:
    problems = [*refusals(fields, CONFIG_KEYS), *_unsupported(family, hf), *_inconsistent(family, hf)]
    rope = RopeConfig(0.0)
    try:
        rope = read_rope(fields)
    except UnsupportedRope as error:
        problems.append(str(error))
    if problems:
        raise UnsupportedModel(f"config.json of this {family.architecture}: " + "; ".join(problems))
    declared = family.qkv_bias is None
    return DecoderConfig(
        architecture=family.architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=_kv_heads(family, hf),
        head_dim=_head_dim(family, hf),
        norm_eps=hf.rms_norm_eps,
        context_len=hf.max_position_embeddings,
        rope=rope,
        windows=_windows(family, hf),
        tied_embeddings=hf.tie_word_embeddings,
        activation=hf.hidden_act,
        qkv_bias=hf.attention_bias if declared else bool(family.qkv_bias),
        output_bias=hf.attention_bias and declared,
        mlp_bias=hf.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        fp8=_fp8_scheme(hf),
        unread=(*unexplained(fields, CONFIG_KEYS), *unread_rope_keys(fields)),
    )


def _fp8_scheme(hf: _HfConfig) -> Fp8Scheme | None:
    found = read_fp8_scheme(hf.quantization_config) if hf.quantization_config is not None else None
    assert not isinstance(found, str), "refused before"
    return found


def _unsupported(family: Family, hf: _HfConfig) -> Iterator[str]:
    """A sentence for each setting of the configuration that is not implemented."""
    if hf.quantization_config is not None:
        scheme = read_fp8_scheme(hf.quantization_config)
        if isinstance(scheme, str):
            yield scheme
    if hf.hidden_act != "silu":
        yield f"hidden_act {shown(hf.hidden_act)} is not supported, only silu"
    known = {FULL_ATTENTION, SLIDING_ATTENTION} if family.slides else {FULL_ATTENTION}
    for layer_type in sorted(set(hf.layer_types or ()) - known):
        yield f"{shown(layer_type)} in layer_types is not supported"
    # transformers computes such a model with all tokens in one pass, and without in generation
    window = hf.sliding_window or hf.max_position_embeddings
    if not family.slides and window < hf.max_position_embeddings:
        yield f"sliding_window {hf.sliding_window} is not supported"


def _inconsistent(family: Family, hf: _HfConfig) -> Iterator[str]:
    misfits = [name for name in _SIZES if not 1 <= getattr(hf, name) <= SIZE_MAX]
    if misfits:
        yield f"{', '.join(misfits)} must be at least 1, and no more than {SIZE_MAX}"
        return
    if hf.num_hidden_layers > LAYERS_MAX:
        yield f"num_hidden_layers must be at most {LAYERS_MAX}"
    if not 0.0 < hf.rms_norm_eps < math.inf:
        yield f"rms_norm_eps {hf.rms_norm_eps} is no positive number"
    kv_heads, head_dim = _kv_heads(family, hf), _head_dim(family, hf)
    if kv_heads < 1 or hf.num_attention_heads % kv_heads:
        yield f"num_attention_heads {hf.num_attention_heads} is no multiple of num_key_value_heads {kv_heads}"
    if not 2 <= head_dim <= SIZE_MAX or head_dim % 2:
        yield f"head_dim {head_dim} must be even"
    if hf.layer_types is not None and len(hf.layer_types) != hf.num_hidden_layers:
        yield f"layer_types has {len(hf.layer_types)} entries for {hf.num_hidden_layers} layers"
    window = _window(family, hf)
    if window is not None and window < WINDOW_MIN:
        yield f"sliding_window must be at least {WINDOW_MIN}"
    if window is None and family.slides and SLIDING_ATTENTION in (hf.layer_types or ()):
        yield "layer_types names sliding layers, and there is no sliding_window"


def _kv_heads(family: Family, hf: _HfConfig) -> int:
    stated = family.kv_heads if hf.num_key_value_heads is UNSET else hf.num_key_value_heads
    return hf.num_attention_heads if stated is None else stated


def _head_dim(family: Family, hf: _HfConfig) -> int:
    stated = family.head_dim if hf.head_dim is None else hf.head_dim
    return hf.hidden_size // hf.num_attention_heads if stated is None else stated


def _window(family: Family, hf: _HfConfig) -> int | None:
    """The window of the layers that slide, in tokens; None when no layer slides."""
    if not family.slides or (family.windows is WindowRule.SWITCHED and not hf.use_sliding_window):
        return None
    return _DEFAULT_WINDOW if hf.sliding_window is UNSET else hf.sliding_window


def _windows(family: Family, hf: _HfConfig) -> tuple[int | None, ...]:
    window, layers = _window(family, hf), hf.num_hidden_layers
    if family.windows is not WindowRule.ALL and hf.layer_types is not None:
        return tuple(window if kind == SLIDING_ATTENTION else None for kind in hf.layer_types)
    first = hf.max_window_layers if family.windows is WindowRule.SWITCHED else 0
    return tuple(window if layer >= first else None for layer in range(layers))
