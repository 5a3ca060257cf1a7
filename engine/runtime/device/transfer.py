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
    own = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts, end = [], 0
    for each in own:
        starts.append(end)
        end += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, each in zip(starts, own, strict=True):
        if each.nbytes:
            staged[start : start + each.nbytes].copy_(each.view(-1).view(torch.uint8))
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + each.nbytes].view(each.dtype).view(each.shape)
        for start, each in zip(starts, own, strict=True)
    ]


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
