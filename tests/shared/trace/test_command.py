"""`penstock trace`: the slowest requests of logs, rows as requests end, and questions that make no sense."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from shared.cli import trace as command
from shared.trace.log_reading import LINE_LEN_MAX, SlowestReading, Tail
from tests.shared.trace.test_trace import REAL, line_of, trace


def log_of(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def pair(number: int, total_ms: float, **changes: Any) -> list[dict[str, Any]]:
    """A request's line of the engine, and then the gateway's."""
    span = f"{number:016x}"
    gateway = line_of("gateway", "left", request_id=f"r{number}", span_id=span, total_ms=total_ms, **changes)
    engine = line_of(
        "engine", "left", request_id=f"r{number}", parent_span_id=span, span_id=f"e{number:015x}"
    )
    return [{**engine, "trace_id": gateway["trace_id"], "total_ms": total_ms - 1.0}, gateway]


def test_the_slowest_requests_come_first_with_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "both.log"
    slow = {5: 900.0, 17: 700.0}
    pairs = [pair(n, slow.get(n, 10.0 + n)) for n in range(40)]
    log.write_bytes(b"garbage\n" + log_of(*itertools.chain(*pairs)) + b'{"event":"request.completed", torn')
    code, text, told = trace(capsys, "--slowest", "2", "--logs", str(log), "--json")
    assert code == 0
    found = [json.loads(row) for row in text.splitlines()]
    assert [one["request_id"] for one in found] == ["r5", "r17"]
    assert [len(one["engines"]) for one in found] == [1, 1]
    assert told == "penstock trace: lines that cannot be read: 1\n"
    code, text, _ = trace(capsys, "--slowest", "2", "--logs", str(log))
    assert text.index("request r5") < text.index("request r17")
    assert "missing" not in text


def test_the_slowest_are_found_in_bounded_memory_also_in_an_engines_log_alone() -> None:
    reading = SlowestReading(3)
    for number in range(1000):
        reading.read(io.BytesIO(log_of(pair(number, 10.0 + number)[0])))
    assert sorted(line.request_id for line in reading.lines) == ["r997", "r998", "r999"]
    assert sum(map(len, reading._heaps.values())) == 24


def test_a_log_without_requests_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.log").write_text("nothing\n")
    code, _, told = trace(capsys, "--slowest", "2", "--logs", str(tmp_path / "empty.log"))
    assert (code, "no completed line in" in told) == (1, True)


def test_a_log_that_gzip_has_packed_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, packed = tmp_path / "gateway.log.1.gz", gzip.compress(REAL.read_bytes())
    log.write_bytes(packed)
    code, text, told = trace(capsys, "left", "--logs", str(log))
    assert (code, told) == (0, "")
    assert trace(capsys, "left", "--logs", str(REAL))[1] == text
    log.write_bytes(packed[:-12])
    code, text, told = trace(capsys, "left", "--logs", str(log))
    assert "gateway.log.1.gz is damaged" in told
    assert "request left" in text


@pytest.mark.parametrize(
    "argv", [(), ("left", "--follow"), ("left", "--slowest", "3"), ("--slowest", "3", "--follow")]
)
def test_one_question_is_answered_at_a_time(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    code, text, told = trace(capsys, *argv)
    assert (code, text) == (2, "")
    assert "give one of REQUEST_ID, --slowest and --follow" in told


@pytest.mark.parametrize("number", ["0", "many", "1001", "-3"])
def test_the_slowest_have_a_bounded_number(capsys: pytest.CaptureFixture[str], number: str) -> None:
    with pytest.raises(SystemExit):
        trace(capsys, f"--slowest={number}", "--logs", str(REAL))
    assert "must be a whole number from 1 to 1000" in capsys.readouterr().err


def test_a_gateway_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = trace(capsys, "left", "--admin-url", "http://127.0.0.1:1")
    assert code == 1
    assert "http://127.0.0.1:1 does not answer" in told
    assert "--logs" in told


# -- following ------------------------------------------------------------------------------------


def test_lines_are_followed_as_they_are_written_whatever_is_between_them(tmp_path: Path) -> None:
    path = tmp_path / "gateway.log"
    whole = log_of(line_of("gateway", "left"))
    path.write_bytes(whole[:50])
    with path.open("rb") as log, path.open("ab") as writer:
        tail = Tail(log)
        assert list(tail.lines()) == []
        for piece in (whole[50:], b"x" * (3 * LINE_LEN_MAX), b"\n" + whole):
            writer.write(piece)
        writer.flush()
        assert list(tail.lines()) == [whole.rstrip(), whole.rstrip()]
        assert len(tail._rest) <= LINE_LEN_MAX


def test_a_row_is_shown_for_each_request_that_ends_in_a_log(tmp_path: Path) -> None:
    path = tmp_path / "both.log"
    path.write_bytes(log_of(*pair(1, 20.0)))
    rows = command._log_rows([str(path)])
    until_idle = list(itertools.takewhile(lambda row: row is not None, rows))
    assert len(until_idle) == 2, "no gateway had written yet when the engine's line came"
    with path.open("ab") as writer:
        writer.write(b'not JSON, "request.completed"\n' + log_of(*pair(2, 1234.0, causes=STALL)))
    [row] = list(itertools.takewhile(lambda row: row is not None, rows))
    assert row is not None
    assert "1.2 s" in row
    assert "r2" in row
    assert row.endswith("stalled 1 s: this client did not read")


STALL = [{"code": "stalled", "ms": 1000.0}]


def test_following_ends_with_the_keyboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command._follow, "__defaults__", (interrupt,))
    (tmp_path / "gateway.log").write_bytes(log_of(line_of("gateway", "left")))
    code, text, _ = trace(capsys, "--follow", "--logs", str(tmp_path / "gateway.log"))
    assert (code, text.count("\n")) == (0, 1)
