"""A request as readable text: what happened in words, then every stage with its times.

Both services are on one time axis (`shared.trace.axis`), which says how far off the engine's times may be.

Every value is shown as printable text on one line: no control character, which a terminal could obey, and no
line end, which could forge a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from typing import Final

import msgspec

from shared.trace.axis import Axis, Bar, axis, named
from shared.trace.join import Trace
from shared.trace.request_records import RequestRecord, RequestSummary, Tick
from shared.trace.sentences import duration
from shared.trace.why import Why, is_lost, reasons
from shared.wire.completed_line import EngineLine, GatewayLine, Line
from shared.wire.end_reason import MEANINGS, EndReason

SHOWN_LEN_MAX: Final = 300
"""Characters of one value that are shown."""
BAR_WIDTH: Final = 32
"""Characters of the longest bar."""
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
        yield from _heading_and_words(trace, count)
        yield ""
        yield from _stages(trace)


def _heading_and_words(trace: Trace, number: str = "", *, is_record: bool = False) -> Iterator[str]:
    yield printable(f"request {trace.request_id}{number}")
    yield from _words(trace, is_record=is_record)


# -- words ----------------------------------------------------------------------------------------


_ROUTES: Final = {
    "retry": "the one before it had failed",
    "panic": "all engines had failed lately",
    "fallback": "of another model, for none of its own could answer",
}
"""The reasons for the choice of an engine that are worth telling."""


def _words(trace: Trace, *, is_record: bool) -> Iterator[str]:
    line: Line = trace.gateway or trace.engines[0]
    model = f"model {line.model}" if line.model else "no model"
    tenant = f"tenant {line.tenant}" if line.tenant else "no tenant"
    key = f", key {line.key_id}" if isinstance(line, GatewayLine) and line.key_id else ""
    session = f", session {line.session}" if isinstance(line, GatewayLine) and line.session else ""
    streamed = ", as a stream" if line.stream else ""
    tier = _tier(line.service_tier if isinstance(line, GatewayLine) else None)
    yield _row("asked", f"{line.method} {line.endpoint}{streamed}; {model}, {tenant}{key}{session}{tier}")
    ended = line.ts.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    yield _row("ended", f"{ended} UTC; trace {line.trace_id}")
    if trace.gateway is not None:
        yield from _gateway(trace.gateway)
    else:
        yield _row("gateway", "no line in these logs: its log is missing, or the engine was asked directly")
    for label, engine in named(trace.engines):
        yield from _end(label, engine, _engine_meaning(engine, trace))
        yield from _engine_tokens(engine)
    if missing := _untold(trace) if is_record else _missing(trace):
        yield _row("engine", missing)
    if not is_record:
        yield from _why([one.text for one in reasons(trace.gateway, trace.engines)])


def _tier(name: str | None) -> str:
    return f", service tier {name}" if name else ""


def _why(causes: Sequence[str]) -> Iterator[str]:
    for number, cause in enumerate(causes):
        yield _row("" if number else "why", cause)


def _gateway(line: GatewayLine) -> Iterator[str]:
    yield from _end("gateway", line, MEANINGS[line.end_reason])
    first = "" if line.first_byte_ms is None else f"the first byte came after {line.first_byte_ms:.3f} ms; "
    engines = "no engine was asked" if not line.attempts else f"asked {_count(line.attempts, 'engine')}"
    replica = f", last {line.replica}" if line.replica else ""
    why = f": {_ROUTES[line.route]}" if line.route in _ROUTES else ""
    yield _row("", f"{first}{engines}{replica}{why}")
    if line.failed_attempts:
        told = ", ".join(f"{one.replica}={one.code}" for one in line.failed_attempts)
        yield _row("", f"failed before: {told}")
    if line.quota_meter is not None:
        yield _row("", f"refused by the {line.quota_scope}'s quota of {line.quota_meter}")
    is_counted = line.prompt_exact or line.prompt_tokens
    tokens = _tokens(line) if is_counted else "the prompt was not counted"
    exact = "" if line.prompt_exact or not is_counted else " (estimated)"
    yield _row("", f"{tokens}{exact}; reserved {line.reserved_tokens}, charged {line.settled_tokens}")


def _engine_tokens(line: EngineLine) -> Iterator[str]:
    if line.sequences is None:
        return
    swapped = f" ({line.swaps} of them with its pages kept in host memory)" if line.swaps else ""
    preempted = f", preempted {_count(line.preemptions, 'time')}{swapped}" if line.preemptions else ""
    yield _row("", f"{_count(line.sequences, 'sequence')}{preempted}; {_tokens(line)}")


def _tokens(line: Line) -> str:
    host = f", {line.host_tokens} of them in host memory" if line.host_tokens else ""
    disk = f", {line.disk_tokens} of them on disk" if line.disk_tokens else ""
    hit, whole = line.cached_tokens, line.prompt_tokens
    share = f", {hit / whole:.0%}" if hit and whole else ""
    cached = "" if hit is None else f" ({hit} cached{share}{host}{disk})"
    answer = "" if line.completion_tokens is None else f", answer {_count(line.completion_tokens, 'token')}"
    reasoning = f" ({line.reasoning_tokens} of reasoning)" if line.reasoning_tokens else ""
    calls = f", {_count(line.calls, 'call')}" if line.calls else ""
    prompt = f"prompt {_count(line.prompt_tokens or 0, 'token')}{cached}"
    return f"{prompt}{answer}{reasoning}{calls}{_drafts(line)}"


def _drafts(line: Line) -> str:
    """The steps that drafts saved, and what became of a prediction."""
    told = ""
    if line.drafted_tokens:
        saved, drafted = line.accepted_tokens or 0, line.drafted_tokens
        told = f", {_count(saved, 'step')} saved by drafts ({saved / drafted:.0%} of {drafted} right)"
    if line.rejected_prediction_tokens is None:
        return told
    right, wrong = line.accepted_prediction_tokens or 0, line.rejected_prediction_tokens
    return f"{told}, of its prediction {right} right and {wrong} wrong"


def _engine_meaning(line: EngineLine, trace: Trace) -> str:
    """The meaning of an engine's end. An answer that it finished may have come to nobody, and with lines
    missing nobody knows whether it was this that the client has."""
    gateway = trace.gateway
    if line.end_reason != EndReason.OK or gateway is None:
        return MEANINGS[line.end_reason]
    if is_lost(line, gateway, trace.engines):
        return "it had finished, and its answer was lost on the way to the gateway"
    if gateway.end_reason == EndReason.OK and len(trace.engines) >= gateway.attempts:
        return MEANINGS[line.end_reason]
    return "it had finished its answer"


def _end(label: str, line: Line, meaning: str) -> Iterator[str]:
    took = f"after {line.total_ms:.3f} ms"
    yield _row(label, f"{line.status} {line.end_reason} in {line.stage}, {took}: {meaning}")
    if line.error_code is not None:
        param = f", param {line.error_param}" if line.error_param else ""
        detail = f": {line.error_detail}" if line.error_detail else ""
        yield _row("", f"error {line.error_code}{param}{detail}")


def _untold(trace: Trace) -> str | None:
    """The note in a gateway's record about an engine that was asked and told nothing. None where it has."""
    line = trace.gateway
    if line is None or not line.attempts or line.engine_end_reason:
        return None
    return "told nothing of it: not reached, lost, or of another make"


