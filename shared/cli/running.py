"""The file in which `penstock up` says where it runs, for other commands; and the user's cache directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

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


def cache_dir() -> Path:
    """The user's own directory for run directories and for `running_file`; made when it is missing.

    Raises OSError or RuntimeError where there is no home that can be written.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "penstock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def running_file() -> Path:
    """The file that says where `penstock up` runs."""
    return cache_dir() / "up.json"


def make_run_dir(wanted: Path | None, gateway_port: int) -> Path:
    """The directory of an `up` whose gateway has this port, made: `wanted`, from `--log-dir`, or the user's
    own. Raises OSError, naming the option."""
    if wanted is not None:
        try:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"--log-dir {wanted}: cannot make this directory: {error.strerror}") from error
        return wanted
    try:
        run_dir = cache_dir() / f"up-{gateway_port}"
        run_dir.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none that can be written
        return Path(tempfile.mkdtemp(prefix="penstock-up-"))
    return run_dir


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read, and replace it in one step."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    draft.replace(path)


def read_running() -> Running | None:
    """The `penstock up` that was started last. None when there is no readable file."""
    try:
        return msgspec.json.decode(running_file().read_bytes(), type=Running)
    except (OSError, RuntimeError, msgspec.DecodeError):
        return None


def write_running(running: Running) -> None:
    """Write the file that says where `penstock up` runs."""
    write_private(running_file(), msgspec.json.encode(running))


def clear_running(pid: int) -> None:
    """Remove the file, unless it is that of another `up` than the one with this pid."""
    running = read_running()
    if running is not None and running.pid == pid:
        running_file().unlink(missing_ok=True)
