"""Pages of the KV cache in a directory: one file each, found again after a restart.

    <name, 64 hex digits>.kv      header, then the page's bytes
    <name>.tmp                    a file that is being written

The header has a magic, the format's version, the length, a fingerprint of all that decides what a page holds
(model, geometry, types, layout), the page's identity, and a SHA-256 of all of this and of the page. The name
is a SHA-256 of fingerprint and identity, so that pages of the same tokens by two models lie side by side.

Rules

1. A file is of use only if every field of its header is as expected and its checksum holds. Otherwise it is
   a miss, and removed: truncated, damaged, of another version, or under another's name. Whole files of other
   fingerprints stay as long as there is room, for an engine that comes back after one that merely differed.
2. A file is written under another name and renamed, so that a reader sees it whole. Nothing is synced: a file
   that a power failure tore has a wrong checksum.
3. Files may be deleted at any time by anybody: that is a miss. Nothing is touched whose name is not as above.
4. The files take `bytes_max` at most, all fingerprints together: before one is written, others are removed,
   those of other fingerprints first, and of each kind those that were read or written longest ago. Over
   restarts their modification times tell.
5. The directory is locked while it is open, by its own descriptor, so that deleting what is in it does not
   unlock it. All names are relative to that descriptor. Its mode is 0700 and the files' is 0600: they hold
   what users wrote. It is made so; one that is there is refused when it is another user's or open to others,
   and never changed, but for this: Kubernetes opens what is in a volume to the group of its pod at each
   mount, so that one that is open to its group alone, and holds nothing but these files, is closed again.

Calls may come from several threads. The index is locked, and never during input or output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.core.pages.block_manager import PageIdentity
from shared.process.files import write_all

MAGIC: Final = b"PENSTKKV"
VERSION: Final = 2
FIELDS: Final = struct.Struct("<8sIIQ32s32s")
"""Magic, version, zero, length of the page, fingerprint, identity."""
HEADER_LEN: Final = FIELDS.size + hashlib.sha256().digest_size
FILES_MAX: Final = 1 << 20
"""Files that a scan looks at, and that there are at most; what a scan finds beyond is left alone."""
_NAME: Final = re.compile(r"([0-9a-f]{64})\.(kv|tmp)")
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW


class DirectoryRefused(Exception):
    """The directory is not this engine's."""


class DirectoryInUse(DirectoryRefused):
    """Another engine has the directory."""


class DirectoryNotPrivate(DirectoryRefused):
    """The directory is another user's, or open to others."""


