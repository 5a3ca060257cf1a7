"""The small random models that are checked on a card: of every family, as far as its kernels differ."""

from __future__ import annotations

from pathlib import Path

from tests.engine.models import CONTEXT_LEN, FAMILIES, VOCAB_SIZE, make_tiny_model
from tests.engine.runtime.config_oracle import BY_KERNELS, Weights


def plain_models(directory: Path) -> dict[str, Path]:
    """By family."""
    return {family: make_tiny_model(family, directory / family) for family in FAMILIES}


def other_models(directory: Path) -> dict[str, Path]:
    """Those of other pieces, by family: norms behind blocks, GELU, factors, gates, states."""
    return {family: other_model(family, directory / family) for family in BY_KERNELS}


def other_model(family: str, path: Path) -> Path:
    keys = {"max_position_embeddings": CONTEXT_LEN, **BY_KERNELS[family]}
    return Weights(family, vocab=VOCAB_SIZE).saved(path, **keys)
