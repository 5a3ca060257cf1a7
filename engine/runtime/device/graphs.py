"""The decode step as CUDA graphs: one launch from the host, whatever the model's depth.

A captured step is a fixed list of kernels over fixed addresses. Rules that follow:

  1. A graph per batch size would be many; there is one per bucket, and a batch is padded to the next.
     Padding rows sit in a slot of their own whose only page belongs to nobody else, with one token: they
     read and write there and nowhere else.
  2. What differs between steps is in `DecodeInputs`: which slot a row is, and how many tokens it has. All
     else (tokens, page tables, parameters) lies on the device by slot, and the step gathers it.
  3. Graphs share one memory pool. The largest is captured first, so that the smaller ones fit into what it
     freed instead of adding to it.
  4. Results lie where the graph put them: the next replay of any graph overwrites them. Whoever needs them
     longer copies them, in stream order.
  5. A step runs once before it is captured: kernels are compiled and workspaces allocated then, which a
     capture does not allow.

`eager` is the same step without a graph, padding included: what tests compare with, and what runs where there
is no graph to be had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

SMALL_BUCKETS: Final = (1, 2, 4)
"""Where a padding row is a large share of the step."""
BUCKET_STEP: Final = 8
"""Up to `FINE_ROWS_MAX`; beyond, twice that. A padding row costs its share of attention and nothing else, as
the weights are read anyway."""
FINE_ROWS_MAX: Final = 64
ALIGNED_ROWS: Final = 4
"""16 bytes: where inputs begin elsewhere, kernels are compiled anew in the first step without a graph."""
STAGES: Final = 3
"""Host copies of the inputs. A step's copy may still be read while the next is planned, not two steps later:
the host has collected its results by then."""

Output = TypeVar("Output", covariant=True)


def batch_buckets(rows_max: int) -> tuple[int, ...]:
    """Ascending; the last is `rows_max` itself."""
    assert rows_max >= 1
    fine = range(BUCKET_STEP, FINE_ROWS_MAX + 1, BUCKET_STEP)
    coarse = range(FINE_ROWS_MAX + 2 * BUCKET_STEP, rows_max, 2 * BUCKET_STEP)
    sizes = (*SMALL_BUCKETS, *fine, *coarse)
    return (*(size for size in sizes if size < rows_max), rows_max)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode step is told, at fixed addresses on the device: [rows] int32 each.

    Both lie in one piece of memory, the lengths behind the slots of so many rows: they come in one copy. So
    each count of rows has addresses of its own, in memory that all share.
    """

    slots: Tensor
    lengths: Tensor
    """Tokens whose keys a row sees, its own included; the new token will stand at this position."""

    @staticmethod
    def within(memory: Tensor, rows: int) -> DecodeInputs:
        """`memory` [at least input_len(rows)] int32, on the device or on its way there."""
        return DecodeInputs(memory[:rows], memory[_aligned(rows) :][:rows])

    @staticmethod
    def empty(rows: int, device: torch.device) -> DecodeInputs:
        return DecodeInputs.within(torch.zeros(input_len(rows), dtype=torch.int32, device=device), rows)


def input_len(rows: int) -> int:
    """Numbers that `DecodeInputs` of so many rows take."""
    return 2 * _aligned(rows)


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS


LaunchStep = Callable[[DecodeInputs], Output]
"""Launches a step's kernels; reads nothing back, allocates only on the device's own stream."""


class Captured(Protocol[Output]):
    """A graph, and where it leaves its results."""

    @property
    def output(self) -> Output: ...

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    """Captures. CUDA below; tests have one that only keeps count."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, outside any capture, and wait for it."""
        ...

    def capture(self, run: Callable[[], Output]) -> Captured[Output]: ...


class DecodeGraphs(Generic[Output]):
    """Runs decode steps of up to the largest bucket's rows."""

    def __init__(
        self,
        step: LaunchStep[Output],
        buckets: Sequence[int],
        padding_slot: int,
        device: torch.device,
        plan: Callable[[Sequence[int]], object] = len,
    ) -> None:
        """`buckets`: ascending row counts, as of `batch_buckets`. `plan`: the host's part of a step, if it
        has one; told the rows' lengths, padding included."""
        self._step = step
        self._plan = plan
        self._padding_slot = padding_slot
        self.buckets: Final = tuple(buckets)
        size, pinned = input_len(buckets[-1]), device.type == "cuda"
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(STAGES)]
        self._stage = 0
        self._graphs: dict[int, Captured[Output]] = {}

    def capture(self, device: GraphDevice, progress: Callable[[int, int], None]) -> None:
        """All buckets, the largest first. `progress` hears how many are done, of how many."""
        assert not self._graphs, "captured twice"
        for done, rows in enumerate(reversed(self.buckets)):
            progress(done, len(self.buckets))
            self._fill([], [], rows)
            run = partial(self._step, DecodeInputs.within(self._inputs, rows))
            device.warm_up(run)
            self._graphs[rows] = device.capture(run)
        progress(len(self.buckets), len(self.buckets))

    def bucket(self, rows: int) -> int:
        """The padded size of a batch of so many rows."""
        assert 1 <= rows <= self.buckets[-1]
        return self.buckets[bisect_left(self.buckets, rows)]

    def replay(self, slots: Sequence[int], lengths: Sequence[int]) -> Output:
        """Rows in order; the output has a row for each, then padding. Valid until the next replay."""
        bucket = self.bucket(len(slots))
        self._fill(slots, lengths, bucket)
        graph = self._graphs[bucket]
        graph.replay()
        return graph.output

    def eager(self, slots: Sequence[int], lengths: Sequence[int]) -> Output:
        """As `replay`, kernel by kernel."""
        bucket = self.bucket(len(slots))
        self._fill(slots, lengths, bucket)
        return self._step(DecodeInputs.within(self._inputs, bucket))

    def _fill(self, slots: Sequence[int], lengths: Sequence[int], bucket: int) -> None:
        assert self._padding_slot not in slots
        padding = bucket - len(slots)
        rows = [[*slots, *[self._padding_slot] * padding], [*lengths, *[1] * padding]]
        self._plan(rows[1])
        staged = self._staged[self._stage][: input_len(bucket)]
        self._stage = (self._stage + 1) % STAGES
        there = DecodeInputs.within(staged, bucket)
        there.slots.copy_(torch.tensor(rows[0], dtype=torch.int32))
        there.lengths.copy_(torch.tensor(rows[1], dtype=torch.int32))
        self._inputs[: len(staged)].copy_(staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CudaCaptured(Generic[Output]):
    graph: torch.cuda.CUDAGraph
    output: Output

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphDevice:
    """Captures on the current device, all graphs in one pool."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: to capture on; None: one of its own."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream() if stream is None else stream

    def warm_up(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()

    def capture(self, run: Callable[[], Output]) -> CudaCaptured[Output]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()
        return CudaCaptured(graph, output)
