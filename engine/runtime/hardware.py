"""What this machine, or the container around this process, lets us use. No torch here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
_NATIVE_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86's two, and arm64's."""


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Physical cores that this process may run on: affinity, less hyper-threads, less the cgroup's quota."""
    cores = _physical_cores(_read(proc / "cpuinfo"), os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, round(quota)))


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """What can still be taken: of the machine's memory, or of the cgroup's limit if that is less."""
    available = _meminfo_bytes(_read(proc / "meminfo"), "MemAvailable")
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(cgroup / limit_file).strip(), _read(cgroup / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def multiplies_bf16(proc: Path = PROC) -> bool:
    """Whether the processor has bfloat16 dot products, so that bfloat16 is faster and not just smaller."""
    return not _NATIVE_BF16_FLAGS.isdisjoint(processor_flags(proc))


def processor_flags(proc: Path = PROC) -> frozenset[str]:
    """What the processor can do, by the kernel's names; none where it does not say."""
    for line in _read(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _physical_cores(cpuinfo: str, allowed: set[int]) -> int:
    """Distinct (package, core) pairs among the allowed processors; all of those where no topology is told."""
    cores: set[tuple[str, str]] = set()
    for block in cpuinfo.split("\n\n"):
        fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in block.splitlines())}
        processor = fields.get("processor", "")
        if "core id" in fields and processor.isdigit() and int(processor) in allowed:
            cores.add((fields.get("physical id", "0"), fields["core id"]))
    return len(cores) or max(1, len(allowed))


def _cpu_quota(cgroup: Path) -> float | None:
    fields = _read(cgroup / "cpu.max").split()
    if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]) > 0:
        return int(fields[0]) / int(fields[1])
    return None


def _meminfo_bytes(meminfo: str, name: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _read(path: Path) -> str:
    """The file's text, or nothing where this kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
