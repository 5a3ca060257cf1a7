"""The join of completed lines to requests.

Callers choose request ids, so several requests may have the same one, and even the same trace. They are told
apart by their spans: an engine's line names the gateway's span as its parent. A gateway that asks several
engines for one request is the parent of all their lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.wire.completed_line import EngineLine, GatewayLine, Line


class Trace(Struct, frozen=True, omit_defaults=True):
    """The completed lines of one request."""

    request_id: str
    gateway: GatewayLine | None = None
    """None where no gateway's line was found: its log is missing, or the engine was asked directly."""
    engines: Sequence[EngineLine] = ()
    """The engines' lines, in the order in which they were asked: that of their beginnings, since one that was
    given up may end last. Empty where none was found."""

    @property
    def lines(self) -> list[Line]:
        return [*([self.gateway] if self.gateway else []), *self.engines]

    @property
    def ended_s(self) -> float:
        """The time at which the last line was written, in seconds since 1970."""
        return max(line.ts.timestamp() for line in self.lines)


def _began(line: EngineLine) -> float:
    return line.ts.timestamp() - line.total_ms / 1e3


def join(lines: Iterable[Line]) -> list[Trace]:
    """The requests that the lines are about, in the order of their ends. A line that was read twice counts
    once."""
    gateways: dict[str, GatewayLine] = {}
    engines: dict[str, EngineLine] = {}
    for line in lines:
        if isinstance(line, GatewayLine):
            gateways.setdefault(line.span_id, line)
        else:
            engines.setdefault(line.span_id, line)
    children: dict[str, list[EngineLine]] = {}
    for engine in sorted(engines.values(), key=_began):
        parent = engine.parent_span_id
        key = engine.span_id if parent is None else f"{engine.trace_id} {parent}"
        children.setdefault(key, []).append(engine)
    traces = []
    for gateway in gateways.values():
        own = children.pop(f"{gateway.trace_id} {gateway.span_id}", [])
        traces.append(Trace(gateway.request_id, gateway, own))
    traces += [Trace(own[0].request_id, None, own) for own in children.values()]
    return sorted(traces, key=lambda trace: trace.ended_s)
