"""The families of models, one module each: `describe` turns a family's keys of config.json into a
`Decoder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine.runtime.models.families import (
    arcee,
    cohere2,
    ernie4_5,
    gemma3,
    glm4,
    granite,
    granite4,
    hunyuan,
    llama,
    ministral,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    seed_oss,
    smollm3,
)
from engine.runtime.models.family import Family

FAMILIES: Final[Mapping[str, Family]] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        llama,
        mistral,
        ministral,
        ministral3,
        qwen2,
        qwen3,
        qwen3_5,
        gemma3,
        phi3,
        granite,
        granite4,
        smollm3,
        olmo2,
        olmo3,
        glm4,
        seed_oss,
        arcee,
        hunyuan,
        ernie4_5,
        cohere2,
    )
}
"""The families that are implemented, by `model_type`."""
