"""A family of models: how its config.json becomes a description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Whole:
    """A model of more than text whose text part is of a family, with the keys in `text_config`."""

    model_type: str
    architecture: str
    at: str
    """What the names of the text part's tensors begin with, instead of `model.`."""


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
    whole: Whole | None = None