def open_directory(path: Path) -> int:
    """The descriptor of the directory, which is made when it is not there, and locked. Raises
    DirectoryRefused, or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_private(directory, path)
        _lock(directory, path)
    except BaseException:
        os.close(directory)
        raise
    return directory


@dataclass(frozen=True, slots=True)
class _Header:
    """A whole file of any fingerprint, as far as its header tells."""

    written_at: int
    """Its modification time, in nanoseconds."""
    file_len: int
    fingerprint: bytes
    identity: PageIdentity


class PageFiles:
    """The page files of one engine."""

    def __init__(self, directory: int, fingerprint: bytes, page_bytes: int, bytes_max: int) -> None:
        """`directory` is from `open_directory`, and closed by `close`. `scan` finds what it holds."""
        assert len(fingerprint) == 32
        self._directory: Final = directory
        self._fingerprint: Final = fingerprint
        self._page_bytes: Final = page_bytes
        self.file_len: Final = HEADER_LEN + page_bytes
        self._bytes_max: Final = bytes_max
        self._lock: Final = threading.Lock()
        self._files: OrderedDict[PageIdentity, None] = OrderedDict()  # removed from the front
        self._others: OrderedDict[str, int] = OrderedDict()
        """The lengths of the files of other fingerprints, by name; removed from the front."""
        self._others_len = 0  # bytes of all of these

    def __len__(self) -> int:
        return len(self._files)

    @property
    def others(self) -> int:
        """The number of files of other fingerprints."""
        return len(self._others)

    def has(self, identity: PageIdentity) -> bool:
        with self._lock:
            return identity in self._files

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._directory)

    def scan(self) -> None:
        """Find the files of earlier runs, and remove those that are of no use here, as far as their headers
        tell. Raises OSError."""
        found: list[tuple[int, PageIdentity]] = []
        others: list[tuple[int, str, int]] = []
        with os.scandir(self._directory) as entries:
            names = [entry.name for _, entry in zip(range(FILES_MAX), entries, strict=False)]
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            header = self._header(name) if match[2] == "kv" else None
            if header is None:
                self._unlink(name)
            elif header.fingerprint == self._fingerprint:
                found.append((header.written_at, header.identity))
            else:
                others.append((header.written_at, name, header.file_len))
        with self._lock:
            self._others = OrderedDict((name, length) for _, name, length in sorted(others))
            self._others_len = sum(self._others.values())
            newer, self._files = self._files, OrderedDict()
            self._files.update(dict.fromkeys(identity for _, identity in sorted(found)))
            for identity in newer:
                self._files[identity] = None
                self._files.move_to_end(identity)
        self._make_room(0)

    def _header(self, name: str) -> _Header | None:
        """A file's header; None when the file is of no use to any engine."""
        try:
            file = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=self._directory)
        except OSError:
            return None
        with contextlib.closing(os.fdopen(file, "rb", buffering=0)) as opened:
            status = os.fstat(file)
            fields = opened.read(FIELDS.size) if stat.S_ISREG(status.st_mode) else b""
        if len(fields) < FIELDS.size:
            return None
        magic, form, zero, length, fingerprint, identity = FIELDS.unpack(fields)
        found = (magic, form, zero, HEADER_LEN + length, name)
        if found != (MAGIC, VERSION, 0, status.st_size, _name(fingerprint, identity)):
            return None
        if fingerprint == self._fingerprint and length != self._page_bytes:
            return None
        return _Header(status.st_mtime_ns, status.st_size, fingerprint, PageIdentity(identity))

    def _fields(self, identity: PageIdentity) -> bytes:
        return FIELDS.pack(MAGIC, VERSION, 0, self._page_bytes, self._fingerprint, identity)

    def write(self, identity: PageIdentity, page: memoryview) -> bool:
        """Write a page. False when there is no room for any. Raises OSError, and leaves nothing behind
        then."""
        assert len(page) == self._page_bytes
        if self.file_len > self._bytes_max:
            return False
        if self.has(identity):
            return True
        self._make_room(1)
        fields = self._fields(identity)
        header = fields + _digest(fields, page)
        name = self._name(identity)
        temporary = name.replace(".kv", ".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS
        try:
            file = os.open(temporary, flags, 0o600, dir_fd=self._directory)
            with contextlib.closing(os.fdopen(file, "wb", buffering=0)) as opened:
                write_all(opened.fileno(), header)
                write_all(opened.fileno(), page)
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            self._unlink(temporary)
            raise
        with self._lock:
            self._files[identity] = None
        return True

    def read_into(self, identity: PageIdentity, page: memoryview) -> bool:
        """Read a page. False when it is not there or of no use; then `page` holds anything. Raises OSError
        when the directory cannot be read."""
        assert len(page) == self._page_bytes
        try:
            file = os.open(self._name(identity), os.O_RDONLY | _FLAGS, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # gone, or a link in its place
                raise
            self._forget(identity)
            return False
        with contextlib.closing(os.fdopen(file, "rb", buffering=0)) as opened:
            is_good = self._read_checked(opened.fileno(), identity, page)
            if is_good:
                os.utime(file)
        if not is_good:
            self._forget(identity)
            return False
        with self._lock:
            if identity in self._files:
                self._files.move_to_end(identity)
        return True

    def _read_checked(self, file: int, identity: PageIdentity, page: memoryview) -> bool:
        if os.fstat(file).st_size != self.file_len:
            return False
        header, fields = os.read(file, HEADER_LEN), self._fields(identity)
        if header[: FIELDS.size] != fields:
            return False
        done = 0
        while done < len(page):
            count = os.readv(file, [page[done:]])
            if not count:
                return False
            done += count
        return header[FIELDS.size :] == _digest(fields, page)

    def drop(self, identity: PageIdentity) -> bool:
        """Find a page no more, from now on. Returns whether it was found. Does no input or output."""
        with self._lock:
            if identity not in self._files:
                return False
            del self._files[identity]
            return True

    def remove(self, identity: PageIdentity) -> bool:
        """Remove the file of a page that is not found any more; one that was written again stays."""
        if self.has(identity):
            return False
        self._unlink(self._name(identity))
        return True

    def _forget(self, identity: PageIdentity) -> None:
        if self.drop(identity):
            self.remove(identity)

    def _make_room(self, count: int) -> None:
        """Remove files so that there is room for `count` more, other fingerprints' first and the longest
        unused (rule 4)."""
        while True:
            with self._lock:
                own = len(self._files) + count
                has_room = own * self.file_len + self._others_len <= self._bytes_max
                if has_room and own + len(self._others) <= FILES_MAX:
                    return
                if self._others:
                    name, length = self._others.popitem(last=False)
                    self._others_len -= length
                else:
                    name = self._name(self._files.popitem(last=False)[0])
            self._unlink(name)

    def _name(self, identity: PageIdentity) -> str:
        return _name(self._fingerprint, identity)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it is gone already, or stays, and is found to be of no use
            os.unlink(name, dir_fd=self._directory)


def _name(fingerprint: bytes, identity: bytes) -> str:
    return f"{hashlib.sha256(fingerprint + identity).hexdigest()}.kv"


def _check_private(directory: int, path: Path) -> None:
    """Raise DirectoryNotPrivate where what users wrote must not be kept. OSError, too."""
    status = os.fstat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        raise DirectoryNotPrivate(f"{path} belongs to another user (uid {status.st_uid})")
    if not mode & 0o077:
        return
    with os.scandir(directory) as entries:
        is_of_pages = all(_NAME.fullmatch(entry.name) for entry in entries)
    if mode & (stat.S_ISVTX | 0o007) or not is_of_pages:
        raise DirectoryNotPrivate(
            f"{path} is open to others (mode {mode:04o}), and is to hold what users wrote: name one that "
            "is not there, which is made, or one with mode 0700"
        )
    os.fchmod(directory, 0o700)


def _lock(directory: int, path: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryInUse(
            f"{path} is in use by another engine: give each a directory of its own"
        ) from None


def _digest(fields: bytes, page: memoryview) -> bytes:
    digest = hashlib.sha256(fields)
    digest.update(page)
    return digest.digest()
