"""Programmatic dependent launch, from Hopper on: a kernel starts while the one before it ends.

In a stream a kernel starts when the one before it has ended and its writes have reached memory; between two
that depend on each other there is time in which the device does nothing. Launched dependently, a kernel may
start as soon as every program of the one before has allowed it or ended, and waits by itself for the results
that it needs. Before that it can fetch what no kernel writes: weights.

Rules, which make this as safe as a plain launch:

  1. A kernel that is launched dependently waits (`gdc_wait`) before it reads what an earlier kernel writes,
     and before it writes at all: an earlier kernel may still read what it would overwrite.
  2. Every program of it waits, also one with nothing to do. The wait lasts until the kernel before has ended,
     which had waited itself: so all earlier kernels have ended as well.
  3. It lets the next one start (`gdc_launch_dependents`) when its own wait is over: one kernel is ahead,
     never a queue of them that takes up the multiprocessors. (On an H200 a decode step of one row took 0.94
     times as long so for a model of 0.6B, and 1.14 times for one of 8B, whose long kernels push what the next
     one fetches ahead out of the cache again. Let the next one start at their ends, neither gained.)
  4. Before the wait nothing is touched but weights, which are not written once they are loaded.

A kernel that is launched plainly, Triton's or a library's, needs none of this: it starts when all before it
have ended, and a kernel that is launched dependently on it waits until it has. So kernels of both kinds mix.
The first of a step is launched plainly, as it depends on a copy.

Whether launches are dependent is a property of a whole step and not of its products or norms. So it is not a
parameter of all of them, but set once around the step, like the current stream.
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
    """Set whether kernels that are launched within are launched dependently."""
    token = _IS_ON.set(is_on)
    try:
        yield
    finally:
        _IS_ON.reset(token)


def dependent() -> dict[str, bool]:
    """The options of a launch that may be dependent; its kernel begins with `wait_for_earlier`."""
    return {"PDL": True, "launch_pdl": True} if _IS_ON.get() else {"PDL": False}


def plain() -> dict[str, bool]:
    """The options of a step's first launch, which is plain and lets the next kernel start early."""
    return {"PDL": _IS_ON.get()}


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Fetch a line for each pointer into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
