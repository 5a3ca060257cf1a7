"""Compiles for sm_90 in threads, on a machine without a GPU, by what a launch would look for.

A program, as the interpreter of the other tests cannot be switched off in their process. Prints, one JSON
object a line, how many kernels were compiled by whom: first ahead, then by the same launches again.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.runtime.kernels import fused
from engine.runtime.kernels.launching import compile_ahead, compiling, compiling_in

THREADS = 2


class NoCard:
    """What Triton asks a driver for before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def walk() -> None:
    """Three kernels, one of them twice."""
    fused.silu_mul(meta(32, 2048))
    fused.silu_mul(meta(7, 4096))
    for hidden in (1024, 4096):
        fused.rms_norm(meta(8, hidden), meta(hidden), 1e-6)


def main() -> int:
    driver.set_active(NoCard())  # type: ignore[no-untyped-call]
    compiled: Counter[str] = Counter()
    compile_: Any = triton.compiler.compile

    def counted(*args: Any, **kwargs: Any) -> Any:
        compiled[threading.current_thread().name.partition("_")[0]] += 1
        return compile_(*args, **kwargs)

    triton.compiler.compile = counted
    with ThreadPoolExecutor(THREADS, "compile") as threads, compiling_in(threads):
        walk()
    print(json.dumps(compiled))  # noqa: T201
    with compiling(compile_ahead):
        walk()
    print(json.dumps(compiled))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
