"""Paged decode attention in the interpreter, against its definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    piece_tokens_min: int = 256,
    queries: int = 1,
) -> Tensor:
    """On whatever device; tests/gpu calls it too. `queries`: the tokens of a row that are computed together;
    1: each is a row of its own."""
    case = case.moved(device)
    shape, tokens = case.shape, len(case.q)

    def column(each: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([n for own in each for n in own], dtype=torch.int32, device=device)

    rows = list(zip(case.lengths, case.chunks, strict=True))
    lengths = column([range(length - chunk + 1, length + 1) for length, chunk in rows])
    behind = column([range(chunk - 1, -1, -1) for _, chunk in rows]) if queries > 1 else None
    tables = case.tables.repeat_interleave(torch.tensor(case.chunks, device=device), 0)
    work = kernels.DecodeWork.empty(programs, device)
    tile = kernels.tile_tokens(shape.page_size, shape.head_dim, case.q.dtype)
    heads = shape.heads, shape.kv_heads, shape.head_dim
    scratch = kernels.DecodeScratch.empty(programs, tokens, *heads, device, queries)
    scratch.sums.fill_(torch.nan)
    own = lengths, shape.kv_heads, window, tile, work
    kernels.list_work(*own, programs=programs, piece_tokens_min=piece_tokens_min, behind=behind)
    out = kernels.paged_decode(
        case.q,
        case.keys,
        case.values,
        tables,
        lengths,
        work,
        scratch,
        scale=shape.head_dim**-0.5,
        window=window,
        kv_scales=scales,
        programs=programs,
        tile=tile,
        behind=behind,
        queries=queries,
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


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("programs", [1, 2, 5, 7, 40])
def test_pieces_of_any_length(programs: int, window: int | None) -> None:
    """Down to a tile each, so that many programs share a row; also more programs than tiles."""
    case = paged_case(Shape(2, 2, 32, 16), [1] * len(RAGGED), RAGGED)
    found = run(case, window, programs, piece_tokens_min=1)
    close(found, case.expected(window))
    assert torch.equal(run(case, window, programs, piece_tokens_min=1), found)


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


def test_bits_do_not_depend_on_where_pages_lie() -> None:
    case = paged_case(Shape(2, 2, 64), [1] * len(RAGGED), RAGGED)
    order = torch.tensor(random.Random(1).sample(range(len(case.keys)), len(case.keys)))
    moved = replace(
        case, keys=case.keys[order], values=case.values[order], tables=order.argsort()[case.tables].int()
    )
    assert torch.equal(run(moved, programs=7), run(case, programs=7))


# -- tokens of one sequence -----------------------------------------------------------------------

CHUNKS = (1, 4, 2, 3, 1, 4, 1)
VERIFIED = (513, 66, 64, 65, 1, 4, 0)
"""A row beside those that verify, last tokens that begin a page, keys that are all new, and no keys."""


@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize(
    ("shape", "queries"), [(Shape(1, 1, 64), 16), (Shape(2, 4, 64), 4), (Shape(1, 7, 64, 16), 8)], ids=str
)
def test_tokens_of_a_sequence_that_share_their_keys_equal_the_definition(
    shape: Shape, queries: int, window: int | None
) -> None:
    case = paged_case(shape, CHUNKS, VERIFIED)
    close(run(case, window, queries=queries), case.expected(window))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("programs", [1, 4, 7, 40])
def test_tokens_of_a_sequence_in_pieces_of_any_length(programs: int, window: int | None) -> None:
    """A page holds less keys than a row has tokens, so pieces hold keys that some of them do not see."""
    chunks, lengths = (7, 1, 8, 2), (130, 17, 31, 2)
    case = paged_case(Shape(2, 2, 32, 4), chunks, lengths)
    found = run(case, window, programs, piece_tokens_min=1, queries=8)
    close(found, case.expected(window))
    assert torch.equal(run(case, window, programs, piece_tokens_min=1, queries=8), found)


def test_what_alone_reads_in_one_piece_is_the_same_to_the_bit_as_rows_of_their_own() -> None:
    """Sums run over the same keys in the same order, and what a token does not see adds nothing."""
    case = paged_case(Shape(2, 2, 64), CHUNKS, VERIFIED)
    alone = run(case, programs=1)
    for queries in (4, 8):
        assert torch.equal(run(case, programs=1, queries=queries), alone)


def test_tokens_of_a_sequence_over_an_fp8_cache() -> None:
    case = paged_case(Shape(2, 4, 64), [3, 1], [300, 40], kv_dtype=torch.float8_e4m3fn)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    close(run(case, scales=(0.5, 3.0), queries=4), case.expected(None))


@pytest.mark.parametrize(
    ("group", "head_dim", "most", "counts"),
    [
        (1, 128, 16, (16,)),
        (2, 128, 16, (8, 16)),
        (4, 64, 16, (4, 16)),
        (4, 256, 16, (4, 8)),
        (7, 128, 16, (2, 8)),
        (8, 128, 4, (2, 4)),
        (16, 128, 16, (4,)),
        (33, 128, 16, ()),
    ],
)
def test_tiles_have_room_for_what_costs_nothing_and_for_four_times_as_many(
    group: int, head_dim: int, most: int, counts: tuple[int, ...]
) -> None:
    assert kernels.query_counts(group, head_dim, most) == counts


@dataclass(frozen=True)
class Piece:
    row: int
    at: int
    count: int
    segments: int
    each: int
    length: int


def listed(lengths: Sequence[int], heads: int, window: int | None, page: int, programs: int) -> list[Piece]:
    work = kernels.DecodeWork.empty(programs, CPU)
    kernels.list_work(torch.tensor(lengths, dtype=torch.int32), heads, window, page, work, programs=programs)
    return [Piece(*numbers) for numbers in work.pieces[:, :6].tolist()]


def line(lengths: Sequence[int], heads: int, window: int | None, page: int) -> list[tuple[int, int]]:
    """The (row, head) of every tile, in order: what pieces are cut from."""
    first = [0 if window is None else max(0, length - window) // page for length in lengths]
    tiles = [max(1, -(-length // page) - begin) for length, begin in zip(lengths, first, strict=True)]
    return [(row, head) for row, own in enumerate(tiles) for head in range(heads) for _ in range(own)]


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=9),
    st.sampled_from([1, 2, 8]),
    st.none() | st.integers(1, 500),
    st.sampled_from([16, 64]),
    st.integers(1, 12),
)
def test_pieces_are_equal_shares_of_the_line(
    lengths: list[int], heads: int, window: int | None, page: int, programs: int
) -> None:
    """All of it, in order, none twice; and never shorter than is worth it but at the end."""
    pieces, whole = listed(lengths, heads, window, page, programs), line(lengths, heads, window, page)
    each = max(-(-len(whole) // programs), 256 // page)
    assert {piece.each for piece in pieces} == {each}
    starts = [next(i for i, (row, _) in enumerate(whole) if row == r) for r in range(len(lengths))]
    for program, piece in enumerate(pieces):
        own = whole[program * each :][:each]
        assert piece.count == len(own)
        assert piece.segments == len(set(own))
        if own:
            assert piece.row == own[0][0]
            assert piece.at == program * each - starts[piece.row]
            assert piece.length == lengths[piece.row]