def _missing(trace: Trace) -> str | None:
    """The note about engines that were asked and have no line. None when no line is missing."""
    asked = 0 if trace.gateway is None else trace.gateway.attempts
    missing = asked - len(trace.engines)
    if missing <= 0:
        return None
    return f"{_count(missing, 'line')} missing: not in these logs, not reached, or of another make"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _row(label: str, text: str) -> str:
    return f"  {label:<9}{printable(text)}"


# -- stages ---------------------------------------------------------------------------------------


def _stages(trace: Trace) -> Iterator[str]:
    shown = axis(trace.gateway, trace.engines)
    ends = {"gateway": trace.gateway.stage} if trace.gateway else {}
    ends |= {label: engine.stage for label, engine in named(trace.engines)}
    yield from waterfall(shown, ends)


def waterfall(shown: Axis, ends: Mapping[str, str], ticks: Sequence[Tick] = ()) -> Iterator[str]:
    """The axis as rows with bars. `ends` has the stage in which the request ended, by service. The `ticks`
    are a row of marks under the last visit to the stage in which the gateway passes events on."""
    yield f"  {'service':<9}{'stage':<12}{'from ms':>12}{'takes ms':>12}"
    whole_ms = max((bar.from_ms + bar.takes_ms for bar in shown.bars if bar.from_ms is not None), default=0.0)
    under = max((at for at, bar in enumerate(shown.bars) if _is_relay(bar)), default=len(shown.bars) - 1)
    for number, bar in enumerate(shown.bars):
        at = "" if bar.from_ms is None else f"{bar.from_ms:.3f}"
        mark = "   ended here" if ends.get(bar.service) == bar.stage else ""
        row = f"  {bar.service:<9}{bar.stage:<12}{at:>12}{bar.takes_ms:>12.3f}  {_bar(bar, whole_ms)}{mark}"
        yield printable(row.rstrip())
        if ticks and number == under:
            yield _ticks(ticks, whole_ms)
    if shown.error_ms is not None:
        yield f"  the engine's times are placed within {shown.error_ms:.3f} ms"


