"""What kernels are checked with, on whatever device they run: inputs with poison, and torch's answer.

Everything is made on the CPU from a seed and moved, so that a case is the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    kv_heads: int
    group: int
    head_dim: int
    page_size: int = 64

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(slots=True)
class PagedCase:
    """Rows whose last `chunk` tokens ask, over a cache in which everything that no row owns is NaN: stray
    pages, the end of each row's last page, and page-table entries that point at a page of NaN."""

    shape: Shape
    chunks: Sequence[int]
    lengths: Sequence[int]
    """Keys per row, the chunk's own included."""
    q: Tensor
    """[T, H, D]"""
    keys: Tensor
    values: Tensor
    tables: Tensor
    """[R, P] int32"""
    history: list[tuple[Tensor, Tensor]]
    """Per row, keys and values [length, Hkv, D], as stored."""

    def moved(self, device: torch.device) -> PagedCase:
        tensors = (t.to(device) for t in (self.q, self.keys, self.values, self.tables))
        q, keys, values, tables = tensors
        return PagedCase(self.shape, self.chunks, self.lengths, q, keys, values, tables, self.history)

    def in_parts(self, size: int) -> PagedCase:
        """The same in pages of so many tokens, of which several make one of these."""
        shape, (pages, kv_heads, page_size, dim) = self.shape, self.keys.shape
        parts = page_size // size

        def cut(x: Tensor) -> Tensor:
            own = x.view(pages, kv_heads, parts, size, dim).transpose(1, 2)
            return own.reshape(pages * parts, kv_heads, size, dim)

        tables = (self.tables[:, :, None] * parts + torch.arange(parts, dtype=torch.int32)).flatten(1)
        smaller = Shape(shape.kv_heads, shape.group, shape.head_dim, size)
        given = self.chunks, self.lengths, self.q, cut(self.keys), cut(self.values), tables, self.history
        return PagedCase(smaller, *given)

    def expected(self, window: int | None) -> Tensor:
        """[T, H, D] float32 on the CPU: attention as it is defined, row by row, in float64."""
        found, offset = [], 0
        for chunk, length, (k, v) in zip(self.chunks, self.lengths, self.history, strict=True):
            q = self.q[offset : offset + chunk].cpu().double()
            found.append(_attend(q, k.double(), v.double(), length - chunk, window))
            offset += chunk
        return torch.cat(found).float()


def paged_case(
    shape: Shape,
    chunks: Sequence[int],
    lengths: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PagedCase:
    """Pages lie in shuffled order; `seed` decides the numbers and, apart from them, `seed + 1` nothing."""
    generator = torch.Generator().manual_seed(seed)
    size, kv_dtype = shape.page_size, kv_dtype or dtype
    width = max(-(-length // size) for length in lengths) + 1
    needed = sum(-(-length // size) for length in lengths)
    order = torch.randperm(needed + 2, generator=generator).int()
    cache_shape = (needed + 2, shape.kv_heads, size, shape.head_dim)
    keys = torch.full(cache_shape, torch.nan).to(kv_dtype)
    values = keys.clone()
    tables = order[-1].expand(len(lengths), width).clone()
    history, used = [], 0
    for row, length in enumerate(lengths):
        k, v = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=generator).to(kv_dtype)
        for page, start in enumerate(range(0, length, size)):
            here, own = int(order[used]), slice(start, min(start + size, length))
            keys[here, :, : own.stop - start] = k[own].transpose(0, 1)
            values[here, :, : own.stop - start] = v[own].transpose(0, 1)
            tables[row, page] = here
            used += 1
        history.append((k, v))
    q = torch.randn(sum(chunks), shape.heads, shape.head_dim, generator=generator).to(dtype)
    return PagedCase(shape, chunks, lengths, q, keys, values, tables, history)


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """q [t, H, D] at positions start...; k, v [start + t, Hkv, D]."""
    if len(k) == 0:
        return torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q, k) / q.shape[2] ** 0.5
    query, key = start + torch.arange(len(q))[:, None], torch.arange(len(k))
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return torch.einsum("htl,lhd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
