"""Logs as JSON lines, one per event: ours through structlog, the libraries' through stdlib logging.

Rules:

1. A log call never raises and never waits for the reader of the stream. Lines pass a bounded queue
   to one writer thread; when the reader is too slow, lines are dropped and the drop is counted.
   After each write the writer rests for `REST_S`: waking it costs a request more than its line does.
2. No prompt text. Names on the deny list are redacted at any depth, and only plain values (numbers,
   strings, lists, dicts of those) are written out: anything else is named by its type, so that a
   request object handed to a log call by mistake shows nothing.
3. Exceptions are structured tracebacks without local variables.
4. Processes that share a stream, such as a gateway's workers, take turns by a lock on it, so that their lines
   do not run into each other, however long they are. One that stands still with the lock delays the others'
   lines for `LOCK_S`. From then on each line is written by itself, which a pipe keeps whole up to 4 KiB.

`request_id` and its like are bound once per request, as `REQUEST_ID` or with `structlog.contextvars`, and
merged into every line of that context.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from select import PIPE_BUF
from types import TracebackType
from typing import Any, Final, TextIO, get_args

import msgspec
import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.types import Processor

from shared.process.settings import LogLevel

REQUEST_ID: Final[ContextVar[str]] = ContextVar(f"{structlog.contextvars.STRUCTLOG_KEY_PREFIX}request_id")
"""The context's `request_id`. By its name it is one of structlog's; to bind it by a call takes six times as
long."""
LINES_MAX: Final = 4096
"""The most lines that wait for the writer; a few more when several threads log at the same moment."""
TEXT_LEN_MAX: Final = 2048
"""Characters of one string value."""
ITEMS_MAX: Final = 100
DEPTH_MAX: Final = 8
NAMES_MAX: Final = 1024
"""Names of fields whose check is cached: most are constants of the code."""
FRAMES_MAX: Final = 30
REST_S: Final = 0.05
"""The rest of the writer after each write, in seconds: the last lines that a killed process may lose. A first
line after silence goes out at once."""
LOCK_S: Final = 1.0
"""The most that a writer waits for its turn at a shared stream, in seconds."""
LOCK_RETRY_S: Final = 0.01
FLUSH_S: Final = 2.0
"""The time that the end of the process waits for the writer, in seconds."""

REDACTED: Final = "[redacted]"
DENIED: Final = frozenset(
    {"prompt", "messages", "content", "text", "input", "output", "completion", "choices", "delta", "body"}
    | {"token_ids", "prompt_ids", "authorization", "cookie", "api_key", "key", "secret", "password", "token"}
)
LEVELS: Final = get_args(LogLevel)

_exception_to_dicts: Final = ExceptionDictTransformer(
    show_locals=False, max_frames=FRAMES_MAX, use_rich=False
)


class _Writer:
    """A thread that writes lines which it takes from any other thread."""

    def __init__(
        self, stream: TextIO, service: str, level: str, *, is_shared: bool, has_audits: bool = True
    ) -> None:
        self._stream = stream
        self._is_shared = is_shared
        self.service = service
        self.has_audits = has_audits
        self.levels: Final = frozenset(LEVELS[LEVELS.index(level) :])
        """The levels whose lines are shown."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # a tenth of what a Queue costs
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def msg(self, line: str) -> None:
        if self._lines.qsize() < LINES_MAX:
            self._lines.put(line)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write the lines that wait, within `FLUSH_S`."""
        if not self._thread.is_alive():
            return
        self._closing.set()
        self._lines.put(None)
        self._thread.join(FLUSH_S)  # after that the reader is stuck, and the last lines are lost

    def _run(self) -> None:
        lines: list[str | None] = []
        while None not in lines:
            lines = [self._lines.get()]
            while len(lines) < LINES_MAX and not self._lines.empty():
                lines.append(self._lines.get())
            self._write([line for line in lines if line is not None])
            if self._lines.empty():
                self._report_dropped()
            self._closing.wait(REST_S)

    def _report_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._write([render(self.service, "warning", "logs.dropped", {"lines": dropped})])

    def _write(self, lines: Sequence[str]) -> None:
        try:
            with self._turn() as is_alone:
                for text in ["".join([f"{line}\n" for line in lines])] if is_alone else _atomic(lines):
                    self._stream.write(text)
                    self._stream.flush()
        except (OSError, ValueError):
            self._dropped += len(lines)  # the stream is closed or broken

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Keep other processes from writing to the stream. Gives True if none can write now."""
        if not self._is_shared:
            yield True
            return
        is_alone = _lock(self._stream)
        try:
            yield is_alone
        finally:
            if is_alone:
                fcntl.lockf(self._stream, fcntl.LOCK_UN)


