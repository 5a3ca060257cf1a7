"""The part of a model that a rank holds. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from engine.runtime.models.spec import DecoderSpec, DeltaNet, Layer
from engine.runtime.setup.model_errors import BadRunnerConfig

Span = tuple[int, int]
"""A range [start, stop)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of a model that is split into `size` equal ones."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    def span(self, count: int, width: int = 1) -> Span:
        """This rank's range of `count` items of `width` elements each, in elements.

        Where there are fewer items than ranks, neighbouring ranks hold the same one.
        """
        assert count % self.size == 0 or self.size % count == 0
        first = self.rank * count // self.size
        own = max(1, count // self.size)
        return first * width, (first + own) * width

    def padded_span(self, count: int) -> Span:
        """This rank's range of any `count` of items: the last ranks may have fewer than `padded_len`, or
        none."""
        own = self.padded_len(count)
        return min(self.rank * own, count), min((self.rank + 1) * own, count)

    def padded_len(self, count: int) -> int:
        """The number of items per rank, rounded up."""
        return -(-count // self.size)

    def of(self, config: DecoderSpec) -> DecoderSpec:
        """The model as one rank computes it: its heads, its part of the MLP. Raises BadRunnerConfig."""
        problems = list(_problems(config, self.size))
        if problems:
            fitting = ", ".join(str(size) for size in range(1, config.heads + 1) if _fits(config, size))
            raise BadRunnerConfig(
                f"--tensor-parallel-size {self.size} {' and '.join(problems)}; this model takes {fitting}"
            )
        mtp = None if config.mtp is None else self._of_layer(config.mtp)
        return replace(config, layers=tuple(map(self._of_layer, config.layers)), mtp=mtp)

    def _of_layer(self, layer: Layer) -> Layer:
        own, mlp = layer.attention, replace(layer.mlp, inner=layer.mlp.inner // self.size)
        if isinstance(own, DeltaNet):
            key_heads, value_heads = own.key_heads // self.size, own.value_heads // self.size
            return replace(
                layer, attention=replace(own, key_heads=key_heads, value_heads=value_heads), mlp=mlp
            )
        heads, kv_heads = own.heads // self.size, max(1, own.kv_heads // self.size)
        return replace(layer, attention=replace(own, heads=heads, kv_heads=kv_heads), mlp=mlp)


WHOLE: Final = Shard()


def _fits(config: DecoderSpec, size: int) -> bool:
    return not any(_problems(config, size))


def _problems(config: DecoderSpec, size: int) -> Iterator[str]:
    if config.heads % size:
        yield f"does not divide num_attention_heads ({config.heads})"
    if config.kv_heads % size and size % config.kv_heads:
        yield f"neither divides num_key_value_heads ({config.kv_heads}) nor is a multiple of it"
    if split := [own.key_heads for own in config.deltas if own.key_heads % size]:
        yield f"does not divide linear_num_key_heads ({split[0]})"
    if wide := [layer.mlp.inner for layer in config.layers if layer.mlp.inner % size]:
        yield f"does not divide intermediate_size ({wide[0]})"
