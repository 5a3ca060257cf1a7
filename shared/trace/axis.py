"""Both services' stages on one time axis: that of the gateway, from the request's headers on.

No two clocks are compared. The gateway knows when it sent the request and when the answer's first byte came;
the engine knows how long it took from the request's headers to that byte. What is left between the two is the
hop's round trip: the engine's part lies within it, and is put into its middle. So it is off by half of the
round trip at most, and that error is told. Without a first byte, the whole time at the engine is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct

from shared.wire.completed_line import ENGINE_STAGES, GATEWAY_STAGES, EngineLine, GatewayLine, Line

BETWEEN = ("preempted", "stalled", "handover")
"""Stages of the engine that come in between others, so that they have no beginning of their own."""
TOLD = ("edge", "body", "validate", "tokenize", "grammar", "queue", "prefill", "decode", *BETWEEN)
"""The engine's stages that the gateway's line has."""

BEFORE_FIRST_BYTE = ("edge", "body", "validate", "tokenize", "grammar", "queue", "prefill")
"""The engine's stages before an answer's first byte, but for the handover."""


class Visit(Struct, frozen=True, array_like=True):
    """A visit to a stage, in milliseconds from the request's headers."""

    stage: str
    from_ms: float
    takes_ms: float


class Bar(Struct, frozen=True, omit_defaults=True):
    """A stage on the axis, in milliseconds."""

    service: str
    stage: str
    takes_ms: float
    from_ms: float | None = None
    """None for a stage that comes in between others, and where nobody knows."""


class Axis(Struct, frozen=True, omit_defaults=True):
    """The stages of one request."""

    bars: tuple[Bar, ...]
    error_ms: float | None = None
    """How far off the engine's bars may be, against the gateway's. None where there are not both."""


def axis(gateway: GatewayLine | None, engines: Sequence[EngineLine], visits: Sequence[Visit] = ()) -> Axis:
    """The axis of a request, from what is known of it. `visits` are the gateway's, where they are known; else
    its stages are taken to have been visited once each, in their order."""
    if gateway is None:
        return Axis(
            tuple(chain.from_iterable(_engine_bars(name, line, 0.0) for name, line in named(engines)))
        )
    visits = visits or list(visits_of(gateway))
    bars = [Bar("gateway", visit.stage, visit.takes_ms, visit.from_ms) for visit in visits]
    bars += [Bar("client", "blocked", one.takes_ms, one.from_ms) for one in gateway.blocked or ()]
    waits = [visit for visit in visits if visit.stage == "wait"]
    if engines:
        place = _place(gateway, waits, engines[-1].total_ms)
        for number, (name, line) in enumerate(named(engines)):
            at_ms = place[0] if place and line is engines[-1] else None
            if at_ms is None and len(waits) == len(engines):  # each wait was for one of them
                at_ms = waits[number].from_ms + max(0.0, waits[number].takes_ms - line.total_ms) / 2
            bars += _engine_bars(name, line, at_ms, gateway.engine_first_byte_ms)
    else:
        place = _place(gateway, waits, None)
        bars += _told_bars(gateway, place[0] if place else None)
    return Axis(tuple(bars), place[1] if place and any(bar.service != "gateway" for bar in bars) else None)


def visits_of(line: GatewayLine) -> Iterator[Visit]:
    """The gateway's stages one after the other, as its line has them. Attempts that failed stand where they
    were, and what is left of connecting and waiting is the last one's."""
    at_ms, connected, waited = 0.0, line.connect_ms, line.wait_ms
    for stage in GATEWAY_STAGES:
        takes_ms: float | None = getattr(line, f"{stage}_ms")
        if stage == "connect":
            for one in line.failed_attempts or ():
                connect_ms = one.takes_ms if one.connect_ms is None else one.connect_ms
                yield Visit("connect", one.from_ms, connect_ms)
                wait_ms = round(one.takes_ms - connect_ms, 3)
                if one.connect_ms is not None:
                    yield Visit("wait", round(one.from_ms + connect_ms, 3), wait_ms)
                connected, waited = _left(connected, connect_ms), _left(waited, wait_ms)
                at_ms = one.from_ms + one.takes_ms
            takes_ms = connected
        elif stage == "wait":
            takes_ms = waited
        if takes_ms is not None:
            yield Visit(stage, round(at_ms, 3), takes_ms)
            at_ms += takes_ms


