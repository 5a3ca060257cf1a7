"""Sums of billing lines that were rotated away, by key, model and day, in `FILE.sums`.

A file with `file_max` is moved to `FILE.old` when it is full, in place of the one that was moved before, of
which the lines are added to the sums first. So there are two files of `file_max` bytes at most, and the sums,
and each line is in one of the three.

The sums are replaced in one step, and say whose lines they had last: the file's first line names it, as its
id is that of no other line. Where the process ended before that file was replaced, it is `FILE.old`, and
counts no more. Blocking calls, for a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.admission.usage import UsageRow, UsageRows
from shared.wire.undecodable import UNDECODABLE

SUMS_LEN_MAX: Final = 64 * 1024 * 1024
"""Bytes of sums that are read: some 300,000 rows."""

Count = Callable[[UsageRows, bytes], None]
"""Counts a line."""


class SumsOf(Struct, frozen=True):
    """The contents of the file of sums."""

    last: str
    """Names the file whose lines were added last."""
    rows: list[UsageRow]


class Sums:
    """The sums of the lines of one file that were rotated away."""

    def __init__(self, path: Path, days_kept: int, count: Count) -> None:
        """`path` is the file's."""
        self._path: Final = path.with_name(f"{path.name}.sums")
        self.old: Final = path.with_name(f"{path.name}.old")
        """The path of the file that was moved aside last."""
        self._days_kept: Final = days_kept
        self._count: Final = count

    def count_into(self, rows: UsageRows) -> None:
        """Count all that was rotated away. Raises OSError."""
        sums = self._read()
        for row in sums.rows:
            rows.add(row)
        if self._name() not in (None, sums.last):
            for line in _lines(self.old):
                self._count(rows, line)

    def take_old(self) -> None:
        """Add the lines of `FILE.old`, which may be replaced then. Raises OSError where they could not be."""
        sums, name = self._read(), self._name()
        if name is None or name == sums.last:
            return
        rows = UsageRows(self._days_kept)
        self.count_into(rows)
        told = [row for tenant in sorted(rows.tenants()) for row in rows.of(tenant, 0, 2**63)]
        draft = self._path.with_name(f"{self._path.name}.new")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(SumsOf(name, told)))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._path)

    def _name(self) -> str | None:
        """The name of `FILE.old` by what it has. None where there is none, or nothing in it."""
        with contextlib.suppress(FileNotFoundError):
            for line in _lines(self.old):
                return hashlib.sha256(line).hexdigest()
        return None

    def _read(self) -> SumsOf:
        """Nothing where there are none yet. Raises OSError where they are not ours."""
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(SUMS_LEN_MAX), type=SumsOf)
        except FileNotFoundError:
            return SumsOf("", [])
        except UNDECODABLE:
            raise OSError(f"{self._path} has no sums") from None


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file
