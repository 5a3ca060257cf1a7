"""The figures in an engine's metrics that the console shows. No I/O.

A sample is what the counters and gauges said at one moment; figures are made of two samples, for what is told
per second. Metrics that are not there, as those of engines of another make, leave their figures out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

SAMPLE_AGE_MAX_S: Final = 30.0
"""A sample that is older is not compared with: its mean would say nothing about now."""
VALUE_MAX: Final = 1e18
_PREFIX: Final = b"penstock_engine_"
_NAMES: Final = (
    *("running_sequences", "stalled_sequences", "class_waiting", "kv_pages", "host_pages", "open_sequences"),
    *("step_seconds_sum", "step_seconds_count", "generated_tokens_total", "prompt_tokens_total"),
    *("preemptions_total", "prefix_query_tokens_total", "prefix_hit_tokens_total"),
)
_LABEL: Final = rb'(?:service_class|state|kind)="([a-z_]{1,32})"'
_LINE: Final = re.compile(
    rb"^%b(%b)(?:\{%b\})?[ \t]+([0-9.eE+-]{1,32})(?:[ \t][^\n]*)?$"
    % (_PREFIX, "|".join(_NAMES).encode(), _LABEL),
    re.MULTILINE,
)

Sample = Mapping[str, float]
"""Values by name, `name/label` where the metric has one."""


class EngineFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine at one moment."""

    running: int | None = None
    """Sequences that hold a slot."""
    stalled: int | None = None
    """Sequences whose client does not read."""
    waiting: dict[str, int] = {}
    """Sequences that wait for a slot, by service class."""
    pages: dict[str, int] = {}
    """Pages of the KV cache: owned, cached, free."""
    host_pages: dict[str, int] = {}
    """Pages in host memory: used, free."""
    step_ms: float | None = None
    """The mean time of the steps since the sample before. None where there was none."""
    generated_per_s: float | None = None
    """Tokens that were generated, since the sample before."""
    prompt_per_s: float | None = None
    """Prompt tokens of the requests that were taken, since the sample before."""
    preemptions: int | None = None
    """Preemptions since its start."""
    cache_hit_percent: float | None = None
    """The part of the prompt tokens that were found in the prefix cache, since its start."""


def parse_sample(text: bytes) -> Sample:
    """The values in an engine's exposition. Empty where it tells none of them."""
    found: dict[str, float] = {}
    for name, label, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value) and 0 <= value <= VALUE_MAX:
            found[f"{name.decode()}/{label.decode()}" if label else name.decode()] = value
    return found


def figures(now: Sample, before: Sample | None = None, elapsed_s: float = 0.0) -> EngineFigures:
    """The figures of a sample, and of the one that was taken so long before."""
    return EngineFigures(
        running=_whole(now, "running_sequences"),
        stalled=_whole(now, "stalled_sequences"),
        waiting=_family(now, "class_waiting"),
        pages=_family(now, "kv_pages"),
        host_pages=_family(now, "host_pages"),
        step_ms=_mean_step_ms(now, before),
        generated_per_s=_rate(now, before, "generated_tokens_total", elapsed_s),
        prompt_per_s=_rate(now, before, "prompt_tokens_total", elapsed_s),
        preemptions=_preemptions(now),
        cache_hit_percent=_hits(now),
    )


def _whole(sample: Sample, name: str) -> int | None:
    return None if (value := sample.get(name)) is None else round(value)


def _family(sample: Sample, name: str) -> dict[str, int]:
    begin = f"{name}/"
    return {key.removeprefix(begin): round(value) for key, value in sample.items() if key.startswith(begin)}


def _growth(now: Sample, before: Sample | None, name: str) -> float | None:
    """How much a counter grew. None where that is not known, as after the engine's restart."""
    if before is None or name not in now or name not in before or now[name] < before[name]:
        return None
    return now[name] - before[name]


def _rate(now: Sample, before: Sample | None, name: str, elapsed_s: float) -> float | None:
    growth = _growth(now, before, name)
    return None if growth is None or elapsed_s <= 0 else round(growth / elapsed_s, 1)


def _mean_step_ms(now: Sample, before: Sample | None) -> float | None:
    seconds, steps = _growth(now, before, "step_seconds_sum"), _growth(now, before, "step_seconds_count")
    return None if seconds is None or not steps else round(seconds / steps * 1e3, 3)


def _preemptions(now: Sample) -> int | None:
    kinds = _family(now, "preemptions_total")
    return sum(kinds.values()) if kinds else None


def _hits(now: Sample) -> float | None:
    asked = now.get("prefix_query_tokens_total")
    return None if not asked else round(now.get("prefix_hit_tokens_total", 0.0) / asked * 100, 1)
