"""The families of models, one module each: the keys of config.json that a family reads, and what its models
compute. A module that is added here is a family more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from engine.runtime.models.dense import DenseKeys


def _derived(keys: type[DenseKeys]) -> Iterator[type[DenseKeys]]:
    for own in keys.__subclasses__():
        yield own
        yield from _derived(own)


for found in iter_modules(__path__):
    import_module(f"{__name__}.{found.name}")
FAMILIES: Final[Mapping[str, type[DenseKeys]]] = {
    own.model_type: own for own in sorted(_derived(DenseKeys), key=lambda own: own.model_type)
}
"""The families that are implemented, by `model_type`."""
