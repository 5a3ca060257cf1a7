"""How a row is run and how it is measured, on the current CUDA device."""

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

from engine.bench.gpu.results import write
from engine.bench.gpu.supervise import HUNG, LOST, SHARE_VARIABLE, TRIED_VARIABLE

ROW_LIMIT_S: Final = 60.0
"""What takes longer hangs."""
MESSAGE_LEN_MAX: Final = 1200
"""Of which the end is kept too: a compiler's errors end with what is wrong."""
PLACES: Final = 4
_ROOT: Final = Path(__file__).parents[3]
_rows: Final = count()


def check(
    part: str,
    row: str,
    run: Callable[[], Mapping[str, Any]],
    *,
    limit_s: float = ROW_LIMIT_S,
    absent: type[Exception] | tuple[()] = (),
) -> bool:
    """Run one check, if it is this process's turn; what it raises is its result, and the next one still runs.
    `absent`: what it raises where there is nothing to check. A CUDA error ends the process, since nothing
    after it can be believed, and so does a check that hangs: `supervise` starts another."""
    if not _is_ours(row):
        return True
    with _deadline(part, row, limit_s):
        try:
            found = run()
        except absent as error:
            write(part, row, absent=str(error))
            return True
        except Exception as error:  # a compiler's, a library's of another version: it is this row's
            at = _places(traceback.extract_tb(error.__traceback__))
            write(part, row, ok=False, error=_message(error), at=at)
            if isinstance(error, torch.AcceleratorError) or not _is_sound():
                _leave(LOST)
            return False
    write(part, row, ok=True, **found)
    return True


def _is_ours(row: str) -> bool:
    """Neither another share's nor tried before. It is noted as tried."""
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
    """Who waits for a kernel that never ends cannot be interrupted: another thread ends the process."""
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
    """Whoever was the first to be told that a device is lost, torch is told too when it waits."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _leave(status: int) -> None:
    """At once: what would be tidied up waits for the device."""
    sys.stderr.flush()
    os._exit(status)


def _message(error: Exception) -> str:
    text, half = f"{type(error).__name__}: {error}", MESSAGE_LEN_MAX // 2
    return text if len(text) <= MESSAGE_LEN_MAX else f"{text[:half]} ... {text[-half:]}"


def _places(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """In our own files, the innermost first."""
    ours = [f for f in frames if _ROOT in Path(f.filename).parents and f.filename != __file__]
    return [f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in reversed(ours[-PLACES:])]


def graph_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of one of many runs, captured and replayed, so that the host plays no part."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what `run` reads may still be on its way
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return span_ms(graph.replay, repetitions)


def span_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of one of many runs behind each other."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repetitions
