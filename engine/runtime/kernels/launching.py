"""Launches kernels, or compiles them ahead: one call either way, so that both go by the same arguments.

A kernel is compiled for the types of its arguments and for what is fixed about them, not for their values:
tensors without memory do. Whoever wants a function's kernels compiled calls it as if to compute something,
within `compiling`. What is said around a call belongs to the thread that says it.
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
"""(kernel, grid, arguments, and those by name): in place of a launch."""

_COMPILE: ContextVar[Compile | None] = ContextVar("compile", default=None)
FUSED_ARITHMETIC: Final = {"enable_fp_fusion": True}
"""a * b + c is rounded once. Said, as Triton's default will be another from 3.10 on."""


@contextmanager
def compiling(compile_: Compile) -> Iterator[None]:
    """What is launched meanwhile is handed over instead. Tensors that it would have filled hold anything."""
    token = _COMPILE.set(compile_)
    try:
        yield
    finally:
        _COMPILE.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """kernel[grid](*args, **named), with what all of ours are compiled by."""
    compile_ = _COMPILE.get()
    if compile_ is None:
        kernel[grid](*args, **named, **FUSED_ARITHMETIC)
    else:
        compile_(kernel, grid, args, named | FUSED_ARITHMETIC)


def compile_ahead(kernel: Any, grid: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """A `Compile`: for the current device; within Triton's `AsyncCompileMode`, in its threads."""
    kernel.warmup(*args, grid=grid, **named)


@contextmanager
def compiling_in(workers: Executor, device: torch.device) -> Iterator[None]:
    """Within, what this thread launches is compiled and loaded by those workers instead; it ends when all
    is. What cannot be says why when it is launched."""
    _choose(device)
    with triton.AsyncCompileMode(_Loading(workers, device), ignore_errors=True), compiling(compile_ahead):
        yield


@dataclass(frozen=True, slots=True)
class _Loading(Executor):
    """Has each kernel loaded by who compiled it: what launches it is C that Triton has compiled as well."""

    workers: Executor
    device: torch.device

    def submit(self, compile_: Callable[[], Any], /, *args: Any, **named: Any) -> Future[Any]:
        return self.workers.submit(_loaded, self.device, compile_)


def _loaded(device: torch.device, compile_: Callable[[], Any]) -> Any:
    kernel = compile_()
    _choose(device)
    with suppress(OutOfResources):  # the kernel keeps it for who launches it
        _ = kernel.run
    return kernel


def _choose(device: torch.device) -> None:
    """For this thread, which has a current one of its own."""
    if device.index is not None:
        torch.cuda.set_device(device)