def _left(whole_ms: float | None, taken_ms: float) -> float | None:
    """The rest of a stage's time. None where there is none."""
    left_ms = round((whole_ms or 0.0) - taken_ms, 3)
    return left_ms if left_ms > 0.0 else None


def named(engines: Sequence[EngineLine]) -> list[tuple[str, EngineLine]]:
    """The engines' lines with names that differ."""
    if len(engines) == 1:
        return [("engine", engines[0])]
    return [(f"engine {number}", line) for number, line in enumerate(engines, 1)]


def _place(
    gateway: GatewayLine, waits: Sequence[Visit], total_ms: float | None
) -> tuple[float, float] | None:
    """When the engine that answered got the request, on the gateway's axis, and how far off that may be."""
    if not waits:
        return None
    wait = waits[-1]
    first_ms = gateway.engine_first_byte_ms
    if first_ms and gateway.first_byte_ms is not None:
        room_ms = gateway.first_byte_ms - wait.from_ms - first_ms
    elif total_ms is not None:
        room_ms = gateway.total_ms - wait.from_ms - total_ms
    else:
        told = sum(getattr(gateway, f"engine_{stage}_ms") or 0.0 for stage in TOLD)
        room_ms = gateway.total_ms - wait.from_ms - told
    return round(wait.from_ms + max(0.0, room_ms) / 2, 3), round(abs(room_ms) / 2, 3)


def _engine_bars(
    name: str, line: EngineLine, at_ms: float | None, first_byte_ms: float | None = None
) -> Iterator[Bar]:
    times = ((stage, getattr(line, f"{stage}_ms")) for stage in ENGINE_STAGES)
    return _with_thinking(_row(name, dict(times), at_ms, first_byte_ms), line)


def _told_bars(line: GatewayLine, at_ms: float | None) -> Iterator[Bar]:
    """The engine's stages, as its closing told them to the gateway."""
    times = ((stage, getattr(line, f"engine_{stage}_ms") or None) for stage in TOLD)
    return _with_thinking(_row("engine", dict(times), at_ms, line.engine_first_byte_ms), line)


def _with_thinking(bars: Iterator[Bar], line: Line) -> Iterator[Bar]:
    """The bars, and under the answer's the part of it that is thinking, which comes first."""
    for bar in bars:
        yield bar
        if bar.stage == "decode" and line.reasoning_tokens and line.completion_tokens:
            takes_ms = round(bar.takes_ms * line.reasoning_tokens / line.completion_tokens, 3)
            yield Bar(bar.service, "thinking", takes_ms, bar.from_ms)


def _row(
    name: str, times: Mapping[str, float | None], at_ms: float | None, first_byte_ms: float | None
) -> Iterator[Bar]:
    """Bars one after the other. Those that come in between move what follows them. Where the first byte came
    so much later than by the stages before it, the handover lies before the queue."""
    before_ms = sum(times.get(stage) or 0.0 for stage in BEFORE_FIRST_BYTE)
    handover_ms = times.get("handover") or 0.0
    moved_ms = min(handover_ms, max(0.0, (first_byte_ms or 0.0) - before_ms))
    handover_at_ms: float | None = None
    for stage, takes_ms in times.items():
        if stage == "queue" and at_ms is not None and moved_ms > handover_ms / 2:
            handover_at_ms, at_ms = at_ms, at_ms + handover_ms
        if takes_ms is None:
            continue
        from_ms = None if stage in BETWEEN else at_ms
        if stage == "handover":
            from_ms = handover_at_ms
        yield Bar(name, stage, takes_ms, None if from_ms is None else round(from_ms, 3))
        if at_ms is not None and (stage != "handover" or handover_at_ms is None):
            at_ms += takes_ms
