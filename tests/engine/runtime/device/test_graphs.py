"""Graph logic on a device that captures by remembering what was launched, and on which memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runtime.device.graphs import DecodeGraphs, DecodeInputs, batch_buckets

CPU = torch.device("cpu")
PADDING = 9

Output = TypeVar("Output")


@dataclass
class FakeCaptured(Generic[Output]):
    """Replays into the memory that it was captured with."""

    run: Callable[[], Output]
    output: Output

    def replay(self) -> None:
        _tensor(self.output).copy_(_tensor(self.run()))


@dataclass
class FakeDevice:
    log: list[str] = field(default_factory=list)

    def warm_up(self, run: Callable[[], object]) -> None:
        self.log.append("warm")
        run()

    def capture(self, run: Callable[[], Output]) -> FakeCaptured[Output]:
        output = run()
        self.log.append(f"capture {len(_tensor(output))}")
        return FakeCaptured(run, output)


def _tensor(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return output


class Model:
    """A step whose answer says which row it came from, and that counts the padding it saw."""

    def __init__(self) -> None:
        self.state = torch.arange(10, 20)
        self.seen: list[list[int]] = []

    def step(self, inputs: DecodeInputs) -> Tensor:
        self.seen.append(inputs.slots.tolist())
        return self.state[inputs.slots] * 100 + inputs.lengths


def graphs(model: Model, rows_max: int = 12) -> DecodeGraphs[Tensor]:
    return DecodeGraphs(model.step, batch_buckets(rows_max), PADDING, CPU)


@given(st.integers(1, 600))
def test_buckets_ascend_to_the_largest_batch_and_waste_little(rows_max: int) -> None:
    buckets = batch_buckets(rows_max)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == rows_max
    for rows in range(1, rows_max + 1):
        bucket = min(size for size in buckets if size >= rows)
        assert bucket < 2 * rows
        assert bucket - rows < 16


def test_the_largest_is_captured_first_and_each_is_warm_before() -> None:
    device = FakeDevice()
    heard: list[tuple[int, int]] = []
    graphs(Model()).capture(device, lambda done, of: heard.append((done, of)))
    sizes = [12, 8, 4, 2, 1]
    assert device.log == [line for size in sizes for line in ("warm", f"capture {size}")]
    assert heard == [(done, 5) for done in range(6)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 12])
def test_a_replay_is_the_eager_step(rows: int) -> None:
    model = Model()
    own = graphs(model)
    own.capture(FakeDevice(), lambda done, of: None)
    slots, lengths = [i % 9 for i in range(rows)], list(range(3, 3 + rows))
    replayed = own.replay(slots, lengths).clone()
    assert torch.equal(replayed, own.eager(slots, lengths))
    assert replayed[:rows].tolist() == [(10 + s) * 100 + n for s, n in zip(slots, lengths, strict=True)]
    padding = own.bucket(rows) - rows
    assert replayed[rows:].tolist() == [1901] * padding
    assert model.seen[-1] == slots + [PADDING] * padding


def test_a_replay_reads_what_is_on_the_device_then() -> None:
    """State that changes between replays is read anew, and a bucket keeps its place for results."""
    model = Model()
    own = graphs(model)
    own.capture(FakeDevice(), lambda done, of: None)
    first = own.replay([3], [1])
    assert first.tolist() == [1301]
    model.state[3] = 50
    assert own.replay([3], [1]) is first
    assert first.tolist() == [5001]


def test_inputs_lie_where_a_step_without_a_graph_has_them() -> None:
    """Kernels are compiled for pointers to 16 bytes, and for others apart."""
    inputs = DecodeInputs.empty(6, CPU)
    assert (inputs.lengths.data_ptr() - inputs.slots.data_ptr()) % 16 == 0
    assert inputs.slots.shape == inputs.lengths.shape == (6,)


def test_inputs_are_one_copy() -> None:
    """Of as many numbers as the bucket has, whatever the largest is."""
    copied: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].data_ptr() == own._inputs.data_ptr():
                copied.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    own = graphs(Model())
    with Copies():  # type: ignore[no-untyped-call]  # torch has no type for it
        own.eager([1, 2, 3], [7, 8, 9])
    assert copied == [2 * 4]


def test_consecutive_steps_are_staged_apart() -> None:
    """Until two further steps were filled, a step's host copy is left alone."""
    own = graphs(Model())
    own.eager([1, 2], [7, 8])
    staged = own._staged[0].clone()
    own.eager([3, 4], [1, 1])
    own.eager([5, 6], [1, 1])
    assert torch.equal(own._staged[0], staged)


def test_too_many_rows_and_a_taken_padding_slot_are_the_callers_mistake() -> None:
    own = graphs(Model())
    for slots in ([], list(range(8)) * 2, [PADDING]):
        with pytest.raises(AssertionError):
            own.eager(slots, [1] * len(slots))
