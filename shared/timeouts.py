"""Deadlines that callers state in headers, in seconds."""

from __future__ import annotations

import math
from typing import Final

from shared.errors import InvalidRequest

TIMEOUT_S_MAX: Final = 86_400.0
TEXT_LEN_MAX: Final = 64


def stated_timeout_s(header: str, value: str | None) -> float | None:
    """The bound in a header's value, in seconds; None without the header. Raises InvalidRequest, which names
    the header."""
    if value is None:
        return None
    try:
        seconds = float(value[: TEXT_LEN_MAX + 1])
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= TIMEOUT_S_MAX or len(value) > TEXT_LEN_MAX:
        raise InvalidRequest(
            f"{header} must be a number of seconds above 0, up to {TIMEOUT_S_MAX:g}.", param=header
        )
    return seconds
