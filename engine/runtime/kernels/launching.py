"""Launches kernels, or compiles them ahead by the same call and so with the same arguments.

A kernel is compiled for the types of its arguments and for their constants, not for their values: tensors
without memory are enough. A function's kernels are compiled by calling it within `compiling`. That setting
belongs to the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from triton import OutOfResources

Compile = Callable[[Any, Sequence[int], Sequence[Any], Mapping[str, Any]], object]
"""Takes a launch's kernel, grid, arguments and named arguments, in place of launching."""

_COMPILE: ContextVar[Compile | None] = ContextVar("compile", default=None)
VERSION: Final[str] = triton.__version__
FUSED_ARITHMETIC: Final = {"enable_fp_fusion": True}
"""An option of every launch: a * b + c is rounded once. Triton's default changes with 3.10."""


@contextmanager
def compiling(compile_: Compile) -> Iterator[None]:
    """Have `compile_` take the launches within. The tensors that these would have filled stay undefined."""
    token = _COMPILE.set(compile_)
    try:
        yield
    finally:
        _COMPILE.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Launch `kernel[grid](*args, **named)` with the options that every kernel here is compiled with."""
    compile_ = _COMPILE.get()
    if compile_ is None:
        kernel[grid](*args, **named, **FUSED_ARITHMETIC)
    else:
        compile_(kernel, grid, args, named | FUSED_ARITHMETIC)


def compile_ahead(kernel: Any, grid: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """A `Compile` for the current device. Within Triton's `AsyncCompileMode` its threads compile."""
    kernel.warmup(*args, grid=grid, **named)


@contextmanager
def compiling_in(workers: Executor, device: torch.device) -> Iterator[None]:
    """Have `workers` compile and load the kernels that this thread launches within, instead of running them.

    Ends when all are compiled. A kernel that cannot be compiled raises its error when it is launched.
    """
    _choose(device)
    with triton.AsyncCompileMode(_Loading(workers, device), ignore_errors=True), compiling(compile_ahead):
        yield


@dataclass(frozen=True, slots=True)
class _Loading(Executor):
    """Loads each kernel in the thread that compiled it: Triton compiles its launcher, which is C, on
    loading."""

    workers: Executor
    device: torch.device

    def submit(self, compile_: Callable[[], Any], /, *args: Any, **named: Any) -> Future[Any]:
        return self.workers.submit(_loaded, self.device, compile_)


def _loaded(device: torch.device, compile_: Callable[[], Any]) -> Any:
    kernel = compile_()
    _choose(device)
    with suppress(OutOfResources):  # the kernel raises it again when it is launched
        _ = kernel.run
    return kernel


def _choose(device: torch.device) -> None:
    """Make `device` current in this thread."""
    if device.index is not None:
        torch.cuda.set_device(device)
