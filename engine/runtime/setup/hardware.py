"""The cores and the memory that this machine, or the container around this process, grants. No torch here.

A limit may be set on the control group of this process or on any group around it, by version 2 of the
interface or by version 1, whose groups have a tree for each resource. The tightest counts. In a container the
groups around it cannot be seen, nor, with version 1, the name that the kernel gives for its own: it is the
root of the mounted tree, which is read in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
CPUS: Final = Path("/sys/devices/system/cpu")
_NATIVE_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The kernel's names for bfloat16 dot products: two on x86, one on arm64."""


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP, cpus: Path = CPUS) -> int:
    """Physical cores that this process may run on: affinity, less hyper-threads, less the control groups'
    quota. Half a core of a quota counts as one: its thread gains more while it runs than all lose by waiting
    for the next period when the quota is used up.

    Threads are not tied to cores: that brought nothing when it was tried, and the kernel moves a computing
    thread out of the way of others (`engine.__main__.NICENESS`)."""
    cores = _physical_cores(cpus, os.sched_getaffinity(0))
    return max(1, min([cores, *(int(quota + 0.5) for quota in _cpu_quotas(proc, cgroup))]))


def computes_on_all_cores(threads: int | None) -> bool:
    """True if so many threads, by default one for each core, leave no core to others."""
    return threads is None or threads >= usable_cores()


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The memory that can still be allocated: the machine's, or a control group's if that is less. Cached
    files count as free, as they do in the kernel's own figure for the machine."""
    available = _meminfo_bytes(_read(proc / "meminfo"), "MemAvailable")
    return max(0, min([available, *_memory_left(proc, cgroup)]))


def multiplies_bf16(proc: Path = PROC) -> bool:
    """True if the processor has bfloat16 dot products, so that bfloat16 is faster and not just smaller."""
    return not _NATIVE_BF16_FLAGS.isdisjoint(processor_flags(proc))


def processor_flags(proc: Path = PROC) -> frozenset[str]:
    """The processor's features, by the kernel's names; empty where the kernel lists none."""
    for line in _read(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _physical_cores(cpus: Path, allowed: set[int]) -> int:
    """The number of cores among the allowed processors, which share one where the kernel lists them as
    siblings. One without a list is a core. Numbers of packages and cores would not do: under some hypervisors
    all processors have the same, and in packages of several dies they are given out again in each."""
    siblings = (_read(cpus / f"cpu{number}" / "topology" / "thread_siblings_list") for number in allowed)
    return len({shared.strip() or number for number, shared in zip(allowed, siblings, strict=True)})


def _cpu_quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    """The CPU quota, in cores, of every control group that has one."""
    for group in _groups(proc, cgroup, "cpu"):
        quota = _read(group / "cpu.max").split() or [
            *_read(group / "cpu.cfs_quota_us").split(),
            *_read(group / "cpu.cfs_period_us").split(),
        ]
        if len(quota) == 2 and all(field.isdigit() for field in quota) and int(quota[1]) > 0:
            yield int(quota[0]) / int(quota[1])


def _memory_left(proc: Path, cgroup: Path) -> Iterator[int]:
    """The memory left, in bytes, in every control group that has a limit."""
    for group in _groups(proc, cgroup, "memory"):
        for limit_file, usage_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
            if limit.isdigit() and usage.isdigit():
                cached = {f"{prefix}active_file", f"{prefix}inactive_file"}
                lines = (line.partition(" ") for line in _read(group / "memory.stat").splitlines())
                yield int(limit) - int(usage) + sum(int(value) for name, _, value in lines if name in cached)


def _groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's control groups, from its own to the root, with either interface."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        tree = cgroup if number == "0" else cgroup / controller
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if ".." not in group.parts:  # outside the mounted tree
                yield tree / group


def _meminfo_bytes(meminfo: str, name: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _read(path: Path) -> str:
    """The file's text; empty where this kernel does not have the file."""
    try:
        return path.read_text()
    except OSError:
        return ""
