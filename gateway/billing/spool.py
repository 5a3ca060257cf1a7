"""The file of billing lines, and how much of it a webhook has taken. Blocking calls, for a thread.

Rules:

1. The file holds whole lines. A write that fails leaves it as it was; the start of a line that a crash cut
   off is taken away when the file is opened again.
2. One process writes it, which a lock on it ensures. A file that was renamed or removed is left alone, and a
   new one is begun: that is how it is rotated. With a webhook, what was not taken yet is copied into the new
   one first. One that somebody else has cut short goes on from where it ends now.
3. With a webhook, `FILE.sent` says how many bytes were taken: the file's inode and the number. It is replaced
   by renaming, after the webhook has answered. So what was taken may be sent twice after a crash, and is
   never passed over. While the disk takes no note, as a full one, the process itself knows what was taken.
4. With `file_max` a file that would become longer is moved aside and a new one is begun, when what was aside
   before is in the sums (`gateway.billing.sums`). Where that fails it grows on, and the next write tries it
   again.
5. What was taken is cut off once that is `COMPACT_LEN` bytes, or half of what the file may hold where that
   is less, and at least half of the file: a copy of the rest takes the file's place. A copy that is not
   whole, as on a full disk, is thrown away, and made again until it is whole. So a file that is full has room
   again once what it holds was taken, also where the process was ended in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.billing.sums import Sums
from shared.process import logs
from shared.process.files import write_all
from shared.process.setting_values import ConfigError

BATCH_LEN: Final = 256 * 1024
"""Bytes of lines that are sent at once."""
COMPACT_LEN: Final = 1024 * 1024
LINE_LEN_MAX: Final = 16 * 1024
"""Bytes; the names in a line are bounded by the configuration, and take a few hundred."""
assert LINE_LEN_MAX < BATCH_LEN, "a batch has a whole line"

log = logs.get(__name__)


class Batch(Struct, frozen=True):
    """Whole lines, and their place among all that the webhook gets from this file and those after it."""

    start: int
    data: bytes

    @property
    def lines(self) -> int:
        """How many there are."""
        return self.data.count(b"\n")


class Spool:
    """The file. Its calls may come from several threads."""

    def __init__(
        self,
        path: Path,
        len_max: int | None = None,
        *,
        file_max: int | None = None,
        sums: Sums | None = None,
    ) -> None:
        """`len_max` bounds a file that is emptied by sending it, and `file_max` one that is moved aside, of
        which there are `sums`. None: it is neither bounded nor emptied here.

        Raises ConfigError when it cannot be written, or another process writes it.
        """
        self._path: Final = path
        self._sent_path: Final = path.with_name(f"{path.name}.sent")
        self._len_max: Final = len_max
        self._file_max: Final = file_max
        self._sums: Final = sums
        self._lock: Final = threading.Lock()
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError([f"accounting.file: {error}"]) from None
        self._compact_len: Final = COMPACT_LEN if len_max is None else min(COMPACT_LEN, len_max // 2)
        self._sent = 0 if len_max is None else self._read_sent()
        self._base = 0
        """The place of the file's first byte, as `Batch.start` counts."""
        self._is_noted = False
        self._size = os.fstat(self._fd).st_size

    @property
    def waiting(self) -> int:
        """Bytes that were not sent yet."""
        return self._size - self._sent

    def append(self, lines: Sequence[bytes]) -> int:
        """Write lines, and return how many: fewer where the file is full. Raises OSError when none was
        written."""
        with self._lock:
            self._follow()
            count = len(lines)
            if self._len_max is not None:
                ends = accumulate(map(len, lines), initial=self._size)
                count = sum(end <= self._len_max for end in islice(ends, 1, None))
            data = b"".join(lines[:count])
            self._make_room(len(data))
            try:
                write_all(self._fd, data)
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(data)
            return count

    def _make_room(self, length: int) -> None:
        """Move the file aside where it would become too long (rule 4)."""
        if self._sums is None or self._file_max is None or self._size + length <= self._file_max:
            return
        if not self._size:
            return
        try:
            self._sums.take_old()
            os.rename(self._path, self._sums.old)
            self._follow()
        except OSError as error:
            log.error("billing.not_rotated", problem=str(error))

    def all_lines(self) -> Iterator[bytes]:
        """All whole lines. Raises OSError."""
        with self._path.open("rb") as file:
            yield from file

    def last_lines(self, len_max: int) -> Iterator[bytes]:
        """The last whole lines of so many bytes, in their order. Raises OSError."""
        with self._lock:
            start = max(0, self._size - len_max)
            data = os.pread(self._fd, self._size - start, start)
        yield from data[data.find(b"\n") + 1 if start else 0 :].splitlines()

    def sync(self) -> None:
        """Wait until what was written is on the disk. Raises OSError."""
        with self._lock:
            fd = os.dup(self._fd)  # a slow disk is not to hold up `append`
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def next_batch(self) -> Batch | None:
        """The first lines that were not sent. None when all were. Raises OSError."""
        with self._lock:
            self._follow()
            data = os.pread(self._fd, BATCH_LEN, self._sent)
            end = data.rfind(b"\n") + 1
            return Batch(self._base + self._sent, data[:end]) if end else None

    def sent(self, batch: Batch) -> None:
        """Note that a batch was taken. Raises OSError when the disk does not take the note: the batch is
        passed over nevertheless, and `note` is to be called until it succeeds."""
        with self._lock:
            if batch.start == self._base + self._sent:  # else the file was cut short meanwhile
                self._sent += len(batch.data)
            self._is_noted = False
            self._note()

    def note(self) -> None:
        """Write how much was taken, and cut it off where that is due, unless that is done. Raises OSError."""
        with self._lock:
            if not self._is_noted:
                self._note()

    def close(self) -> None:
        """Write what is not on the disk yet, and give the lock up."""
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)

    def _open(self, path: Path | None = None) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(path or self._path, flags, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(fd).st_size
            tail = os.pread(fd, LINE_LEN_MAX, max(0, size - LINE_LEN_MAX))
            os.ftruncate(fd, size - len(tail) + tail.rfind(b"\n") + 1)
        except BlockingIOError:
            os.close(fd)
            raise OSError(f"another process writes {self._path}") from None
        except OSError:
            os.close(fd)
            raise
        return fd

    def _follow(self) -> None:
        """Go on in a new file where this one was renamed or removed, or from where it was cut short (rule 2).
        Raises OSError where nothing was changed."""
        own = os.fstat(self._fd)
        if own.st_size < self._size:
            self._begin_at(own.st_size, is_next=False)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == own.st_ino:
                return
        new = self._open()
        size = os.fstat(new).st_size
        try:
            left = 0 if self._len_max is None else self._copy_left(new)
        except OSError:
            os.ftruncate(new, size)
            os.close(new)
            raise
        old, self._fd = self._fd, new
        os.fsync(old)
        os.close(old)
        self._begin_at(size + left, is_next=size == 0)

    def _begin_at(self, size: int, *, is_next: bool) -> None:
        """Go on with a file of which nothing was sent. `is_next` is true if it begins with what comes next;
        if not, a batch that is under way is none of its."""
        self._base += self._sent if is_next else self._size + 1
        self._size, self._sent, self._is_noted = size, 0, False

    def _note(self) -> None:
        self._follow()
        try:
            if self._sent >= self._compact_len and 2 * self._sent >= self._size:
                self._compact()  # first: the note may need the room that this frees
        finally:
            self._write_sent()
        self._is_noted = True

    def _compact(self) -> None:
        """Cut off what was taken: a copy of the rest takes the file's place (rule 4)."""
        new_path = self._path.with_name(f"{self._path.name}.new")
        new_path.unlink(missing_ok=True)
        new = self._open(new_path)
        try:
            left = self._copy_left(new)
            os.rename(new_path, self._path)
        except OSError:
            os.close(new)
            new_path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = new
        self._begin_at(left, is_next=True)

    def _copy_left(self, new: int) -> int:
        """Copy what was not sent to the end of another file, and return how many bytes."""
        at = self._sent
        while data := os.pread(self._fd, COMPACT_LEN, at):
            write_all(new, data)
            at += len(data)
        os.fsync(new)
        return at - self._sent

    def _read_sent(self) -> int:
        """0 where it says nothing of this file."""
        try:
            inode, sent = map(int, self._sent_path.read_text().split())
        except (OSError, ValueError):
            return 0
        stat = os.fstat(self._fd)
        return sent if inode == stat.st_ino and sent <= stat.st_size else 0

    def _write_sent(self) -> None:
        new_path = self._sent_path.with_name(f"{self._sent_path.name}.new")
        with new_path.open("w") as file:
            file.write(f"{os.fstat(self._fd).st_ino} {self._sent}\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(new_path, self._sent_path)
