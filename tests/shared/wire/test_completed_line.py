"""What is held against the schema of the completed line, and what it finds."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from shared.process import logs
from shared.wire.completed_line import (
    ENGINE_STAGES,
    EVENT,
    GATEWAY_STAGES,
    CompletedLine,
    EngineLine,
    GatewayLine,
)
from shared.wire.end_reason import MEANINGS, EndReason
from tests.line_check import SUITES, LineCheck, schema_problem

BOTH: dict[str, Any] = {
    "ts": datetime.now(UTC),
    "level": "info",
    "event": EVENT,
    "logger": "any",
    "request_id": "r-1",
    "trace_id": "a" * 32,
    "span_id": "b" * 16,
    "method": "POST",
    "endpoint": "/v1/chat/completions",
    "status": 200,
    "end_reason": "ok",
    "stage": "relay",
    "stream": True,
    "total_ms": 1.5,
    "edge_ms": 1.5,
}
OF_THE_GATEWAY: dict[str, Any] = {
    **BOTH,
    "service": "gateway",
    "attempts": 1,
    "prompt_exact": True,
    "reserved_tokens": 5,
    "settled_tokens": 3,
    "events": 2,
    "body_len": 100,
}
OF_THE_ENGINE: dict[str, Any] = {**BOTH, "service": "engine"}


@pytest.mark.parametrize("line", [OF_THE_GATEWAY, OF_THE_ENGINE], ids=["gateway", "engine"])
def test_a_line_as_the_schema_has_it_is_accepted(line: dict[str, Any]) -> None:
    assert schema_problem(line) is None


@pytest.mark.parametrize("line", [OF_THE_GATEWAY, OF_THE_ENGINE], ids=["gateway", "engine"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"route": "/v1/models"}, "route"),
        ({"duration_ms": 1.0}, "duration_ms"),
        ({"status": "200"}, "status"),
        ({"stream": 1}, "stream"),
        ({"end_reason": "client_gone"}, "end_reason"),
        ({"error_param": None}, "error_param"),
        ({"request_id": ...}, "request_id"),
        ({"total_ms": ...}, "total_ms"),
    ],
)
def test_an_unknown_field_a_wrong_type_a_null_and_a_missing_field_are_named(
    line: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    wrong = {name: value for name, value in {**line, **change}.items() if value is not ...}
    assert says in (schema_problem(wrong) or "")


def test_what_one_service_knows_is_no_field_of_the_other() -> None:
    assert "attempts" in (schema_problem({**OF_THE_ENGINE, "attempts": 1}) or "")
    assert "sequences" in (schema_problem({**OF_THE_GATEWAY, "sequences": 1}) or "")


def test_every_stage_has_a_field_and_every_time_its_unit() -> None:
    for kind, stages in ((GatewayLine, GATEWAY_STAGES), (EngineLine, ENGINE_STAGES)):
        assert {f"{stage}_ms" for stage in stages} <= set(kind.__struct_fields__)
        times = {name for name in kind.__struct_fields__ if name.endswith("_ms")}
        told = {"total_ms", "first_byte_ms", "blocked_ms", "masks_ms", "store_ms"} | {
            name for name in times if name.startswith("engine_")
        }
        assert times - told == {f"{stage}_ms" for stage in stages}
    assert set(CompletedLine.__struct_fields__) <= set(GatewayLine.__struct_fields__)


def test_every_reason_has_a_meaning_in_words() -> None:
    assert set(MEANINGS) == set(EndReason)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> LineCheck:
    """A check of its own, in the place of the one that all tests have."""
    monkeypatch.setattr(logs, "write", SUITES.write)
    own = LineCheck()
    own.install()
    return own


def test_the_suites_hook_finds_a_line_that_breaks_the_schema(check: LineCheck) -> None:
    stream = io.StringIO()
    logs.configure("gateway", stream=stream)
    fields = {name: value for name, value in OF_THE_GATEWAY.items() if name not in ("ts", "level", "event")}
    del fields["service"]
    logs.write(EVENT, {**fields, "logger": "gateway.request.record"})
    assert check.take() == []
    logs.write(EVENT, {**fields, "logger": "engine.api.answer.exchange"})
    [problem] = check.take()
    assert "no field of EngineLine: attempts" in problem
    logs.write(EVENT, {**fields, "logger": "gateway.request.record", "total_ms": 4.0, "wait_ms": 1.0})
    assert "1.500 ms are in no stage" in check.take()[0]
    logs.close()
    assert check.checked == 3
    assert len(stream.getvalue().splitlines()) == 3, "what is wrong is written all the same"
    assert json.loads(stream.getvalue().splitlines()[0])["event"] == EVENT


def test_the_hook_stands_before_the_writer_in_every_test() -> None:
    assert logs.write.__module__ == "tests.line_check"
    assert logs.write is not SUITES.write
