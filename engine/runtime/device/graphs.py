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

**Drafts.** A step in which rows verify drafts has a row of the inputs for each of its tokens, so that its
graphs are by numbers of tokens: whichever rows they belong to, the device is told in `Drafted`. Attention
alone has a constant that depends on them, the most tokens of a row for which its tiles have room, and two
values of it at most (`decode_attention.query_counts`): for each there is a graph per number of tokens in
`verify_buckets`, where a row of that many fits in. A step that no graph is for goes kernel by kernel.

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
from itertools import accumulate
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from engine.runtime.device.memory import out_of_memory
from engine.runtime.kernels.autotune import Timer
from engine.runtime.reference.delta_net import StepStates
from engine.runtime.step.protocols import Ahead
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

DRAFTED_PADDING: Final = (0, 0, -1, 0)
"""The values of `Drafted.columns` for padding: each token is a row, without a mask."""

Output = TypeVar("Output", covariant=True)


def batch_buckets(rows_max: int) -> tuple[int, ...]:
    """The padded batch sizes, ascending; the last is `rows_max` itself."""
    assert rows_max >= 1
    fine = range(BUCKET_STEP, FINE_ROWS_MAX + 1, BUCKET_STEP)
    coarse = range(FINE_ROWS_MAX + 2 * BUCKET_STEP, rows_max, 2 * BUCKET_STEP)
    sizes = (*SMALL_BUCKETS, *fine, *coarse)
    return (*(size for size in sizes if size < rows_max), rows_max)


def verify_buckets(tokens_max: int) -> tuple[int, ...]:
    """The padded numbers of tokens of steps in which rows verify drafts, ascending; the last is `tokens_max`
    itself. Each is one and a half times the one before at most: fewer than for plain steps, as each takes a
    graph for every constant of attention, and drafts fill what would be padding
    (`engine.core.drafts.price`)."""
    sizes = sorted({size for power in range(1, 16) for size in (2 << power - 1, 3 << power - 1)})
    return (*(size for size in sizes if size < tokens_max), tokens_max)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a decode step, at fixed addresses on the device: [rows] int32 each.

    All lie in one piece of memory, the lengths behind the slots, and are sent in one copy. Each batch size
    has addresses of its own in memory that all sizes share.
    """

    slots: Tensor
    lengths: Tensor
    """The number of tokens whose keys a row sees, its own included: the position of the new token."""

    ahead: Ahead | None = None
    """None: no row verifies drafts."""

    @staticmethod
    def within(memory: Tensor, shape: StepShape) -> DecodeInputs:
        """The inputs of a step within `memory`, [at least input_len(shape)] int32 on the device or the
        host."""
        each = _aligned(shape.rows)
        slots, lengths, *drafted = (memory[at : at + shape.rows] for at in range(0, input_len(shape), each))
        if not drafted:
            return DecodeInputs(slots, lengths)
        before, behind, masked_by, windows = drafted
        return DecodeInputs(slots, lengths, Ahead(before, behind, masked_by, shape.together, windows))

    def bound(self, states: States | None) -> StepStates | None:
        """A model's states, bound to these rows; None where it has none."""
        if states is None:
            return None
        return StepStates(states, (), len(self.slots), self.slots, self.lengths, ahead=self.ahead)

    @staticmethod
    def empty(rows: int, device: torch.device, together: int = 1) -> DecodeInputs:
        shape = StepShape(rows, together)
        return DecodeInputs.within(torch.zeros(input_len(shape), dtype=torch.int32, device=device), shape)


def verify_shapes(buckets: Sequence[int], together: Sequence[int]) -> list[StepShape]:
    """The shapes of steps in which rows verify drafts, of these numbers of tokens (`verify_buckets`).
    `together`: the constants of attention, ascending; a row that needs the next has more tokens than the one
    before has room for."""
    least = [2, *(count + 1 for count in together)]
    return [
        StepShape(tokens, count)
        for tokens in buckets
        for count, lowest in zip(together, least, strict=False)
        if tokens >= lowest
    ]


def input_len(shape: StepShape) -> int:
    """The number of elements that `DecodeInputs` of a step take."""
    return (2 if shape.together == 1 else 6) * _aligned(shape.rows)


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS


class Drafted(NamedTuple):
    """The tokens of a step in which rows verify drafts, on the host: as `Ahead` has them."""

    before: Sequence[int]
    behind: Sequence[int]
    masked_by: Sequence[int]

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        """A number of each for each token, in the order in which `Ahead` has them on the device; the windows
        last."""
        windows = accumulate((before > 0 for before in self.before[:-1]), initial=0)
        return self.before, self.behind, self.masked_by, list(windows)[: len(self.before)]

    @property
    def counts(self) -> list[int]:
        """The tokens of each row."""
        return [own + 1 for own, before in zip(self.behind, self.before, strict=True) if not before]

    @property
    def most(self) -> int:
        """The most tokens of a row."""
        return max(self.before) + 1


