"""Attention over the paged cache, behind one call per layer.

Prefill and decode are different problems (many queries of one sequence against its own keys; one
query of many sequences, each against its own pages), so each has a back end of its own, chosen
apart. A back end prepares a step once, and is then called for every layer.

A query at position p sees the keys at positions (p - window, p].

The back ends of a device are here: `DecodePages` and `PrefillPages`. Another kernel has stored the step's
keys and values before they run, page tables lie on the device, and decode can be part of a CUDA graph.
`engine.runtime.setup.backends` chooses among them. A CPU has its own (`engine.runtime.host.torch_paged`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.runtime.models.spec import DecoderSpec
from engine.runtime.step.batch import Row


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: Sequence[int | None]
    """Per layer, the latest tokens that a query sees, itself included; None: all."""
    score_scale: float | None = None
    """The factor of scores. None: 1 / sqrt(head_dim)."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.score_scale is None else self.score_scale

    @staticmethod
    def of(model: DecoderSpec) -> AttentionSpec:
        """`model`: as a rank computes it."""
        return AttentionSpec(
            model.heads, model.kv_heads, model.head_dim, model.windows, model.attention.scale
        )


@dataclass(frozen=True, slots=True)
class Ahead:
    """The tokens of a step in which rows verify drafts: those of one row side by side, [T] int32 each, on the
    device. A row that only decodes is one of a single token."""

    before: Tensor
    """The number of drafts of its row before the token, which are not known yet."""
    behind: Tensor
    """The number of those behind it."""
    masked_by: Tensor
    """The place of its mask among those of all slots (`engine.runtime.device.device_sampling`); -1: none."""
    most: int
    """The tokens of a row at most: a constant of kernels."""
    windows: Tensor
    """The number of drafts of the step before the token: a draft's own window
    (`engine.runtime.step.states`)."""

    def first(self, tokens: int) -> Ahead:
        """The first tokens, whole rows."""
        before, behind, masked_by = self.before[:tokens], self.behind[:tokens], self.masked_by[:tokens]
        return Ahead(before, behind, masked_by, self.most, self.windows[:tokens])


class DecodeRows(Protocol):
    """A step's rows of one token, bound to their lengths and page tables."""

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [decode_rows, H, D] -> the same shape. The rows' keys and values are in the cache already."""
        ...


def chunks_of(rows: Sequence[Row]) -> list[Row]:
    """The rows, which follow each other, with offsets from the first of them."""
    return [Row(row.slot, row.start, row.length, row.offset - rows[0].offset) for row in rows]


def to_device(
    numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """The numbers as a tensor on `device`, copied from pinned memory, so that the host does not wait."""
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
        """Prepare what depends on a prompt's length, for lengths up to `tokens_max` and queries in `dtype`:
        nothing, where the kernels are the same for all lengths."""
        return

    def of_chunks(self, chunks: Sequence[Row], tables: Tensor) -> PrefillRows:
        """tables [R, P], a row per chunk, on the device."""
        ...


class DecodePages(Protocol):
    """A decode back end that reads the cache alone, and can be captured."""

    together: Sequence[int] = ()
    """The numbers of tokens of one row that it can compute together, each by a kernel of its own, ascending;
    empty: each token is a row to it, which reads its keys by itself."""

    def prepare(self, lengths: Sequence[int], tables: Tensor) -> DecodeRows:
        """Bind a step that is launched kernel by kernel. `lengths`: keys per row; tables [R, P], on the
        device."""
        return self.on_device(tables, to_device(lengths, tables.device))

    def plan(self, lengths: Sequence[int]) -> None:
        """The host's part of a step by `on_device`, to be called before it is captured and before each
        replay: nothing, where the kernel reads lengths and tables on the device. `lengths`: keys per row,
        padding rows included."""
        return

    def on_device(self, tables: Tensor, lengths: Tensor, ahead: Ahead | None = None) -> DecodeRows:
        """Bind a step that launches only and reads nothing back. tables [R, P], lengths [R] int32, on the
        device. `ahead`: of a step in which rows verify drafts; each of their tokens has a table and a
        length."""
        ...
