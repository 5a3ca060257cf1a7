"""A kernel that starts while the one before it ends: programmatic dependent launch, from Hopper on.

In a stream a kernel starts when the one before it has ended and its writes have reached memory; between two
that depend on each other there is time in which the device does nothing. Launched dependently, a kernel
may start as soon as every program of the one before has said so or ended, and has to wait by itself for what
it needs. What it can do before is fetch what no kernel writes: weights.

Rules, which make this as safe as a plain launch:

  1. Whoever is launched dependently waits (`gdc_wait`) before it reads what an earlier kernel writes, and
     before it writes at all: what it would overwrite, an earlier one may still read.
  2. Every program of it waits, also one with nothing to do. The wait lasts until the kernel before has ended,
     which had waited itself: so whatever comes earlier has ended as well.
  3. It lets the next one start (`gdc_launch_dependents`) when its own wait is over: one kernel is ahead,
     never a queue of them that takes up the multiprocessors.
  4. Before the wait nothing is touched but weights, which nobody writes once they are loaded.

A kernel launched plainly, ours or a library's, needs none of this: it starts when all before it have ended,
and whoever is launched dependently on it waits until it has. So kernels of both kinds mix. The first of a
step is launched plainly, as it depends on a copy.

Whether launches overlap belongs to a step as a whole and not to any of its products or norms, so it is not
handed through all of them: it is said once around the step, as one says which stream is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import triton
import triton.language as tl

_IS_ON: ContextVar[bool] = ContextVar("dependent_launch", default=False)


@contextmanager
def dependent_launches(is_on: bool) -> Iterator[None]:
    """Kernels that are launched meanwhile overlap, or do not."""
    token = _IS_ON.set(is_on)
    try:
        yield
    finally:
        _IS_ON.reset(token)


def dependent() -> dict[str, bool]:
    """What a launch has to say besides its arguments; its kernel begins with `wait_for_earlier`."""
    return {"PDL": True, "launch_pdl": True} if _IS_ON.get() else {"PDL": False}


def plain() -> dict[str, bool]:
    """The same for a step's first kernel, which lets the next one start early."""
    return {"PDL": _IS_ON.get()}


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Into the second-level cache: a line for each pointer."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
