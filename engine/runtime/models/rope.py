"""Reads the rotary embeddings of a config.json.

Three spellings are in use: `rope_theta` beside `rope_scaling` (transformers 4), both inside `rope_parameters`
(transformers 5), and a mixture of the two, where an old model card is followed with a new file. The
precedence is that of transformers 5 (`RotaryEmbeddingConfigMixin`):

1. `rope_scaling`, unless it is null or empty; else `rope_parameters`. The other one is ignored as a whole.
2. `rope_theta` inside of it; else the one at the top level; else 10,000.
3. `rope_type` inside of it; else `type`; else `default`.
4. For the type `llama3`, `original_max_position_embeddings` at the top level; else the one inside; else
   `max_position_embeddings`.

A key that is there wins even when it is null, which is then refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from shared.text.model_files import USED, KeyMeanings, shown, unexplained

DEFAULT_THETA: Final = 10_000.0
SUPPORTED_TYPES: Final = ("default", "llama3")
_ORIGINAL_LEN: Final = "original_max_position_embeddings"
_BY_LAYER_TYPE: Final = ("full_attention", "sliding_attention")
_LLAMA3: Final = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_LEN)
_KEYS: Final[Mapping[str, KeyMeanings]] = {
    kind: dict.fromkeys(("rope_type", "type", "rope_theta", "partial_rotary_factor", *own), USED)
    for kind, own in (("default", ()), ("llama3", _LLAMA3))
}
"""The keys that each type of rotary embeddings reads."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of low frequencies (transformers `_compute_llama3_parameters`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    llama3: Llama3Scaling | None = None


class UnsupportedRope(ValueError):
    """These rotary embeddings are not implemented, or not described completely."""


class _Llama3(msgspec.Struct, frozen=True):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def read_rope(fields: Mapping[str, Any]) -> RopeConfig:
    """The rotary embeddings of a config.json, given as a whole. Raises UnsupportedRope."""
    name, scaling = _chosen(fields)
    if any(kind in scaling for kind in _BY_LAYER_TYPE):
        raise UnsupportedRope(f"{name} by layer type are not supported")
    kind = scaling["rope_type"] if "rope_type" in scaling else scaling.get("type", "default")
    if kind not in SUPPORTED_TYPES:
        raise UnsupportedRope(
            f"rope type {shown(kind)} of {name} is not supported, only {', '.join(SUPPORTED_TYPES)}"
        )
    for at, stated in ((f" of {name}", scaling), ("", fields)):
        partial = stated.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise UnsupportedRope(f"partial_rotary_factor {shown(partial)}{at} is not supported, only 1.0")
    theta = scaling["rope_theta"] if "rope_theta" in scaling else fields.get("rope_theta", DEFAULT_THETA)
    return RopeConfig(_theta(theta), _llama3(fields, name, scaling) if kind == "llama3" else None)


def unread_rope_keys(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of rotary embeddings that nothing reads, for a config.json that `read_rope` understands."""
    name, scaling = _chosen(fields)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    unread = tuple(f"{name}.{key}" for key in unexplained(scaling, _KEYS[kind]))
    overridden = name == "rope_scaling" and fields.get("rope_parameters")
    return (*unread, "rope_parameters") if overridden else unread


def _chosen(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The key that decides, and its object; an empty one where neither key is set."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if scaling:
            if not isinstance(scaling, dict):
                raise UnsupportedRope(f"{name} {shown(scaling)} is no object")
            return name, scaling
    return "rope_parameters", {}


def _theta(stated: object) -> float:
    try:
        theta = msgspec.convert(stated, float)
    except msgspec.ValidationError:
        theta = math.nan
    if not 0.0 < theta < math.inf:
        raise UnsupportedRope(f"rope_theta {shown(stated)} is no positive number")
    return theta


def _llama3(fields: Mapping[str, Any], name: str, scaling: Mapping[str, Any]) -> Llama3Scaling:
    original_len = scaling.get(_ORIGINAL_LEN, fields.get("max_position_embeddings"))
    stated = dict(scaling) | {_ORIGINAL_LEN: fields.get(_ORIGINAL_LEN, original_len)}
    try:
        own = msgspec.convert(stated, _Llama3)
    except msgspec.ValidationError as error:
        raise UnsupportedRope(f"{name} of type llama3: {error}") from error
    factors = own.factor, own.low_freq_factor, own.high_freq_factor
    if not (
        all(0 < factor < math.inf for factor in factors)
        and own.low_freq_factor < own.high_freq_factor
        and own.original_max_position_embeddings > 0
    ):
        raise UnsupportedRope(
            f"{name} of type llama3 needs a positive factor, low_freq_factor, a larger high_freq_factor, and "
            f"{_ORIGINAL_LEN}"
        )
    return Llama3Scaling(*factors, own.original_max_position_embeddings)
