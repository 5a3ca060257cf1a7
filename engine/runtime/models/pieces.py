"""The pieces of a model's arithmetic, by name, and whether a network implements them all.

Three networks compute a model: the native kernels, torch, and the device's kernels. Each declares the pieces
that it implements (`IMPLEMENTED`) beside those that all do, and is not chosen for a model that has any other:
a family or a setting that a network does not know goes to another network, or is refused by name. That sizes
divide evenly proves nothing about the arithmetic.

    a choice     its field and its value        `mlp.act silu`, `layer.norms before`
    an option    its field, where it is used    `attention.window`, `tied_embeddings`
    a value      its field and its class        `rope.scaling Llama3`

The names follow from the fields of `engine.runtime.models.spec`, so that a field which is added there, and
which a network has not declared, keeps that network from being chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Final

from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet, Layer, Mlp, NormSpec, Rope

NESTED: Final = (Layer, Attention, DeltaNet, Mlp, NormSpec, Rope)
"""The values that are looked into."""
NO_ARITHMETIC: Final = frozenset({"architecture", "mtp", "names", "unread"})
"""Fields that change no token."""
AT_LOAD: Final = frozenset(
    {"rope.part", "rope.interleaved", "norm.offset", "attention.rope none"}
    | {f"rope.scaling {name}" for name in ("Linear", "Llama3", "Yarn", "Longrope")}
)
"""The pieces that are in parameters (`engine.runtime.weights.parameters`) and angles
(`engine.runtime.models.rotary`) already when a network sees them."""
EVERYWHERE: Final = frozenset(
    {"norm.kind rms", "layer.norms before", "layer.norms behind", "layer.norms both"}
    | {"mlp.act silu", "mlp.act gelu_tanh", "mlp.act relu2", "mlp.gated no", "mlp.bias"}
    | {"attention.qk_norm heads", "attention.qk_norm rotated heads", "attention.qk_norm width"}
    | {"attention.window", "attention.bias", "attention.out_bias", "attention.tempering Tempering"}
    | {"attention.output_gate", "deltanet.gate silu", "tied_embeddings", "fp8 Fp8Scheme"}
    | {"embed_scale", "residual_scale", "logit_scale", "logit_softcap"}
)
"""The pieces that all three networks implement. A new one is declared by each that does, until all do."""


def pieces_of(decoder: DecoderSpec) -> frozenset[str]:
    """The names of all that a network has to implement to compute this model."""
    return frozenset(_named(decoder, "")) - AT_LOAD


def lacking(decoder: DecoderSpec, implemented: frozenset[str]) -> str | None:
    """The model's pieces that are not among `implemented`, as a reason; None when all are."""
    missing = sorted(pieces_of(decoder) - implemented)
    return f"{', '.join(missing)}: not implemented" if missing else None


def _named(described: object, prefix: str) -> Iterator[str]:
    assert is_dataclass(described)
    for own in fields(described):
        if own.name not in NO_ARITHMETIC:
            value = getattr(described, own.name)
            for each in value if isinstance(value, tuple) else (value,):
                yield from _of_field(own, each, prefix + own.name)


def _of_field(own: Field[object], value: object, name: str) -> Iterator[str]:
    if isinstance(value, NESTED):
        yield from _named(value, f"{type(value).__name__.removesuffix('Spec').lower()}.")
    elif isinstance(value, str):
        yield f"{name} {value}"
    elif own.default is MISSING:
        if value is None:
            yield f"{name} none"
    elif value != own.default:
        said = type(value).__name__ if is_dataclass(value) else "no" if value is False else ""
        yield f"{name} {said}".rstrip()
