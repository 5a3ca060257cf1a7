"""The last hours by the minute: how many requests ended, how, how fast, and with how many tokens.

Rules:

1. A request is noted once, at its end, with what its completed line has: a few additions, no look at a clock,
   nothing that is worked out. Quantiles are the reader's (`edges_ms`).
2. There are `MINUTES_MAX` minutes, `KINDS_MAX` pairs of a model and a replica in each (those beyond share
   one), `CODES_MAX` codes of errors in each of these, and `CELLS_MAX` pairs in all minutes: the oldest go.
3. The time of the first token, and the mean time between two tokens, are those of streams that have all of
   their answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct, field

from shared.wire.completed_line import GatewayLine
from shared.wire.end_reason import EndReason

MINUTES_MAX: Final = 360
KINDS_MAX: Final = 256
CODES_MAX: Final = 32
CELLS_MAX: Final = 2048
BUCKETS: Final = 96
PER_OCTAVE: Final = 4
"""The buckets in which times double."""
NONE: Final = "none"
"""The model of a request that named none that there is, and the replica of one that reached none."""
OTHER: Final = "other"
_MINUTE: Final = timedelta(minutes=1)
_OK: Final = EndReason.OK
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


def edges_ms() -> list[float]:
    """The upper ends of the buckets, in milliseconds. The last one has all that is longer, too."""
    return [round((2.0 ** ((at + 1) / PER_OCTAVE) - 1.0) / 10.0, 4) for at in range(BUCKETS)]


_EDGES_MS: Final = edges_ms()[:-1]


def _buckets() -> list[int]:
    return [0] * BUCKETS


class Cell(Struct, eq=False):
    """What ended in one minute, of one model at one replica."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first: list[int] = field(default_factory=_buckets)
    """Streams by the time of their first token."""
    gaps: list[int] = field(default_factory=_buckets)
    """Streams by their mean time between two tokens."""
    errors: dict[str, int] = field(default_factory=dict)
    """Requests without their whole answer, by the error's code, or the reason of their end."""

    def failed(self, code: str) -> None:
        """Count an error."""
        if code not in self.errors and len(self.errors) >= CODES_MAX:
            code = OTHER
        self.errors[code] = self.errors.get(code, 0) + 1


Kind = tuple[str | None, str | None]
"""A model and a replica."""


class Minute(Struct, frozen=True):
    """One minute."""

    at: datetime
    """Its beginning."""
    cells: dict[Kind, Cell]


class Minutes:
    """The last minutes in which requests ended."""

    def __init__(self) -> None:
        self._minutes: Final[deque[Minute]] = deque()
        self._cells: dict[Kind, Cell] = {}
        """Those of the latest minute."""
        self._ends = _NEVER
        """The end of that minute."""
        self._count = 0
        """The cells of all minutes."""

    def note(self, line: GatewayLine) -> None:
        """Count a request that has ended."""
        if line.ts >= self._ends:
            self._turn(line.ts)
        kind = line.model, line.replica
        cell = self._cells.get(kind) or self._cell(kind)
        cell.requests += 1
        if (prompt := line.prompt_tokens) is not None:
            cell.prompt_tokens += prompt
        if cached := line.cached_tokens:
            cell.cached_tokens += cached
        if line.end_reason is not _OK:
            cell.failed(line.error_code or line.end_reason)
            return
        if tokens := line.completion_tokens:
            cell.completion_tokens += tokens
        if line.stream and (first_ms := line.first_byte_ms) is not None:
            cell.first[bisect_right(_EDGES_MS, first_ms)] += 1
            if tokens and tokens > 1:
                cell.gaps[bisect_right(_EDGES_MS, (line.total_ms - first_ms) / (tokens - 1))] += 1

    @property
    def version(self) -> tuple[int, int]:
        """Two numbers that change whenever a request is noted."""
        latest = int(self._minutes[-1].at.timestamp()) if self._minutes else 0
        return latest, sum(cell.requests for cell in self._cells.values())

    def since(self, at: datetime | None) -> Iterator[Minute]:
        """The minutes that are kept, the oldest first; with `at` those that began then or later."""
        for minute in self._minutes:
            if at is None or minute.at >= at:
                yield minute

    def _turn(self, now: datetime) -> None:
        """Begin a minute. Should the clock have been set back, the one that is later goes on."""
        at = now.replace(second=0, microsecond=0)
        self._ends, self._cells = at + _MINUTE, {}
        self._minutes.append(Minute(at, self._cells))
        while self._minutes[0].at <= at - MINUTES_MAX * _MINUTE:
            self._drop()

    def _cell(self, kind: Kind) -> Cell:
        if len(self._cells) >= KINDS_MAX:
            kind = OTHER, OTHER
        if (cell := self._cells.get(kind)) is None:
            cell = self._cells[kind] = Cell()
            self._count += 1
            while self._count > CELLS_MAX and len(self._minutes) > 1:
                self._drop()
        return cell

    def _drop(self) -> None:
        self._count -= len(self._minutes.popleft().cells)
