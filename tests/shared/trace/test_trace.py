"""`penstock trace`: from lines of both services' logs to what a person reads."""

from __future__ import annotations

import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared import cli
from shared.trace import log_reading
from shared.trace.axis import axis
from shared.trace.join import Trace, join
from shared.trace.log_reading import LogReading, bounded_lines
from shared.trace.request_records import RequestRecord, RequestSummary
from shared.trace.request_text import record_text, table
from tests.line_check import schema_problem

REAL = Path(__file__).with_name("lines.jsonl")
"""What `penstock up` wrote of these requests: `twice` (a stream, and two choices), `refused`, `left` by its
client in the middle, and `direct`, which the engine was asked itself."""
LINES: list[dict[str, Any]] = [json.loads(line) for line in REAL.read_text().splitlines()]


def line_of(service: str, request_id: str, /, **changes: Any) -> dict[str, Any]:
    """The first real line of a request in a service, changed; a field that becomes `...` is left out."""
    found = next(line for line in LINES if line["service"] == service and line["request_id"] == request_id)
    return {name: value for name, value in {**found, **changes}.items() if value is not ...}


def read(request_id: str, *lines: dict[str, Any] | bytes) -> LogReading:
    found = LogReading(request_id)
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    found.read(io.BytesIO(b"\n".join(texts) + b"\n"))
    return found


def traces_of(request_id: str, *lines: dict[str, Any] | bytes) -> list[Trace]:
    return join(read(request_id, *lines).lines)


def shown(request_id: str, *lines: dict[str, Any] | bytes) -> str:
    return "\n".join(table(traces_of(request_id, *lines)))


