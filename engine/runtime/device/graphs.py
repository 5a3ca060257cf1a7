"""The decode step as CUDA graphs: one launch from the host, whatever the model's depth.

A captured step is a fixed list of kernels over fixed addresses. Rules that follow:

  1. A graph per batch size would be many; there is one per bucket, and a batch is padded to the next.
     Padding rows have a slot of their own, with one token on a page that no sequence has: they read and
     write there and nowhere else.
  2. `DecodeInputs` holds all that differs between steps: each row's slot, and its number of tokens. All
     else (tokens, page tables, parameters) lies on the device by slot, and the step gathers it.
  3. Graphs share one memory pool. The largest is captured first, so that the smaller ones fit into what it
     freed instead of adding to it.
  4. Results lie where the graph put them: the next replay of any graph overwrites them. The caller copies
     what it needs longer, in stream order.
  5. A step runs once before it is captured: kernels are compiled and workspaces allocated then, which a
     capture does not allow.

**Overlap.** A step may be given in a second form, whose kernels start while those before them end
(`kernels/dependent_launch.py`). It computes the same bits. Which form is faster depends on the card and on
the number of rows, so both are captured, replayed, compared and timed, and one is kept. That is done for
buckets that are powers of two and for the largest. The others follow the next larger of these, which bounds
the time of a start. A form whose results differ by a bit, or that cannot be launched, is not taken. Where
replays cannot be timed the plain form stays.

`eager` is the same step without a graph, padding included: tests compare graphs with it, and it runs where
graphs are switched off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.runtime.device.memory import out_of_memory
from engine.runtime.kernels.autotune import Timer
from engine.runtime.reference.delta_net import StepStates
from engine.runtime.step.states import States

SMALL_BUCKETS: Final = (1, 2, 4)
"""Buckets of few rows, where a padding row is a large share of the step."""
BUCKET_STEP: Final = 8
"""The distance of buckets up to `FINE_ROWS_MAX`, in rows; beyond, it is twice that. A padding row costs
its share of attention and nothing else, as the weights are read anyway."""
FINE_ROWS_MAX: Final = 64
ALIGNED_ROWS: Final = 4
"""Row counts are rounded up to a multiple of this, so that every input begins at a multiple of 16 bytes: at
other addresses the first step without a graph would compile its kernels anew."""
OVERLAP_MARGIN: Final = 1.01
"""How many times as long a step has to take without overlap as with it, for overlap to be taken: a smaller
difference is noise."""
STAGES: Final = 3
"""The number of host buffers for the inputs. The device may still read a step's buffer while the next step is
planned, but not two steps later: the host has collected its results by then."""

Output = TypeVar("Output", covariant=True)


def batch_buckets(rows_max: int) -> tuple[int, ...]:
    """The padded batch sizes, ascending; the last is `rows_max` itself."""
    assert rows_max >= 1
    fine = range(BUCKET_STEP, FINE_ROWS_MAX + 1, BUCKET_STEP)
    coarse = range(FINE_ROWS_MAX + 2 * BUCKET_STEP, rows_max, 2 * BUCKET_STEP)
    sizes = (*SMALL_BUCKETS, *fine, *coarse)
    return (*(size for size in sizes if size < rows_max), rows_max)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a decode step, at fixed addresses on the device: [rows] int32 each.

    Both lie in one piece of memory, the lengths behind the slots, and are sent in one copy. Each batch size
    has addresses of its own in memory that all sizes share.
    """

    slots: Tensor
    lengths: Tensor
    """The number of tokens whose keys a row sees, its own included: the position of the new token."""

    @staticmethod
    def within(memory: Tensor, rows: int) -> DecodeInputs:
        """The inputs of a batch size within `memory`, [at least input_len(rows)] int32 on the device or the
        host."""
        return DecodeInputs(memory[:rows], memory[_aligned(rows) :][:rows])

    def bound(self, states: States | None) -> StepStates | None:
        """A model's states, bound to these rows; None where it has none."""
        if states is None:
            return None
        return StepStates(states, (), len(self.slots), self.slots, self.lengths)

    @staticmethod
    def empty(rows: int, device: torch.device) -> DecodeInputs:
        return DecodeInputs.within(torch.zeros(input_len(rows), dtype=torch.int32, device=device), rows)


def input_len(rows: int) -> int:
    """The number of elements that `DecodeInputs` of so many rows take."""
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
    """Captures graphs. CUDA's is below; tests have one that only counts."""

    @property
    def timer(self) -> Timer | None:
        """Measures a replay; None where time cannot be measured."""
        ...

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run a step once, outside any capture, and wait for it."""
        ...

    def capture(self, run: Callable[[], Output]) -> Captured[Output]: ...


class Overlap(Enum):
    """The result of comparing a bucket's step with its form whose kernels overlap."""

    FASTER = "faster"
    SLOWER = "not faster"
    DIFFERS = "other results"
    REFUSED = "cannot be launched"


