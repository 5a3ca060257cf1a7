"""The families of models, one module each: `describe` turns a family's keys of config.json into a
`Decoder`. A module that is added here is a family more."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from engine.runtime.models.family import Family

_MODULES: Final = (import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
FAMILIES: Final[Mapping[str, Family]] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""The families that are implemented, by `model_type`."""
