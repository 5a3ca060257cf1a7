"""Reads config.json of a Hugging Face directory into a `DecoderSpec`, the description that networks compute
by.

Rules:

1. The model is computed as transformers computes it (5.23, loaded by its Auto classes); settings that are not
   implemented are refused by name. A checkpoint that loads and answers slightly wrong is the worst outcome.
2. Every key has a meaning, in `keys.py` or in its family, or is named in the log.
3. `model_type` decides the family, as in transformers. `architectures`, which other servers read, must agree:
   of an embedder (`engine.contract.embedders`) it may name the family's network without a head.

tests/engine/runtime/test_config_matrix.py compares the outcomes, key by key and in odd combinations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.contract.embedders import MODULES
from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.families import FAMILIES
from engine.runtime.models.keys import COMMON_KEYS, WHOLE_KEYS
from engine.runtime.models.rope import unread_rope_keys
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.setup.model_directory import OTHER_SERVER
from engine.runtime.setup.model_errors import ModelUnavailable, UnsupportedModel
from shared.process.files import read_bytes
from shared.text.model_files import (
    FILE_LEN_MAX,
    USED,
    BadModelFile,
    KeyMeanings,
    parse_object,
    refusals,
    shown,
    unexplained,
)

NEAREST_SHOWN_MAX: Final = 3
"""The most families that are named as near to an unknown one."""


class _Named(msgspec.Struct, frozen=True):
    model_type: str | None = None
    architectures: list[str] | None = None


def read_model_config(model_dir: Path) -> DecoderSpec:
    """The directory's model. Raises ModelUnavailable without a config.json, UnsupportedModel where it is
    refused."""
    try:
        data = read_bytes(model_dir / "config.json", FILE_LEN_MAX)
    except OSError as error:
        raise ModelUnavailable(f"{model_dir} has no readable config.json") from error
    return parse_model_config(data, embeds=(model_dir / MODULES).exists())


def parse_model_config(data: bytes, *, embeds: bool = False) -> DecoderSpec:
    """The model that `data`, a config.json, describes; `embeds`: of an embedder. Raises UnsupportedModel,
    naming all that is unsupported."""
    try:
        fields = parse_object(data)
        family = _family(fields, embeds=embeds)
        around, whole = fields, family.whole
        is_part = whole is not None and fields["model_type"] == whole.model_type
        if is_part:
            fields = _text_config(fields, family)
        keys = msgspec.convert(fields, family)
    except BadModelFile as error:
        raise UnsupportedModel(f"config.json {error}") from error
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"config.json cannot be read: {error}") from error
    meanings = key_meanings(family)
    if problems := [*refusals(fields, meanings), *keys.problems()]:
        raise UnsupportedModel(f"config.json of this {family.architecture}: " + "; ".join(problems))
    unread = (*unexplained(fields, meanings), *unread_rope_keys(fields, keys.rope_rules))
    described = keys.describe(unread=unread)
    if whole is None or not is_part:
        return described
    beside = tuple(unexplained(around, WHOLE_KEYS))
    names = described.names.moved("model.", whole.at)
    return replace(described, names=names, unread=(*beside, *unread))


def _text_config(fields: Mapping[str, Any], family: type[DenseKeys]) -> dict[str, Any]:
    """The text part's keys in the config.json of a model of more than text. Raises UnsupportedModel."""
    inner = fields.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type", family.model_type) != family.model_type:
        raise UnsupportedModel(
            f"text_config {shown(inner)} is not supported, only one of model_type {family.model_type}"
        )
    tied = [own.get("tie_word_embeddings") for own in (fields, inner)]
    if None not in tied and tied[0] != tied[1]:
        raise UnsupportedModel(
            "config.json contradicts itself: tie_word_embeddings in text_config, and beside it"
        )
    if problems := [*refusals(fields, WHOLE_KEYS)]:
        raise UnsupportedModel(f"config.json of this {family.architecture}: " + "; ".join(problems))
    return inner


def key_meanings(family: type[DenseKeys]) -> KeyMeanings:
    """The meaning of each key of a family's config.json."""
    return {**COMMON_KEYS, **dict.fromkeys(family.__struct_fields__, USED), **family.limits}


def _nearest(fields: Mapping[str, Any]) -> str:
    """The families that explain most of a config.json, and the keys that they do not know: pieces that are
    missing, or another way to say what they have."""
    inner = fields.get("text_config")
    if isinstance(inner, dict) and inner.get("model_type") in FAMILIES:
        return f"its text_config is {inner['model_type']}, which is supported by itself, without images"
    unknown = {name: unexplained(fields, key_meanings(family)) for name, family in FAMILIES.items()}
    fewest = min(map(len, unknown.values()))
    nearest = [name for name, keys in unknown.items() if len(keys) == fewest]
    lacks = f", but for {', '.join(unknown[nearest[0]])}" if fewest else ""
    told = "is {}, which knows" if len(nearest) == 1 else "are {}, which know"
    return f"nearest {told.format(', '.join(nearest[:NEAREST_SHOWN_MAX]))} its keys{lacks}"


def _family(fields: Mapping[str, Any], *, embeds: bool) -> type[DenseKeys]:
    """The family that config.json names. Raises UnsupportedModel, and ValidationError where a name is no
    string."""
    named = msgspec.convert(fields, _Named)
    architectures = ", ".join(map(shown, named.architectures or ["none named"]))
    of_whole = {family.whole.model_type: family for family in FAMILIES.values() if family.whole is not None}
    family = FAMILIES.get(named.model_type or "") or of_whole.get(named.model_type or "")
    if named.model_type == "mistral" and "layer_types" in fields:  # as transformers' AutoConfig has it
        family = FAMILIES["ministral"]
    if family is None:
        raise UnsupportedModel(
            f"model_type {shown(named.model_type)} (architectures: {architectures}) is not supported; "
            f"{_nearest(fields)}; supported are {', '.join([*FAMILIES, *of_whole])}; what knows it may run "
            f"as {OTHER_SERVER}"
        )
    expected = {family.architecture, *family.also_named}
    if embeds:
        expected |= {name.removesuffix("ForCausalLM") + "Model" for name in expected}
    if family.whole is not None:
        expected.add(family.whole.architecture)
    if named.architectures and not expected.intersection(named.architectures):
        raise UnsupportedModel(
            f"config.json contradicts itself: model_type {named.model_type} is {family.architecture}, and "
            f"architectures says {architectures}"
        )
    return family
