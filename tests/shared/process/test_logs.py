from __future__ import annotations

import contextvars
import io
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from select import PIPE_BUF
from typing import Any, Final

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from shared.apis.chat_messages import ChatMessage
from shared.process import logs
from shared.wire.causes import Cause, CauseCode

CANARY = "the-secret-of-the-prompt"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    saved = root.handlers[:], root.level, sys.excepthook, structlog.get_config()
    stream = io.StringIO()
    logs.configure("test", stream=stream)
    yield stream
    logs.close()
    logging.captureWarnings(False)
    root.handlers[:], level, sys.excepthook, config = saved
    root.setLevel(level)
    structlog.configure(**config)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    logs.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_when_what_and_who(stream: io.StringIO) -> None:
    with structlog.contextvars.bound_contextvars(request_id="req_1"):
        logs.get("gateway.app").info("request.completed", status=200, queue_ms=1.5)
    (line,) = lines(stream)
    assert datetime.fromisoformat(str(line.pop("ts"))).utcoffset() == timedelta(0)
    assert line == {
        "level": "info",
        "service": "test",
        "event": "request.completed",
        "logger": "gateway.app",
        "request_id": "req_1",
        "status": 200,
        "queue_ms": 1.5,
    }


def test_lines_of_a_request_have_its_id_whoever_writes_them(stream: io.StringIO) -> None:
    def write() -> None:
        logs.REQUEST_ID.set("req_1")
        logs.get("gateway.app").warning("replica.ejected")
        logging.getLogger("aiohttp").warning("of the library")

    contextvars.copy_context().run(write)
    logs.get("gateway.app").warning("of no request")
    assert [line.get("request_id") for line in lines(stream)] == ["req_1", "req_1", None]


def test_levels_below_the_configured_one_are_silent(stream: io.StringIO) -> None:
    log = logs.get("x")
    log.debug("quiet")
    log.warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_prompt_text_is_redacted_at_any_depth(stream: io.StringIO) -> None:
    logs.get("x").info(
        "e",
        prompt=CANARY,
        Authorization=CANARY,
        headers={"x-api-key": "k", "api-key": CANARY},
        nested=[{"deep": {"messages": [CANARY]}}],
        message=ChatMessage(role="user", content=CANARY),
        raw=CANARY.encode(),
    )
    (line,) = lines(stream)
    assert CANARY not in json.dumps(line)
    assert line["prompt"] == logs.REDACTED
    assert line["message"] == "<ChatMessage>"


def test_exceptions_carry_frames_without_locals(stream: io.StringIO) -> None:
    def fails(prompt: str) -> None:
        hidden = prompt + "!"
        raise RuntimeError(f"{len(hidden)}")

    try:
        fails(CANARY)
    except RuntimeError:
        logs.get("x").exception("boom")
    (line,) = lines(stream)
    assert line["level"] == "error"
    exceptions: Any = line["exception"]
    assert exceptions[0]["exc_type"] == "RuntimeError"
    assert exceptions[0]["frames"][-1]["name"] == "fails"
    assert CANARY not in json.dumps(line)