def _is_relay(bar: Bar) -> bool:
    return (bar.service, bar.stage) == ("gateway", "relay")


def _ticks(ticks: Sequence[Tick], whole_ms: float) -> str:
    """The row of the moments at which events were passed on."""
    first_ms, last_ms = ticks[0].at_ms, ticks[-1].at_ms
    scale = BAR_WIDTH / max(whole_ms, last_ms, 0.001)
    marked = {min(BAR_WIDTH - 1, int(tick.at_ms * scale)) for tick in ticks}
    marks = "".join("|" if at in marked else " " for at in range(BAR_WIDTH)).rstrip()
    return printable(f"  {'':<9}{'events':<12}{first_ms:>12.3f}{last_ms - first_ms:>12.3f}  {marks}")


def _bar(bar: Bar, whole_ms: float) -> str:
    if bar.from_ms is None or whole_ms <= 0.0:
        return " " * BAR_WIDTH
    first = min(BAR_WIDTH - 1, int(bar.from_ms / whole_ms * BAR_WIDTH))
    width = max(1, min(BAR_WIDTH - first, round(bar.takes_ms / whole_ms * BAR_WIDTH)))
    return f"{' ' * first}{'=' * width}".ljust(BAR_WIDTH)


# -- requests in a row each -----------------------------------------------------------------------


def record_text(record: RequestRecord) -> Iterator[str]:
    """A gateway's record of a request as text."""
    one = record.summary
    if record.line is not None:
        yield from _heading_and_words(Trace(one.request_id, record.line), is_record=True)
        yield from _why(record.causes)
    else:
        yield printable(f"request {one.request_id}, in progress")
        model, tenant = one.model or "no model", one.tenant or "no tenant"
        yield _row(
            "asked", f"{one.method} {one.endpoint}; model {model}, tenant {tenant}{_tier(one.service_tier)}"
        )
        yield _row(
            "now", f"in {one.stage} for {duration(one.total_ms)} in all; {_count(one.events, 'event')}"
        )
        yield from _why(record.causes)
    served = [f"gateway {record.gateway}"] if record.gateway is not None else []
    served += [f"worker {record.worker}"] if record.worker is not None else []
    if served:
        yield _row("served", printable(f"by {', '.join(served)}"))
    yield ""
    ends = {"gateway": one.stage} if not one.is_live else {}
    yield from waterfall(record.axis, ends, record.ticks)


def summary_row(one: RequestSummary, causes: Sequence[Why] = ()) -> str:
    """A request in one row: when, how it ended, how long it took, whose it was, and why it took long."""
    ended = one.began_at.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]
    end = f"in {one.stage}" if one.is_live else f"{one.status} {one.end_reason}"
    why = f"  {causes[0].text}" if causes else ""
    whose = f"{one.tenant or '-'} {one.model or '-'}"
    return printable(f"{ended}  {duration(one.total_ms):>10}  {end:<24} {whose}  {one.request_id}{why}")


def line_row(line: Line) -> str:
    """A completed line in one row."""
    told = {**msgspec.structs.asdict(line), "is_live": False, "began_at": line.ts}
    one = msgspec.convert(told, RequestSummary)
    return summary_row(one, reasons(line) if isinstance(line, GatewayLine) else reasons(None, [line]))
