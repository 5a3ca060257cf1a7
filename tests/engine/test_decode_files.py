"""The way of a decode step through the code: few files, for whoever follows one through it. How many frames
it takes is measured by `python -m tests.bench.calls --decode`."""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FrameType

from engine.core.scheduler_config import SchedulerConfig
from tests.bench.calls import calls_of
from tests.bench.decode_steps import core

FILES = 18
"""The most of our files that a step of one row enters: those of which some function is called."""
STEPS = 50


def test_a_decode_step_enters_few_files() -> None:
    """Without drafts, which are tried as long as they seem to pay."""
    frames = Counter[CodeType]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            frames[frame.f_code] += 1

    with core(STEPS, SchedulerConfig(drafts_max=0)) as loop:
        sys.setprofile(note)
        try:
            loop.run()
        finally:
            sys.setprofile(None)
    files = calls_of(frames, STEPS).by_file
    assert "engine/core/scheduler.py" in files
    assert len(files) <= FILES, sorted(files)
