"""Descriptions of decoders from flat settings, for tests whose layers differ in their windows at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet, Layer, Mlp, Names, NormSpec, Rope

PLAIN_ROPE = Rope(10_000.0)
_OF_ATTENTION = ("bias", "out_bias", "qk_norm", "tempering", "output_gate")
_OF_MLP = ("act", "gated")
_OF_DECODER = ("tied_embeddings", "embed_scale", "residual_scale", "logit_scale", "logit_softcap", "fp8")


def dense(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context_len: int,
    windows: Sequence[int | None] = (None, None),
    norm_eps: float = 1e-5,
    norm_kind: Any = "rms",
    norm_offset: float = 0.0,
    norms: Any = "before",
    rope: Rope | None = PLAIN_ROPE,
    ropes: Sequence[Rope | None] | None = None,
    scale: float | None = None,
    mlp_bias: bool = False,
    architecture: str = "LlamaForCausalLM",
    **pieces: Any,
) -> DecoderSpec:
    """Further `pieces` are fields of Attention, Mlp and DecoderSpec by name. `ropes`: one per layer."""
    assert pieces.keys() <= {*_OF_ATTENTION, *_OF_MLP, *_OF_DECODER}, pieces.keys()

    def of(names: Sequence[str]) -> dict[str, Any]:
        return {name: pieces[name] for name in names if name in pieces}

    def layer(window: int | None, own: Rope | None) -> Layer:
        scaled = head_dim**-0.5 if scale is None else scale
        attention = Attention(heads, kv_heads, head_dim, scaled, own, window, **of(_OF_ATTENTION))
        return Layer(attention, Mlp(intermediate_size, bias=mlp_bias, **of(_OF_MLP)), norms)

    layers = tuple(map(layer, windows, ropes or [rope] * len(windows)))
    norm = NormSpec(norm_eps, norm_kind, norm_offset)
    gate_up = Names().gate_up if pieces.get("gated", True) else ("mlp.up_proj",)
    names = Names(gate_up=gate_up, attention_post_norm="attention_post_norm", mlp_post_norm="mlp_post_norm")
    return DecoderSpec(
        architecture, vocab_size, hidden_size, context_len, layers, norm, names=names, **of(_OF_DECODER)
    )


def like(decoder: DecoderSpec, **changes: Any) -> DecoderSpec:
    """The same with other settings."""
    own, mlp = decoder.attention, decoder.layers[0].mlp
    flat = {name: getattr(own, name) for name in ("heads", "kv_heads", "head_dim", "rope", *_OF_ATTENTION)}
    flat |= {name: getattr(mlp, name) for name in _OF_MLP} | {"mlp_bias": mlp.bias}
    flat |= {
        name: getattr(decoder, name) for name in ("vocab_size", "hidden_size", "context_len", *_OF_DECODER)
    }
    flat |= {"intermediate_size": mlp.inner, "windows": decoder.windows, "norms": decoder.layers[0].norms}
    flat |= {"norm_eps": decoder.norm.eps, "norm_offset": decoder.norm.offset}
    flat |= {"norm_kind": decoder.norm.kind}
    return dense(**{"architecture": decoder.architecture} | flat | changes)


def with_deltas(decoder: DecoderSpec, own: DeltaNet) -> DecoderSpec:
    """The same with two layers more, of such delta nets: the first, and the last but one."""
    first, *others = decoder.layers
    delta = replace(first, attention=own)
    return replace(decoder, layers=(delta, first, *others[:-1], delta, *others[-1:]))