def trace(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["trace", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['service']} {line['request_id']}")
def test_the_real_lines_are_as_the_schema_has_them(line: dict[str, Any]) -> None:
    assert schema_problem(line) is None


# -- one picture ----------------------------------------------------------------------------------


def test_a_request_is_shown_in_words_and_stage_by_stage() -> None:
    text = shown("left", *LINES)
    assert "asked    POST /v1/chat/completions, as a stream; model penstock-demo, tenant development" in text
    assert "gateway  499 client_cancel in relay, after" in text
    assert "engine   499 client_cancel in decode, after" in text
    assert text.count("the client left before its answer was complete") == 2
    assert text.count("prompt 12 tokens (0 cached), answer ") == 2
    rows = [row.split() for row in text[text.index("service") :].splitlines()[1:-1]]
    stages = [tuple(row[:2]) for row in rows]
    assert stages[:3] == [("gateway", "edge"), ("gateway", "auth"), ("gateway", "seat")]
    assert stages.index(("gateway", "settle")) < stages.index(("engine", "body"))
    assert [row[1] for row in rows if row[-2:] == ["ended", "here"]] == ["relay", "decode"]


def test_cached_tokens_are_told_as_a_share_and_by_tier() -> None:
    told = {"prompt_tokens": 128, "cached_tokens": 96, "host_tokens": 64, "disk_tokens": 32}
    text = shown("left", line_of("engine", "left", **told))
    assert "prompt 128 tokens (96 cached, 75%, 64 of them in host memory, 32 of them on disk)" in text


@pytest.mark.parametrize("service", ["gateway", "engine"])
def test_the_steps_that_drafts_saved_are_told_and_what_came_of_a_prediction(service: str) -> None:
    told = {"drafted_tokens": 40, "accepted_tokens": 30}
    text = shown("left", line_of(service, "left", **told))
    assert "30 steps saved by drafts (75% of 40 right)" in text
    assert "prediction" not in text
    predicted = {"accepted_prediction_tokens": 21, "rejected_prediction_tokens": 4}
    text = shown("left", line_of(service, "left", **told, **predicted))
    assert "of its prediction 21 right and 4 wrong" in text


def test_the_session_that_a_caller_named_is_told() -> None:
    named = line_of("gateway", "left", session="0123456789abcdef")
    assert schema_problem(named) is None
    assert ", session 0123456789abcdef" in shown("left", named)
    assert "session" not in shown("left", *LINES)
    assert schema_problem({**named, "session": "joe@example.org"}) is not None


def test_the_gateways_stages_follow_one_another_until_its_total() -> None:
    text = shown("left", line_of("gateway", "left"))
    rows = [row.split() for row in text[text.index("service") :].splitlines()[1:] if "gateway" in row]
    spans = [(float(row[2]), float(row[3])) for row in rows]
    for (start, takes), (following, _) in pairwise(spans):
        assert start + takes == pytest.approx(following, abs=0.002)
    total = line_of("gateway", "left")["total_ms"]
    assert sum(spans[-1]) == pytest.approx(total, abs=0.2)


def test_requests_that_share_an_id_are_told_apart_and_none_gets_the_others_line() -> None:
    first, second = traces_of("twice", *reversed(LINES))
    assert first.ended_s < second.ended_s
    for one in (first, second):
        assert one.gateway is not None
        [engine] = one.engines
        assert engine.parent_span_id == one.gateway.span_id
        assert engine.completion_tokens == one.gateway.completion_tokens
    text = shown("twice", *LINES)
    assert "request twice, 1 of 2\n" in text
    assert "request twice, 2 of 2\n" in text


def test_requests_that_share_id_and_trace_are_told_apart_by_their_spans() -> None:
    trace_id = "c" * 32
    lines = [{**line, "trace_id": trace_id} for line in LINES]
    assert [len(one.engines) for one in traces_of("twice", *lines)] == [1, 1]


def test_a_request_that_two_engines_were_asked_for_is_one() -> None:
    gateway, engine = line_of("gateway", "left", attempts=2), line_of("engine", "left")
    other = {
        **engine,
        "span_id": "d" * 16,
        "end_reason": "refused",
        "status": 503,
        "ts": "2026-01-01T00:00:00Z",
    }
    text = shown("left", engine, gateway, other)
    assert "engine 1 503 refused" in text.replace("engine 1  ", "engine 1 ")
    assert "engine 2" in text
    assert "missing" not in text


def test_the_same_log_given_twice_shows_nothing_twice() -> None:
    assert len(traces_of("twice", *LINES, *LINES)) == 2


# -- one side's log -------------------------------------------------------------------------------


def test_without_the_gateways_log_the_engines_side_is_shown_and_the_other_missed() -> None:
    text = shown("left", line_of("engine", "left"))
    assert "gateway  no line in these logs" in text
    assert "engine   499 client_cancel in decode" in text


def test_without_the_engines_log_the_gateways_side_is_shown_and_the_other_missed() -> None:
    text = shown("left", line_of("gateway", "left"))
    assert "engine   1 line missing" in text


@pytest.mark.parametrize(("told", "missed"), [({}, False), ({"engine_end_reason": ""}, True)])
def test_a_gateways_record_misses_an_engine_that_told_nothing(told: dict[str, Any], missed: bool) -> None:
    """It has no engine's lines, and needs none."""
    [found] = traces_of("left", line_of("gateway", "left", **told))
    line = found.gateway
    assert line is not None
    one = RequestSummary(
        request_id="left",
        is_live=False,
        began_at=line.ts,
        total_ms=line.total_ms,
        stage=line.stage,
        method=line.method,
        endpoint=line.endpoint,
    )
    text = "\n".join(record_text(RequestRecord(summary=one, axis=axis(line, ()), line=line)))
    assert "line missing" not in text
    assert ("told nothing of it" in text) == missed


def test_an_engine_that_was_not_asked_is_not_missed() -> None:
    text = shown("refused", *LINES)
    assert "missing" not in text
    assert "no engine was asked" in text
    assert "error invalid_value, param temperature" in text
    assert "the prompt was not counted" in text


# -- lines of any kind ----------------------------------------------------------------------------

NAMES_IT = b'"request.completed" "left"'
DAMAGED: dict[str, dict[str, Any] | bytes] = {
    "cut off": json.dumps(line_of("gateway", "left")).encode()[:-20],
    "not JSON": NAMES_IT + b" {",
    "not UTF-8": json.dumps(line_of("gateway", "left")).encode().replace(b"POST", b"P\xffST"),
    "brackets": b'{"event":"request.completed","request_id":"left","x":' + b"[" * 60_000,
    "no status": line_of("gateway", "left", status=...),
    "a status in words": line_of("gateway", "left", status="fine"),
    "a huge number": line_of("gateway", "left", attempts=2**70),
    "less than nothing": line_of("engine", "left", decode_ms=-1.0),
    "an endless time": line_of("engine", "left", total_ms=1e300),
    "a time without its zone": line_of("engine", "left", ts="2026-01-01T00:00:00"),
    "an end that is none": line_of("engine", "left", end_reason="exploded"),
}
OTHERS: dict[str, dict[str, Any] | bytes] = {
    "another event": {"event": "request.crashed", "request_id": "left", "about": "request.completed"},
    "another service": line_of("engine", "left", service="sidecar"),
    "another id": line_of("engine", "left", request_id="right", tenant="left"),
    "text": b"left a request.completed behind",
    "nothing": b"",
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_counted_and_the_others_are_shown(line: dict[str, Any] | bytes) -> None:
    found = read("left", line_of("engine", "left"), line, line_of("gateway", "left"))
    assert (found.damaged, len(found.lines)) == (1, 2)


@pytest.mark.parametrize("line", OTHERS.values(), ids=OTHERS.keys())
def test_other_lines_are_passed_over(line: dict[str, Any] | bytes) -> None:
    found = read("left", line, line_of("gateway", "left"))
    assert (found.damaged, len(found.lines)) == (0, 1)


def test_fields_of_a_later_version_do_not_matter() -> None:
    assert len(traces_of("left", line_of("gateway", "left", shoe_size=44))) == 1


def test_what_a_container_runtime_puts_before_a_line_is_passed_over() -> None:
    line = b"engine-1  | " + json.dumps(line_of("engine", "left")).encode()
    assert len(traces_of("left", line)) == 1


def test_a_line_without_an_end_is_never_held() -> None:
    class Endless(io.RawIOBase):
        """A gigabyte without a line end, then a line."""

        left = 1 << 30

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size == log_reading.LINE_LEN_MAX
            if self.left <= 0:
                self.left, last = self.left - 1, self.left
                return b"the next line\n" if last == 0 else b""
            self.left -= 1 << 20
            return b"x" * size if self.left else b"the end of the long one\n"

    assert list(bounded_lines(Endless())) == [b"the next line\n"]  # type: ignore[arg-type]


def test_lines_beyond_the_bound_are_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reading, "LINES_MAX", 3)
    found = read("left", *[line_of("gateway", "left", span_id=f"{i:016x}") for i in range(5)])
    assert (len(found.lines), found.left_out) == (3, 2)


# -- the terminal ---------------------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\u2028\x00\x7f"
TEXTS = ("method", "endpoint", "stage", "tenant", "model", "key_id", "replica", "trace_id", "error_code")


@pytest.mark.parametrize("field", [*TEXTS, "error_param", "error_detail"])
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "JSON"])
def test_no_field_can_reach_the_terminals_controls_or_forge_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, form: tuple[str, ...]
) -> None:
    plain, hostile = tmp_path / "plain.log", tmp_path / "hostile.log"
    base = {"quota_meter": "tokens", "quota_scope": "key", "error_code": "c", "error_detail": "d"}
    plain.write_text(json.dumps(line_of("gateway", "left", **base)))
    hostile.write_text(
        json.dumps(line_of("gateway", "left", **base | {field: f"a{ESCAPES}\n  forged   row\tb"}))
    )
    _, expected, _ = trace(capsys, "left", "--logs", str(plain), *form)
    code, text, _ = trace(capsys, "left", "--logs", str(hostile), *form)
    assert code == 0
    assert all(char.isprintable() or char == "\n" for char in text)
    assert text.count("\n") <= expected.count("\n") + 1, "an error's row more, where there was none"
    assert "forged" in text or form, "what it says is shown"


