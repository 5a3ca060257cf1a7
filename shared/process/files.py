"""Reading and writing files by whole contents."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

MARK: Final = "\ufeff"
"""A byte order mark, which some editors and PowerShell put before a text."""


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a descriptor: one call may write a part, as on a disk that is nearly full.
    Raises OSError, after which some of it may have been written."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def read_text(path: Path, len_max: int) -> str:
    """The content of a file (`read_bytes`), decoded, with the ends of lines as Python has them. Raises
    UnicodeDecodeError, too."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, len_max)), "utf-8").read()


def read_bytes(path: Path, len_max: int) -> bytes:
    """A regular file of at most `len_max` bytes. Raises OSError.

    What is no file is refused: a FIFO would be waited for until somebody writes to it.
    """
    with open_regular(path) as file:
        data = file.read(len_max + 1)
    if len(data) > len_max:
        raise OSError(errno.EFBIG, f"larger than {len_max} bytes")
    return data


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, for what is no regular file, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


class FileVersion(NamedTuple):
    """A value that changes whenever a file does."""

    mtime_ns: int
    size: int
    inode: int


def file_version(path: Path) -> FileVersion | None:
    """A value that changes whenever the file does, a replaced one too; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileVersion(status.st_mtime_ns, status.st_size, status.st_ino)


class WatchedFiles:
    """Files that are read again when they change. Those that are None count for nothing."""

    def __init__(self, files: Iterable[str | Path | None]) -> None:
        self.paths: Final = tuple(Path(file) for file in files if file is not None)
        self._seen: list[FileVersion | None] | None = None
        self.changed()

    def changed(self) -> bool:
        """True if they are others than at the last look."""
        before, self._seen = self._seen, [file_version(path) for path in self.paths]
        return self._seen != before

    def forget(self) -> None:
        """Count them as changed at the next look, whatever they are."""
        self._seen = None
