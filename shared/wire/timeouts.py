"""Deadlines that callers state in headers, in seconds."""

from __future__ import annotations

import re
from typing import Final

from shared.wire.errors import InvalidRequest

TIMEOUT_S_MAX: Final = 86_400.0
TEXT_LEN_MAX: Final = 64
_DIGITS_MAX: Final = 8
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def stated_timeout_s(header: str, value: str | None) -> float | None:
    """The bound in a header's value, in seconds; None without the header. Raises InvalidRequest, which names
    the header."""
    if value is None:
        return None
    is_number = len(value) <= TEXT_LEN_MAX and _NUMBER.fullmatch(value) is not None
    if not is_number or not 0.0 < (seconds := float(value)) <= TIMEOUT_S_MAX:
        raise InvalidRequest(
            f"{header} must be a number of seconds above 0, up to {TIMEOUT_S_MAX:g}.", param=header
        )
    return seconds


def stated_timeout_ms(header: str, value: str | None) -> float | None:
    """The bound in a header of the hop, in seconds, from whole milliseconds; None without the header. Raises
    InvalidRequest, which names the header."""
    if value is None:
        return None
    is_whole = value.isascii() and value.isdecimal() and len(value) <= _DIGITS_MAX
    if not is_whole or not 0 < int(value) <= 1e3 * TIMEOUT_S_MAX:
        most = f"{1e3 * TIMEOUT_S_MAX:.0f}"
        raise InvalidRequest(f"{header} must be whole milliseconds from 1 to {most}.", param=header)
    return int(value) / 1e3
