"""The disk tier of an engine, opened once its runner is warm: what makes a page another's, and what may fail.

Keys and values depend on the weights, on the code, types and kernels that compute them, and on a page's
layout. All of that is in the fingerprint of the files: what was written under another one is never read. What
leaves them alone is not in it, so that a prefix outlives a change of it: the context's length, the sizes of
pools and steps, the tokenizer and the template, and the number of threads, except where it changes the bits
(`RunnerInfo.arithmetic`). What a setting has become is in it, not what it said.

Weights are told apart by all of their bytes. Less would not do: images have files with equal times, and a
model that was tuned further in a few layers has its parent's sizes, first and last bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from engine.contract.messages import Runner, RunnerInfo
from engine.core.pages.disk import DiskThreads
from engine.core.pages.page_files import PageFiles, open_directory
from shared.process import logs
from shared.process.build import version
from shared.process.files import open_regular

if TYPE_CHECKING:
    from engine.runtime.setup.runner_config import RunnerConfig
    from engine.runtime.step.kv_cache import HostPages

PART_LEN: Final = 256 << 20
"""Bytes of a file of weights that one thread hashes at a time. A core does 1 to 2 GB/s, and the file has just
been read, so that all cores together take a few seconds for the largest model that a device holds."""
READ_LEN: Final = 4 << 20
HASH_THREADS_MAX: Final = 16
log = logs.get(__name__)


@runtime_checkable
class Hosted(Protocol):
    """A runner that is one process, with its pages of host memory. Naming the runners' own classes would
    import those of every device, and Triton with them, which a CPU's installation has not."""

    info: RunnerInfo

    @property
    def host(self) -> HostPages: ...


def open_disk_tier(config: RunnerConfig, runner: Runner) -> DiskThreads | None:
    """The disk tier that `config` asks for; None without one, and when the directory cannot be used, which is
    logged. Raises DirectoryRefused."""
    if config.kv_disk_dir is None or not runner.info.host_pages:
        return None
    assert isinstance(runner, Hosted), "ranks are refused with the settings"
    page_bytes = len(runner.host.view(0))
    try:
        directory = open_directory(Path(os.path.expanduser(config.kv_disk_dir)))
        try:
            fingerprint = fingerprint_of(Path(config.model), runner.info)
        except BaseException:
            os.close(directory)
            raise
        files = PageFiles(directory, fingerprint, page_bytes, config.kv_disk_bytes)
    except OSError as error:
        log.warning("core.disk_tier_off", reason=f"{type(error).__name__}: {error}")
        return None
    disk = DiskThreads(files, runner.host.view)
    disk.start()
    return disk


def fingerprint_of(model: Path, info: RunnerInfo) -> bytes:
    """The fingerprint of all that decides what a page holds, and of no more. Raises OSError."""
    # another release may compute or lay out a page otherwise
    kind = [version(), info.arithmetic, info.dtype, info.page_size, info.page_bytes]
    digest = hashlib.sha256(msgspec.msgpack.encode(kind))
    for part in _weights(model):
        digest.update(part)
    return digest.digest()


def _weights(directory: Path) -> Iterator[bytes]:
    """The digests of all files that the network is made of, in parts."""
    parts: list[tuple[Path, int]] = []
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors*"))]:
        size = path.stat().st_size
        yield hashlib.sha256(f"{path.name} {size}".encode()).digest()
        parts += [(path, at) for at in range(0, size, PART_LEN)]
    with ThreadPoolExecutor(min(HASH_THREADS_MAX, os.cpu_count() or 1), "hash") as threads:
        yield from threads.map(_digest_of_part, parts)


def _digest_of_part(part: tuple[Path, int]) -> bytes:
    path, at = part
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_LEN))
    with open_regular(path) as file:
        file.seek(at)
        left = PART_LEN
        while left and (count := file.readinto(buffer[:left])):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
