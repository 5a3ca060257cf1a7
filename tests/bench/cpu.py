"""CPU time and memory of another process, as the Linux kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process that have not ended, in seconds.

    `schedstat` counts nanoseconds; where the kernel lacks it, `stat` counts ticks of 10 ms.
    """
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S


def descendants(pid: int) -> list[int]:
    """`pid` and all processes below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except FileNotFoundError:
            continue
        for child in children:
            found += descendants(int(child))
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all below it. Shared pages count once for each."""
    return sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in descendants(pid)) * _PAGE


def proportional_bytes(pid: int) -> int:
    """Proportional memory (PSS) of a process and all below it: a page that several processes share counts
    once among them."""
    total_kib = 0
    for p in descendants(pid):
        rollup = Path(f"/proc/{p}/smaps_rollup").read_text()
        total_kib += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total_kib * 1024
