"""The other ranks as rank 0 sees them: processes, a socket to each, and a thread that watches them. Of a rank
on another machine there is the socket alone.

The thread is needed because the main one may be inside a collective (or wait for a device that is), which
never ends once a rank died in it. The thread watches three things:

  1. a socket's end, or a rank's last words: that rank is lost, at once;
  2. a rank that has not done what it was told within `deadline_s`;
  3. rank 0's own step, which has taken as long: then no rank can be named.

The first of these to occur decides. Every rank is ended, waits of the main thread end with `RankLost`, and
`on_lost` is called with the reason. Deadlines are counted on rank 0's clock alone, and only while it serves:
loading and capturing have no deadline of their own, as the API process has one for the whole start.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from engine.runtime.parallel.wire import (
    RECEIVE_LEN,
    Build,
    Execute,
    FromRank,
    Goodbye,
    Landed,
    RankDone,
    RankFailed,
    Reader,
    Start,
    frame,
)
from engine.runtime.setup.model_errors import CollectiveFailed, RankLost
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process import logs
from shared.process.child_python import environment
from shared.process.clock import SYSTEM_CLOCK, Clock

MODULE: Final = "engine.runtime.parallel.rank"
WATCH_INTERVAL_S: Final = 0.1
"""The longest time after its deadline at which a late rank is noticed."""
LAST_WORDS_S: Final = 5.0
"""The time, after a collective failed, in which the watch has to find the rank that is to blame."""
EXIT_S: Final = 1.0
"""The longest wait for the end of a process whose socket has ended or which was killed. A process that is
stuck in a driver takes longer, and is not waited for."""

log = logs.get(__name__)
Answer = TypeVar("Answer", bound=FromRank)
OnLost = Callable[[str], None]
"""Called with the reason, in the watch's thread, once every rank is ended."""


@dataclass(slots=True)
class _Rank:
    """One rank's process and its socket."""

    number: int
    process: subprocess.Popen[bytes] | None
    """None for one that somebody else started: it ends by itself when its socket does."""
    wire: socket.socket
    reader: Reader[FromRank]
    answers: deque[FromRank] = field(default_factory=deque)
    """The answers to `Start`, which the main thread waits for."""
    told_at_s: deque[float] = field(default_factory=deque)
    """The times at which messages were sent that the rank has not answered yet. The main thread appends, the
    watch removes."""

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped by a signal or by a debugger."""
        if self.process is None:
            return False
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state in "Tt"
        return False

    def end(self) -> None:
        """End the rank at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        else:
            with contextlib.suppress(OSError):
                self.wire.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Wait for the end of its process, for a moment."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_S)

    def end_reason(self) -> str:
        """Why its socket has ended."""
        if self.process is None:
            return f"rank {self.number} has closed its connection, or cannot be reached"
        try:
            status = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return f"rank {self.number} has closed its socket"
        if status < 0:
            return f"rank {self.number} was ended by {signal.Signals(-status).name}"
        return f"rank {self.number} exited with status {status}"


