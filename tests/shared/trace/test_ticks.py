"""A stream's ticks in the terminal's waterfall: a row of marks on the axis."""

from __future__ import annotations

from datetime import UTC, datetime

from shared.trace.axis import Axis, Bar
from shared.trace.request_records import RequestRecord, RequestSummary, Tick
from shared.trace.request_text import BAR_WIDTH, record_text, waterfall

BARS = (
    Bar("gateway", "wait", 20.0, 0.0),
    Bar("gateway", "relay", 44.0, 20.0),
    Bar("engine", "decode", 40.0, 20.0),
)
HEAD = len(f"  {'':<9}{'':<12}{'':>12}{'':>12}  ")


def test_the_marks_stand_under_the_relay_on_the_same_axis() -> None:
    ticks = (Tick(20.0, 1), Tick(22.0, 2), Tick(63.9, 3))
    rows = list(waterfall(Axis(BARS), {}, ticks))
    assert [row.split()[:2] for row in rows[1:]] == [
        ["gateway", "wait"],
        ["gateway", "relay"],
        ["events", "20.000"],
        ["engine", "decode"],
    ]
    assert rows[3][HEAD:] == " " * 10 + "||" + " " * 19 + "|"
    assert len(rows[3]) == HEAD + BAR_WIDTH
    assert rows[2][HEAD:].startswith(" " * 10 + "=")
    assert "      43.900" in rows[3]
    assert list(waterfall(Axis(BARS), {})) == [*rows[:3], *rows[4:]]


def test_a_tick_behind_the_last_bar_and_a_request_without_a_relay_are_shown_all_the_same() -> None:
    late = list(waterfall(Axis(BARS), {}, (Tick(20.0, 1), Tick(128.0, 2))))[3]
    assert (late[HEAD + 5], late[HEAD + BAR_WIDTH - 1], late[HEAD:].count("|")) == ("|", "|", 2)
    assert list(waterfall(Axis(BARS[:1]), {}, (Tick(1.0, 1),)))[-1].split()[0] == "events"
    assert list(waterfall(Axis((Bar("gateway", "relay", 0.0, 0.0),)), {}, (Tick(0.0, 1),)))[-1].endswith("|")


def test_a_live_requests_text_has_its_ticks() -> None:
    summary = RequestSummary(
        request_id="r",
        is_live=True,
        began_at=datetime(2026, 11, 23, tzinfo=UTC),
        total_ms=64.0,
        stage="relay",
        method="POST",
        endpoint="/v1/chat/completions",
        events=2,
    )
    record = RequestRecord(summary=summary, axis=Axis(BARS[:2]), ticks=(Tick(20.0, 1), Tick(30.0, 2)))
    last = list(record_text(record))[-1]
    assert last.split()[:3] == ["events", "20.000", "10.000"]
    assert last.count("|") == 2
