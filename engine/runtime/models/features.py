"""The parts of a model's arithmetic, by name, and whether a network implements them all.

Three networks compute a model: the native kernels, torch, and the device's kernels. Each declares the set of
names that it implements (`IMPLEMENTED`), and is not chosen for a model that has any other: a family or a
setting that a network does not know goes to another network, or is refused by name. That sizes divide evenly
proves nothing about the arithmetic.

    a choice     its field and its value        `architecture Qwen3ForCausalLM`, `activation silu`
    an option    its field, where it is used    `qk_norm`, `windows`, `tied_embeddings`, `rope.llama3`

The names follow from the fields of `DecoderConfig` and `RopeConfig`, so that a field which is added there,
and which a network has not declared, keeps that network from being chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from engine.runtime.models.decoder_config import DecoderConfig
from engine.runtime.models.rope import RopeConfig

NUMBERS: Final = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "norm_eps"}
    | {"context_len", "rope.theta"}
)
"""Fields that every network reads as numbers."""
NO_ARITHMETIC: Final = frozenset({"unread", "rope"})
"""Fields that change nothing by themselves: `rope` is looked into."""


def features_of(config: DecoderConfig) -> frozenset[str]:
    """The names of all that a network has to implement to compute this model."""
    return frozenset((*_named(config, ""), *_named(config.rope, "rope.")))


def lacking(config: DecoderConfig, implemented: frozenset[str]) -> str | None:
    """The model's features that are not among `implemented`, as a reason; None when all are."""
    missing = sorted(features_of(config) - implemented)
    return f"{', '.join(missing)}: not implemented" if missing else None


def _named(described: DecoderConfig | RopeConfig, prefix: str) -> Iterator[str]:
    for own in fields(described):
        name, value = prefix + own.name, getattr(described, own.name)
        if name in NUMBERS or name in NO_ARITHMETIC:
            continue
        if isinstance(value, str):
            yield f"{name} {value}"
        elif _is_set(value) and value != own.default:
            yield name


def _is_set(value: object) -> bool:
    """True if an option is used: at least once, where it is one per layer."""
    if isinstance(value, tuple):
        return any(_is_set(of_layer) for of_layer in value)
    return value is not None and value is not False