class Ranks:
    def __init__(
        self,
        config: RunnerConfig,
        on_lost: OnLost,
        clock: Clock = SYSTEM_CLOCK,
        joined: Sequence[socket.socket] = (),
    ) -> None:
        """Start the other ranks, in the thread that lives longest: ranks are killed when that thread ends.

        `joined`: connections to ranks that somebody else has started, from rank 1 on; then none is
        started."""
        assert config.tensor_parallel_size > 1
        self._deadline_s = config.rank_timeout_s
        self._on_lost = on_lost
        self._clock = clock
        self._news = threading.Condition()
        """Guards the answers and `_lost`, which both threads use."""
        self._lost: str | None = None
        self._is_closed = False
        self._is_serving = False
        self._step: tuple[int, float] | None = None
        """The main thread's current step and its start, in seconds of the clock; None between steps."""
        if joined:
            self.store_file = ""
            self._ranks = [self._greet(config, number, wire) for number, wire in enumerate(joined, 1)]
        else:
            # Stays open as long as this process: torch writes to it once more when it drops its store.
            self._store = os.memfd_create("ranks")
            self.store_file = f"/proc/self/fd/{self._store}"
            self._ranks = [self._start(config, number) for number in range(1, config.tensor_parallel_size)]
        self._watch = threading.Thread(target=self._watch_all, name="ranks", daemon=True)
        self._watch.start()

    def _start(self, config: RunnerConfig, number: int) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=theirs.fileno(),
                pass_fds=[self._store],
                env=environment(),
            )
        rank = _Rank(number, process, ours, Reader(msgspec.msgpack.Decoder(FromRank)))
        ours.sendall(frame(Start(config, number, os.getpid(), self.store_file)))
        log.info("rank.started", rank=number, pid=process.pid)
        return rank

    def _greet(self, config: RunnerConfig, number: int, wire: socket.socket) -> _Rank:
        with contextlib.suppress(OSError):  # the watch finds that it is gone
            wire.sendall(frame(Start(config, number, os.getpid(), self.store_file)))
        log.info("rank.joined", rank=number, address=wire.getpeername()[0])
        return _Rank(number, None, wire, Reader(msgspec.msgpack.Decoder(FromRank)))

    # -- the main thread --------------------------------------------------------------------------

    def answers(self, kind: type[Answer]) -> list[Answer]:
        """The next answer of every rank, which must be of this kind. Raises RankLost."""
        with self._news:
            self._news.wait_for(lambda: self._lost or all(rank.answers for rank in self._ranks))
            if self._lost is not None:
                raise RankLost(self._lost)
            found: list[Answer] = []
            for rank in self._ranks:
                answer = rank.answers.popleft()
                assert isinstance(answer, kind), f"rank {rank.number} is out of step"
                found.append(answer)
            return found

    def send(self, message: Build | Execute | Landed) -> None:
        """Send a message to every rank, encoded once. Raises RankLost."""
        data = frame(message)
        for rank in self._ranks:
            rank.told_at_s.append(self._clock.monotonic())
            try:
                rank.wire.sendall(data)
            except OSError as error:
                raise self._blame(error) from error

    def serve(self) -> None:
        """Give steps a deadline from now on."""
        self._is_serving = True

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Encloses work that waits for the other ranks. Raises RankLost."""
        self._step = number, self._clock.monotonic()
        try:
            yield
        except CollectiveFailed as error:
            raise self._blame(error) from error
        finally:
            self._step = None

    def _blame(self, error: Exception) -> RankLost:
        """The reason for a failure, which the watch finds."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None, LAST_WORDS_S)
            return RankLost(self._lost or f"a collective failed: {error}")

    def close(self) -> None:
        """End every rank and the watch. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_serving and self._lost is None:
            self._say_goodbye()
        self._end_all()
        self._watch.join()
        for rank in self._ranks:
            rank.wire.close()

    def _say_goodbye(self) -> None:
        """Let ranks that somebody else started end as they should."""
        for rank in self._ranks:
            if rank.process is None:
                with contextlib.suppress(OSError):  # one that does not take it learns it from the end
                    rank.wire.settimeout(EXIT_S)
                    rank.wire.sendall(frame(Goodbye()))

    # -- the watch --------------------------------------------------------------------------------

    def _watch_all(self) -> None:
        try:
            reason = self._watch_until_lost()
        except Exception as error:  # unwatched, a lost rank would hold up everything for ever
            log.exception("ranks.watch_failed")
            reason = f"what the ranks say cannot be followed: {type(error).__name__}"
        if not self._is_closed:
            self._lose(reason)

    def _watch_until_lost(self) -> str:
        """The reason why a rank is lost; any text once the ranks are closed."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.wire, selectors.EVENT_READ, rank)
            while not self._is_closed:
                ready = selector.select(WATCH_INTERVAL_S)
                reasons = (self._read(key.data) for key, _ in ready)
                if reason := next(filter(None, reasons), None) or self._late():
                    return reason
        return "closed"

    def _read(self, rank: _Rank) -> str | None:
        """Take in a rank's messages. Returns the reason why it is lost, or None."""
        try:
            data = rank.wire.recv(RECEIVE_LEN, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return rank.end_reason()
        for message in rank.reader.feed(data):
            match message:
                case RankDone():
                    rank.told_at_s.popleft()
                case RankFailed(reason):
                    return f"rank {rank.number}: {reason}"
                case _:
                    with self._news:
                        rank.answers.append(message)
                        self._news.notify_all()
        return None

    def _late(self) -> str | None:
        """The reason why a rank, or rank 0's step, is past its deadline; None while none is."""
        if not self._is_serving:
            return None
        since_s = self._clock.monotonic() - self._deadline_s
        late = [rank for rank in self._ranks if rank.told_at_s and rank.told_at_s[0] < since_s]
        if late:
            blamed = [
                rank for rank in late if rank.is_stopped
            ] or late  # other late ranks wait for a stopped one
            numbers = ", ".join(str(rank.number) for rank in blamed)
            return f"no answer from rank {numbers} for {self._deadline_s:g} s"
        step = self._step
        if step is not None and step[1] < since_s:
            return f"step {step[0]} has taken {self._deadline_s:g} s, though all ranks answer"
        return None

    def _lose(self, reason: str) -> None:
        log.error("rank.lost", reason=reason)
        self._end_all()
        with self._news:
            self._lost = reason
            self._news.notify_all()
        self._on_lost(reason)

    def _end_all(self) -> None:
        for rank in self._ranks:
            rank.end()
        for rank in self._ranks:
            rank.reap()
