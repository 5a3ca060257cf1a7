"""Numbers of bytes as people write them: `512MiB`, `2GB`, `1.5g`."""

from __future__ import annotations

import re
from typing import Final

PATTERN: Final = r"(\d{1,16}(?:\.\d{1,16})?)\s*([kKmMgGtT]?)(i?)[bB]?"
"""The form of a size. With an `i`, or without a `b`, its unit is a power of 1024, else of 1000."""
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int | None:
    """The number of bytes; None when the text is no size."""
    match = re.fullmatch(PATTERN, text.strip())
    if match is None:
        return None
    digits, unit, binary = match.groups()
    is_decimal = unit and not binary and text.strip().lower().endswith("b")
    return int(float(digits) * (1000 if is_decimal else 1024) ** _POWERS[unit.lower()])


def show_size(size: int) -> str:
    """The size in the largest binary unit of which it is a whole multiple."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)
