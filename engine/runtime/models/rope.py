"""Reads the rotary embeddings of a config.json.

Three spellings are in use: `rope_theta` beside `rope_scaling` (transformers 4), both inside `rope_parameters`
(transformers 5), and a mixture of the two, where an old model card is followed with a new file. The
precedence is that of transformers 5 (`RotaryEmbeddingConfigMixin`):

1. `rope_scaling`, unless it is null or empty; else `rope_parameters`. The other one is ignored as a whole.
2. `rope_theta` inside of it; else the one at the top level; else the family's. `partial_rotary_factor` alike.
3. `rope_type` inside of it; else `type`; else `default`.
4. For the types that have one, `original_max_position_embeddings` at the top level; else the one inside; else
   `max_position_embeddings`.

A key that is there wins even when it is null, which is then refused. Families whose layers have rotary
embeddings of two kinds have `rope_parameters` by kind (`read_ropes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from engine.runtime.models.spec import Linear, Llama3, Longrope, Rope, Yarn
from shared.text.model_files import USED, shown, unexplained

ROPE_KEYS: Final = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
_ORIGINAL_LEN: Final = "original_max_position_embeddings"
_BY_LAYER_TYPE: Final = ("full_attention", "sliding_attention")
_EVERY_TYPE: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
Scaling = Linear | Llama3 | Yarn | Longrope


class UnsupportedRope(ValueError):
    """These rotary embeddings are not implemented, or not described completely."""


@dataclass(frozen=True, slots=True)
class RopeRules:
    """The rules that a family adds to those above."""

    theta: float = 10_000.0
    """The base where config.json has none."""
    part: float = 1.0
    """`partial_rotary_factor` where config.json has none."""
    partial: bool = False
    """True if the family rotates a part of a head where config.json says so."""
    interleaved: bool = False
    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    also: tuple[str, ...] = ()
    """Keys of the object that the family reads by itself."""


class _Linear(msgspec.Struct, frozen=True):
    factor: float


class _Llama3(msgspec.Struct, frozen=True):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class _Yarn(msgspec.Struct, frozen=True):
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _Longrope(msgspec.Struct, frozen=True):
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    max_position_embeddings: int | None = None


class _Default(msgspec.Struct, frozen=True):
    pass


def read_rope(fields: Mapping[str, Any], rules: RopeRules, head_dim: int) -> Rope:
    """The rotary embeddings of a config.json, given as a whole. Raises UnsupportedRope."""
    name, scaling = chosen(fields)
    if any(kind in scaling for kind in _BY_LAYER_TYPE):
        raise UnsupportedRope(f"{name} by layer type are not supported")
    return _rope(fields, name, scaling, rules, head_dim)


def unread_rope_keys(fields: Mapping[str, Any], rules: RopeRules) -> tuple[str, ...]:
    """The keys of rotary embeddings that nothing reads, for a config.json that `read_rope` understands."""
    name, scaling = chosen(fields)
    by_type = [(f"{name}.{kind}", scaling[kind]) for kind in _BY_LAYER_TYPE if scaling.get(kind)]
    unread: list[str] = []
    for at, own in by_type or [(name, scaling)]:
        reader = _READERS.get(_type_of(own), _READERS["default"])[0]
        known = (*_EVERY_TYPE, *rules.also, *reader.__struct_fields__)
        unread += [f"{at}.{key}" for key in unexplained(own, dict.fromkeys(known, USED))]
    overridden = name == "rope_scaling" and fields.get("rope_parameters") and not by_type
    return (*unread, "rope_parameters") if overridden else tuple(unread)


def read_ropes(
    fields: Mapping[str, Any], rules: RopeRules, head_dim: int, sliding_theta: object = UNSET
) -> Mapping[str, Rope]:
    """The rotary embeddings of full and of sliding layers, for families that have two: `rope_parameters` by
    type of layer, or keys of old files, of which `rope_scaling` is for full layers alone. Raises
    UnsupportedRope. `sliding_theta`: the base of sliding layers in an old file; unset: the family's."""
    stated = fields.get("rope_parameters") or {}
    if not isinstance(stated, dict) or (flat := stated.keys() - set(_BY_LAYER_TYPE)):
        told = shown(stated) if not isinstance(stated, dict) else f"with {shown(min(flat))}"
        raise UnsupportedRope(f"rope_parameters {told} are not supported, only by layer type")
    found = {}
    for kind, theta in zip(_BY_LAYER_TYPE, (fields.get("rope_theta", UNSET), sliding_theta), strict=True):
        own = stated.get(kind) or {"rope_type": "default"}
        if kind == _BY_LAYER_TYPE[0] and fields.get("rope_scaling"):
            own = {**own, **fields["rope_scaling"]}
        if own.get("truncate", True) is not True:
            raise UnsupportedRope(
                f"truncate {shown(own['truncate'])} of rope_parameters.{kind} is not supported"
            )
        names = "max_position_embeddings", "partial_rotary_factor"
        inner = {name: fields.get(name) for name in names}
        if not isinstance(theta, UnsetType):
            inner["rope_theta"] = theta
        found[kind] = _rope(inner, f"rope_parameters.{kind}", own, rules, head_dim)
    return found