class DecodeGraphs(Generic[Output]):
    """Runs decode steps of up to the largest bucket's rows."""

    def __init__(
        self,
        step: LaunchStep[Output],
        buckets: Sequence[int],
        padding_slot: int,
        device: torch.device,
        plan: Callable[[Sequence[int]], object] = len,
        overlapping: LaunchStep[Output] | None = None,
    ) -> None:
        """`buckets`: ascending row counts, as `batch_buckets` gives them. `plan`: the host's part of a step,
        called with the rows' lengths, padding included; without one it does nothing. `overlapping`: the step
        whose kernels overlap; None where the card has no such launches."""
        self._step = step
        self._overlapping = overlapping
        self._plan = plan
        self._padding_slot = padding_slot
        self.buckets: Final = tuple(buckets)
        size, pinned = input_len(buckets[-1]), device.type == "cuda"
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(STAGES)]
        self._stage = 0
        self._graphs: dict[int, Captured[Output]] = {}
        self.overlaps: dict[int, Overlap] = {}
        """The result of each comparison, by bucket."""

    def capture(self, device: GraphDevice, progress: Callable[[int, int], None]) -> None:
        """Capture all buckets, the largest first. `progress` is called with the numbers of graphs done and of
        all."""
        assert not self._graphs, "captured twice"
        step = self._step
        for done, rows in enumerate(reversed(self.buckets)):
            progress(done, len(self.buckets))
            self._fill([], [], rows)
            if rows in self.timed_buckets and device.timer is not None and self._overlapping is not None:
                found = self._compared(device, rows, self._overlapping, device.timer)
                self.overlaps[rows], self._graphs[rows] = found
                step = self._overlapping if found[0] is Overlap.FASTER else self._step
            else:
                self._graphs[rows] = self._captured(device, rows, step)
        progress(len(self.buckets), len(self.buckets))

    @property
    def timed_buckets(self) -> tuple[int, ...]:
        """The buckets for which both forms of a step are timed."""
        *smaller, largest = self.buckets
        return (*(rows for rows in smaller if rows & (rows - 1) == 0), largest)

    def _captured(self, device: GraphDevice, rows: int, step: LaunchStep[Output]) -> Captured[Output]:
        run = partial(step, DecodeInputs.within(self._inputs, rows))
        device.warm_up(run)
        return device.capture(run)

    def _compared(
        self, device: GraphDevice, rows: int, overlapping: LaunchStep[Output], timer: Timer
    ) -> tuple[Overlap, Captured[Output]]:
        """The better of both forms. The other's graph is dropped before the next is captured."""
        plain = self._captured(device, rows, self._step)
        run = partial(overlapping, DecodeInputs.within(self._inputs, rows))
        try:
            device.warm_up(run)
        except RuntimeError as error:
            if out_of_memory(error) is not None:
                raise
            return Overlap.REFUSED, plain
        other = device.capture(run)
        if not all(map(torch.equal, _results(plain), _results(other))):
            return Overlap.DIFFERS, plain
        if timer(other.replay) * OVERLAP_MARGIN < timer(plain.replay):
            return Overlap.FASTER, other
        return Overlap.SLOWER, plain

    def bucket(self, rows: int) -> int:
        """The padded size of a batch of so many rows."""
        assert 1 <= rows <= self.buckets[-1]
        return self.buckets[bisect_left(self.buckets, rows)]

    def replay(self, slots: Sequence[int], lengths: Sequence[int]) -> Output:
        """Run a step by its graph. The output has a row for each slot, then padding; valid until the next
        replay."""
        bucket = self.bucket(len(slots))
        self._fill(slots, lengths, bucket)
        graph = self._graphs[bucket]
        graph.replay()
        return graph.output

    def eager(self, slots: Sequence[int], lengths: Sequence[int]) -> Output:
        """Run the same step kernel by kernel."""
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


def _results(graph: Captured[object]) -> list[Tensor]:
    """A copy of what a replay leaves: the next replay of any graph overwrites it."""
    graph.replay()
    output = graph.output
    return [part.clone() for part in (output if isinstance(output, tuple) else (output,))]


@dataclass(frozen=True, slots=True)
class CudaCaptured(Generic[Output]):
    graph: torch.cuda.CUDAGraph
    output: Output

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphDevice:
    """Captures on the current device, with one memory pool for all graphs."""

    def __init__(self, stream: torch.cuda.Stream | None = None, timer: Timer | None = None) -> None:
        """`stream`: the stream that graphs are captured on. None: a new one."""
        self.timer: Final = timer
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
