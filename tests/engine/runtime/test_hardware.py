"""Machines and containers, as their files describe them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runtime import hardware
from engine.runtime.hardware import available_memory_bytes, multiplies_bf16, usable_cores

FOUR_THREADS_ON_TWO_CORES = "\n\n".join(
    f"processor\t: {n}\nphysical id\t: 0\ncore id\t\t: {n // 2}\nflags\t\t: fpu avx512f{flag}"
    for n, flag in enumerate(("", "", "", ""))
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    write(tmp_path, "cpuinfo", FOUR_THREADS_ON_TWO_CORES)
    write(tmp_path, "meminfo", "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_hyper_threads_are_no_cores(machine: Path) -> None:
    assert usable_cores(machine, machine) == 2


def test_affinity_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert usable_cores(machine, machine) == 1


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000", 2), ("100000 100000", 1), ("150000 100000", 2), ("5000 100000", 1)]
)
def test_a_quota_counts(machine: Path, cpu_max: str, cores: int) -> None:
    write(machine, "cpu.max", cpu_max)
    assert usable_cores(machine, machine) == cores


def test_without_a_topology_every_processor_counts(machine: Path) -> None:
    write(machine, "cpuinfo", "processor : 0\n\nprocessor : 1\n")
    assert usable_cores(machine, machine) == 4


def test_memory_of_the_machine_and_of_its_cgroup(machine: Path) -> None:
    assert available_memory_bytes(machine, machine) == 4000 * 1024
    write(machine, "memory.max", "max\n")
    write(machine, "memory.current", "1000000\n")
    assert available_memory_bytes(machine, machine) == 4000 * 1024
    write(machine, "memory.max", "3000000\n")
    assert available_memory_bytes(machine, machine) == 2000000
    write(machine, "memory.max", "500000\n")
    assert available_memory_bytes(machine, machine) == 0


def test_memory_of_an_old_cgroup(machine: Path) -> None:
    write(machine, "memory/memory.limit_in_bytes", "3000000")
    write(machine, "memory/memory.usage_in_bytes", "2000000")
    assert available_memory_bytes(machine, machine) == 1000000


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags : fpu avx512_bf16 amx_tile", True),
        ("flags : fpu amx_bf16", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("flags : fpu avx512f", False),
        ("model name : bf16", False),
    ],
)
def test_native_bfloat16(machine: Path, line: str, native: bool) -> None:
    write(machine, "cpuinfo", line)
    assert multiplies_bf16(machine) is native


def test_this_machine_answers() -> None:
    assert usable_cores() >= 1
    assert available_memory_bytes() > 0
    assert hardware.PROC.is_dir()
