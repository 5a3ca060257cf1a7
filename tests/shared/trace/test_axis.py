"""Both services on one time axis, whichever of their lines are there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.trace.axis import Axis, Visit, axis
from shared.wire.completed_line import EngineLine, GatewayLine
from tests.shared.trace.test_trace import line_of

STAGES = {name: ... for name in line_of("gateway", "left") if name.endswith("_ms")}


def gateway(**changes: Any) -> GatewayLine:
    times = {"total_ms": 100.0, "edge_ms": 2.0, "connect_ms": 8.0, "wait_ms": 50.0, "relay_ms": 40.0}
    told = {"first_byte_ms": 60.0, "engine_first_byte_ms": 44.0, "engine_queue_ms": 30.0}
    return msgspec.convert(line_of("gateway", "left", **STAGES | times | told | changes), GatewayLine)


def engine(**changes: Any) -> EngineLine:
    of_it = {name: ... for name in line_of("engine", "left") if name.endswith("_ms")}
    times = {"total_ms": 80.0, "edge_ms": 1.0, "queue_ms": 30.0, "stalled_ms": 9.0, "decode_ms": 40.0}
    return msgspec.convert(line_of("engine", "left", **of_it | times | changes), EngineLine)


def starts(found: Axis, service: str = "engine") -> dict[str, float | None]:
    return {bar.stage: bar.from_ms for bar in found.bars if bar.service == service}


def test_the_engines_part_is_put_into_the_middle_of_the_round_trip() -> None:
    """It was sent at 10 ms, its first byte came at 60, of which the engine had 44."""
    found = axis(gateway(), [engine()])
    assert starts(found, "gateway") == {"edge": 0.0, "connect": 2.0, "wait": 10.0, "relay": 60.0}
    assert starts(found) == {"edge": 13.0, "queue": 14.0, "decode": 44.0, "stalled": None}
    assert found.error_ms == 3.0


def test_without_a_first_byte_the_whole_time_at_the_engine_is_placed() -> None:
    found = axis(gateway(first_byte_ms=..., engine_first_byte_ms=...), [engine()])
    assert (starts(found)["edge"], found.error_ms) == (15.0, 5.0)


def test_without_the_engines_line_the_gateway_shows_what_it_was_told() -> None:
    found = axis(gateway(), [])
    assert starts(found) == {"queue": 13.0}
    alone = axis(gateway(first_byte_ms=..., engine_queue_ms=20.0), [])
    assert (starts(alone)["queue"], alone.error_ms) == (45.0, 35.0)


def test_without_the_gateways_line_the_engine_begins_its_own_axis() -> None:
    found = axis(None, [engine()])
    assert starts(found)["edge"] == 0.0
    assert found.error_ms is None


def test_a_request_that_was_not_sent_has_no_engine_on_its_axis() -> None:
    found = axis(gateway(wait_ms=..., relay_ms=..., engine_queue_ms=..., total_ms=10.0), [])
    assert starts(found) == {}
    assert found.error_ms is None


def test_each_visit_has_a_bar_and_each_engine_is_in_its_wait() -> None:
    visits = [
        Visit("edge", 0.0, 2.0),
        Visit("connect", 2.0, 1.0),
        Visit("wait", 3.0, 7.0),
        Visit("connect", 10.0, 5.0),
        Visit("wait", 15.0, 45.0),
        Visit("relay", 60.0, 40.0),
    ]
    found = axis(gateway(), [engine(), engine()], visits)
    assert [bar.stage for bar in found.bars if bar.service == "gateway"].count("wait") == 2
    assert starts(found, "engine 1")["queue"] == 4.0
    assert starts(found, "engine 2")["edge"] == 15.5


@pytest.mark.parametrize("first_ms", [49.0, 70.0])
def test_times_that_do_not_fit_are_placed_all_the_same(first_ms: float) -> None:
    found = axis(gateway(engine_first_byte_ms=first_ms), [engine()])
    room_ms = 50.0 - first_ms
    assert starts(found)["edge"] == 10.0 + max(0.0, room_ms) / 2
    assert found.error_ms == abs(room_ms) / 2


def test_the_times_in_which_the_client_was_behind_stand_where_they_were() -> None:
    blocked = ((62.0, 10.0), (90.0, 5.0))
    found = axis(gateway(blocked_ms=15.0, blocked=blocked), [])
    told = [(bar.stage, bar.from_ms, bar.takes_ms) for bar in found.bars if bar.service == "client"]
    assert told == [("blocked", *one) for one in blocked]


@pytest.mark.parametrize("engines", [[], [engine(reasoning_tokens=30, completion_tokens=40)]])
def test_thinking_stands_at_the_beginning_of_the_answer(engines: list[EngineLine]) -> None:
    tokens = {"reasoning_tokens": 30, "completion_tokens": 40, "engine_decode_ms": 40.0}
    bars = {bar.stage: bar for bar in axis(gateway(**tokens), engines).bars if bar.service == "engine"}
    assert bars["thinking"].from_ms == bars["decode"].from_ms
    assert bars["thinking"].takes_ms == 30.0
