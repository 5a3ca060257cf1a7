"""The directory of the sockets between a service's own processes. It is private, and is removed however the
service ends.

Rules:

1. Only the user who started the service can enter it (mode 0700).
2. The service holds a lock on it, which the kernel releases when the process ends. A pid in its name would
   not do: services in containers can share a temporary directory and not see each other's processes.
3. A service that was killed leaves its directory behind, and the next one to start removes it. It removes
   only directories with its prefix, of this user, with mode 0700, that are not locked; and deletes nothing
   in them but sockets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from shared.process import logs
from shared.process.settings import is_unicode

_ATTEMPTS_MAX: Final = 16
ADDRESS_LEN_MAX: Final = 107
"""Bytes of a Unix socket's path (sockaddr_un)."""
NAME_LEN_MAX: Final = 8
"""Bytes that are kept for the names of the sockets."""

log = logs.get(__name__)


class SocketDirectory:
    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        """A file descriptor of the directory. It carries the lock, and is open while the directory is
        in use."""

    @classmethod
    def make(cls, prefix: str) -> SocketDirectory:
        """Make a new directory in the temporary directory, after removing those of services that are
        gone. `prefix` begins the names of this kind of service's directories. Raises OSError."""
        remove_abandoned(Path(tempfile.gettempdir()), prefix)
        for _ in range(_ATTEMPTS_MAX):
            path = Path(tempfile.mkdtemp(prefix=prefix))
            _check(path)
            with contextlib.suppress(
                FileNotFoundError
            ):  # another service's start removed it before it was locked
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


def _check(path: Path) -> None:
    """Remove a new directory again and raise OSError where sockets in it would have too long a path, or one
    that other processes cannot be told."""
    if not is_unicode(str(path)):
        path.rmdir()
        text = "the path is not UTF-8, as this process's locale has it: set TMPDIR to another directory"
        raise OSError(errno.EILSEQ, text, str(path.parent))
    if len(os.fsencode(path)) + 1 + NAME_LEN_MAX > ADDRESS_LEN_MAX:
        path.rmdir()
        text = "the path is too long for sockets: set TMPDIR to a shorter directory"
        raise OSError(errno.ENAMETOOLONG, text, str(path.parent))


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the socket directories in `parent` whose services are gone."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or gone meanwhile
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in os.listdir(descriptor):
            if stat.S_ISSOCK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=descriptor)
        path.rmdir()
        log.info("sockets.removed", directory=path)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