def _lock(stream: TextIO) -> bool:
    """Lock a file or pipe against other processes that lock it, within `LOCK_S`. The lock is a process's own,
    though all have inherited one open file, and ends with it. Returns whether it was had."""
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EACCES or EAGAIN: another has it
            if time.monotonic() >= until_s:
                return False
            time.sleep(LOCK_RETRY_S)
        except OSError:  # this kind of file has no locks
            return False
        else:
            return True


def _atomic(lines: Iterable[str]) -> Iterator[str]:
    """The texts in which lines are written so that a pipe takes each as a whole without a lock. A line that
    is longer than a pipe allows for is written by itself, and may be torn."""
    text, text_len = "", 0
    for line in lines:
        line_len = len(line.encode(errors="replace")) + 1
        if text and text_len + line_len > PIPE_BUF:
            yield text
            text, text_len = "", 0
        text, text_len = f"{text}{line}\n", text_len + line_len
    if text:
        yield text


class _Sink:
    """The last step of structlog's chain: the writer, and the name of the module that logs."""

    __slots__ = ("msg", "name")

    def __init__(self, name: str, writer: _Writer) -> None:
        self.name = name
        self.msg = writer.msg

    def __getattr__(self, level: str) -> Callable[[str], None]:
        return self.msg


class _StdlibHandler(logging.Handler):
    """A handler for the libraries' records (aiohttp, asyncio, warnings), written as lines like ours."""

    def __init__(self, service: str, writer: _Writer) -> None:
        super().__init__()
        self._service = service
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit their format
            event = str(record.msg)
        fields: dict[str, object] = {"logger": record.name, **structlog.contextvars.get_contextvars()}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._writer.msg(render(self._service, record.levelname.lower(), event, fields))


_writer: _Writer | None = None


def configure(
    service: str,
    *,
    level: str = "info",
    stream: TextIO | None = None,
    is_shared: bool = False,
    has_audits: bool = True,
) -> None:
    """Send all logs of this process to `stream` (default: stderr). `is_shared` is true if other processes
    write there, too. Without `has_audits` operators' changes leave no line. May be called again."""
    global _writer
    assert level in LEVELS
    close()
    _writer = writer = _Writer(
        stream or sys.stderr, service, level, is_shared=is_shared, has_audits=has_audits
    )
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _renderer(service)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda name="": _Sink(name, writer),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_StdlibHandler(service, writer)]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel("WARNING")  # below that it logs whole URLs, which may hold secrets
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def close() -> None:
    """Write the lines that wait, within `FLUSH_S`. Runs at exit by itself."""
    global _writer
    if _writer is not None:
        _writer.close()
        _writer = None


atexit.register(close)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger for one module. The event comes first: `log.info("request.completed", status=200)`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(name)
    return logger


def write(event: str, fields: Mapping[str, object], level: str = "info") -> None:
    """Write a line that every request has: rendered like any other, but without structlog, which copies its
    forty fields five times. Variables bound to the context are not added; `fields` name the logger."""
    if _writer is not None and level in _writer.levels:
        _writer.msg(render(_writer.service, level, event, fields))


def audit(event: str, fields: Mapping[str, object]) -> None:
    """Write a line about a change that an operator has made, whatever the lowest level is. `fields` name the
    logger."""
    if _writer is not None and _writer.has_audits:
        _writer.msg(render(_writer.service, "info", event, fields))


def write_line(line: msgspec.Struct, level: str) -> bytes | None:
    """Write a line that is a value of one type, which has its event, service and logger. Its fields need no
    check but its length. Defaults are left out. Returns its JSON, and None where that was not written."""
    if _writer is None or level not in _writer.levels:
        return None
    try:
        encoded = msgspec.json.encode(line)
        if len(encoded) <= TEXT_LEN_MAX:  # and so is every text in it
            _writer.msg(encoded.decode())
            return encoded
    except (OverflowError, UnicodeEncodeError):
        pass  # a huge number, or a lone surrogate
    fields = msgspec.to_builtins(line)
    _writer.msg(render(_writer.service, level, str(fields.pop("event", "")), fields))
    return None


