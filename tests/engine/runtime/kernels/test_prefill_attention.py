"""Paged prefill attention in the interpreter, against its definition."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.runtime.kernels import prefill_attention as kernels
from engine.runtime.kernels.prefill_attention import BLOCK_M, tile_list
from engine.runtime.step.batch import Row
from tests.engine.runtime.kernels.cases import PagedCase, Shape, paged_case

CPU = torch.device("cpu")
CHUNKS, LENGTHS = (70, 1, 200, 64, 5), (70, 100, 200, 192, 133)
"""A prompt over a page, one token after a hundred, more than a tile, a page on a page boundary, a tail."""


def run(
    case: PagedCase,
    window: int | None = None,
    scales: tuple[float, float] = (1, 1),
    device: torch.device = CPU,
) -> Tensor:
    """On whatever device; tests/gpu calls it too."""
    case = case.moved(device)
    offsets = accumulate(case.chunks, initial=0)
    chunks = [
        Row(0, length - chunk, chunk, offset)
        for chunk, length, offset in zip(case.chunks, case.lengths, offsets, strict=False)
    ]
    columns = [(chunk.start, chunk.length, chunk.offset) for chunk in chunks]
    out = kernels.paged_prefill(
        case.q,
        case.keys,
        case.values,
        case.tables,
        torch.tensor(columns, dtype=torch.int32, device=device),
        torch.tensor(tile_list(chunks, case.shape.group, window), dtype=torch.int32, device=device),
        scale=case.shape.head_dim**-0.5,
        window=window,
        kv_scales=scales,
    )
    return out.cpu()


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    "shape", [Shape(1, 1, 64), Shape(1, 4, 128), Shape(1, 7, 64), Shape(2, 2, 64)], ids=str
)
def test_equals_the_definition(shape: Shape, window: int | None) -> None:
    case = paged_case(shape, CHUNKS, LENGTHS)
    close(run(case, window), case.expected(window))


@pytest.mark.parametrize("shape", [Shape(1, 2, 32, 16), Shape(1, 1, 256)], ids=str)
def test_other_pages_and_head_sizes(shape: Shape) -> None:
    case = paged_case(shape, [40, 3], [90, 3])
    close(run(case, 20), case.expected(20))


@pytest.mark.parametrize("window", [None, 100])
def test_a_page_too_large_for_shared_memory_is_read_in_parts(window: int | None) -> None:
    """To the bit as if the parts were pages."""
    case = paged_case(Shape(1, 2, 128, 256), [40, 3, 1], [290, 3, 256])
    found = run(case, window)
    close(found, case.expected(window))
    assert torch.equal(found, run(case.in_parts(64), window))


def test_half_precision() -> None:
    case = paged_case(Shape(2, 4, 64), CHUNKS, LENGTHS, dtype=torch.float16)
    close(run(case), case.expected(None), 4e-3)


def test_fp8_cache() -> None:
    case = paged_case(Shape(1, 2, 64), [40, 3], [100, 3], kv_dtype=torch.float8_e4m3fn)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    close(run(case, scales=(0.5, 3.0)), case.expected(None))


def test_a_prompt_in_chunks_is_the_prompt_whole() -> None:
    """Written in full beforehand, asked in two steps: to the bit, wherever the edges of tiles fall."""
    whole = paged_case(Shape(1, 2, 64), [150], [150])
    out = run(whole)
    parts = []
    for begin, end in ((0, 37), (37, 150)):
        part = PagedCase(
            whole.shape, [end - begin], [end], whole.q[begin:end], whole.keys, whole.values, whole.tables, []
        )
        parts.append(run(part))
    assert torch.equal(torch.cat(parts), out)


@pytest.mark.parametrize("window", [None, 20])
def test_tiles_of_a_chunk_without_tokens_read_and_write_nothing(window: int | None) -> None:
    """Its page table names pages that do not exist."""
    case = paged_case(Shape(1, 2, 64), [40], [100])
    tables = torch.cat((case.tables, torch.full_like(case.tables, 1 << 30)))
    chunks = torch.tensor([(60, 40, 0), (0, 0, 0)], dtype=torch.int32)
    tiles = torch.tensor([(0, 0), (1, 0), (1, 0)], dtype=torch.int32)
    out = torch.full((41, *case.q.shape[1:]), 7.0)
    given = case.q, case.keys, case.values, tables, chunks, tiles
    kernels.paged_prefill(*given, scale=case.shape.head_dim**-0.5, window=window, out=out)
    assert torch.equal(out[:40], run(case, window))
    assert (out[40] == 7.0).all()


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([None, 1, 100]),
)
def test_tiles_cover_every_token_once_and_the_longest_come_first(
    rows: list[tuple[int, int]], group: int, window: int | None
) -> None:
    chunks = [Row(0, start, length, 0) for start, length in rows]
    tiles = tile_list(chunks, group, window)
    tokens = BLOCK_M // group
    covered = sorted(
        (row, t) for row, first in tiles for t in range(first, min(first + tokens, rows[row][1]))
    )
    assert covered == [(row, t) for row, (_, length) in enumerate(rows) for t in range(length)]
    if window is None:
        ends = [rows[row][0] + min(first + tokens, rows[row][1]) for row, first in tiles]
        assert ends == sorted(ends, reverse=True)
