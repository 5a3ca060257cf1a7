"""Kernels compiled while weights are being read.

A start launches fifty kernels and more that Triton's cache may not hold yet, and each would be compiled at
its first launch, one after another. Compiling needs the shapes of weights, not their values. So a start is
walked through once before, on torch's `meta` device, whose tensors have shapes and no memory; the kernels
that the walk launches are compiled in threads instead, while the disk is busy.

A rehearsal cannot make a start wrong: a kernel that it misses is compiled at its first launch, and so are all
kernels if the rehearsal ends in an error. Tests hold the number of missed kernels close to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Event
from time import monotonic
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from engine.runtime.device.card import Card, Compiler, MemoryReading
from engine.runtime.device.graphs import GraphDevice
from engine.runtime.kernels.autotune import Timer, once
from engine.runtime.models.quantization import Fp8Scheme
from engine.runtime.weights.checkpoint import ALL, TensorPart
from engine.runtime.weights.fp8 import Fp8Weight

T = TypeVar("T")
META: Final = torch.device("meta")
THREADS_MAX: Final = 32
"""The most threads that compile, on any number of cores: each compiler takes memory while it works."""


@contextmanager
def rehearsed(compiler: Compiler, walk: Callable[[], None], threads: int) -> Iterator[Callable[[], str]]:
    """Run `walk` beside the body, with its kernels compiled in threads.

    Yields a function that waits for the end and returns the outcome, for the log. A body that ends without
    calling it waits for the kernels that are being compiled, and calls off the rest.
    """
    with (
        ThreadPoolExecutor(1, "rehearse") as conductor,
        Workers(min(threads, THREADS_MAX)) as workers,
    ):
        try:
            yield conductor.submit(_rehearse, compiler, walk, workers).result
        finally:
            workers.called_off.set()
            conductor.shutdown()


class Workers(ThreadPoolExecutor):
    """Threads whose work can be called off."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, "compile")
        self.called_off: Final = Event()
        """Set: calls that have not begun end in `CancelledError`. (A future's own `cancel` does not wake a
        thread that waits for several futures.)"""

    def submit(self, fn: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        return super().submit(self._run, fn, *args, **named)

    def _run(self, fn: Callable[..., T], /, *args: Any, **named: Any) -> T:
        if self.called_off.is_set():
            raise CancelledError
        return fn(*args, **named)


def _rehearse(compiler: Compiler, walk: Callable[[], None], workers: Executor) -> str:
    began_s = monotonic()
    try:
        with torch.inference_mode(), compiler.compiling(workers):
            walk()
    except Exception as error:
        return f"kernels are compiled when they are first needed ({type(error).__name__}: {error})"
    return f"kernels compiled meanwhile, in {monotonic() - began_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A card of the same make without memory, which runs nothing."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    device: torch.device = META

    @staticmethod
    def of(card: Card) -> Blueprint:
        return Blueprint(card.name, card.capability, card.multiprocessors)

    def memory(self) -> MemoryReading:
        return MemoryReading(0, 0, 0, 0)

    def start_peak(self) -> None:
        pass

    def timer(self) -> Timer:
        return once

    def graphs(self) -> GraphDevice:
        raise AssertionError("steps are rehearsed kernel by kernel")

    def compiling(self, workers: Executor) -> AbstractContextManager[None]:
        raise AssertionError("a rehearsal is compiled as a whole")


@dataclass(frozen=True, slots=True)
class Shapes:
    """A WeightSource and Fp8Source of tensors without memory. All matrices are in fp8, or none is."""

    dtype: torch.dtype
    fp8: Fp8Scheme | None

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        return torch.empty(part.shape(rows, columns), dtype=self.dtype, device=META)

    def stack_fp8(
        self, names: Sequence[str], rows: Sequence[int], columns: int, part: TensorPart = ALL
    ) -> Fp8Weight | None:
        if self.fp8 is None:
            return None
        height, width = part.shape(rows, [columns])
        group = self.fp8.group(0 if part.columns is None else part.columns[0])
        scales = torch.empty((-(-width // group), height) if group else height, device=META)
        return Fp8Weight(torch.empty(height, width, dtype=torch.float8_e4m3fn, device=META), scales, group)

    def kv_scales(self, layers: Sequence[int]) -> None:
        return None
