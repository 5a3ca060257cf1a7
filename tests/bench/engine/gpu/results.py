"""The results file: one JSON object per line, written as soon as it is known. No torch here.

Every line has `part` and `row`; a row that was checked or measured has `ok`, and figures of its own. The last
line of a row counts: a part may be run again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RESULTS_VARIABLE: Final = "PENSTOCK_GPU_RESULTS"
Line = Mapping[str, Any]


def path() -> Path:
    return Path(os.environ[RESULTS_VARIABLE])


def write(part: str, row: str, **fields: Any) -> None:
    """Append and show a line. `row` is the name by which the table finds it."""
    line = append(path(), part, row, fields)
    sys.stdout.write(line)
    sys.stdout.flush()


def append(file: Path, part: str, row: str, fields: Mapping[str, Any]) -> str:
    """Append a line and return it. It is written in one piece, as several processes may write."""
    line = json.dumps({"part": part, "row": row, **fields}) + "\n"
    with file.open("ab", buffering=0) as results:
        results.write(line.encode())
    return line


def read(file: Path | None = None) -> list[Line]:
    file = path() if file is None else file
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def floors() -> tuple[float, float]:
    """The card's measured rates: bytes per second, operations per second."""
    found = [line for line in read() if line["part"] == "floors" and line["row"] == "card"]
    assert found, "the part `floors` has to run first"
    return found[-1]["read_bytes_per_s"], found[-1]["bf16_flops"]
