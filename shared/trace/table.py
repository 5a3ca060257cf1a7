"""A request as readable text: what happened in words, then every stage with its times.

The two services have an axis each, from the request's headers to its end there. The engine's lies within the
gateway's `wait` and `relay`; their clocks do not say where exactly.

Every value is shown as printable text on one line: no control character, which a terminal could obey, and no
line end, which could forge a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import Final

from shared.completed_line import ENGINE_STAGES, GATEWAY_STAGES, EngineLine, GatewayLine, Line
from shared.end_reason import MEANINGS
from shared.trace.join import Trace

SHOWN_LEN_MAX: Final = 300
"""Characters of one value that are shown."""
REST_MS_MIN: Final = 0.1
"""The shortest time between stages that has a row, in milliseconds."""
BETWEEN: Final = ("preempted", "stalled")
"""Stages of the engine that come in between others, so that they have no beginning of their own."""
_UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """The text as it can be shown on one line of a terminal: characters that are not printable become
    U+FFFD."""
    shown = "".join(char if char.isprintable() else _UNPRINTABLE for char in text[:SHOWN_LEN_MAX])
    return shown if len(text) <= SHOWN_LEN_MAX else f"{shown}..."


def table(traces: Sequence[Trace]) -> Iterator[str]:
    """The lines of text that show the requests, one after the other."""
    for number, trace in enumerate(traces, 1):
        if number > 1:
            yield ""
        count = f", {number} of {len(traces)}" if len(traces) > 1 else ""
        yield printable(f"request {trace.request_id}{count}")
        yield from _words(trace)
        yield ""
        yield from _stages(trace)


# -- words ----------------------------------------------------------------------------------------


def _words(trace: Trace) -> Iterator[str]:
    line: Line = trace.gateway or trace.engines[0]
    model = f"model {line.model}" if line.model else "no model"
    tenant = f"tenant {line.tenant}" if line.tenant else "no tenant"
    key = f", key {line.key_id}" if isinstance(line, GatewayLine) and line.key_id else ""
    streamed = ", as a stream" if line.stream else ""
    yield _row("asked", f"{line.method} {line.endpoint}{streamed}; {model}, {tenant}{key}")
    ended = line.ts.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    yield _row("ended", f"{ended} UTC; trace {line.trace_id}")
    if trace.gateway is not None:
        yield from _gateway(trace.gateway)
    else:
        yield _row("gateway", "no line in these logs: its log is missing, or the engine was asked directly")
    for label, engine in _labelled(trace.engines):
        yield from _end(label, engine)
        yield from _engine_tokens(engine)
    if missing := _missing(trace):
        yield _row("engine", missing)


def _gateway(line: GatewayLine) -> Iterator[str]:
    yield from _end("gateway", line)
    first = "" if line.first_byte_ms is None else f"the first byte came after {line.first_byte_ms:.3f} ms; "
    engines = "no engine was asked" if not line.attempts else f"asked {_count(line.attempts, 'engine')}"
    replica = f", last {line.replica}" if line.replica else ""
    yield _row("", f"{first}{engines}{replica}")
    if line.quota_meter is not None:
        yield _row("", f"refused by the {line.quota_scope}'s quota of {line.quota_meter}")
    is_counted = line.prompt_exact or line.prompt_tokens
    tokens = _tokens(line) if is_counted else "the prompt was not counted"
    exact = "" if line.prompt_exact or not is_counted else " (estimated)"
    yield _row("", f"{tokens}{exact}; reserved {line.reserved_tokens}, charged {line.settled_tokens}")


def _engine_tokens(line: EngineLine) -> Iterator[str]:
    if line.sequences is None:
        return
    preempted = f", preempted {_count(line.preemptions, 'time')}" if line.preemptions else ""
    yield _row("", f"{_count(line.sequences, 'sequence')}{preempted}; {_tokens(line)}")


def _tokens(line: Line) -> str:
    cached = "" if line.cached_tokens is None else f" ({line.cached_tokens} cached)"
    answer = "" if line.completion_tokens is None else f", answer {_count(line.completion_tokens, 'token')}"
    return f"prompt {_count(line.prompt_tokens or 0, 'token')}{cached}{answer}"


def _end(label: str, line: Line) -> Iterator[str]:
    reason = line.end_reason
    yield _row(
        label, f"{line.status} {reason} in {line.stage}, after {line.total_ms:.3f} ms: {MEANINGS[reason]}"
    )
    if line.error_code is not None:
        param = f", param {line.error_param}" if line.error_param else ""
        detail = f": {line.error_detail}" if line.error_detail else ""
        yield _row("", f"error {line.error_code}{param}{detail}")


def _missing(trace: Trace) -> str | None:
    """The note about engines that were asked and have no line. None when no line is missing."""
    asked = 0 if trace.gateway is None else trace.gateway.attempts
    missing = asked - len(trace.engines)
    if missing <= 0:
        return None
    return f"{_count(missing, 'line')} missing: not in these logs, not reached, or of another make"


def _labelled(engines: Sequence[EngineLine]) -> list[tuple[str, EngineLine]]:
    if len(engines) == 1:
        return [("engine", engines[0])]
    return [(f"engine {number}", line) for number, line in enumerate(engines, 1)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _row(label: str, text: str) -> str:
    return f"  {label:<9}{printable(text)}"


# -- stages ---------------------------------------------------------------------------------------


def _stages(trace: Trace) -> Iterator[str]:
    yield f"  {'service':<9}{'stage':<12}{'from ms':>12}{'takes ms':>12}"
    if trace.gateway is not None:
        yield from _axis("gateway", trace.gateway, GATEWAY_STAGES)
    for label, engine in _labelled(trace.engines):
        yield from _axis(label, engine, ENGINE_STAGES)


def _axis(label: str, line: Line, stages: Sequence[str]) -> Iterator[str]:
    """The stages that the request came to, in order, and what is left of its time."""
    at_ms = between_ms = 0.0
    for stage in stages:
        takes_ms: float | None = getattr(line, f"{stage}_ms")
        if takes_ms is None:
            continue
        is_between = stage in BETWEEN
        yield _stage_row(label, stage, None if is_between else at_ms, takes_ms, is_last=stage == line.stage)
        if is_between:
            between_ms += takes_ms
        else:
            at_ms += takes_ms
    rest_ms = line.total_ms - at_ms - between_ms
    if rest_ms >= REST_MS_MIN:
        yield _stage_row(label, "(other)", None, rest_ms, is_last=False)


def _stage_row(label: str, stage: str, at_ms: float | None, takes_ms: float, *, is_last: bool) -> str:
    at = "" if at_ms is None else f"{at_ms:.3f}"
    mark = "   ended here" if is_last else ""
    return f"  {label:<9}{stage:<12}{at:>12}{takes_ms:>12.3f}{mark}"