def render(service: str, level: str, event: str, fields: Mapping[str, object]) -> str:
    """One line, without its newline."""
    line: dict[str, object] = {
        "ts": datetime.now(UTC),  # as RFC 3339 has it, by the encoder
        "level": level,
        "service": service,
        "event": event[:TEXT_LEN_MAX],
    }
    if _harmless.issuperset(fields) and _PLAIN.issuperset(map(type, fields.values())):
        # checked as a whole: one by one, forty fields take longer than all the rest
        try:
            encoded = msgspec.json.encode({**line, **fields})
            if len(encoded) <= TEXT_LEN_MAX:  # and so is every text in it
                return encoded.decode()
        except (OverflowError, UnicodeEncodeError):
            pass  # a huge number, or a lone surrogate, which is handled below
    exception = _exception_of(fields.get("exc_info"))
    if exception is not None:
        line["exception"] = plain(_exception_to_dicts(exception))
    for name, value in fields.items():
        if name in line or name == "exc_info":
            continue
        if _denied(name):
            line[name] = REDACTED
        else:
            line[name] = plain(value)
            if name not in _OUR_OWN and len(_harmless) < NAMES_MAX:
                _harmless.add(name)
    try:
        return msgspec.json.encode(line).decode()
    except UnicodeEncodeError:  # a lone surrogate somewhere
        return msgspec.json.encode(_without_surrogates(line)).decode()


def plain(value: object, depth: int = 0) -> object:
    """The value as JSON-safe data within bounds. An object that is not plain data is named by its type, not
    shown."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is str:
        return _bounded(str(value))
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else "<huge int>"  # type: ignore[operator]
    return _plain(value, depth)


def _plain(value: object, depth: int) -> object:
    match value:
        case Enum():
            return value.name.lower()
        case float():
            return float(value)
        case int():
            return plain(int(value))
        case str():
            return _bounded(value)
        case PurePath():
            return str(value)
        case BaseException():
            return f"{type(value).__name__}: {str(value)[:200]}"
        case _ if depth >= DEPTH_MAX:
            return f"<{type(value).__name__}>"
        case Mapping():
            return {
                str(name)[:TEXT_LEN_MAX]: REDACTED if _denied(str(name)) else plain(item, depth + 1)
                for name, item in list(value.items())[:ITEMS_MAX]
            }
        case list() | tuple():
            return [plain(item, depth + 1) for item in value[:ITEMS_MAX]]
        case _:
            return f"<{type(value).__name__}>"


def _bounded(text: str) -> str:
    return text if len(text) <= TEXT_LEN_MAX else text[:TEXT_LEN_MAX] + "…"


_AS_THEY_ARE: Final = frozenset({float, bool, type(None)})
_PLAIN: Final = _AS_THEY_ARE | {int, str}
_OUR_OWN: Final = frozenset({"ts", "level", "service", "event", "exception", "exc_info"})
_harmless: Final[set[str]] = set()
"""Names of fields that are known to be neither denied nor reserved."""
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1


@lru_cache(maxsize=NAMES_MAX)
def _denied(name: str) -> bool:
    return name.lower().replace("-", "_") in DENIED


def _renderer(service: str) -> Processor:
    def last(sink: _Sink, level: str, fields: MutableMapping[str, Any]) -> str:
        event = str(fields.pop("event", ""))
        return render(service, _LEVEL_OF.get(level, level), event, {"logger": sink.name, **fields})

    return last


_LEVEL_OF: Final = {"exception": "error", "warn": "warning"}
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def _exception_of(exc_info: object) -> _ExcInfo | None:
    """The exception that `exc_info=` stands for, in any of the forms that logging knows. None without one."""
    error = sys.exc_info()[1] if exc_info is True else exc_info
    if isinstance(error, tuple):
        error = error[1]
    return (type(error), error, error.__traceback__) if isinstance(error, BaseException) else None


def _without_surrogates(value: object) -> object:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
        case list():
            return [_without_surrogates(item) for item in value]
        case _:
            return value


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if _writer is None or issubclass(kind, KeyboardInterrupt):  # a command may have closed its log
        sys.__excepthook__(kind, error, traceback)
    else:
        get(__name__).error("process.uncaught", exc_info=(kind, error, traceback))
