"""A supervisor of child services: it starts and watches them, and stops them in the opposite order.

Rules:

1. A child runs in a session of its own, so that Ctrl-C in the terminal reaches the parent alone, which
   then stops the children in order: first the one started last, which depends on those before it.
2. A child ends with its parent, however that ends (`shared.process.lifecycle.die_with_parent`).
3. Stopping is SIGTERM, a bounded wait, SIGKILL. After `hurry` it is SIGKILL at once.
4. What a child writes goes to the end of its log file, behind what its last run wrote; the end of that file
   says why it died. A file that has grown to `LOG_LEN_MAX` is moved aside, in place of the one that was moved
   before: two such files at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import httpx
import msgspec

from shared.process import tls
from shared.process.child_python import environment
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.lifecycle import die_with_parent
from shared.process.waits import first_of

READY_POLL_S: Final = 0.05
LIVE_POLL_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 5.0
TAIL_LEN: Final = 64 * 1024
"""Bytes of a log that are read for its last lines."""
TAIL_LINES: Final = 12
LOG_LEN_MAX: Final = 64 * 1024 * 1024
"""Bytes of a log file before it is moved aside: about a hundred thousand requests."""
assert TAIL_LEN < LOG_LEN_MAX
LINE_LEN_MAX: Final = 400

T = TypeVar("T")


class ServiceDied(Exception):
    """A service ended, or failed, on its own. The message names it and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    name: str
    argv: tuple[str, ...]
    log: Path
    url: str
    """The URL at which it answers `/readyz` and `/livez`."""
    start_deadline_s: float
    cert: str | None = None
    """The path of its certificate for an `https` URL, PEM. None for plain HTTP."""
    restarts: bool = False
    """True if it is started again when it ends."""


class RunningService:
    """A running child."""

    def __init__(self, spec: ServiceSpec, process: Process, log: BinaryIO, clock: Clock) -> None:
        self.spec = spec
        self._process = process
        self._log = log
        self._clock = clock

    @classmethod
    async def start(cls, spec: ServiceSpec, clock: Clock = SYSTEM_CLOCK) -> RunningService:
        with spec.log.open("ab") as log:  # append mode: the child writes on at the end after the file was cut
            keep_short(spec.log)
            own = spec.log.open("rb")
            own.seek(0, os.SEEK_END)
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment(),
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        return cls(spec, process, own, clock)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, on_line: Callable[[str], None]) -> None:
        """Wait until the service says that it is ready, and pass its log lines to `on_line`.

        Raises ServiceDied when it ends first, or takes longer than its `start_deadline_s`.
        """
        deadline_s = self._clock.monotonic() + self.spec.start_deadline_s
        async with _probe_client(self.spec) as client:
            while not await self._answers(client, "/readyz"):
                self._pass_lines(on_line)
                if self._process.returncode is not None or self._clock.monotonic() >= deadline_s:
                    raise self._died()
                await self._clock.sleep(READY_POLL_S)
        self._pass_lines(on_line)

    async def failed(self) -> ServiceDied:
        """Wait until the service has ended on its own, or `/livez` says that it has failed."""
        async with _probe_client(self.spec) as client:
            while self._process.returncode is None:
                await first_of(self._process.wait(), self._clock.sleep(LIVE_POLL_S))
                keep_short(self.spec.log)
                if self._process.returncode is None and await self._answers(client, "/livez", status=500):
                    break
        return self._died()

    async def stop(self, grace_s: float) -> bool:
        """Stop the service. Returns True when it ended by itself within `grace_s`, False when it was
        killed."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
            return False
        self._log.close()
        return True

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._log.close()

    async def _answers(self, client: httpx.AsyncClient, path: str, status: int = 200) -> bool:
        try:
            return (await client.get(self.spec.url + path)).status_code == status
        except httpx.TransportError:
            return False

    def _pass_lines(self, on_line: Callable[[str], None]) -> None:
        """Pass the new whole lines of the log on. An unfinished line is read again the next time."""
        while (line := self._log.readline()).endswith(b"\n"):
            on_line(line.decode(errors="replace"))
        self._log.seek(-len(line), os.SEEK_CUR)

    def _died(self) -> ServiceDied:
        match self._process.returncode:
            case None:
                how = "does not answer that it is well"
            case code if code >= 0:
                how = f"exited with status {code}"
            case code:
                how = f"was killed by signal {-code}"
        return ServiceDied(f"the {self.spec.name} {how}\n{log_tail(self.spec.log)}".rstrip())


def _probe_client(spec: ServiceSpec) -> httpx.AsyncClient:
    verify = tls.pinned_context(spec.cert) if spec.cert is not None else True
    return httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S, verify=verify)


async def stop_all(services: Sequence[RunningService], grace_s: float, hurry: asyncio.Event) -> None:
    """Stop the services, the last started first; kill all at once when `hurry` is set."""

    async def in_order() -> None:
        for service in reversed(services):
            await service.stop(grace_s)

    if not await unless(hurry, in_order()):
        await asyncio.gather(*(service.kill() for service in services))


async def unless(event: asyncio.Event, work: Awaitable[Any]) -> bool:
    """Do `work` unless `event` is set first. Returns whether the work was done; if not, it was cancelled."""
    task = asyncio.ensure_future(work)
    interrupted = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        task.cancel()
        interrupted.cancel()
        await asyncio.gather(task, interrupted, return_exceptions=True)


# -- logs, readable -----------------------------------------------------------------------------


def keep_short(log: Path, len_max: int = LOG_LEN_MAX) -> None:
    """Move the contents of a log aside once they have `len_max` bytes. Its writer goes on in the same file,
    so the contents are copied and the file is cut: a line that is written between the two is lost."""
    if log.stat().st_size >= len_max:
        shutil.copyfile(log, log.with_suffix(".old.log"))
        os.truncate(log, 0)


def log_tail(path: Path) -> str:
    """The last lines of a log, readable."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_LEN))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {readable(line)}" for line in lines[-TAIL_LINES:])


def readable(line: str) -> str:
    """A JSON line as `level event name=value ...`; any other line as it is."""
    fields = parse_line(line)
    if fields is None:
        return line[:LINE_LEN_MAX]
    level, event = fields.pop("level", ""), fields.pop("event", "")
    for name in ("ts", "service", "logger"):
        fields.pop(name, None)
    shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    return f"{level} {event} {shown}".strip()[:LINE_LEN_MAX]


def _shown(value: Any) -> str:
    match value:
        case [{"exc_type": str(kind), "exc_value": str(text)}, *_]:
            return f"{kind}: {text}"
        case str():
            return value
        case _:
            return msgspec.json.encode(value).decode()


def parse_line(line: str) -> dict[str, Any] | None:
    """The fields of a log line of ours; None for any other line."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
