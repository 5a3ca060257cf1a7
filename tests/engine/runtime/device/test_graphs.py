"""Graph logic on a device that captures by remembering what was launched, and on which memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runtime.device.graphs import DecodeGraphs, DecodeInputs, Overlap, batch_buckets
from engine.runtime.kernels.autotune import Timer

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
    timer: Timer | None = None

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


class TwoForms(Model):
    """The overlapping form computes the same, but where it is told not to."""

    def __init__(self, faster: Sequence[int] = (), wrong: Sequence[int] = ()) -> None:
        super().__init__()
        self.faster, self.wrong = faster, wrong
        self.ran = ""

    def step(self, inputs: DecodeInputs) -> Tensor:
        self.ran = "plain"
        return super().step(inputs)

    def overlapping(self, inputs: DecodeInputs) -> Tensor:
        found = super().step(inputs)
        self.ran = "overlapping"
        return found + (len(found) in self.wrong)

    def replay_us(self, replay: Callable[[], object]) -> float:
        replay()
        is_faster = self.ran == "overlapping" and len(self.seen[-1]) in self.faster
        return 9.0 if is_faster else 10.0 if self.ran == "plain" else 9.95

    def captured(self, rows_max: int, *, can_time: bool = True) -> DecodeGraphs[Tensor]:
        own = DecodeGraphs(self.step, batch_buckets(rows_max), PADDING, CPU, overlapping=self.overlapping)
        own.capture(FakeDevice(timer=self.replay_us if can_time else None), lambda done, of: None)
        return own

    def forms(self, graphs: DecodeGraphs[Tensor]) -> dict[int, str]:
        """Which form each bucket replays."""
        found = {}
        for rows in graphs.buckets:
            graphs.replay(list(range(9))[:rows] + [0] * (rows - 9), [1] * rows)
            found[rows] = self.ran
        return found


def test_the_faster_form_of_a_step_is_kept_bucket_by_bucket() -> None:
    """Buckets between those that are timed follow the next larger; a hundredth is noise."""
    model = TwoForms(faster=[1, 4, 32, 40])
    own = model.captured(40)
    assert own.timed_buckets == (1, 2, 4, 8, 16, 32, 40)
    assert {rows for rows, found in own.overlaps.items() if found is Overlap.FASTER} == {1, 4, 32, 40}
    assert {rows for rows, found in own.overlaps.items() if found is Overlap.SLOWER} == {2, 8, 16}
    overlapping = {1, 4, 24, 32, 40}
    assert model.forms(own) == {
        rows: "overlapping" if rows in overlapping else "plain" for rows in (1, 2, 4, 8, 16, 24, 32, 40)
    }


def test_a_form_with_other_results_is_not_taken() -> None:
    model = TwoForms(faster=[1, 2, 4], wrong=[2])
    own = model.captured(4)
    assert own.overlaps == {4: Overlap.FASTER, 2: Overlap.DIFFERS, 1: Overlap.FASTER}
    assert model.forms(own) == {1: "overlapping", 2: "plain", 4: "overlapping"}


def test_where_nothing_can_be_timed_steps_are_plain() -> None:
    model = TwoForms(faster=[1, 2, 4])
    own = model.captured(4, can_time=False)
    assert set(model.forms(own).values()) == {"plain"}
    assert not own.overlaps


def test_a_form_that_cannot_be_launched_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ends is told instead."""
    model = TwoForms(faster=[1, 2, 4])
    said = "Triton Error [CUDA]: invalid argument"

    def refused(inputs: DecodeInputs) -> Tensor:
        raise RuntimeError(said)

    monkeypatch.setattr(model, "overlapping", refused)
    own = model.captured(4)
    assert set(own.overlaps.values()) == {Overlap.REFUSED}
    assert set(model.forms(own).values()) == {"plain"}
    said = "Triton Error [CUDA]: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        model.captured(4)


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
