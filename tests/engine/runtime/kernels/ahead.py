"""Compiles for sm_90 in threads, on a machine without a GPU, by what a launch would look for.

A program, as the interpreter of the other tests cannot be switched off in their process. Prints how
many kernels were compiled and loaded by whom, when what was compiled ahead is launched afterwards.
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
from triton.runtime import driver

from engine.runtime.kernels import fused
from engine.runtime.kernels.absent_card import AbsentCard
from engine.runtime.kernels.launching import compiling_in

THREADS = 2


class NoCard(AbsentCard):
    """A Hopper card. Counts what is loaded, by thread."""

    def __init__(self) -> None:
        super().__init__((9, 0))
        self.loaded: Counter[str] = Counter()

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[object, ...]:
        self.loaded[here()] += 1
        return super().load_binary(name, code, shared, device)


def here() -> str:
    """Whose thread this is."""
    return threading.current_thread().name.partition("_")[0]


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def walk() -> None:
    """Three kernels, one of them twice."""
    fused.silu_mul(meta(32, 2048))
    fused.silu_mul(meta(7, 4096))
    for hidden in (1024, 4096):
        fused.rms_norm(meta(8, hidden), meta(hidden), 1e-6)


def main() -> int:
    card = NoCard()
    driver.set_active(card)
    compiled: Counter[str] = Counter()
    compile_: Any = triton.compiler.compile

    def counted(*args: Any, **kwargs: Any) -> Any:
        compiled[here()] += 1
        return compile_(*args, **kwargs)

    triton.compiler.compile = counted
    with ThreadPoolExecutor(THREADS, "compile") as threads, compiling_in(threads, torch.device("meta")):
        walk()
    walk()
    print(json.dumps({"compiled": compiled, "loaded": card.loaded}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
