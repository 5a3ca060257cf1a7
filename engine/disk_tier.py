"""The disk tier of an engine, opened once its runner is warm: what makes a page another's, and what may fail.

Keys and values depend on the weights, on the types and kernels that compute them, and on a page's layout. All
of that is in the fingerprint of the files: what was written under another one is never read. Weights are told
apart by their files' names, sizes and times of change, and by their first and last bytes: a copy that was
downloaded again counts as other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from engine.core.disk import DiskThreads
from engine.core.messages import Runner, RunnerInfo
from engine.core.page_files import PageFiles
from shared import logs
from shared.files import open_regular

if TYPE_CHECKING:
    from engine.runtime.config import RunnerConfig
    from engine.runtime.kv_cache import HostPages

SAMPLE_LEN: Final = 1 << 20
"""Bytes at either end of a file of weights that are in the fingerprint."""
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
    logged. Raises DirectoryInUse."""
    if config.kv_disk_dir is None or not runner.info.host_tier:
        return None
    assert isinstance(runner, Hosted), "ranks are refused with the settings"
    page_bytes = len(runner.host.view(0))
    try:
        fingerprint = fingerprint_of(config, runner)
        files = PageFiles(Path(config.kv_disk_dir), fingerprint, page_bytes, config.kv_disk_bytes)
    except OSError as error:
        log.warning("core.disk_tier_off", reason=f"{type(error).__name__}: {error}")
        return None
    disk = DiskThreads(files, runner.host.view)
    disk.start()
    return disk


def fingerprint_of(config: RunnerConfig, runner: Runner) -> bytes:
    """The fingerprint of all that decides what a page holds. Raises OSError."""
    info = runner.info
    names = ("device", "dtype", "weights", "kernels", "attention_backend", "kv_cache_dtype")
    settings = [getattr(config, name) for name in names]
    # the native kernels order a page by the processor's instructions, which their name has
    model = getattr(runner, "model", None)
    layout = getattr(model, "name", type(model).__name__)
    kind = [type(runner).__name__, layout, info.dtype, info.page_size, info.page_bytes, info.max_model_len]
    digest = hashlib.sha256(msgspec.msgpack.encode([kind, settings]))
    for part in _weights(Path(config.model)):
        digest.update(hashlib.sha256(part).digest())
    return digest.digest()


def _weights(directory: Path) -> Iterator[bytes]:
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")]):
        status, target = path.stat(), path.resolve()
        yield f"{path.name} {target.name} {status.st_size} {status.st_mtime_ns}".encode()
        with open_regular(path) as file:
            yield file.read(SAMPLE_LEN)
            file.seek(max(0, status.st_size - SAMPLE_LEN))
            yield file.read(SAMPLE_LEN)
