"""Copies between host memory and a device's, without waiting for either.

A copy is queued on the device's stream like any kernel, and the host goes on. Two rules make that safe:

  1. The host's side is pinned memory, fresh for every copy. torch's allocator of pinned memory knows which
     copies read a block, and does not hand the block out again before they are done: so the memory that a
     step sends from is left alone, however many steps are in flight.
  2. A result is not read before its event says that it has arrived.

A copy costs its launch, at any size up to a few kilobytes: all arrays of a step are sent in one copy.

On a CPU host and device are the same: nothing is copied on the way there, and results are copied at once,
since the next step may overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT: Final = 16
"""The alignment, in bytes, that kernels assume of a pointer."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, sent in one copy, with their shapes and types."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=True):
        if array.nbytes:
            own = torch.from_numpy(np.ascontiguousarray(array)).view(-1).view(torch.uint8)
            staged[start : start + array.nbytes].copy_(own)
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


_TYPES: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class DeviceArrival:
    """The moment at which all copies to the host that were queued before it are done."""

    event: torch.cuda.Event | None

    @staticmethod
    def on(device: torch.device) -> DeviceArrival:
        if device.type != "cuda":
            return DeviceArrival(None)
        event = torch.cuda.Event()
        event.record()
        return DeviceArrival(event)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


def download(tensor: Tensor) -> Tensor:
    """A copy in host memory, not to be read before a `DeviceArrival` that was created after it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)
