"""The device as the loader sees it: its abilities and its memory. Tests put a CPU in its place."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.runtime.device.graphs import CudaGraphDevice, GraphDevice
from engine.runtime.device.kernel_timing import DeviceTimer, shortest_replay_us
from engine.runtime.kernels.autotune import Timer
from engine.runtime.kernels.launching import compiling_in


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A reading of a device's memory, in bytes."""

    total: int
    free: int
    """Free memory of the whole card, all processes counted."""
    reserved: int
    """Memory that torch has reserved in this process."""
    reserved_peak: int
    """The largest `reserved` since `Card.start_peak`."""


class Card(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """The card's name, for the log."""
        ...

    @property
    def capability(self) -> tuple[int, int]: ...

    @property
    def multiprocessors(self) -> int: ...

    def memory(self) -> MemoryReading:
        """Wait for the device, and read its memory. Memory that torch keeps unused counts as free."""
        ...

    def start_peak(self) -> None: ...

    def timer(self) -> Timer: ...

    def graphs(self) -> GraphDevice: ...


class Compiler(Protocol):
    """Compiles kernels for a card."""

    def compiling(self, workers: Executor) -> AbstractContextManager[None]:
        """Have `workers` compile the kernels that this thread launches within, instead of running them. Ends
        when all are compiled."""
        ...


class OwnCard(Card, Compiler, Protocol):
    """The card that a runner computes on."""


class CudaCard:
    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.device)
        self.name: str = properties.name
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        self.multiprocessors: int = properties.multi_processor_count
        # Libraries keep a workspace for each stream that they were called on: all graphs share one stream.
        self._stream = torch.cuda.Stream(self.device)

    def memory(self) -> MemoryReading:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return MemoryReading(total, free, torch.cuda.memory_reserved(), peak)

    def start_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def timer(self) -> Timer:
        return DeviceTimer()

    def graphs(self) -> GraphDevice:
        return CudaGraphDevice(self._stream, shortest_replay_us)

    def compiling(self, workers: Executor) -> AbstractContextManager[None]:
        return compiling_in(workers, self.device)
