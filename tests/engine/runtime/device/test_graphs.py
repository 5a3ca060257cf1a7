"""Graph logic on a device that captures by remembering what was launched, and on which memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runtime.device.graphs import (
    DecodeGraphs,
    DecodeInputs,
    Drafted,
    Overlap,
    StepShape,
    batch_buckets,
    verify_buckets,
    verify_shapes,
)
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
    slots, lengths = [i % 9 for i in range(rows)], list(range(3, 3 + rows))
    launched = own.run(slots, lengths).clone()
    own.capture(FakeDevice(), lambda done, of: None)
    replayed = own.run(slots, lengths).clone()
    assert torch.equal(replayed, launched)
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
            graphs.run(list(range(9))[:rows] + [0] * (rows - 9), [1] * rows)
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
    first = own.run([3], [1])
    assert first.tolist() == [1301]
    model.state[3] = 50
    assert own.run([3], [1]) is first
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
        own.run([1, 2, 3], [7, 8, 9])
    assert copied == [2 * 4]


def test_consecutive_steps_are_staged_apart() -> None:
    """Until two further steps were filled, a step's host copy is left alone."""
    own = graphs(Model())
    own.run([1, 2], [7, 8])
    staged = own._staged[0].clone()
    own.run([3, 4], [1, 1])
    own.run([5, 6], [1, 1])
    assert torch.equal(own._staged[0], staged)


def test_too_many_rows_and_a_taken_padding_slot_are_the_callers_mistake() -> None:
    own = graphs(Model())
    for slots in ([], list(range(8)) * 2, [PADDING]):
        with pytest.raises(AssertionError):
            own.run(slots, [1] * len(slots))


# -- drafts ---------------------------------------------------------------------------------------


@given(st.integers(2, 600))
def test_buckets_of_steps_with_drafts_are_few_and_waste_a_third_at_most(tokens_max: int) -> None:
    buckets = verify_buckets(tokens_max)
    assert list(buckets) == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (2, tokens_max)
    assert all(2 * later <= 3 * earlier + 1 for earlier, later in pairwise(buckets))
    assert len(buckets) <= 18


def test_shapes_are_those_that_a_row_fits_into() -> None:
    """A row that needs the wider kernel has more tokens than the narrow one has room for."""
    shapes = verify_shapes(verify_buckets(12), (4, 16))
    assert shapes == [(2, 4), (3, 4), (4, 4), (6, 4), (6, 16), (8, 4), (8, 16), (12, 4), (12, 16)]
    assert len(verify_shapes(verify_buckets(512), (4, 16))) == 31


class Verifying(Model):
    """A step whose answer says of each token how many drafts are before it, and whether it has a mask."""

    def step(self, inputs: DecodeInputs) -> Tensor:
        found = super().step(inputs)
        if inputs.ahead is None:
            return found
        assert inputs.ahead.most > int(inputs.ahead.behind.max())
        return found * 100 + inputs.ahead.before * 10 + inputs.ahead.masked_by


@pytest.mark.parametrize(("drafts", "shape"), [([2, 0], (4, 4)), ([3, 3, 0, 1], (12, 4)), ([6], (8, 16))])
def test_a_step_with_drafts_is_replayed_by_its_tokens(drafts: list[int], shape: tuple[int, int]) -> None:
    """Padded with rows of one token, without a mask; beside plain steps, which are captured as before."""

    def made() -> DecodeGraphs[Tensor]:
        shapes = verify_shapes(verify_buckets(12), (4, 16))
        return DecodeGraphs(Verifying().step, batch_buckets(4), PADDING, CPU, verified=shapes)

    own, device = made(), FakeDevice()
    own.capture(device, lambda done, of: None)
    assert len(device.log) == 2 * (len(own.buckets) + len(own.verified))
    before = [at for own_drafts in drafts for at in range(own_drafts + 1)]
    behind = [own_drafts - at for own_drafts in drafts for at in range(own_drafts + 1)]
    drafted = Drafted(before, behind, [at % 3 for at in range(len(before))])
    assert drafted.counts == [own_drafts + 1 for own_drafts in drafts]
    slots, lengths = [at % 9 for at in range(len(before))], list(range(7, 7 + len(before)))
    assert own.takes(len(slots), drafted)
    found = own.run(slots, lengths, drafted)
    assert len(found) == shape[0]
    columns = zip(slots, lengths, before, drafted.masked_by, strict=True)
    assert found[: len(slots)].tolist() == [
        ((10 + slot) * 100 + length) * 100 + at * 10 + mask for slot, length, at, mask in columns
    ]
    assert found[len(slots) :].tolist() == [190099] * (shape[0] - len(slots))
    assert torch.equal(made().run(slots, lengths, drafted), found)
    assert own.run([1, 2], [5, 6]).tolist() == [1105, 1206]


def test_what_no_graph_is_for_is_said() -> None:
    own = DecodeGraphs(Model().step, [4], PADDING, CPU, verified=[StepShape(6, 4)])
    assert own.takes(4)
    assert not own.takes(5)
    assert own.takes(6, Drafted([0, 1, 2, 0, 1, 0], [2, 1, 0, 1, 0, 0], [-1] * 6))
    assert not own.takes(5, Drafted([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [-1] * 5)), "a tile has room for 4"
    assert not own.takes(8, Drafted([0, 1] * 4, [1, 0] * 4, [-1] * 8))


def test_inputs_with_drafts_lie_where_a_step_without_a_graph_has_them() -> None:
    inputs = DecodeInputs.empty(6, CPU, 4)
    assert inputs.ahead is not None
    columns = [inputs.slots, inputs.lengths, inputs.ahead.before, inputs.ahead.behind, inputs.ahead.masked_by]
    assert {(column.data_ptr() - inputs.slots.data_ptr()) % 16 for column in columns} == {0}
    assert {len(column) for column in columns} == {6}
