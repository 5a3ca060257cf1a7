"""The back ends that call a library, and torch's, against the definition of attention.

The libraries are stand-ins that insist on what the true ones insist on; `tests/gpu` runs the true ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runtime.attention.build import Bounds, build_backends
from engine.runtime.attention.flashinfer_paged import FlashInferDecode, workspace
from engine.runtime.setup.backends import Backend, BackendChoice, Chosen
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec, DecodePages, PrefillPages, chunks_of
from tests.engine.runtime import attention_libraries as libraries
from tests.engine.runtime.kernels.cases import PagedCase, Shape, paged_case

LENGTHS = (513, 1, 64, 65, 256)
CHUNKS, CONTEXTS = (70, 1, 200, 64, 5), (70, 100, 200, 192, 533)
WINDOW = 100
FP8 = torch.float8_e4m3fn
HALF = torch.float16

DECODE: dict[Backend, tuple[ModuleType | None, int]] = {
    Backend.FLASH_ATTN_2: (libraries.FLASH_ATTN_2, 256),
    Backend.FLASH_ATTN_3: (libraries.FLASH_ATTN_3, 64),
    Backend.FLASHINFER: (libraries.FLASHINFER, 16),
    Backend.FLASHINFER_TRTLLM: (libraries.FLASHINFER, 64),
    Backend.TORCH: (None, 64),
}
"""With the pages to try."""
PREFILL: dict[Backend, tuple[ModuleType | None, int]] = {
    backend: how for backend, how in DECODE.items() if backend is not Backend.FLASHINFER_TRTLLM
}


def cache_of(case: PagedCase, scales: tuple[float, float] = (1.0, 1.0)) -> KVCache:
    """Two layers of the same keys and values."""
    shape = case.shape
    geometry = KVGeometry(2, shape.kv_heads, shape.page_size, shape.head_dim, case.keys.dtype)
    cache = KVCache(geometry, len(case.keys), [scales] * 2)
    for layer in range(2):
        cache.keys[layer], cache.values[layer] = case.keys, case.values
    return cache


def back_ends(
    cache: KVCache, shape: Shape, decode: Chosen, prefill: Chosen
) -> tuple[DecodePages, PrefillPages]:
    """The second layer has a window."""
    spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, [None, WINDOW])
    return build_backends(BackendChoice(prefill, decode), cache, spec, HALF, Bounds(8, 1024, 1))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


def decoding(
    backend: Backend, library: ModuleType | None, case: PagedCase, scales: tuple[float, float] = (1.0, 1.0)
) -> DecodePages:
    torch_prefill = Chosen(Backend.TORCH)
    return back_ends(cache_of(case, scales), case.shape, Chosen(backend, library), torch_prefill)[0]


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("backend", DECODE, ids=lambda backend: backend.name)
def test_decode(backend: Backend, group: int) -> None:
    """Ragged rows, shuffled pages, NaN in all that no row owns; a layer with a window and one without."""
    library, page_size = DECODE[backend]
    case = paged_case(Shape(2, group, 64, page_size), [1] * len(LENGTHS), LENGTHS, dtype=HALF)
    decode = decoding(backend, library, case)
    decode.plan(LENGTHS)
    step = decode.on_device(case.tables, torch.tensor(LENGTHS, dtype=torch.int32))
    close(step(0, case.q), case.expected(None))
    close(step(1, case.q), case.expected(WINDOW))


@pytest.mark.parametrize("backend", DECODE, ids=lambda backend: backend.name)
def test_decode_of_a_batch(backend: Backend) -> None:
    """As a step that is launched kernel by kernel prepares it; tables are 64 bits wide there."""
    library, page_size = DECODE[backend]
    case = paged_case(Shape(2, 2, 64, page_size), [1] * len(LENGTHS), LENGTHS, dtype=HALF)
    decode = decoding(backend, library, case)
    close(decode.prepare(LENGTHS, case.tables.long())(1, case.q), case.expected(WINDOW))
    close(decode.prepare(LENGTHS, case.tables)(0, case.q), case.expected(None))


@pytest.mark.parametrize("backend", PREFILL, ids=lambda backend: backend.name)
def test_prefill(backend: Backend) -> None:
    """Whole prompts, chunks over a cached context, one token after a hundred."""
    library, page_size = PREFILL[backend]
    case = paged_case(Shape(2, 2, 64, page_size), CHUNKS, CONTEXTS, dtype=HALF)
    prefill = back_ends(cache_of(case), case.shape, Chosen(Backend.TORCH), Chosen(backend, library))[1]
    offsets = accumulate(CHUNKS, initial=0)
    chunks = [Row(0, end - n, n, offset) for n, end, offset in zip(CHUNKS, CONTEXTS, offsets, strict=False)]
    step = prefill.of_chunks(chunks, case.tables)
    close(step(0, case.q), case.expected(None))
    close(step(1, case.q), case.expected(WINDOW))
    # The same as rows of a batch, behind a decode row, by tables that are 64 bits wide.
    rows = [Row(slot=0, start=c.start, length=c.length, offset=c.offset + 1) for c in chunks]
    close(prefill.of_chunks(chunks_of(rows), case.tables.long())(0, case.q), case.expected(None))


@pytest.mark.parametrize(
    "backend", [Backend.FLASHINFER, Backend.FLASHINFER_TRTLLM, Backend.TORCH], ids=lambda b: b.name
)
def test_an_fp8_cache_is_read_with_its_scales(backend: Backend) -> None:
    library, page_size = DECODE[backend]
    case = paged_case(Shape(2, 4, 64, page_size), [1, 1], [300, 40], dtype=HALF, kv_dtype=FP8)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    decode = decoding(backend, library, case, (0.5, 3.0))
    decode.plan([300, 40])
    step = decode.on_device(case.tables, torch.tensor([300, 40], dtype=torch.int32))
    close(step(0, case.q) / 3, case.expected(None) / 3)


def test_an_fp8_cache_under_flashinfers_prefill() -> None:
    case = paged_case(Shape(2, 2, 64, 16), [40, 3], [100, 3], dtype=HALF, kv_dtype=FP8)
    case.history = [(k.float() * 0.5, v.float() * 3.0) for k, v in case.history]
    cache = cache_of(case, (0.5, 3.0))
    chosen = Chosen(Backend.FLASHINFER, libraries.FLASHINFER)
    prefill = back_ends(cache, case.shape, Chosen(Backend.TORCH), chosen)[1]
    found = prefill.of_chunks([Row(0, 60, 40, 0), Row(0, 0, 3, 40)], case.tables)(0, case.q)
    close(found / 3, case.expected(None) / 3)


def test_a_captured_step_of_flashinfer_reads_what_each_plan_and_each_replay_left() -> None:
    """One wrapper per number of rows and window, made once; lengths and pages that change between replays."""
    shape = Shape(2, 2, 64, 16)
    cases = [paged_case(shape, [1] * 3, lengths, dtype=HALF, seed=i) for i, lengths in enumerate(REPLAYS)]
    cache = cache_of(cases[0])
    spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, [None, WINDOW])
    made: list[bool] = []

    class Counted(libraries.BatchDecodeWithPagedKVCacheWrapper):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(kwargs.get("use_cuda_graph", False))
            super().__init__(*args, **kwargs)

    library: Any = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Counted)
    space = workspace(torch.device("cpu"))
    decode = FlashInferDecode(library, cache, spec, HALF, space, rows_max=4, length_max=1024)
    for case in cases:
        for layer in range(2):
            cache.keys[layer], cache.values[layer] = case.keys, case.values
        decode.plan(case.lengths)
        step = decode.on_device(case.tables, torch.tensor(case.lengths, dtype=torch.int32))
        close(step(0, case.q), case.expected(None))
        close(step(1, case.q), case.expected(WINDOW))
    assert sorted(made) == [False, False, True, True]


REPLAYS: Sequence[Sequence[int]] = ([300, 1, 64], [16, 17, 600], [1, 1, 1])


def test_small_groups_stay_off_the_tensor_cores() -> None:
    seen: Callable[[Any], bool] = lambda decode: decode._eager[None].use_tensor_cores  # noqa: E731
    for group, expected in ((1, False), (3, False), (4, True), (7, True)):
        case = paged_case(Shape(1, group, 64, 16), [1], [5], dtype=HALF)
        assert seen(decoding(Backend.FLASHINFER, libraries.FLASHINFER, case)) is expected
