"""Runs and measures a row on the current CUDA device."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from tests.bench.engine.gpu.results import write
from tests.bench.engine.gpu.supervise import HUNG, LOST, SHARE_VARIABLE, TRIED_VARIABLE

ROW_LIMIT_S: Final = 60.0
"""Seconds after which a row counts as hanging."""
MESSAGE_LEN_MAX: Final = 1200
"""The longest message. Its end is kept too: a compiler's errors end with the cause."""
PLACES: Final = 4
_ROOT: Final = Path(__file__).parents[4]
_rows: Final = count()


def check(
    part: str,
    row: str,
    run: Callable[[], Mapping[str, Any]],
    *,
    limit_s: float = ROW_LIMIT_S,
    absent: type[Exception] | tuple[()] = (),
) -> bool:
    """Run one check, if it is this process's turn. An error is its result, and the next check still runs.

    `absent`: the error of a check that has nothing to check. A CUDA error ends the process, since no result
    after it can be trusted, and so does a check that hangs: `supervise` starts another process.
    """
    if not _is_ours(row):
        return True
    with _deadline(part, row, limit_s):
        try:
            found = run()
        except absent as error:
            write(part, row, absent=str(error))
            return True
        except Exception as error:  # a compiler's, or a library's: it is this row's result
            at = _places(traceback.extract_tb(error.__traceback__))
            write(part, row, ok=False, error=_message(error), at=at)
            if isinstance(error, torch.AcceleratorError) or not _is_sound():
                _leave(LOST)
            return False
    write(part, row, ok=True, **found)
    return True


def _is_ours(row: str) -> bool:
    """True if this process runs the row: it is in this share and was not tried before. Notes it as tried."""
    number, shares = map(int, os.environ.get(SHARE_VARIABLE, "0/1").split("/"))
    is_ours = next(_rows) % shares == number
    file = os.environ.get(TRIED_VARIABLE)
    if not is_ours or file is None:
        return is_ours
    if row in Path(file).read_text().splitlines():
        return False
    with Path(file).open("a") as tried:
        tried.write(f"{row}\n")
    return True


@contextmanager
def _deadline(part: str, row: str, limit_s: float) -> Iterator[None]:
    """End the process after a time, from another thread: a wait for a kernel that never ends cannot be
    interrupted."""
    waiting = threading.get_ident()

    def give_up() -> None:
        at = _places(traceback.extract_stack(sys._current_frames()[waiting]))
        write(part, row, ok=False, error=f"not done in {limit_s:g} s", at=at)
        _leave(HUNG)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_sound() -> bool:
    """True if the device still works. A lost device is reported to torch, too, when it waits."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _leave(status: int) -> None:
    """End the process at once: a regular exit would wait for the device."""
    sys.stderr.flush()
    os._exit(status)


def _message(error: Exception) -> str:
    text, half = f"{type(error).__name__}: {error}", MESSAGE_LEN_MAX // 2
    return text if len(text) <= MESSAGE_LEN_MAX else f"{text[:half]} ... {text[-half:]}"


def _places(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """The lines of an error's trace in this project's files, the innermost first."""
    ours = [f for f in frames if _ROOT in Path(f.filename).parents and f.filename != __file__]
    return [f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in reversed(ours[-PLACES:])]


def graph_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of a run, ms, of many that are captured and replayed, without the host's time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # inputs of `run` may still be on their way
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return span_ms(graph.replay, repetitions)


def span_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of a run, ms, of many behind each other."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repetitions
