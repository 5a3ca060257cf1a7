"""The results file: one JSON object per line, written as soon as it is known. No torch here.

Every line has `part` and `row`; what was checked or measured has `ok`, and figures of its own. The last word
on a row counts: a part may be run again.
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
    """Keep and show. `row` names what was checked or measured; it is how the table finds it."""
    line = append(path(), part, row, fields)
    sys.stdout.write(line)
    sys.stdout.flush()


def append(file: Path, part: str, row: str, fields: Mapping[str, Any]) -> str:
    """The line as it was written. In one piece: several processes may write."""
    line = json.dumps({"part": part, "row": row, **fields}) + "\n"
    with file.open("ab", buffering=0) as results:
        results.write(line.encode())
    return line


def read(file: Path | None = None) -> list[Line]:
    file = path() if file is None else file
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def floors() -> tuple[float, float]:
    """(bytes per second, operations per second) that this card was measured to do."""
    found = [line for line in read() if line["part"] == "floors" and line["row"] == "card"]
    assert found, "the part `floors` has to run first"
    return found[-1]["read_bytes_per_s"], found[-1]["bf16_flops"]