class StepShape(NamedTuple):
    """The numbers of rows and tokens that a step is captured for."""

    rows: int
    """Rows, or tokens where rows verify drafts."""
    together: int = 1
    """Tokens of a row at most; 1: no row verifies."""


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
        verified: Sequence[StepShape] = (),
    ) -> None:
        """`buckets`: ascending row counts, as `batch_buckets` gives them. `plan`: the host's part of a step,
        called with the rows' lengths, padding included; without one it does nothing. `overlapping`: the step
        whose kernels overlap; None where the card has no such launches. `verified`: the shapes of steps in
        which rows verify drafts (`verify_shapes`), which are not overlapped."""
        self._step = step
        self._overlapping = overlapping
        self._plan = plan
        self._padding_slot = padding_slot
        self.buckets: Final = tuple(buckets)
        self.verified: Final = sorted(verified)
        shapes = [*map(StepShape, self.buckets), *self.verified]
        self._shapes: Final = sorted(shapes, reverse=True)
        size, pinned = max(map(input_len, shapes)), device.type == "cuda"
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(STAGES)]
        self._stage = 0
        self._graphs: dict[StepShape, Captured[Output]] = {}
        self.overlaps: dict[int, Overlap] = {}
        """The result of each comparison, by bucket."""

    def capture(self, device: GraphDevice, progress: Callable[[int, int], None]) -> None:
        """Capture all shapes, the largest first. `progress` is called with the numbers of graphs done and of
        all."""
        assert not self._graphs, "captured twice"
        step = self._step
        for done, shape in enumerate(self._shapes):
            progress(done, len(self._shapes))
            self._fill([], [], shape)
            if shape.together > 1:
                self._graphs[shape] = self._captured(device, shape, self._step)
            elif self._is_timed(shape) and device.timer is not None and self._overlapping is not None:
                found = self._compared(device, shape, self._overlapping, device.timer)
                self.overlaps[shape.rows], self._graphs[shape] = found
                step = self._overlapping if found[0] is Overlap.FASTER else self._step
            else:
                self._graphs[shape] = self._captured(device, shape, step)
        progress(len(self._shapes), len(self._shapes))

    def _is_timed(self, shape: StepShape) -> bool:
        return shape.rows in self.timed_buckets

    @property
    def timed_buckets(self) -> tuple[int, ...]:
        """The buckets for which both forms of a step are timed."""
        *smaller, largest = self.buckets
        return (*(rows for rows in smaller if rows & (rows - 1) == 0), largest)

    def _captured(self, device: GraphDevice, shape: StepShape, step: LaunchStep[Output]) -> Captured[Output]:
        run = partial(step, DecodeInputs.within(self._inputs, shape))
        device.warm_up(run)
        return device.capture(run)

    def _compared(
        self, device: GraphDevice, shape: StepShape, overlapping: LaunchStep[Output], timer: Timer
    ) -> tuple[Overlap, Captured[Output]]:
        """The better of both forms. The other's graph is dropped before the next is captured."""
        plain = self._captured(device, shape, self._step)
        run = partial(overlapping, DecodeInputs.within(self._inputs, shape))
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

    def takes(self, rows: int, drafted: Drafted | None = None) -> bool:
        """True if some shape is for a step of so many rows, or tokens."""
        return rows <= self.buckets[-1] if drafted is None else self._verifying(rows, drafted) is not None

    def _shape(self, rows: int, drafted: Drafted | None) -> StepShape:
        shape = StepShape(self.bucket(rows)) if drafted is None else self._verifying(rows, drafted)
        assert shape is not None, f"{rows} tokens"
        return shape

    def _verifying(self, tokens: int, drafted: Drafted) -> StepShape | None:
        """The shape of a step in which rows verify drafts: the smallest, and of these the one whose kernels
        have the least room."""
        at = bisect_left(self.verified, StepShape(tokens, drafted.most))
        return next((shape for shape in self.verified[at:] if shape.together >= drafted.most), None)

    def run(self, slots: Sequence[int], lengths: Sequence[int], drafted: Drafted | None = None) -> Output:
        """Run a step by its graph, or kernel by kernel where none was captured. The output has a row for each
        slot, then padding; valid until the next replay. `drafted`: of a step in which rows verify drafts,
        which has a slot and a length for each of their tokens."""
        shape = self._shape(len(slots), drafted)
        self._fill(slots, lengths, shape, drafted)
        if not self._graphs:
            return self._step(DecodeInputs.within(self._inputs, shape))
        graph = self._graphs[shape]
        graph.replay()
        return graph.output

    def _fill(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        shape: StepShape,
        drafted: Drafted | None = None,
    ) -> None:
        assert self._padding_slot not in slots
        padding = shape.rows - len(slots)
        columns = [[*slots, *[self._padding_slot] * padding], [*lengths, *[1] * padding]]
        self._plan(columns[1])
        if shape.together > 1:
            none = Drafted([], [], []) if drafted is None else drafted
            columns += [
                [*own, *[filler] * padding] for own, filler in zip(none.columns, DRAFTED_PADDING, strict=True)
            ]
        each, length = _aligned(shape.rows), input_len(shape)
        staged = self._staged[self._stage][:length]
        self._stage = (self._stage + 1) % STAGES
        there = staged.view(-1, each)[:, : shape.rows]
        there.copy_(torch.tensor(columns, dtype=torch.int32))
        self._inputs[:length].copy_(staged, non_blocking=True)


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
