"""The load of an engine of another make, as its metrics tell it. No I/O.

vLLM, SGLang and llama.cpp show how many requests they compute and how many wait, in Prometheus's text format.
None of them tells the prompt tokens that wait, so each waiting request counts as `WAITING_LEN`.
"""

from __future__ import annotations

import math
import re
from typing import Final

from shared.wire.load_report import LoadReport

EXPOSITION_LEN_MAX: Final = 1024 * 1024
"""Bytes of metrics that are read. vLLM's are about 100 KiB."""
REQUESTS_MAX: Final = 1_000_000
"""A number of requests above this is no number of requests."""
WAITING_LEN: Final = 512
"""The prompt tokens that a waiting request counts as."""
WAITING: Final = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred")
RUNNING: Final = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing")
_SAMPLE: Final = re.compile(
    rb"^(%b)(?:\{[^\n]*\})?[ \t]+([0-9.eE+-]{1,32})(?:[ \t]+[0-9]+)?[ \t]*\r?$"
    % b"|".join(WAITING + RUNNING),
    re.MULTILINE,
)


def parse_exposition(text: bytes, own: int = 0) -> LoadReport | None:
    """The load in an engine's metrics; None where they do not tell it. A metric with several series is their
    sum. `own` is how many of the waiting requests the caller counts by itself."""
    sums: dict[bytes, float] = {}
    for name, number in _SAMPLE.findall(text):
        try:
            value = float(number)
        except ValueError:
            return None
        if not math.isfinite(value) or not 0 <= value <= REQUESTS_MAX:
            return None
        sums[name] = sums.get(name, 0.0) + value
    if not sums:
        return None
    waiting = min(REQUESTS_MAX, int(sum(sums.get(name, 0.0) for name in WAITING)))
    running = min(REQUESTS_MAX, int(sum(sums.get(name, 0.0) for name in RUNNING)))
    return LoadReport((0, max(0, waiting - own) * WAITING_LEN, 0), waiting + running)
