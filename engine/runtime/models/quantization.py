"""`quantization_config` of a config.json: the checkpoints with fp8 weights that can be read.

Four writers are known. All store a matrix in e4m3 beside its scales, one per matrix, row or block. Scales of
activations are ignored: activations stay in the compute type here, which is more exact than the checkpoint
expects. Everything else is refused by name.

    fp8                  `weight_scale` per matrix (AutoFP8), or `weight_scale_inv` per block (DeepSeek, Qwen)
    fbgemm_fp8           `weight_scale` per row
    compressed-tensors   `weight_scale` per matrix, row or block, of type float with 8 bits
    modelopt             `weight_scale` per matrix, algorithm FP8
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

GROUP_MULTIPLE: Final = 64
"""The number that widths of groups are multiples of, so that a kernel's tile lies within one group."""
_BLOCK: Final = re.compile(r"(\d+)x(\d+)")
_COMPRESSED_FORMATS: Final = ("float-quantized", "naive-quantized")
_STRATEGIES: Final = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """A writer's way to store fp8. The tensors show which matrices are in fp8, with scales per matrix or per
    row."""

    method: str
    block: tuple[int, int] | None = None
    """The rows and columns that share a scale; None where scales are not per block."""

    def __str__(self) -> str:
        grain = "" if self.block is None else " in blocks of {}x{}".format(*self.block)
        return f"fp8 ({self.method}{grain})"

    def scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scale of a matrix may have."""
        plain: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        if self.block is None:
            return plain
        return (*plain, (-(-rows // self.block[0]), -(-columns // self.block[1])))

    def group(self, first_column: int = 0) -> int:
        """The number of columns that share a scale, in a matrix or its part from `first_column` on; 0 where
        scales are not per block, no kernel takes such blocks, or the part cuts through one."""
        width = 0 if self.block is None else self.block[1]
        return 0 if width % GROUP_MULTIPLE or (width and first_column % width) else width


def read_fp8_scheme(config: Mapping[str, Any]) -> Fp8Scheme | str:
    """The scheme, or the reason why it is not supported."""
    method = str(config.get("quant_method", "unnamed"))
    readers = {
        "fp8": _plain_problems,
        "fbgemm_fp8": lambda _: iter(()),
        "compressed-tensors": _compressed_problems,
        "modelopt": _modelopt_problems,
    }
    if method not in readers:
        return f"quantization_config ({method}) is not supported, only {', '.join(readers)}"
    problems = list(readers[method](config))
    if problems:
        return f"quantization_config ({method}): " + ", ".join(problems)
    return Fp8Scheme(method, _block(config))


def _plain_problems(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("fmt", "e4m3") != "e4m3":
        yield f"fmt {config['fmt']!r} is not supported, only 'e4m3'"
    size = config.get("weight_block_size")
    if size is not None and _pair(size) is None:
        yield f"weight_block_size {size!r} is not two counts"


def _modelopt_problems(config: Mapping[str, Any]) -> Iterator[str]:
    algorithm = config.get("quant_algo")
    if algorithm != "FP8":
        yield f"quant_algo {algorithm!r} is not supported, only 'FP8'"


def _compressed_problems(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("format") not in (None, *_COMPRESSED_FORMATS):
        yield f"format {config['format']!r} is not supported, only {', '.join(_COMPRESSED_FORMATS)}"
    for name in ("sparsity_config", "transform_config"):
        if any((config.get(name) or {}).values()):
            yield f"{name} is not supported"
    blocks = set()
    for name, weights in _groups(config):
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            yield f"{name} has weights of type {weights.get('type')} with {weights.get('num_bits')} bits"
        elif weights.get("strategy") not in _STRATEGIES:
            yield f"{name} has weights by {weights.get('strategy')}, not by {', '.join(_STRATEGIES)}"
        elif weights.get("dynamic"):
            yield f"{name} has dynamic weights"
        elif weights["strategy"] == "block":
            blocks.add(_structure(weights))
    if None in blocks or len(blocks) > 1:
        yield "block_structure is not one pair of counts"


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    if config.get("weight_block_size") is not None:
        return _pair(config["weight_block_size"])
    of_groups = (_structure(w) for _, w in _groups(config) if w.get("strategy") == "block")
    return next(of_groups, None)


def _groups(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings of weights in each group of compressed-tensors, with the group's name."""
    for name, group in (config.get("config_groups") or {}).items():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            yield name, group["weights"]


def _structure(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block, written as a list, or as `128x128` by older versions."""
    found = weights.get("block_structure")
    match = _BLOCK.fullmatch(found) if isinstance(found, str) else None
    return (int(match[1]), int(match[2])) if match else _pair(found)


def _pair(found: object) -> tuple[int, int] | None:
    if isinstance(found, list) and len(found) == 2 and all(isinstance(n, int) and n > 0 for n in found):
        return found[0], found[1]
    return None
