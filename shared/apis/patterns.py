"""Regular expressions of callers: what one of them asks of the matcher, told from its text alone.

A matcher unrolls counted repeats: `((x{100}){100}){100}` is 29 characters long, and a million when unrolled,
one step over which takes a quarter of a second. Its own limits do not see that, so it is counted here. Where
the text is doubtful (a bracket within a class, say), the count is too high and never too low.
"""

from __future__ import annotations

import re
from typing import Final

from shared.wire.errors import InvalidRequest

PATTERN_LEN_MAX: Final = 16 * 1024
"""Characters of a regular expression."""
UNROLLED_LEN_MAX: Final = 20_000
"""Characters and classes of a regular expression when its counted repeats are written out."""

_PART: Final = re.compile(
    r"""
    (?P<open>\() | (?P<close>\))
    | (?P<count>\{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\})
    | (?P<times>[*+?|^$])
    | (?P<atom>\\[pPxu]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def check_pattern(pattern: str, param: str) -> None:
    """Refuse a regular expression that is too long, as it is or unrolled, or that is not ended. Raises
    InvalidRequest."""
    if len(pattern) > PATTERN_LEN_MAX:
        raise InvalidRequest(f"{param} is longer than {PATTERN_LEN_MAX:,} characters.", param=param)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequest(f"{param} ends with a backslash.", param=param)
    if unrolled_len(pattern) > UNROLLED_LEN_MAX:
        message = f"{param} is longer than {UNROLLED_LEN_MAX:,} characters when its repeats are written out."
        raise InvalidRequest(message, param=param)


def unrolled_len(pattern: str) -> int:
    """The characters and classes of `pattern` when its counted repeats are written out."""
    outer: list[int] = []
    total = last = 0
    for part in _PART.finditer(pattern):
        if part["open"]:
            outer.append(total)
            total = last = 0
        elif part["close"]:
            last, total = total, total + (outer.pop() if outer else 0)
        elif part["count"]:
            times = max(_count(part["least"]), _count(part["most"]), 1)
            total += last * (times - 1)
            last *= times
        elif part["atom"]:
            last = 1
            total += 1
    return total + sum(outer)


def _count(digits: str | None) -> int:
    return int(digits[:9]) if digits else 0
