"""The data directory that `penstock up` keeps, and the files in which those that run say where, for other
commands.

Rules

1. A data directory is one `up`'s at a time, and outlives it: the gateway's file with further keys and
   tenants, the logs, the billing lines that usage is counted from after a restart, and the two keys that were
   made. Without `--data-dir` it is the user's own for the port, or for any free port one of this run alone.
2. Every `up` that runs has a file of its own in the cache directory, by its port. Commands that name no
   server mean the one that was started last of those that run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

KEY_VARIABLE: Final = "PENSTOCK_API_KEY"
"""The variable with the API key that the commands use."""


class Running(msgspec.Struct, frozen=True):
    """A running `penstock up`, as the other commands need to know it."""

    url: str
    """The OpenAI base URL, with `/v1`."""
    key: str
    model: str
    pid: int
    cert: str | None = None
    """The path of its certificate, PEM; None for plain HTTP."""
    config: str | None = None
    """The path of its gateway's file. None for one of an older version."""
    admin_url: str | None = None
    """The URL of its gateway's admin listener. None for one of an older version, as the next."""
    admin_key: str | None = None
    """The key that opens it."""

    @property
    def urls(self) -> tuple[str | None, ...]:
        """The URLs by which a user may mean it."""
        return self.url, self.url.removesuffix("/v1"), self.admin_url


def cache_dir() -> Path:
    """The user's own directory for the files of those that run; made when it is missing.

    Raises OSError or RuntimeError where there is no home that can be written.
    """
    return _own_dir("XDG_CACHE_HOME", ".cache")


def _own_dir(variable: str, otherwise: str) -> Path:
    base = os.environ.get(variable)
    directory = (Path(base) if base else Path.home() / otherwise) / "penstock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


# -- the data directory ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataDir:
    """An `up`'s directory, which is its own for as long as it runs."""

    path: Path
    is_kept: bool
    """False if it is of this run alone."""
    lock: int = -1
    """The descriptor that holds it, until the process ends."""

    @property
    def keys(self) -> Keys:
        """The keys that were made the last time; none at first."""
        try:
            return msgspec.json.decode((self.path / "keys.json").read_bytes(), type=Keys)
        except (OSError, msgspec.DecodeError):
            return Keys()

    def keep(self, keys: Keys) -> None:
        """Write the keys down, for the next time. Raises OSError."""
        write_private(self.path / "keys.json", msgspec.json.encode(keys))


class Keys(msgspec.Struct, frozen=True):
    """The two keys of a data directory."""

    api: str | None = None
    admin: str | None = None


def data_dir(wanted: Path | None, port: int) -> DataDir:
    """The directory of an `up` that was asked to listen on this port, made and taken: `wanted`, from
    `--data-dir`, or the user's own. Raises OSError, naming the option."""
    path = wanted or (_own_data_dir(port) if port else None)
    is_kept = path is not None
    try:
        path = path or Path(tempfile.mkdtemp(prefix="penstock-up-"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(f"--data-dir {path}: cannot make this directory: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OSError(f"--data-dir {path}: another penstock up uses it") from None
    return DataDir(path, is_kept, lock)


def _own_data_dir(port: int) -> Path | None:
    """None where there is no home, or none that can be written."""
    try:
        path = _own_dir("XDG_DATA_HOME", ".local/share") / f"up-{port}"
        path.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return path


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read, and replace it in one step."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    draft.replace(path)


# -- those that run -------------------------------------------------------------------------------


def running_file(running: Running) -> Path:
    """The file that says that it runs. Raises OSError and RuntimeError, as `cache_dir` does."""
    return cache_dir() / f"up-{urlsplit(running.url).port}.json"


def all_running() -> list[Running]:
    """Every `penstock up` of this user that runs, the one that was started last in front."""
    try:
        files = sorted(cache_dir().glob("up-*.json"), key=_written_ns, reverse=True)
    except (OSError, RuntimeError):
        return []
    found = (_read(file) for file in files)
    return [running for running in found if running is not None and is_alive(running.pid)]


def read_running(url: str | None = None) -> Running | None:
    """The `penstock up` that is at this URL, or where none is asked for the one that was started last. None
    where there is none."""
    urls = [*filter(None, [url])]
    return next((one for one in all_running() if not urls or urls[0] in one.urls), None)


def write_running(running: Running) -> None:
    """Write the file that says where it runs."""
    write_private(running_file(running), msgspec.json.encode(running))


def clear_running(running: Running) -> None:
    """Remove the file, unless it is that of another `up`."""
    with contextlib.suppress(OSError, RuntimeError):
        file = running_file(running)
        if (there := _read(file)) is not None and there.pid == running.pid:
            file.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """True if there is such a process."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _read(file: Path) -> Running | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return None


def _written_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0
