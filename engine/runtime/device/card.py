"""The device as the loader sees it: what it can, and how full it is. Tests have one on a CPU."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.runtime.device.graphs import CudaGraphDevice, GraphDevice
from engine.runtime.device.timing import DeviceTimer
from engine.runtime.kernels.autotune import Timer
from engine.runtime.kernels.launching import compiling_in


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes."""

    total: int
    free: int
    """Of the whole card, whoever took the rest."""
    reserved: int
    """By torch, for this process."""
    reserved_peak: int
    """The most since `Card.start_peak`."""


class Card(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def capability(self) -> tuple[int, int]: ...

    @property
    def multiprocessors(self) -> int: ...

    def memory(self) -> MemoryReading:
        """Waits for the device. Memory that torch keeps and nobody uses counts as free."""
        ...

    def start_peak(self) -> None: ...

    def timer(self) -> Timer: ...

    def graphs(self) -> GraphDevice: ...


class Compiler(Protocol):
    """What compiles for a card."""

    def compiling(self, workers: Executor) -> AbstractContextManager[None]:
        """Within, kernels that this thread launches are compiled by those workers instead; it ends when all
        are."""
        ...


class OwnCard(Card, Compiler, Protocol):
    """The card that a runner is for."""


class CudaCard:
    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.device)
        self.name: str = properties.name
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        self.multiprocessors: int = properties.multi_processor_count
        # Libraries keep a workspace for every stream that they were ever called on: all graphs are of one.
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
        return CudaGraphDevice(self._stream)

    def compiling(self, workers: Executor) -> AbstractContextManager[None]:
        return compiling_in(workers, self.device)
