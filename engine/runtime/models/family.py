"""A family of models: how its config.json becomes a description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    architecture: str
    keys: type[DenseKeys]
    """The keys of config.json that the family reads."""
    describe: Callable[[Any], DecoderSpec]
    """The model of keys that have no problems."""
    also_named: tuple[str, ...] = ()
    """Other names that `architectures` may have."""
