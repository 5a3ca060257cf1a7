"""Reading and writing files by whole contents."""

from __future__ import annotations

import os


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a descriptor: one call may write a part, as on a disk that is nearly full.
    Raises OSError, after which some of it may have been written."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
