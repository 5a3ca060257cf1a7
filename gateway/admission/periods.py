"""Calendar days and months of UTC, as whole numbers.

Times are milliseconds since the Unix epoch. Only whole numbers are divided, each below 2^53, so that a store
in another language (`quota.lua`) computes the same.

The months are counted from March of the year 0, as Howard Hinnant's `civil_from_days` does: the day that a
leap year has more is then the last of its year, and the lengths of months follow one formula
("chrono-Compatible Low-Level Date Algorithms", https://howardhinnant.github.io/date_algorithms.html).
"""

from __future__ import annotations

from typing import Final

DAY_MS: Final = 86_400_000
_EPOCH: Final = 719_468
"""The days from 0000-03-01 to 1970-01-01."""
_ERA: Final = 146_097
"""The days of 400 years, after which the calendar repeats."""


def day_of(ms: int) -> int:
    """The days from the epoch to the day of this moment."""
    return ms // DAY_MS


def month_of(ms: int) -> int:
    """The months from March of the year 0 to the month of this moment."""
    era, day = divmod(ms // DAY_MS + _EPOCH, _ERA)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    return (era * 400 + year) * 12 + (5 * day + 2) // 153


def day_end_ms(ms: int) -> int:
    """The first moment of the next day."""
    return (ms // DAY_MS + 1) * DAY_MS


def month_end_ms(ms: int) -> int:
    """The first moment of the next month."""
    year, month = divmod(month_of(ms) + 1, 12)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5
    return (days - _EPOCH) * DAY_MS
