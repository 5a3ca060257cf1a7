"""A CPU in a GPU's place: kernels in Triton's interpreter, graphs that run again, memory as it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
from torch import Tensor

from engine.runtime.device.card import MemoryReading
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.device.device_shard import load_shard
from engine.runtime.device.graphs import GraphDevice
from engine.runtime.kernels.autotune import Timer
from engine.runtime.kernels.launching import compiling
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start import starting
from engine.runtime.start.starting import start_alone
from tests.engine.runtime.kernels.interpreter import prepare_interpreter

prepare_interpreter()

Output = TypeVar("Output")
GONE = -7


@dataclass
class RunAgain(Generic[Output]):
    """A graph: its results lie where they did when it was captured, and what any other left is gone."""

    device: FakeGraphs
    run: Callable[[], Output]
    output: Output

    def replay(self) -> None:
        self.device.replays += 1
        for outputs in self.device.outputs:
            for tensor in outputs:
                tensor.fill_(GONE)
        for kept, found in zip(_tensors(self.output), _tensors(self.run()), strict=True):
            kept.copy_(found)


@dataclass
class FakeGraphs:
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    replays: int = 0
    timer: Timer | None = None

    def warm_up(self, run: Callable[[], object]) -> None:
        """Nothing: what is captured runs as well, and the interpreter has nothing to load."""

    def capture(self, run: Callable[[], Output]) -> RunAgain[Output]:
        output = run()
        self.outputs.append(_tensors(output))
        return RunAgain(self, run, output)


def _tensors(output: object) -> tuple[Tensor, ...]:
    assert isinstance(output, tuple)
    return output


Specialized = tuple[str, tuple[tuple[str, object], ...]]
"""A kernel's name, and what there is one compiled for: types, constants, pointers that are aligned, integers
that are 1 or divisible by 16."""


def specialized(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Specialized:
    """`kernel`: as the interpreter has it."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | dict(named)
    fixed = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    fixed |= given.keys() - set(kernel.arg_names)
    loose = kernel.kwargs.get("do_not_specialize") or ()
    kinds = {
        name: value if name in fixed else "any" if name in loose else _kind(value)
        for name, value in given.items()
    }
    return kernel.fn.__name__, tuple(sorted(kinds.items()))


def _kind(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{value.dtype}, aligned" if value.data_ptr() % 16 == 0 else f"{value.dtype}"
    if isinstance(value, float):
        return "float"
    if isinstance(value, int):
        return 1 if value == 1 else "by 16" if value % 16 == 0 else "any"
    assert value is None
    return None


@dataclass
class FakeCard:
    """`readings` are what `memory` answers, one after another, and then the last of them for ever."""

    readings: list[MemoryReading] = field(default_factory=lambda: [MemoryReading(1 << 30, 1 << 30, 0, 0)])
    captured: FakeGraphs = field(default_factory=FakeGraphs)
    """Of the latest capture."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    name: str = "a CPU in a GPU's place"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 1
    compiled: set[Specialized] = field(default_factory=set)
    replay_us: Timer | None = None
    """Measures a graph's replay."""

    def memory(self) -> MemoryReading:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def start_peak(self) -> None:
        pass

    def timer(self) -> Callable[[Callable[[], object]], float]:
        return lambda run: 1.0

    @contextmanager
    def compiling(self, workers: Executor) -> Iterator[None]:
        """As if it compiled: what a launch would be compiled by is kept in `compiled`."""
        with compiling(lambda kernel, grid, args, named: self.compiled.add(specialized(kernel, args, named))):
            yield

    def graphs(self) -> GraphDevice:
        self.captured = FakeGraphs(timer=self.replay_us)
        return self.captured


def fake_config(path: Path, **overrides: Any) -> RunnerConfig:
    """A small one, in fp32. Without drafts, whose graphs the interpreter takes its time for."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "page_size": 16,
        "max_num_seqs": 4,
        "max_model_len": 128,
        "max_step_tokens": 32,
        "swap_memory": 1 << 20,
        "threads": 1,
        "attention_backend": "triton",
        "max_drafts": 0,
    } | overrides
    return RunnerConfig(str(path), **settings)


def load_fake(
    path: Path,
    card: FakeCard | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    *,
    timed: bool = False,
    **overrides: Any,
) -> DeviceRunner:
    """By `fake_config`, profile run and capture included unless `kv_cache_memory` is told. Steps are run to
    warm up and timed only where `timed` says so."""
    with nullcontext() if timed else cold():
        return load_on_card(fake_config(path, **overrides), card or FakeCard(), progress)


def load_on_card(config: RunnerConfig, card: FakeCard, progress: Callable[[str], None]) -> DeviceRunner:
    """A warm runner on one card."""
    return start_alone(config, lambda: load_shard(config, card, progress), progress)


@contextmanager
def cold() -> Iterator[None]:
    """No steps are run to warm up, nor timed: they say nothing of the interpreter, and take it most of a
    load."""
    untimed = mock.patch.multiple(starting, time_steps=lambda *_: (), time_guesses=lambda _: 0.01)
    with untimed, mock.patch.object(starting, "warm_up"):
        yield
