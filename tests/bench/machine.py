"""What the machine can do, to hold an engine against: how fast its cores read memory, and multiply bfloat16.

Memory is read by a few lines of C++ (read.cpp) on every usable core, from a buffer that no cache holds, in
three ways that take turns; the way with the best median is what the machine reads at. Products are torch's,
of square matrices.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import torch

from engine.runtime.native.build import compiler
from engine.runtime.setup.hardware import usable_cores

BUFFER_BYTES: Final = 1 << 30
CHUNK: Final = b"\x01" * (1 << 20)
WAYS: Final = ("in parts", "in parts, prefetched", "in blocks")
FLAGS: Final = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
SQUARE: Final = 2048


class Memory:
    """A buffer, in huge pages where the system gives them, and how long each reading of it took."""

    def __init__(self) -> None:
        self._read = _compiled()
        self._threads = usable_cores()
        self._bytes = BUFFER_BYTES // (self._threads << 18) * (self._threads << 18)
        self._map = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        while self._map.tell() < BUFFER_BYTES:
            self._map.write(CHUNK)  # memory that was never written is all one page
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.forget()

    def forget(self) -> None:
        """The readings so far."""
        self._taken_s: list[list[float]] = [[] for _ in WAYS]

    def read(self) -> None:
        """Once, in the way whose turn it is."""
        way = min(range(len(WAYS)), key=lambda way: len(self._taken_s[way]))
        started_s = time.perf_counter()
        self._read(self._start, self._bytes, self._threads, way)
        self._taken_s[way].append(time.perf_counter() - started_s)

    @property
    def way(self) -> str:
        return WAYS[self._best]

    @property
    def bandwidth(self) -> float:
        """Bytes per second: the best way's median."""
        return self._bytes / statistics.median(self._taken_s[self._best])

    @property
    def bandwidth_max(self) -> float:
        """Bytes per second of the one reading that was the quickest."""
        return self._bytes / min(map(min, self._taken_s))

    @property
    def _best(self) -> int:
        return min(range(len(WAYS)), key=lambda way: statistics.median(self._taken_s[way]))


def _compiled() -> ctypes._NamedFuncPointer:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "read.so")
        source = Path(__file__).with_name("read.cpp")
        subprocess.run([compiler(), *FLAGS, str(source), "-o", str(made)], check=True)
        read = ctypes.CDLL(str(made)).penstock_read
    read.restype = ctypes.c_float
    read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
    return read


class Multiplier:
    """Large products of bfloat16 in torch, on every usable core."""

    def __init__(self) -> None:
        self._a, self._b = torch.rand(2, SQUARE, SQUARE).bfloat16().unbind()
        self._taken_s: list[float] = []

    def multiply(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(usable_cores())
        started_s = time.perf_counter()
        self._a @ self._b
        self._taken_s.append(time.perf_counter() - started_s)
        torch.set_num_threads(threads)

    @property
    def rate(self) -> float:
        """Floating-point operations per second: the median's."""
        return 2 * SQUARE**3 / statistics.median(self._taken_s)