def _rope(
    fields: Mapping[str, Any], name: str, scaling: Mapping[str, Any], rules: RopeRules, head_dim: int
) -> Rope:
    kind = _type_of(scaling)
    if kind not in rules.types:
        raise UnsupportedRope(
            f"rope type {shown(kind)} of {name} is not supported, only {', '.join(rules.types)}"
        )
    theta = positive_number(_first("rope_theta", scaling, fields, rules.theta), "rope_theta")
    part = rules.part
    for at, stated in (("", fields), (f" of {name}", scaling)):
        if (own := stated.get("partial_rotary_factor")) is not None:
            part = positive_number(own, "partial_rotary_factor")
            if not rules.partial and part != 1.0:
                raise UnsupportedRope(f"partial_rotary_factor {shown(own)}{at} is not supported, only 1.0")
    rope = Rope(theta, None, part, rules.interleaved)
    if (turned := rope.rotated(head_dim)) % 2 or not 2 <= turned <= head_dim:
        raise UnsupportedRope(f"partial_rotary_factor {part} rotates {turned} of {head_dim} elements")
    reader, make = _READERS[kind]
    stated = dict(scaling)
    if _ORIGINAL_LEN in reader.__struct_fields__:
        inside = scaling.get(_ORIGINAL_LEN, fields.get("max_position_embeddings"))
        stated |= {_ORIGINAL_LEN: fields.get(_ORIGINAL_LEN, inside)}
        stated |= {"max_position_embeddings": fields.get("max_position_embeddings")}
    try:
        return Rope(theta, make(msgspec.convert(stated, reader), rope, turned), part, rules.interleaved)
    except (msgspec.ValidationError, ValueError, ArithmeticError) as error:
        raise UnsupportedRope(f"{name} of type {kind}: {error}") from error


def chosen(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The key that decides, and its object; an empty one where neither key is set."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if scaling:
            if not isinstance(scaling, dict):
                raise UnsupportedRope(f"{name} {shown(scaling)} is no object")
            return name, scaling
    return "rope_parameters", {}


def _type_of(scaling: Mapping[str, Any]) -> str:
    kind = scaling["rope_type"] if "rope_type" in scaling else scaling.get("type", "default")
    return kind if isinstance(kind, str) else shown(kind)


def _first(key: str, scaling: Mapping[str, Any], fields: Mapping[str, Any], silent: object) -> object:
    return scaling[key] if key in scaling else fields.get(key, silent)


def positive_number(stated: object, name: str) -> float:
    try:
        number = msgspec.convert(stated, float)
    except msgspec.ValidationError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise UnsupportedRope(f"{name} {shown(stated)} is no positive number")
    return number


def _positive(**numbers: float) -> None:
    """Raise ValueError for those that are no positive numbers."""
    if wrong := [f"{name} {number}" for name, number in numbers.items() if not 0 < number < math.inf]:
        raise ValueError(f"{', '.join(wrong)} must be a positive number")


def _linear(own: _Linear, _: Rope, __: int) -> Linear:
    _positive(factor=own.factor)
    return Linear(own.factor)


def _llama3(own: _Llama3, _: Rope, __: int) -> Llama3:
    _positive(
        factor=own.factor,
        low_freq_factor=own.low_freq_factor,
        high_freq_factor=own.high_freq_factor,
        original_max_position_embeddings=own.original_max_position_embeddings,
    )
    if own.low_freq_factor >= own.high_freq_factor:
        raise ValueError("high_freq_factor must be larger than low_freq_factor")
    return Llama3(own.factor, own.low_freq_factor, own.high_freq_factor, own.original_max_position_embeddings)


def _yarn(own: _Yarn, rope: Rope, _: int) -> Yarn:
    def mscale(by: float) -> float:
        return 1.0 if own.factor <= 1 else 0.1 * by * math.log(own.factor) + 1.0

    amplitude = own.attention_factor
    if amplitude is None:
        both = own.mscale and own.mscale_all_dim
        amplitude = mscale(own.mscale) / mscale(own.mscale_all_dim) if both else mscale(1.0)  # type: ignore[arg-type]
    fast, slow = own.beta_fast or 32.0, own.beta_slow or 1.0
    original_len = own.original_max_position_embeddings
    _positive(factor=own.factor, attention_factor=amplitude, beta_fast=fast, beta_slow=slow)
    _positive(original_max_position_embeddings=original_len)
    if rope.theta <= 1.0:
        raise ValueError("rope_theta must be above 1")
    return Yarn(own.factor, original_len, fast, slow, amplitude, own.truncate)


def _longrope(own: _Longrope, _: Rope, turned: int) -> Longrope:
    original_len, amplitude = own.original_max_position_embeddings, own.attention_factor
    if len(own.short_factor) != turned // 2 or len(own.long_factor) != turned // 2:
        raise ValueError(f"short_factor and long_factor must have {turned // 2} numbers")
    for factor in (*own.short_factor, *own.long_factor):
        _positive(factor=factor)
    if amplitude is None:
        factor = own.factor or (own.max_position_embeddings or 0) / original_len
        amplitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original_len))
    _positive(attention_factor=amplitude, original_max_position_embeddings=original_len)
    return Longrope(own.short_factor, own.long_factor, original_len, amplitude)


_READERS: Final[Mapping[str, tuple[type[msgspec.Struct], Callable[[Any, Rope, int], Scaling | None]]]] = {
    "default": (_Default, lambda *_: None),
    "linear": (_Linear, _linear),
    "llama3": (_Llama3, _llama3),
    "yarn": (_Yarn, _yarn),
    "longrope": (_Longrope, _longrope),
    "su": (_Longrope, _longrope),  # an older name
}
"""The keys that each type of rotary embeddings reads, and the value that follows from them."""
