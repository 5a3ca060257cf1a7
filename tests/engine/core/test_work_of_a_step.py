"""The host's work for a decode step does not depend on the lengths of its sequences."""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType
from typing import Any

from engine.contract.messages import Plan
from engine.core.estimate.cost import eliminate, nonnegative
from tests.engine.core.harness import STEP_S, Harness, greedy

PAGE_SIZE = 16
STEPS = 2 * PAGE_SIZE
"""Steps in which every sequence begins two pages and fills two."""
SHORT, LONG = 100, 20_000
SOLVER = {nonnegative.__qualname__, eliminate.__qualname__}


def work_of_decodes(prompt_len: int) -> tuple[int, int]:
    """The lines of Python that the scheduler executes, and the most memory that it allocates meanwhile, in
    bytes."""
    harness = Harness(
        pages=4 * LONG // PAGE_SIZE, page_size=PAGE_SIZE, max_model_len=2 * LONG, step_tokens_max=2 * LONG
    )
    for handle in (1, 2):
        harness.add(handle, [handle] * prompt_len, greedy(1000))
    harness.steps(3)
    assert [len(harness.tokens[handle]) for handle in (1, 2)] == [3, 3]
    lines = bytes_most = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_qualname.split(".")[0] in SOLVER:
            return None  # every sixteenth step, in passes that depend on the times and not on the lengths
        lines += event == "line"
        return count

    def plan() -> Plan:
        plan = harness.scheduler.plan(harness.now)
        assert plan is not None
        assert plan.lengths == [1, 1]
        return plan

    def watched(work: Any, *arguments: Any) -> Any:
        nonlocal bytes_most
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        tracer = sys.gettrace()  # that which measures coverage, for instance
        sys.settrace(count)
        try:
            return work(*arguments)
        finally:
            sys.settrace(tracer)
            bytes_most = max(bytes_most, tracemalloc.get_traced_memory()[1] - before)

    tracemalloc.start()
    try:
        for _ in range(STEPS):
            planned = watched(plan)
            result = harness.runner.run(planned)
            harness.now += STEP_S
            watched(harness.scheduler.commit, planned, result, harness.now)
            assert watched(harness.scheduler.report) is not None
    finally:
        tracemalloc.stop()
    return lines, bytes_most


def test_a_decode_steps_host_work_does_not_grow_with_the_sequence() -> None:
    short_lines, short_bytes = work_of_decodes(SHORT)
    long_lines, long_bytes = work_of_decodes(LONG)
    assert long_lines < 1.1 * short_lines
    assert long_bytes < short_bytes + 2 * LONG, "less than a byte for each token of both"
