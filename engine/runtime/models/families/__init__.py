"""The families of models, one module each: `describe` turns a family's keys of config.json into a
`Decoder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine.runtime.models.families import llama, ministral, mistral, qwen2, qwen3
from engine.runtime.models.family import Family

FAMILIES: Final[Mapping[str, Family]] = {
    module.FAMILY.model_type: module.FAMILY for module in (llama, ministral, mistral, qwen2, qwen3)
}
"""The families that are implemented, by `model_type`."""
