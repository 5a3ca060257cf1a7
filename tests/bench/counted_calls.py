"""Runs a Python command and counts its calls: `python counted_calls.py OUT COMMAND...`.

OUT gets, when the process ends, a JSON list of `[file, function, line, calls]` for frames of Python, where a
coroutine that is resumed counts again, and one row with an empty file for the calls of functions in C.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
import threading
from collections import Counter
from types import CodeType, FrameType

frames = Counter[CodeType]()
in_c = 0


def note(frame: FrameType, event: str, _argument: object) -> None:
    global in_c
    if event == "call":
        frames[frame.f_code] += 1
    elif event == "c_call":
        in_c += 1


def write(path: str) -> None:
    sys.setprofile(None)
    rows = [[code.co_filename, code.co_qualname, code.co_firstlineno, n] for code, n in frames.items()]
    with open(path, "w") as file:
        json.dump([*rows, ["", "", 0, in_c]], file)


def main() -> None:
    _, out, _python, dash_m, module, *arguments = sys.argv
    assert dash_m == "-m", "a module is run"
    atexit.register(write, out)
    sys.argv = [module, *arguments]
    sys.path[0] = ""  # as for `python -m`
    threading.setprofile(note)
    sys.setprofile(note)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