# -- the command ----------------------------------------------------------------------------------


def test_files_and_standard_input_are_read_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(json.dumps(line_of("gateway", "left")))
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(line_of("engine", "left")).encode() + b"\n" + b"{left"))
    monkeypatch.setattr(sys, "stdin", stdin)
    code, text, told = trace(capsys, "left", "--logs", "-", str(log))
    assert (code, told) == (0, "")
    assert "missing" not in text


def test_a_request_that_no_log_knows_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, told = trace(capsys, "nobodys", "--logs", str(REAL))
    assert (code, text) == (1, "")
    assert told == f"penstock trace: no completed line of this request in {REAL}\n"


def test_json_has_every_field_that_the_lines_have(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = trace(capsys, "twice", "--logs", str(REAL), "--json")
    assert code == 0
    first, second = map(json.loads, text.splitlines())
    assert first["request_id"] == second["request_id"] == "twice"
    real = line_of("gateway", "twice")
    assert first["gateway"].items() >= {name: real[name] for name in real if name != "ts"}.items()
    assert [len(one["engines"]) for one in (first, second)] == [1, 1]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("not an id", "--logs", str(REAL)), "must be 1 to 64"),
        (("\x1b[2J", "--logs", str(REAL)), "must be 1 to 64"),
    ],
)
def test_a_wrong_question_is_answered_with_what_would_be_right(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        trace(capsys, *argv)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert "\x1b" not in told


def test_a_log_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = trace(capsys, "left", "--logs", str(tmp_path / "none.log"))
    assert code == 1
    assert "none.log" in told
