"""Paged decode attention in the interpreter, against its definition."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.runtime.kernels import decode_attention as kernels
from tests.engine.runtime.kernels.cases import PagedCase, Shape, paged_case

CPU = torch.device("cpu")
RAGGED = (513, 1, 64, 65, 0, 256)
"""Less than a page, a page to the token, less than a split, splits to the token, none at all."""


def run(
    case: PagedCase,
    window: int | None = None,
    programs: int = 3,
    scales: tuple[float, float] = (1, 1),
    device: torch.device = CPU,
    split_tokens: int = kernels.SPLIT_TOKENS,
) -> Tensor:
    """On whatever device; tests/gpu calls it too."""
    case = case.moved(device)
    rows, shape = len(case.lengths), case.shape
    size = shape.page_size
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    work = kernels.DecodeWork.empty(rows, device)
    tile = kernels.tile_tokens(size, shape.head_dim, case.q.dtype)
    splits = kernels.most_splits(max(case.lengths), window, tile, split_tokens)
    heads = shape.heads, shape.kv_heads, shape.head_dim
    scratch = kernels.DecodeScratch.empty(rows, *heads, splits, device)
    scratch.sums.fill_(torch.nan)
    kernels.list_work(lengths, window, tile, work, split_tokens)
    out = kernels.paged_decode(
        case.q,
        case.keys,
        case.values,
        case.tables,
        lengths,
        work,
        scratch,
        scale=shape.head_dim**-0.5,
        window=window,
        kv_scales=scales,
        programs=programs,
        tile=tile,
        split_tokens=split_tokens,
    )
    assert not scratch.arrivals.any(), "the counters are not ready for the next layer"
    return out.cpu()


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    "shape", [Shape(1, 1, 64), Shape(2, 4, 128), Shape(1, 7, 64), Shape(2, 2, 64)], ids=str
)
def test_equals_the_definition(shape: Shape, window: int | None) -> None:
    case = paged_case(shape, [1] * len(RAGGED), RAGGED)
    close(run(case, window), case.expected(window))


@pytest.mark.parametrize("split_tokens", [64, 128, 1024])
def test_splits_of_other_sizes(split_tokens: int) -> None:
    """In whatever order they arrive: programs take them in another order where there are more."""
    case = paged_case(Shape(1, 2, 32), [1] * len(RAGGED), RAGGED)
    found = run(case, split_tokens=split_tokens)
    close(found, case.expected(None))
    assert torch.equal(run(case, programs=7, split_tokens=split_tokens), found)


@pytest.mark.parametrize("shape", [Shape(2, 2, 32, 16), Shape(1, 20, 16, 32), Shape(1, 4, 256)], ids=str)
def test_other_pages_groups_and_head_sizes(shape: Shape) -> None:
    case = paged_case(shape, [1, 1], [600, 17])
    close(run(case), case.expected(None))


@pytest.mark.parametrize("window", [None, 100])
def test_a_page_too_large_for_shared_memory_is_read_in_parts(window: int | None) -> None:
    """To the bit as if the parts were pages."""
    case = paged_case(Shape(1, 2, 128, 256), [1, 1, 1], [600, 17, 255])
    found = run(case, window)
    close(found, case.expected(window))
    assert torch.equal(found, run(case.in_parts(64), window))


def test_half_precision() -> None:
    case = paged_case(Shape(2, 4, 64), [1] * len(RAGGED), RAGGED, dtype=torch.float16)
    close(run(case), case.expected(None), 2e-3)


def test_fp8_cache() -> None:
    """What is stored is scaled; the answer is that of the stored numbers, unscaled."""
    case = paged_case(Shape(2, 4, 64), [1, 1], [300, 40], kv_dtype=torch.float8_e4m3fn)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    close(run(case, scales=(0.5, 3.0)), case.expected(None))


def test_a_rows_bits_depend_on_nothing_but_the_row() -> None:
    """Not on the neighbours, nor on where its pages lie, nor on how many programs share the work."""
    shape = Shape(2, 2, 64)
    case = paged_case(shape, [1] * len(RAGGED), RAGGED)
    together = run(case)
    alone = PagedCase(shape, [1], RAGGED[:1], case.q[:1], case.keys, case.values, case.tables[:1], [])
    assert torch.equal(run(alone, programs=1), together[:1])
    order = torch.tensor(random.Random(1).sample(range(len(RAGGED)), len(RAGGED)))
    shuffled = PagedCase(
        shape,
        case.chunks,
        [RAGGED[i] for i in order],
        case.q[order],
        case.keys,
        case.values,
        case.tables[order],
        [],
    )
    assert torch.equal(run(shuffled, programs=7), together[order])


@given(
    st.integers(1, 70_000),
    st.none() | st.integers(1, 5000),
    st.sampled_from([16, 64, 512]),
    st.sampled_from([64, 128, 256, 512, 1024]),
    st.data(),
)
def test_no_row_has_more_splits_than_there_is_room_for(
    longest: int, window: int | None, page: int, tokens: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, longest))
    most = kernels.most_splits(longest, window, page, tokens)
    assert kernels.split_count(length, window, page, tokens) <= most


@pytest.mark.parametrize(
    ("length", "longest", "window"),
    [(8193, 8192 + 64, 4096), (32_768, 33_280, None)],
    ids=["window", "width"],
)
def test_the_longest_row_has_not_always_the_most_splits(
    length: int, longest: int, window: int | None
) -> None:
    assert kernels.split_count(length, window, 64) > kernels.split_count(longest, window, 64)


@pytest.mark.parametrize(("window", "tokens"), [(None, 256), (90, 256), (90, 32), (None, 8)])
def test_the_list_of_work_is_the_hosts_rule(window: int | None, tokens: int) -> None:
    """A page is the least that a split has."""
    page = 16
    limit = kernels.SPLITS_MAX * kernels.SPLIT_TOKENS
    lengths = [0, 1, 255, 256, 257, limit, limit + 1, 3 * limit + 5, 17]
    counts = [kernels.split_count(length, window, page, tokens) for length in lengths]
    expected = [
        row * kernels.SPLITS_MAX + split for row, count in enumerate(counts) for split in range(count)
    ]
    assert listed(lengths, window, page, tokens) == expected
    assert max(counts) <= kernels.SPLITS_MAX
    if (window, tokens) == (None, 256):
        assert counts == [1, 1, 1, 1, 2, 128, 121, 126, 1]


def listed(lengths: Sequence[int], window: int | None, page: int, tokens: int) -> list[int]:
    work = kernels.DecodeWork.empty(len(lengths), torch.device("cpu"))
    kernels.list_work(torch.tensor(lengths, dtype=torch.int32), window, page, work, tokens)
    return work.items[: work.total].tolist()
