"""The directory of the core's two sockets. It is private, and is removed however its engine ends.

Rules:

1. Only the user who started the engine can enter it (mode 0700).
2. The engine holds a lock on it, which the kernel releases when the process ends. A pid in its name would not
   do: engines in containers can share a temporary directory and not see each other's processes.
3. An engine that was killed leaves its directory behind, and the next one to start removes it. It removes
   only directories with this prefix, of this user, with mode 0700, that are not locked; and deletes nothing
   in them but the two sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from shared import logs

PREFIX: Final = "penstock-core-"
INBOX: Final = "in"
OUTBOX: Final = "out"
_ATTEMPTS_MAX: Final = 16

log = logs.get(__name__)


class SocketDirectory:
    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        """A file descriptor of the directory. It carries the lock, and is open while the directory is
        in use."""

    @classmethod
    def make(cls) -> SocketDirectory:
        """Make a new directory in the temporary directory, after removing those of engines that are
        gone. Raises OSError."""
        remove_abandoned(Path(tempfile.gettempdir()))
        for _ in range(_ATTEMPTS_MAX):
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            with contextlib.suppress(
                FileNotFoundError
            ):  # another engine's start removed it before it was locked
                descriptor = _open(path)
                with contextlib.suppress(OSError):  # the file system has no locks, so nothing is ever removed
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if path.exists():
                    return cls(path, descriptor)
                os.close(descriptor)
        raise FileExistsError(f"{tempfile.gettempdir()}: every directory that was made there was removed")

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def remove_abandoned(parent: Path) -> None:
    """Remove the socket directories in `parent` whose engines are gone."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or gone meanwhile
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in (INBOX, OUTBOX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
        path.rmdir()
        log.info("core.sockets_removed", directory=path)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
