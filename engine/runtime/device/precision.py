"""The parts of a model that a GPU holds in fp8: matrices, and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.runtime.models.spec import Attention, DecoderSpec
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.weights.checkpoint import Fp8Source, WeightSource

FP8_CAPABILITY: Final = (8, 9)
"""The least compute capability whose hardware converts e4m3."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of weights and of stored keys and values on a GPU."""

    weights_fp8: bool
    """True if matrices are in fp8, the embedding and the head excepted."""
    kv_dtype: torch.dtype

    @staticmethod
    def of(
        config: RunnerConfig, model: DecoderSpec, dtype: torch.dtype, capability: tuple[int, int]
    ) -> Precision:
        """The precision that the settings and the checkpoint ask for. Raises BadRunnerConfig where this GPU
        cannot."""
        able, kv_fp8 = capability >= FP8_CAPABILITY, config.kv_cache_dtype == "fp8"
        for setting, asked in (("weights", config.weights == "fp8"), ("kv_cache_dtype", kv_fp8)):
            if asked and not able:
                has = ".".join(map(str, capability))
                raise BadRunnerConfig(f"{setting}=fp8 needs compute capability 8.9, this GPU has {has}")
        weights_fp8 = config.weights == "fp8" or (model.fp8 is not None and able)
        return Precision(weights_fp8, torch.float8_e4m3fn if kv_fp8 else dtype)

    def kv_scales(self, model: DecoderSpec, source: WeightSource) -> list[tuple[float, float]] | None:
        """The scales of stored keys and values per layer that attends; None where they are 1. Raises
        WeightsMismatch."""
        if self.kv_dtype != torch.float8_e4m3fn or not isinstance(source, Fp8Source):
            return None
        attends = [at for at, own in enumerate(model.layers) if isinstance(own.attention, Attention)]
        return source.kv_scales(attends)

    def describe(self, model: DecoderSpec, scales: Sequence[tuple[float, float]] | None) -> str:
        """The use of fp8, for the log; empty where nothing is in fp8."""
        parts = []
        if self.weights_fp8:
            origin = "rounded here" if model.fp8 is None else f"as stored: {model.fp8}"
            parts.append(f"weights in fp8, {origin}")
        elif model.fp8 is not None:
            parts.append(f"weights multiplied out of {model.fp8}")
        if self.kv_dtype == torch.float8_e4m3fn:
            parts.append("KV in fp8, scales " + ("of 1" if scales is None else "from the checkpoint"))
        return "; ".join(parts)
