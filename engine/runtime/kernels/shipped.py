"""Kernels that an image brings along, compiled when it was built.

Triton keeps each kernel in a folder. The folder's name is a hash of all that decides the machine code: Triton
itself, ptxas, the card's make, the kernel's source and what it is specialised for. So a kernel of another
release is never taken by mistake: it is not found, and is compiled.

Triton's own cache has to be writable, and is lost with its volume. `ShippedCache` looks there first and then
among the shipped kernels, which nobody has to be able to write. Triton takes it by name:

    TRITON_CACHE_MANAGER=engine.runtime.kernels.shipped:ShippedCache

`engine.runtime.device.shipping` fills the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec
from triton.runtime.cache import FileCacheManager

SHIPPED: Final = Path(sys.prefix, "share/penstock/triton")
"""The folder of an image's own kernels."""


class _Group(msgspec.Struct, frozen=True):
    """Triton's list of one kernel's files. Their paths are those of the machine that compiled them."""

    child_paths: dict[str, str]


class ShippedCache(FileCacheManager):  # type: ignore[misc]  # mypy does not read Triton
    """Triton's cache of one kernel, and the shipped one behind it."""

    def get_file(self, filename: str) -> str | None:
        """The file's path, or None."""
        own: str | None = super().get_file(filename)
        return own or _existing(SHIPPED / self.key / filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by name, or None. A shipped kernel is whole or is not taken."""
        own: dict[str, str] | None = super().get_group(filename)
        if own is not None:
            return own
        folder = SHIPPED / self.key
        try:
            names = msgspec.json.decode((folder / f"__grp__{filename}").read_bytes(), type=_Group).child_paths
        except (OSError, msgspec.DecodeError):
            return None
        found = {name: path for name in names if (path := _existing(folder / name)) is not None}
        return found if len(found) == len(names) else None


def _existing(path: Path) -> str | None:
    return str(path) if path.is_file() else None
