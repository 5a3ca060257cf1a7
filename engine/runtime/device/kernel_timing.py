"""How long a kernel takes when what it reads is in memory, not in the cache.

In a decode step every weight is read once and meanwhile pushed out of the cache by the others. Repeating one
kernel would find its weight there and report a rate that no step reaches, so something larger is read before
each repetition: read and not written, as what was written has to leave the cache while the next kernel reads.
That also keeps the device busy while the next kernel is being launched, so that the events around it measure
the kernel and not the host.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import torch

WARM_UPS: Final = 2
"""Untimed runs before the timed ones; the first compiles."""
REPETITIONS: Final = 8
CACHE_BYTES: Final = 512 << 20
"""Bytes read before each timed run: several times the largest last-level cache of a GPU."""
READS: Final = 2
"""Reads of that memory before each run: together longer than the launch of the timed kernels, four at
most."""

REPLAYS: Final = 5
"""Timed replays of a graph, back to back: a whole step reads more than a cache holds."""


def shortest_replay_us(replay: Callable[[], object]) -> float:
    """An `autotune.Timer` of a graph's replays on the current CUDA device, which takes no memory."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    replay()
    for mark in marks[:-1]:
        mark.record()
        replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return min(float(begin.elapsed_time(end)) for begin, end in pairwise(marks)) * 1e3


class DeviceTimer:
    """An `autotune.Timer` on the current CUDA device."""

    def __init__(self) -> None:
        self._others = torch.zeros(CACHE_BYTES // 4, device="cuda")

    def __call__(self, run: Callable[[], object]) -> float:
        """The shortest of several runs, in us."""
        for _ in range(WARM_UPS):
            run()
        spans = []
        for _ in range(REPETITIONS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(READS):
                self._others.amax()
            begin.record()
            run()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize()
        return min(float(begin.elapsed_time(end)) for begin, end in spans) * 1e3
