"""Where the time of a decode step goes: each kernel of a layer, and the time before it in which nothing runs.

Rows are those of `steps` that have targets. The times are the device's own; on an H200 a step under the
profiler took 1 to 8 % longer than `steps` measured, the short ones most.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from tests.bench.engine.gpu.measuring import check
from tests.bench.engine.gpu.steps import CONTEXT, FP8, LLAMA, QWEN, MakeBench, made

REPLAYS: Final = 3
ATTENTION: Final = "decode_kernel"
"""The kernel that each layer has once, by which a step is cut into layers."""
NAME_LEN_MAX: Final = 48


@dataclass(frozen=True, slots=True)
class Ran:
    name: str
    begin_us: float
    end_us: float


def kernels(found: Any) -> list[Ran]:
    """The kernels of a profile, in their order."""
    events = [e for e in found.events() if e.device_type.name == "CUDA"]
    ran = [Ran(e.name[:NAME_LEN_MAX], e.time_range.start, e.time_range.end) for e in events]
    return sorted(ran, key=lambda kernel: kernel.begin_us)


def layers(ran: Sequence[Ran]) -> list[list[tuple[str, float, float]]]:
    """Runs of (name, time, idle time before) from one layer's attention to the next one's. Only those that
    are as long as most: others span a step's ends."""
    at = [i for i, kernel in enumerate(ran) if kernel.name.startswith(ATTENTION)]
    spans = list(pairwise(at))
    lengths = [end - begin for begin, end in spans]
    usual = max(set(lengths), key=lengths.count)
    return [
        [
            (k.name, k.end_us - k.begin_us, k.begin_us - b.end_us)
            for b, k in zip(ran[i - 1 :], ran[i:j], strict=False)
        ]
        for (i, j), length in zip(spans, lengths, strict=True)
        if length == usual and i > 0
    ]


def summary(ran: Sequence[Ran], replays: int) -> dict[str, Any]:
    """Means over layers and replays, us. What is not in a layer is a step's begin and end."""
    found = layers(ran)
    columns = zip(*found, strict=True)
    mean = [
        (column[0][0], *(sum(row[i] for row in column) / len(column) for i in (1, 2))) for column in columns
    ]
    step_us = (ran[-1].end_us - ran[0].begin_us) / replays
    busy_us = sum(kernel.end_us - kernel.begin_us for kernel in ran) / replays
    return {
        "step_us": round(step_us, 1),
        "busy_us": round(busy_us, 1),
        "layer_us": round(sum(took + idle for _, took, idle in mean), 2),
        "layer": [f"{name}: {took:.2f} after {idle:.2f}" for name, took, idle in mean],
    }


def decode(make: MakeBench, batch: int, dependently: bool) -> dict[str, Any]:
    bench = make()
    run = bench.replayer(batch, CONTEXT, dependently=dependently)
    for _ in range(REPLAYS):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
    return {"batch": batch, "products": bench.choices(batch)} | summary(kernels(found), REPLAYS)


def main() -> int:
    ok = True
    for name, batches in ((LLAMA, (1, 32, 256)), (QWEN, (1, 256)), (FP8, (1, 32))):
        make = cache(partial(made, name))
        for batch in batches:
            for dependently in (False, True)[: 1 + (batch == 1)]:
                row = f"profile {name} batch {batch}{' launched dependently' if dependently else ''}"
                ok &= check("profile", row, partial(decode, make, batch, dependently))
                torch.cuda.empty_cache()
        del make
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if ok else 1
