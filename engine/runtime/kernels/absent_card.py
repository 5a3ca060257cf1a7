"""A card that is not there, for compiling its kernels on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_BYTES_MAX = 227 << 10
"""Shared memory that a kernel may take. A card with less refuses it at its launch, as it would anyway."""


class AbsentCard:
    """Everything that Triton asks of a driver before it launches."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.utils: Any = self
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return _launch_nothing

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES_MAX}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[object, ...]:
        """Module, function, registers, spills, threads at most."""
        return name, 1, 32, 0, 1024


def compile_as_for(capability: tuple[int, int], listener: Callable[..., None]) -> None:
    """Let this process compile for a card of this capability, for good. `listener` is told of each kernel,
    with `cache_hit`."""
    driver.set_active(AbsentCard(capability))
    knobs.compilation.listener = listener


def keep_compiled_in(folder: Path) -> None:
    """Let this process keep what it compiles in a folder: the binaries alone."""
    knobs.cache.dir = str(folder)
    knobs.compilation.store_binary_only = True


def _launch_nothing(*_: object) -> None:
    pass
