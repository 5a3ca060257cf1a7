"""The keys of config.json that dense decoders share, and what follows from them in most families.

A family derives its own keys from `DenseKeys`: its fields are the keys that it reads, its class variables and
methods what differs. `describe` puts the description together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
from msgspec import UNSET

from engine.runtime.models.quantization import Fp8Scheme, read_fp8_scheme
from engine.runtime.models.rope import ROPE_KEYS, RopeRules, UnsupportedRope, read_rope
from engine.runtime.models.spec import (
    Act,
    Attention,
    DecoderSpec,
    DeltaNet,
    Layer,
    Mlp,
    Names,
    NormKind,
    NormSpec,
    Placing,
    QKPlacing,
    Rope,
)
from shared.text.model_files import KeyMeanings, shown

SIZE_MAX: Final = 2**31 - 1
LAYERS_MAX: Final = 4096
WINDOW_MIN: Final = 2
"""The least window, in tokens: with a window of one, transformers' generation differs from its forward
pass."""
DEFAULT_WINDOW: Final = 4096
"""The window, in tokens, of every family that slides, where config.json is silent."""
FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
LINEAR_ATTENTION: Final = "linear_attention"
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
ACTIVATIONS: Final[Mapping[str, Act]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
"""The descriptions' names of transformers' functions."""


def _not_positive(keys: msgspec.Struct, *names: str) -> Iterator[str]:
    """A sentence for each of the named keys that is neither null nor a positive number."""
    for name in names:
        if (value := getattr(keys, name)) is not None and not 0.0 < value < math.inf:
            yield f"{name} {value} is no positive number"


@dataclass(frozen=True, slots=True)
class Whole:
    """A model of more than text whose text part is of a family, with the keys in `text_config`."""

    model_type: str
    architecture: str
    at: str
    """The prefix of the text part's names of tensors, instead of `model.`."""


class DenseKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that all families read. A key that is null means what it means to transformers."""

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
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    rope_theta: Any = UNSET
    rope_scaling: Any = UNSET
    rope_parameters: Any = UNSET
    partial_rotary_factor: Any = UNSET
    original_max_position_embeddings: Any = UNSET

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    also_named: ClassVar[tuple[str, ...]] = ()
    """Other names that `architectures` may have."""
    whole: ClassVar[Whole | None] = None
    names: ClassVar[Names] = Names()
    norms: ClassVar[Placing] = "before"
    norm_kind: ClassVar[NormKind] = "rms"
    norm_offset: ClassVar[float] = 0.0
    qk_norm: ClassVar[QKPlacing | None] = None
    qkv_bias: ClassVar[bool] = False
    """True if queries, keys and values have a bias whatever the keys say."""
    gated: ClassVar[bool] = True
    acts: ClassVar[tuple[str, ...]] = ("silu",)
    act_key: ClassVar[str] = "hidden_act"
    """The key that names the MLP's function."""
    eps_key: ClassVar[str] = "rms_norm_eps"
    limits: ClassVar[KeyMeanings] = {}
    """Keys that are accepted with values that change nothing."""
    positives: ClassVar[tuple[str, ...]] = ()
    """Keys that must be positive numbers, where they are not null."""
    rope_rules: ClassVar[RopeRules] = RopeRules()
    period_key: ClassVar[str] = ""
    """The key by which every so many layers are of full attention, where `layer_types` is silent."""
    slides: ClassVar[bool] = False
    """True if the family has layers with a window, or may have them."""
    layers_alike: ClassVar[bool] = False
    """True if `layer_types` may say no more than `sliding_window` does."""
    also_sizes: ClassVar[tuple[str, ...]] = ()
    """Keys of the family that are numbers of elements, as those above."""
    also_kinds: ClassVar[tuple[str, ...]] = ()
    """Other names in `layer_types` that the family understands."""

    # -- what follows from the keys, in a family that does not say otherwise

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def width(self) -> int:
        """The size of a head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def scale(self) -> float:
        """The factor of attention's scores."""
        return float(self.width**-0.5)

    @property
    def window(self) -> int | None:
        """The window of the layers that slide, in tokens; None when no layer slides."""
        slides = self.slides and getattr(self, "use_sliding_window", True)
        return self.sliding_window if slides else None

    @property
    def kinds(self) -> list[str]:
        """Each layer's kind of attention."""
        if self.period_key:
            return self.every(getattr(self, self.period_key))
        silent = FULL_ATTENTION if self.window is None else SLIDING_ATTENTION
        return self.layer_types or [silent] * self.num_hidden_layers

    def every(self, period: int) -> list[str]:
        """Each layer's kind, where without `layer_types` every so many are of full attention, between
        others."""
        other, *_ = *self.also_kinds, SLIDING_ATTENTION
        numbers = range(1, self.num_hidden_layers + 1)
        return self.layer_types or [other if i % period else FULL_ATTENTION for i in numbers]

    @property
    def act(self) -> str:
        named: str = getattr(self, self.act_key)
        return named

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        stated = {name: getattr(self, name) for name in ROPE_KEYS if getattr(self, name) is not UNSET}
        return stated | {"max_position_embeddings": self.max_position_embeddings}

    def rope(self, kind: str) -> Rope | None:
        """The rotary embeddings of layers of one kind. Raises UnsupportedRope."""
        return read_rope(self.rope_fields, self.rope_rules, self.width)

    def attention(self, kind: str, **options: Any) -> Attention | DeltaNet:
        """`options`: fields of the description that differ."""
        has_bias = getattr(self, "attention_bias", False)
        plain: dict[str, Any] = {
            "scale": self.scale,
            "rope": self.rope(kind),
            "window": self.window if kind == SLIDING_ATTENTION else None,
            "bias": self.qkv_bias or has_bias,
            "out_bias": getattr(self, "attention_out_bias", has_bias),
            "qk_norm": self.qk_norm,
        }
        return Attention(self.num_attention_heads, self.kv_heads, self.width, **(plain | options))

    def mlp(self, **options: Any) -> Mlp:
        """`options`: fields of the description that differ."""
        plain: dict[str, Any] = {"inner": self.intermediate_size, "bias": getattr(self, "mlp_bias", False)}
        return Mlp(act=ACTIVATIONS[self.act], gated=self.gated, **(plain | options))

    def layer(self, kind: str, **options: Any) -> Layer:
        """`options`: fields of the description of attention that differ."""
        return Layer(self.attention(kind, **options), self.mlp(), self.norms)

    def layers(self) -> Iterator[Layer]:
        return map(self.layer, self.kinds)

    def describe(self, **options: Any) -> DecoderSpec:
        """The model of keys that have no problems. `options`: fields of the description that differ."""
        return DecoderSpec(
            self.architecture,
            self.vocab_size,
            self.hidden_size,
            self.max_position_embeddings,
            tuple(self.layers()),
            NormSpec(getattr(self, self.eps_key), self.norm_kind, self.norm_offset),
            self.tie_word_embeddings,
            fp8=self.fp8,
            names=self.names,
            **options,
        )

    @property
    def fp8(self) -> Fp8Scheme | None:
        found = None if self.quantization_config is None else read_fp8_scheme(self.quantization_config)
        assert not isinstance(found, str), "refused before"
        return found

    # -- what cannot be served

    def problems(self) -> Iterator[str]:
        """A sentence for each setting that is not implemented, or contradicts another."""
        if self.quantization_config is not None:
            scheme = read_fp8_scheme(self.quantization_config)
            if isinstance(scheme, str):
                yield scheme
        if self.act not in self.acts:
            only = ", ".join(self.acts)
            yield f"{self.act_key} {shown(self.act)} is not supported, only {only}"
        known = {FULL_ATTENTION, *self.also_kinds} | ({SLIDING_ATTENTION} if self.slides else set())
        for layer_type in sorted(set(self.layer_types or ()) - known):
            yield f"{shown(layer_type)} in layer_types is not supported"
        # transformers computes such a model with all tokens in one pass, and without in generation
        if not self.slides and (self.sliding_window or SIZE_MAX) < self.max_position_embeddings:
            yield f"sliding_window {self.sliding_window} is not supported"
        if wrong := [*_not_positive(self, self.eps_key, *self.positives)]:
            yield from wrong
            return
        misfits = [name for name in (*_SIZES, *self.also_sizes) if not 1 <= getattr(self, name) <= SIZE_MAX]
        if misfits:
            yield f"{', '.join(misfits)} must be at least 1, and no more than {SIZE_MAX}"
            return
        alike = [FULL_ATTENTION if self.window is None else SLIDING_ATTENTION] * self.num_hidden_layers
        if self.layers_alike and self.layer_types not in (None, alike):
            yield "layer_types that differ from sliding_window are not supported"
        yield from self.contradictions()

    def contradictions(self) -> Iterator[str]:
        if self.num_hidden_layers > LAYERS_MAX:
            yield f"num_hidden_layers must be at most {LAYERS_MAX}"
            return
        kv_heads, head_dim = self.kv_heads, self.width
        if kv_heads < 1 or self.num_attention_heads % kv_heads:
            yield (
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{kv_heads}"
            )
        if not 2 <= head_dim <= SIZE_MAX or head_dim % 2:
            yield f"head_dim {head_dim} must be even"
            return
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
        if self.also_kinds and FULL_ATTENTION not in self.kinds:
            key = "layer_types" if self.layer_types or not self.period_key else self.period_key
            yield f"{key}: layers without {FULL_ATTENTION} among them are not supported"
        if self.window is not None and self.window < WINDOW_MIN:
            yield f"sliding_window must be at least {WINDOW_MIN}"
        if self.window is None and self.slides and SLIDING_ATTENTION in self.kinds:
            yield "layer_types names sliding layers, and there is no sliding_window"
        for problem in {self._rope_problem(kind): None for kind in self.kinds}:
            if problem is not None:
                yield problem

    def _rope_problem(self, kind: str) -> str | None:
        try:
            self.rope(kind)
        except UnsupportedRope as error:
            return str(error)
        return None
