"""Attention over the paged cache, behind one call per layer.

Prefill and decode are different problems (many queries of one sequence against its own keys; one
query of many sequences, each against its own pages), so each has a back end of its own, chosen
apart. A back end prepares a step once, and is then called for every layer.

A query at position p sees the keys at positions (p - window, p].

There are two forms. `DecodeBackend` and `PrefillBackend` are the host's, beside `BatchAttention`.
`DecodePages` and `PrefillPages` are a device's: keys and values are stored by another kernel before, page
tables lie on the device, and decode can be part of a CUDA graph. Which of them computes is decided in
`engine.runtime.backends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.runtime.batch import PackedBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model's attention looks like."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: Sequence[int | None]
    """Per layer."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class DecodeRows(Protocol):
    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [decode_rows, H, D] -> the same shape. The rows' keys and values are in the cache already."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row's part of the step: `length` tokens from position `start`, at `offset` of the packed tokens."""

    start: int
    length: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.length


def chunks_of(batch: PackedBatch) -> list[Chunk]:
    """The rows after the decode rows, packed from 0."""
    rows = batch.rows[batch.decode_rows :]
    return [Chunk(row.start, row.length, row.offset - rows[0].offset) for row in rows]


def to_device(
    numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """From pinned memory where there is a device to copy to: the host does not wait."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class PrefillRows(Protocol):
    """A step's rows of several tokens, over keys and values that are in the cache."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [T', H, D] -> the same shape."""
        ...


class PrefillPages(Protocol):
    """A prefill back end that reads the cache alone."""

    def warm_up(self, tokens_max: int, dtype: torch.dtype) -> None:
        """What prompts of up to so many tokens, computed in `dtype`, would wait for one after another."""
        ...

    def of_chunks(self, chunks: Sequence[Chunk], tables: Tensor) -> PrefillRows:
        """tables [R, P], a row per chunk, on the device."""
        ...

    def prepare(self, batch: PackedBatch, tables: Tensor | None = None) -> PrefillRows:
        """`tables`: the page tables of the rows after the decode rows, if they are on the device already."""
        ...


class DecodePages(Protocol):
    """A decode back end that reads the cache alone, and can be captured."""

    def prepare(self, batch: PackedBatch, tables: Tensor | None = None) -> DecodeRows:
        """For a step that is launched kernel by kernel. `tables`: the decode rows', if on the device."""
        ...

    def plan(self, lengths: Sequence[int]) -> None:
        """The host's part of a step of so many rows by `on_device`: before it is captured, and before each
        replay. Keys per row, padding included."""
        ...

    def on_device(self, tables: Tensor, lengths: Tensor) -> DecodeRows:
        """tables [R, P], lengths [R] int32, both on the device: launches only, nothing is read back."""
        ...
