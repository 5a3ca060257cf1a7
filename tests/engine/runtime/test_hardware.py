"""Machines and containers, as their files describe them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runtime.setup import hardware
from engine.runtime.setup.hardware import available_memory_bytes, multiplies_bf16, usable_cores

TWO_CORES = ["0-1", "0-1", "2-3", "2-3"]
"""The siblings of four processors."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    siblings_are(tmp_path, TWO_CORES)
    write(tmp_path, "meminfo", "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n")
    write(tmp_path, "self/cgroup", "0::/\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def siblings_are(root: Path, siblings: list[str]) -> None:
    for number, shared in enumerate(siblings):
        write(root, f"cpu{number}/topology/thread_siblings_list", f"{shared}\n")


@pytest.mark.parametrize(
    ("siblings", "cores"),
    [
        (TWO_CORES, 2),
        (["0,2", "1,3", "0,2", "1,3"], 2),
        # under Xen all have the core 0 of package 0; two dies of an Opteron number their cores anew
        (["0", "1", "2", "3"], 4),
        (["0-3"] * 4, 1),
        ([], 4),  # the kernel tells none
        (["0-1", "0-1"], 3),
    ],
)
def test_processors_that_are_siblings_are_one_core(machine: Path, siblings: list[str], cores: int) -> None:
    siblings_are(machine, ["", "", "", ""])
    siblings_are(machine, siblings)
    same = "".join(f"processor: {n}\nphysical id: 0\ncore id: 0\n\n" for n in range(4))
    write(machine, "cpuinfo", same)
    assert usable_cores(machine, machine, machine) == cores


def test_affinity_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert usable_cores(machine, machine, machine) == 1


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000", 2), ("140000 100000", 1), ("150000 100000", 2), ("400000 100000", 2), ("5000 100000", 1)],
)
def test_a_quota_counts_in_cores(machine: Path, cpu_max: str, cores: int) -> None:
    write(machine, "cpu.max", cpu_max)
    assert usable_cores(machine, machine, machine) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 2), ("100000", 1), ("200000", 2)])
def test_a_quota_of_an_old_cgroup(machine: Path, quota: str, cores: int) -> None:
    write(machine, "self/cgroup", "4:memory:/\n2:cpu,cpuacct:/docker/1f\n1:name=systemd:/\n0::/\n")
    write(machine, "cpu/cpu.cfs_quota_us", f"{quota}\n")  # a container sees its own group as the root
    write(machine, "cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(machine, machine, machine) == cores


@pytest.mark.parametrize("group", ["system.slice/penstock.service", "system.slice", "."])
def test_the_tightest_of_the_groups_around_counts(machine: Path, group: str) -> None:
    write(machine, "self/cgroup", "0::/system.slice/penstock.service\n")
    write(machine, "system.slice/penstock.service/cpu.max", "300000 100000")
    write(machine, f"{group}/cpu.max", "100000 100000")
    write(machine, f"{group}/memory.max", "3000000")
    write(machine, f"{group}/memory.current", "1000000")
    assert usable_cores(machine, machine, machine) == 1
    assert available_memory_bytes(machine, machine) == 2000000


def test_a_group_outside_of_what_is_mounted_is_left_alone(machine: Path) -> None:
    write(machine, "self/cgroup", "0::/../1f\n")
    write(machine, "cgroup/cpu.max", "100000 100000")
    write(machine, "1f/cpu.max", "100000 100000")
    assert usable_cores(machine, machine / "mounted", machine) == 2
    assert usable_cores(machine, machine / "cgroup", machine) == 1


def test_without_a_topology_every_processor_counts(machine: Path) -> None:
    assert usable_cores(machine, machine, machine / "none") == 4


def test_memory_of_the_machine_and_of_its_cgroup(machine: Path) -> None:
    assert available_memory_bytes(machine, machine) == 4000 * 1024
    write(machine, "memory.max", "max\n")
    write(machine, "memory.current", "1000000\n")
    assert available_memory_bytes(machine, machine) == 4000 * 1024
    write(machine, "memory.max", "3000000\n")
    assert available_memory_bytes(machine, machine) == 2000000
    write(machine, "memory.max", "500000\n")
    assert available_memory_bytes(machine, machine) == 0


def test_cached_files_are_no_memory_in_use(machine: Path) -> None:
    """A checkpoint that was just read may fill a container's limit."""
    write(machine, "memory.max", "3000000\n")
    write(machine, "memory.current", "3000000\n")
    write(machine, "memory.stat", "anon 1000000\nfile 2000000\nactive_file 1500000\ninactive_file 400000\n")
    assert available_memory_bytes(machine, machine) == 1900000


def test_memory_of_an_old_cgroup(machine: Path) -> None:
    write(machine, "self/cgroup", "4:memory:/\n0::/\n")
    write(machine, "memory/memory.limit_in_bytes", "3000000")
    write(machine, "memory/memory.usage_in_bytes", "2000000")
    write(machine, "memory/memory.stat", "inactive_file 7\ntotal_active_file 100\ntotal_inactive_file 20\n")
    assert available_memory_bytes(machine, machine) == 1000120


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