def test_libraries_speak_json_too(stream: io.StringIO) -> None:
    logging.getLogger("aiohttp.server").error("Error handling %s", "request")
    ours = logging.getLogger().handlers[0]  # pytest's own handler would raise at this one
    ours.handle(logging.makeLogRecord({"name": "x", "msg": "bad %d", "args": ("arguments",)}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    first, second, third = lines(stream)
    assert (first["logger"], first["event"]) == ("aiohttp.server", "Error handling request")
    assert second["event"] == "bad %d"
    assert third["logger"] == "py.warnings"


def test_an_uncaught_exception_is_a_line(stream: io.StringIO) -> None:
    sys.excepthook(ValueError, ValueError("lost"), None)
    (line,) = lines(stream)
    assert line["event"] == "process.uncaught"


def test_an_exception_behind_the_end_of_the_log_is_not_lost(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.close()
    sys.excepthook(ValueError, ValueError("lost"), None)
    assert capsys.readouterr().err == "ValueError: lost\n"


class StuckStream(io.StringIO):
    """A reader that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.go.wait(30)
        return super().write(text)


@pytest.mark.usefixtures("stream")
def test_a_stuck_reader_of_the_log_drops_lines_and_blocks_no_caller() -> None:
    stuck = StuckStream()
    logs.configure("test", stream=stuck)
    log = logs.get("x")
    log.info("first")
    assert stuck.entered.wait(30)
    for number in range(logs.LINES_MAX + 7):
        log.info("line", number=number)
    stuck.go.set()
    written = lines(stuck)
    assert len(written) == 1 + logs.LINES_MAX + 1
    assert (written[-1]["event"], written[-1]["lines"]) == ("logs.dropped", 7)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20)
    | st.binary(max_size=4)
    | st.builds(object)
    | st.builds(ValueError, st.text(max_size=5)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    st.text(st.characters(codec=None), max_size=20),
    st.dictionaries(st.text(max_size=8), anything, max_size=4),
)
def test_any_value_makes_one_line(event: str, fields: dict[str, object]) -> None:
    line = logs.render("test", "info", event, fields)
    assert "\n" not in line
    assert json.loads(line)["service"] == "test"


def test_values_are_bounded() -> None:
    deep: object = 1
    for _ in range(10_000):
        deep = [deep]
    line = logs.render(
        "test", "info", "e", {"a": "x" * 10**6, "b": list(range(10**5)), "c": deep, "d": 10**5000}
    )
    assert len(line) < 4 * logs.TEXT_LEN_MAX


def test_a_line_of_many_fields_is_as_guarded_as_any(stream: io.StringIO) -> None:
    with structlog.contextvars.bound_contextvars(bound="elsewhere"):
        for _ in range(2):  # names are judged once, values every time
            logs.write("e", {"status": 200, "reason": None, "share": 0.5, "prompt": CANARY})
            logs.write("e", {"status": "y" * 10**5, "reason": 2**70, "ts": CANARY, "share": "\ud800"})
            logs.write("e", {"status": [CANARY.encode()], "reason": "fine"})
            logs.write("e", {"status": 2**70, "reason": "\ud800"})
    written = lines(stream)
    assert CANARY not in json.dumps(written)
    first, long, nested, odd, *again = ({n: v for n, v in line.items() if n != "ts"} for line in written)
    assert again == [first, long, nested, odd]
    assert first == {
        "level": "info", "service": "test", "event": "e",
        "status": 200, "reason": None, "share": 0.5, "prompt": logs.REDACTED,
    }  # fmt: skip
    assert len(long["status"]) == logs.TEXT_LEN_MAX + 1  # type: ignore[arg-type]
    assert (nested["status"], odd["status"]) == (["<bytes>"], "<huge int>")


def test_a_line_of_a_level_that_is_not_shown_is_not_written(stream: io.StringIO) -> None:
    logs.configure("test", level="warning", stream=stream)
    logs.write("e", {})
    assert not lines(stream)


class _Line(msgspec.Struct, omit_defaults=True):
    event: str
    detail: str = ""
    prompt: str = ""
    unset: str | None = None
    causes: tuple[Cause, ...] = ()


CAUSES = tuple(Cause(code=CauseCode.GAP_DECODES, ms=1.5, step=10**6 + i, shared=True) for i in range(40))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (_Line("e", detail="a\ud800b"), {"detail": "a\\ud800b"}),
        (_Line("e", detail="x" * 10_000, prompt=CANARY), {"prompt": logs.REDACTED}),
        (_Line("e", detail="x", causes=CAUSES), {"causes": list(map(msgspec.to_builtins, CAUSES))}),
    ],
    ids=["lone surrogate", "long text", "many causes"],
)
def test_a_typed_line_that_json_or_the_bound_refuses_is_written_with_what_fits(
    stream: io.StringIO, line: _Line, expected: dict[str, object]
) -> None:
    logs.write_line(line, "info")
    (written,) = lines(stream)
    assert written["event"] == "e"
    assert expected.items() <= written.items()
    assert "unset" not in written
    assert len(str(written["detail"])) < 10_000


def test_without_a_lock_a_pipe_takes_each_text_as_a_whole() -> None:
    """It does so with `PIPE_BUF` bytes. This stream is none that can be locked."""
    written: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    told = ["ä" * 900] * 5 + ["x" * (PIPE_BUF + 1), "short"]
    writer = logs._Writer(Pipe(), "test", "info", is_shared=True)
    for line in told:
        writer.msg(line)
    writer.close()
    assert "".join(written) == "".join(f"{line}\n" for line in told)
    assert all(text.endswith("\n") for text in written)
    assert [text for text in written if len(text.encode()) > PIPE_BUF] == ["x" * (PIPE_BUF + 1) + "\n"]


_WRITES: Final = """
import sys
from shared.process import logs
for _ in range(20):  # a writer each, so that many writes contend
    writer = logs._Writer(sys.stderr, "test", "info", is_shared=True)
    for _ in range(5):
        writer.msg(sys.argv[1] * 50_000)
    writer.close()
"""


def test_lines_of_several_processes_do_not_run_into_each_other() -> None:
    """They are much longer than what a pipe takes as a whole. All processes have inherited one open file."""
    reading, writing = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", _WRITES, name], stderr=writing) for name in "abc"]
    os.close(writing)
    with open(reading) as stream:
        told = Counter(stream)
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert told == {name * 50_000 + "\n": 100 for name in "abc"}


def test_a_process_that_stands_still_with_the_lock_does_not_stop_the_lines_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOCK_S", 0.02)
    path = tmp_path / "log"
    with path.open("w") as stream:
        hold = "import fcntl, sys; fcntl.lockf(1, fcntl.LOCK_EX); print('ready', file=sys.stderr); input()"
        holder = subprocess.Popen(
            [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.PIPE
        )
        assert holder.stderr is not None
        assert holder.stderr.readline() == b"ready\n"
        writer = logs._Writer(stream, "test", "info", is_shared=True)
        writer.msg("a line")
        writer.close()
        assert path.read_text() == "a line\n"
        holder.communicate(b"\n", timeout=60)
