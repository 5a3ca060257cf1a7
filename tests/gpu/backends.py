"""Every attention back end that is installed against the definition, on the GPU: the cases of the CPU's tests
with the true libraries instead of stand-ins, larger, launched one by one and captured."""

from __future__ import annotations

import sys
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from engine.runtime.attention.build import Bounds, build_backends
from engine.runtime.setup.backends import NAMES, AttentionPhase, BackendChoice, Need, choose
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from tests.bench.engine.gpu.measuring import check
from tests.engine.runtime.kernels.cases import PagedCase, Shape, paged_case
from tests.gpu.near import near

CUDA = torch.device("cuda")
LENGTHS = (3000, 1, 64, 65, 300, 512, 513, 9000)
CHUNKS, CONTEXTS = (700, 1, 200, 64, 5, 129), (700, 100, 1200, 192, 4133, 129)
WINDOW = 100
HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROW_LIMIT_S = 300.0
"""FlashInfer compiles when it is first called."""
ERROR_MAX = {HALF: 1e-2, FP8: 5e-2}
"""Of the reference's norm. With an fp8 cache, some kernels round the weights of a row to fp8 as well."""


def choice(name: str, phase: AttentionPhase, shape: Shape, kv_dtype: torch.dtype) -> BackendChoice:
    """Raises BadRunnerConfig where it cannot be had."""
    major, minor = torch.cuda.get_device_capability()
    stored = str(kv_dtype).removeprefix("torch.")
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.page_size
    other = AttentionPhase.DECODE if phase is AttentionPhase.PREFILL else AttentionPhase.PREFILL
    need = Need(*sizes, "bfloat16", stored, (major, minor))
    return choose(f"{phase.value}={name},{other.value}=torch", need)


def cache_of(case: PagedCase, clean: bool) -> KVCache:
    """Two layers alike. `clean`: as the storing kernel keeps them for who reads pages whole."""
    shape = case.shape
    geometry = KVGeometry(2, shape.kv_heads, shape.page_size, shape.head_dim, case.keys.dtype)
    cache = KVCache(geometry, len(case.keys), device=CUDA)
    for kept, given in ((cache.keys, case.keys), (cache.values, case.values)):
        for part in kept:
            part.copy_(torch.nan_to_num(given.float()).to(given.dtype) if clean else given)
    return cache


def both(case: PagedCase, how: BackendChoice) -> tuple[Any, Any]:
    """The second layer has a window."""
    shape = case.shape
    spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, [None, WINDOW])
    bounds = Bounds(16, 16_384, torch.cuda.get_device_properties(0).multi_processor_count)
    return build_backends(how, cache_of(case, how.reads_whole_pages), spec, HALF, bounds)


def decode(name: str, shape: Shape, kv_dtype: torch.dtype) -> dict[str, Any]:
    how = choice(name, AttentionPhase.DECODE, shape, kv_dtype)
    case = paged_case(shape, [1] * len(LENGTHS), LENGTHS, dtype=HALF, kv_dtype=kv_dtype)
    back_end, _ = both(case, how)
    q, tables = case.q.to(CUDA), case.tables.to(CUDA)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)

    def step() -> list[Tensor]:
        prepared = back_end.on_device(tables, lengths)
        return [prepared(layer, q) for layer in range(2)]

    back_end.plan(LENGTHS)
    eager = step()
    expected = [case.expected(window) for window in (None, WINDOW)]
    error_max = ERROR_MAX[kv_dtype]
    worst = max(near(f, e, error_max) for f, e in zip(eager, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    # Other lengths than those of the capture: the rows change places.
    back_end.plan(LENGTHS[::-1])
    lengths.copy_(lengths.flip(0))
    tables.copy_(tables.flip(0))
    q.copy_(q.flip(0))
    graph.replay()
    worst = max(worst, *(near(f.flip(0), e, error_max) for f, e in zip(captured, expected, strict=True)))
    return {"back_end": str(how.decode), "error": worst}


def prefill(name: str, shape: Shape, kv_dtype: torch.dtype) -> dict[str, Any]:
    how = choice(name, AttentionPhase.PREFILL, shape, kv_dtype)
    case = paged_case(shape, CHUNKS, CONTEXTS, dtype=HALF, kv_dtype=kv_dtype)
    _, back_end = both(case, how)
    offsets = accumulate(CHUNKS, initial=0)
    chunks = [Row(0, end - n, n, offset) for n, end, offset in zip(CHUNKS, CONTEXTS, offsets, strict=False)]
    step = back_end.of_chunks(chunks, case.tables.to(CUDA))
    found = [step(layer, case.q.to(CUDA)) for layer in range(2)]
    expected = [case.expected(window) for window in (None, WINDOW)]
    worst = max(near(f, e, ERROR_MAX[kv_dtype]) for f, e in zip(found, expected, strict=True))
    return {"back_end": str(how.prefill), "error": worst}


def main() -> int:
    ok = True
    shapes = Shape(4, 4, 128, 64), Shape(4, 7, 128, 64), Shape(4, 4, 128, 256)
    runs = {AttentionPhase.DECODE: decode, AttentionPhase.PREFILL: prefill}
    for name, phase, shape, kv_dtype in product(NAMES, AttentionPhase, shapes, (HALF, FP8)):
        kv = str(kv_dtype).removeprefix("torch.")
        row = f"{phase.value} by {name} group {shape.group} page {shape.page_size} KV {kv}"
        run = partial(runs[phase], name, shape, kv_dtype)
        ok &= check("backends", row, run, absent=BadRunnerConfig, limit_s=ROW_LIMIT_S)
    return 0 if ok else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
