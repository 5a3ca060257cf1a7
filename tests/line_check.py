"""Every completed line that a service writes in this process, held against `shared.wire.completed_line`.

The check is not in the log writer: a line is on every request's way, and checking one takes as long as
writing it. Nor does it raise where the line is written, as a service goes on whatever happens to its log.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import Struct

from shared.process import logs
from shared.wire.completed_line import ENGINE_STAGES, EVENT, GATEWAY_STAGES, EngineLine, GatewayLine

PROBLEMS_MAX: Final = 20
UNNAMED_MS_MAX: Final = 1.0
"""Milliseconds of a request that may be in none of its stages, for rounding. It does not grow with load: the
stages are made so that they add up."""


def schema_problem(line: Mapping[str, object]) -> str | None:
    """The difference between a line as it was written and the schema; None when there is none."""
    kind = GatewayLine if line.get("service") == "gateway" else EngineLine
    if unknown := line.keys() - set(kind.__struct_fields__):
        return f"no field of {kind.__name__}: {', '.join(sorted(unknown))}"
    if empty := [name for name, value in line.items() if value is None]:
        return f"null, and not left out: {', '.join(empty)}"
    try:
        msgspec.convert(line, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return None


class LineCheck:
    """Stands before `logs.write`, and keeps what is wrong with the lines that pass."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self.checked = 0
        """Completed lines that have passed."""
        self.write = logs.write
        """The writer itself."""

    def install(self) -> None:
        """Once in a process, and for its whole life: services write while fixtures come and go."""
        write, write_line = self.write, logs.write_line

        def checked_write(event: str, fields: Mapping[str, object], level: str = "info") -> None:
            if event == EVENT:
                self._check(fields, level)
            write(event, fields, level)

        def checked_write_line(line: Struct, level: str) -> bytes | None:
            if getattr(line, "event", None) == EVENT:
                self._check(msgspec.json.decode(msgspec.json.encode(line)), level)
            return write_line(line, level)

        logs.write = checked_write
        logs.write_line = checked_write_line

    def take(self) -> list[str]:
        """The problems since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def _check(self, fields: Mapping[str, object], level: str) -> None:
        self.checked += 1
        service = str(fields.get("logger")).partition(".")[0]
        line = {"ts": datetime.now(UTC), "level": level, "service": service, "event": EVENT, **fields}
        problem = schema_problem(line) or unnamed_time(line)
        if problem and len(self._problems) < PROBLEMS_MAX:
            self._problems.append(f"{problem} in {line}")


def unnamed_time(line: Mapping[str, object]) -> str | None:
    """The difference between a request's time and that of its stages; None when every millisecond is
    named."""
    names = GATEWAY_STAGES if line["service"] == "gateway" else ENGINE_STAGES
    stages_ms = sum(float(str(line.get(f"{name}_ms", 0.0))) for name in names)
    rest_ms = float(str(line["total_ms"])) - stages_ms
    if abs(rest_ms) <= UNNAMED_MS_MAX:
        return None
    return f"{rest_ms:.3f} ms are in no stage"


SUITES: Final = LineCheck()
"""The one that `tests.conftest` installs."""
