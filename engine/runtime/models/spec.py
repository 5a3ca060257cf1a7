"""A decoder as data: nested values that say what is computed, and nothing of how. No torch here.

A family (`engine.runtime.models.families`) describes its models with these values, and networks follow the
description: one that lacks a piece of it (`engine.runtime.models.pieces`) does not compute the model. Sizes
are in elements.

Rules:

1. A field without a default is a number that every network reads. A field with one is a piece: it has no
   effect at its default, and is named by `pieces` elsewhere. So is every text.
2. All layers that attend have the same heads, and the same scale of attention: a page of the cache spans them
   all. At least one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.runtime.models.quantization import Fp8Scheme

# -- rotary embeddings ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear:
    """All positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling of low frequencies (transformers `_compute_llama3_parameters`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies that turn less than `beta_slow` times within the original context
    are divided by `factor`, those that turn more than `beta_fast` times stay, the rest are blended."""

    factor: float
    original_context_len: int
    beta_fast: float
    beta_slow: float
    amplitude: float
    """The factor of cosines and sines."""
    truncate: bool
    """True if the blend's bounds are rounded outwards, to whole frequencies."""


@dataclass(frozen=True, slots=True)
class Longrope:
    """Each frequency has a divisor of its own: one of `short` where no sequence is longer than the original
    context, else one of `long`. A server has one length for all, so that cached keys stay true."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context_len: int
    amplitude: float
    """The factor of cosines and sines."""

    def is_long(self, context_len: int) -> bool:
        """True if sequences of up to `context_len` tokens take the long divisors."""
        return context_len > self.original_context_len


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: Linear | Llama3 | Yarn | Longrope | None = None
    part: float = 1.0
    """The part of a head's elements that is rotated: the first ones."""
    interleaved: bool = False
    """True if neighbours are a pair that is rotated together; else element i and i + half of the part."""

    def rotated(self, head_dim: int) -> int:
        """The number of elements of a head that are rotated."""
        return int(head_dim * self.part)

    def order(self, head_dim: int) -> Sequence[int] | None:
        """The element of a checkpoint's head for each element of a head as networks hold it: the first and
        the second of each pair in the first and the second half, and those that are not rotated behind, in
        pairs of their own. None: as it is stored."""
        turned, half = self.rotated(head_dim), head_dim // 2
        if self.interleaved:
            pairs = [(i, i + 1) for i in range(0, turned, 2)]
        else:
            pairs = [(i, i + turned // 2) for i in range(turned // 2)]
        pairs += [(turned + i, half + turned // 2 + i) for i in range(half - turned // 2)]
        order = [first for first, _ in pairs] + [second for _, second in pairs]
        return None if order == list(range(head_dim)) else order


# -- layers ---------------------------------------------------------------------------------------

NormKind = Literal["rms", "layer"]
Act = Literal["silu", "gelu_tanh", "relu2"]
QKPlacing = Literal["heads", "rotated heads", "width"]
Placing = Literal["before", "behind", "both", "parallel"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    eps: float
    kind: NormKind = "rms"
    """`rms`: x / sqrt(mean(x^2) + eps), times a weight; `layer`: of x without its mean."""
    offset: float = 0.0
    """The summand of the stored weight."""


@dataclass(frozen=True, slots=True)
class Tempering:
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / original_context_len))."""

    beta: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """The factor of scores."""
    rope: Rope | None
    """None: positions are not told."""
    window: int | None = None
    """The number of latest tokens that a token sees, itself included. None: all."""
    bias: bool = False
    out_bias: bool = False
    qk_norm: QKPlacing | None = None
    """`heads`: each head of queries and keys is normed before it is rotated; `rotated heads`: behind;
    `width`: all heads of queries as one row, and all of keys, before."""
    tempering: Tempering | None = None
    output_gate: bool = False
    """True if each head's output is multiplied by sigmoid(gate), where the gate is as wide as the head, and
    is computed as its query is. A checkpoint has a head's gate behind its query."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The gated delta net (Yang et al. 2025). It keeps no keys and values, but one state for a sequence."""

    key_heads: int
    value_heads: int
    """A multiple of the key heads: so many neighbours have one key head in common."""
    key_dim: int
    value_dim: int
    kernel: int
    """The number of latest tokens that the convolution sees, the token itself included."""
    gate: Literal["silu"] = "silu"
    """The function of the gate that multiplies the normed output."""

    @property
    def keys(self) -> int:
        """The width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The width of what is convolved: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class Mlp:
    inner: int
    act: Act = "silu"
    gated: bool = True
    """True: down(act(gate(x)) * up(x)); else down(act(up(x)))."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention | DeltaNet
    mlp: Mlp
    norms: Placing = "before"
    """The places of norms, around attention and MLP alike: of what goes in, of what comes out, or both.
    `parallel`: the MLP takes what attention takes, behind one norm."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of parameters in a checkpoint. Where one module stands for several, they are fused there, in
    the same order."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """An MLP without a gate has `up` alone."""
    down: str = "mlp.down_proj"
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    delta_inputs: tuple[str, str, str, str] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    delta_output: str = "linear_attn.out_proj"
    delta_conv: str = "linear_attn.conv1d.weight"
    delta_rate: str = "linear_attn.A_log"
    delta_step_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm.weight"
    mtp: str = "mtp"
    """The prefix of the MTP layer's names of parameters."""
    foreign: tuple[str, ...] = ()
    """The prefixes of names of tensors that the text model has nothing to do with."""

    def moved(self, old: str, new: str) -> Names:
        """The names where those of the model's body begin with `new` instead of `old`; the head's does
        not."""
        body = {name: getattr(self, name) for name in ("embedding", "layers", "final_norm")}
        return replace(self, **{name: new + own.removeprefix(old) for name, own in body.items()})


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A dense decoder, fully described."""

    architecture: str
    vocab_size: int
    hidden_size: int
    context_len: int
    layers: tuple[Layer, ...]
    norm: NormSpec
    """All norms of the model: around blocks, of heads, and the last one."""
    tied_embeddings: bool = False
    """True if the embedding is also the head. A checkpoint with a head of its own overrides config.json
    (`engine.runtime.start.starting.checked_checkpoint`)."""
    embed_scale: float = 1.0
    """The factor of embeddings, rounded to the compute type."""
    residual_scale: float = 1.0
    """The factor of what attention and MLP add to the residual."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """c: logits become c * tanh(logits / c)."""
    fp8: Fp8Scheme | None = None
    """The checkpoint's scheme for matrices in fp8. None: all are stored in a plain type."""
    mtp: Layer | None = None
    """The layer that guesses the token behind the next one (`engine.runtime.reference.mtp`). No token depends
    on it."""
    names: Names = Names()
    unread: tuple[str, ...] = ()
    """Keys of config.json that are ignored, and are not known to have no effect, for the log."""

    def __post_init__(self) -> None:
        shapes = {(a.heads, a.kv_heads, a.head_dim, a.scale) for a in self.attentions}
        assert len(shapes) == 1, "the second rule"

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The layers that have keys and values, in their order, which is that of the KV cache."""
        return tuple(own.attention for own in self.layers if isinstance(own.attention, Attention))

    @property
    def deltas(self) -> tuple[DeltaNet, ...]:
        """The layers that have a state instead, in their order."""
        return tuple(own.attention for own in self.layers if isinstance(own.attention, DeltaNet))

    @property
    def places(self) -> tuple[int, ...]:
        """Each layer's number among `attentions`, or among `deltas`."""
        kinds = [type(own.attention) for own in self.layers]
        return tuple(kinds[:at].count(kind) for at, kind in enumerate(kinds))

    @property
    def mtp_body(self) -> DecoderSpec:
        """The MTP layer as a decoder of one layer, with a last norm of its own."""
        assert self.mtp is not None
        at = self.names.mtp
        names = replace(self.names, layers=f"{at}.layers", final_norm=f"{at}.norm.weight")
        return replace(self, layers=(self.mtp,), mtp=None, names=names)

    @property
    def attention(self) -> Attention:
        """The first one, for what all have in common."""
        return self.attentions[0]

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """The widest MLP's."""
        return max(layer.mlp.inner for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of `attentions`."""
        return tuple(own.window for own in self.attentions)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The different ones."""
        return tuple(dict.fromkeys(own.rope for own in self.attentions))
