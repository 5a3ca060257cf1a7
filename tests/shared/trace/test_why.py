"""Why a request took long: the parts of its time add up, and what is told first is what took longest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.trace.axis import axis, visits_of
from shared.trace.join import Trace, join
from shared.trace.request_text import table
from shared.trace.why import ATTEMPTS, CLIENT, parts, reasons, so_far
from shared.wire import engine_words
from shared.wire.causes import Cause
from shared.wire.completed_line import EngineLine, FailedAttempt, GatewayLine
from shared.wire.end_reason import MEANINGS, EndReason
from tests.shared.trace.test_axis import STAGES, engine
from tests.shared.trace.test_trace import line_of


def gateway(**changes: Any) -> GatewayLine:
    """A line whose stages add up to its total."""
    told = {name: ... for name in line_of("gateway", "left") if name.startswith("engine_")}
    left = dict.fromkeys(("causes", "reasoning_tokens", "first_byte_ms", "completion_tokens"), ...)
    line = msgspec.convert(
        line_of("gateway", "left", **STAGES | told | left | {"total_ms": 0.0}), GatewayLine
    )
    for name, value in changes.items():
        setattr(line, name, value)
    own = ("edge", "auth", "seat", "body", "tokenize", "quota", "connect", "wait", "relay", "settle")
    line.total_ms = sum(getattr(line, f"{name}_ms") or 0.0 for name in own)
    return line


def texts(line: GatewayLine, *engines: EngineLine) -> list[str]:
    shares = parts(line, engines)
    assert sum(shares.values()) == pytest.approx(line.total_ms, abs=0.01)
    found = reasons(line, engines)
    assert [one.ms for one in found] == sorted((one.ms for one in found), reverse=True)
    return [one.text for one in found]


ONE = FailedAttempt(replica="a:1", code="connect_timeout", from_ms=1.0, takes_ms=5000.0)
LOST = FailedAttempt(replica="a:1", code="upstream_failed", from_ms=1.0, takes_ms=800.0, connect_ms=2.0)
STORE = "the store of quotas (Redis, where one is set) answered late"
RELAYED = {"wait_ms": 500.0, "relay_ms": 28_000.0, "engine_queue_ms": 100.0, "engine_prefill_ms": 300.0}


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (
            {**RELAYED, "engine_decode_ms": 7_000.0, "blocked_ms": 21_700.0},
            "21.7 s: the client did not read its answer (the gateway's buffers were full)",
        ),
        (
            {**RELAYED, "engine_decode_ms": 27_000.0, "completion_tokens": 900},
            "27 s: computing an answer of 900 tokens",
        ),
        (
            {**RELAYED, "engine_decode_ms": 27_000.0, "completion_tokens": 900, "reasoning_tokens": 800},
            "24 s: thinking, 800 of its 900 tokens",
        ),
        (
            {**RELAYED, "engine_stalled_ms": 26_000.0, "causes": (Cause(code="stalled", ms=26_000.0),)},
            "stalled 26 s: this client did not read",
        ),
        (
            {"wait_ms": 4000.0, "engine_grammar_ms": 3900.0, "causes": (Cause(code="grammar", ms=3900.0),)},
            "making and trying its grammar took 3.9 s",
        ),
        ({"tokenize_ms": 700.0, "wait_ms": 90.0, "prompt_tokens": 9}, "tokenizing took 700 ms, for 9 tokens"),
        ({"seat_ms": 50.0, "wait_ms": 9.0}, f"50 ms: taking a seat: {STORE}"),
        ({"quota_ms": 60.0, "wait_ms": 9.0}, f"60 ms: reserving tokens: {STORE}"),
        ({"auth_ms": 5000.0}, "5 s: finding out who asks, or its tenant's turn"),
        ({"body_ms": 900.0, "wait_ms": 9.0}, "900 ms: the client sent its body"),
        ({"connect_ms": 700.0, "wait_ms": 9.0}, "700 ms: connecting to the engine"),
        ({"wait_ms": 60_000.0, "replica": "a:1"}, "1 min 0 s: a:1 had not begun to answer"),
        (
            {"wait_ms": 2000.0, "replica": "a:1", "engine_end_reason": "ok", "engine_first_byte_ms": 9.0},
            "2 s: between the gateway and a:1, which began its answer within 9 ms",
        ),
        (
            {"relay_ms": 2000.0, "replica": "a:1", "engine_end_reason": "ok", "engine_decode_ms": 9.0},
            "2 s: the answer came from a:1, which took 9 ms for all of it",
        ),
        ({"relay_ms": 9000.0, "replica": "a:1"}, "9 s: the answer came from a:1"),
        (
            {"connect_ms": 5002.0, "wait_ms": 9.0, "failed_attempts": (ONE,)},
            "5 s: a:1 did not accept a connection, and another was asked",
        ),
        (
            {"connect_ms": 2.0, "wait_ms": 810.0, "attempts": 1, "failed_attempts": (LOST,)},
            "800 ms: a:1 broke off, or answered what is no answer",
        ),
        (
            {"wait_ms": 4300.0, "engine_handover_ms": 4251.0},
            "4.3 s: between the engine's API process and its core",
        ),
        (
            {
                "wait_ms": 4300.0, "engine_handover_ms": 4251.0,
                "causes": (Cause(code="core_silent", ms=3400.0), Cause(code="prefill", ms=17.0)),
            },
            "4.3 s: between the engine's API process and its core; the core process did not answer for "
            "3.4 s of it, and most likely for the 851 ms before it was asked",
        ),
        (
            {
                "relay_ms": 4300.0, "engine_decode_ms": 4290.0,
                "causes": (Cause(code="gap_host", ms=4200.0), Cause(code="core_silent", ms=3400.0)),
            },
            "gap of 4.2 s: the host was busy between two steps; the core process did not answer for "
            "3.4 s of it, and most likely for the 800 ms before it was asked",
        ),
        (
            {
                "relay_ms": 9000.0, "engine_decode_ms": 8000.0,
                "causes": (Cause(code="core_silent", ms=900.0),),
            },
            "8 s: computing an answer of 0 tokens",
        ),
    ],
)  # fmt: skip
def test_what_took_longest_is_told_first(changes: dict[str, Any], first: str) -> None:
    assert texts(gateway(**{"attempts": 2, **changes}))[0] == first


@pytest.mark.parametrize(("words", "meaning"), engine_words.MEANINGS.items())
def test_what_an_engine_says_of_itself_is_told_of_its_attempt(words: str, meaning: str) -> None:
    one = msgspec.structs.replace(LOST, detail=words)
    assert texts(gateway(wait_ms=810.0, connect_ms=2.0, attempts=2, failed_attempts=(one,)))[0] == (
        f"800 ms: a:1 {meaning}, and another was asked"
    )


def test_a_pause_that_hands_on_the_clients_own_is_told_once() -> None:
    pause = (Cause(code="stalled", ms=9_000.0),)
    told = texts(gateway(relay_ms=12_000.0, blocked_ms=11_000.0, engine_stalled_ms=9_000.0, causes=pause))
    assert told == ["11 s: the client did not read its answer (the gateway's buffers were full)"]


def test_a_request_that_was_quick_has_no_reason() -> None:
    assert texts(gateway(wait_ms=5.0, relay_ms=3.0)) == []
    assert reasons(None) == ()
    assert parts(None) == {}


def test_the_engines_line_alone_has_its_reasons() -> None:
    line = engine(causes=[{"code": "waited_slots", "ms": 30.0, "requests": 2}], decode_ms=9.0)
    assert [one.text for one in reasons(None, [line])] == ["queued 30 ms: no slot (2 sequences run)"]


def test_what_a_failed_engine_waited_for_is_no_reason_of_the_others() -> None:
    """The line of an engine that failed is told by its attempt; its queue is not that of the answer."""
    failed = engine(causes=[{"code": "waited_slots", "ms": 790.0, "requests": 2}], queue_ms=790.0)
    line = gateway(connect_ms=2.0, wait_ms=810.0, attempts=1, failed_attempts=(LOST,))
    assert texts(line, failed) == ["800 ms: a:1 broke off, or answered what is no answer"]


def test_an_answer_that_was_lost_on_the_way_is_told_as_that() -> None:
    """An engine that had finished knows nothing of it; its client is the gateway."""
    lost = engine(end_reason="ok", total_ms=9.0, ts="2026-11-01T12:00:00Z")
    answered = engine(end_reason="ok", total_ms=8.0, ts="2026-11-01T12:00:05Z")
    line = gateway(connect_ms=2.0, wait_ms=810.0, attempts=2, failed_attempts=(LOST,))
    line.end_reason = EndReason.OK
    first = texts(line, lost, answered)[0]
    assert first.startswith("800 ms: a:1 broke off")
    assert "finished within 9 ms" in first
    assert "lost" in first

    def rows(*engines: EngineLine) -> list[str]:
        shown = table([Trace("left", line, engines)])
        return [row for row in shown if row.startswith("  engine") and "after" in row]

    whole = MEANINGS[EndReason.OK]
    one, other = rows(lost, answered)
    assert "lost on the way" in one
    assert other.endswith(whole)
    [alone] = rows(lost)
    assert not alone.endswith(whole), "with a line missing, it may be either's"
    line.attempts = 1
    [alone] = rows(lost)
    assert "lost on the way" in alone, "no other was asked"


def test_an_engine_that_was_given_up_and_ended_last_is_not_the_one_that_answered() -> None:
    line = gateway(connect_ms=2.0, wait_ms=810.0, attempts=2, failed_attempts=(LOST,))
    own = {"trace_id": line.trace_id, "parent_span_id": line.span_id}
    given_up = engine(total_ms=9000.0, ts="2026-11-01T12:00:09Z", span_id="a" * 16, **own)
    answered = engine(total_ms=8.0, ts="2026-11-01T12:00:05Z", span_id="b" * 16, **own)
    [trace] = join([line, given_up, answered])
    assert [one.span_id for one in trace.engines] == [given_up.span_id, answered.span_id]


def test_an_engine_that_was_done_early_is_not_what_was_waited_for() -> None:
    line = gateway(wait_ms=2000.0, replica="a:1", attempts=1)
    first = texts(line, engine(total_ms=9.0))[0]
    assert "between the gateway and a:1" in first
    assert "within 9 ms" in first


def test_attempts_stand_where_they_were() -> None:
    line = gateway(edge_ms=1.0, connect_ms=5.0, wait_ms=850.0, relay_ms=9.0, failed_attempts=(LOST,))
    visits = [(one.stage, one.from_ms, one.takes_ms) for one in visits_of(line)]
    assert visits == [
        ("edge", 0.0, 1.0),
        ("connect", 1.0, 2.0),
        ("wait", 3.0, 798.0),
        ("connect", 801.0, 3.0),
        ("wait", 804.0, 52.0),
        ("relay", 856.0, 9.0),
    ]
    shares = parts(line)
    assert (shares[ATTEMPTS], CLIENT in shares) == (800.0, False)


def test_a_long_handover_has_a_bar_before_the_queue() -> None:
    line = gateway(wait_ms=4300.0, engine_handover_ms=4251.0, engine_queue_ms=1.0, engine_prefill_ms=8.0)
    line.first_byte_ms, line.engine_first_byte_ms = 4300.0, 4260.0
    bars = {bar.stage: bar for bar in axis(line, ()).bars if bar.service == "engine"}
    assert bars["handover"].from_ms == 20.0
    assert bars["queue"].from_ms == 4271.0
    line.engine_first_byte_ms = 9.0  # the time was spent behind the first byte
    bars = {bar.stage: bar for bar in axis(line, ()).bars if bar.service == "engine"}
    assert bars["handover"].from_ms is None


def test_a_request_in_progress_is_told_what_it_is_at() -> None:
    line = gateway(replica="a:1", attempts=2, failed_attempts=(ONE,))
    told = [one.text for one in so_far(line, "wait", 4200.0)]
    assert told == [
        "5 s: a:1 did not accept a connection, and another was asked",
        "4.2 s so far: a:1 had not begun to answer",
    ]
