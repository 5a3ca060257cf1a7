"""One connection to a Redis server that all of a process's calls share, made anew whenever it is lost.

A pool of connections costs several times as much as the calls: each has a socket to be written, polled and
read. Here the calls of one turn of the event loop leave in one write, and replies are matched by their order.

Rules:

1. Every call ends within `timeout_s`, which is the same for all: the oldest is the first to be late, so one
   timer watches over all of them. A late one means that the connection is stuck; all that wait on it fail.
2. A link is *up* or *down*. It goes down when a call is late, when the server cannot be reached, or when it
   says that it does not do what it is for (`REFUSALS`). While it is down calls fail at once: nobody waits for
   a server that is known not to answer. A probe that succeeds brings it up again.
3. What was sent on a connection that broke is sent once more on the next one, within its time: calls are
   idempotent. A server that has become a replica (`READONLY`) breaks a connection too: the next one is to the
   primary, if there is one by then. Nothing else is ever repeated.
4. A caller that is cancelled leaves its answer in the line, so that the order holds.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import hiredis
from msgspec import Struct

from shared.process import logs
from shared.process.renewable_tls import RenewableTls

WAITING_MAX: Final = 16_384
"""Calls without an answer; further ones fail at once."""
TOLD_MAX: Final = 4
"""Different reasons of one outage that the log has: a password that is wrong hides behind an end."""
REFUSALS: Final = frozenset(
    {
        *("READONLY", "OOM", "MISCONF", "NOREPLICAS", "LOADING", "MASTERDOWN", "CLUSTERDOWN"),
        *("BUSY", "NOAUTH", "NOPERM", "LATE", "UNKILLABLE"),
    }
)
"""The first words of error replies that tell about the server as a whole, not about one call."""

log = logs.get(__name__)

Word = str | int | bytes
Command = tuple[Word, ...]


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class RedisUnavailable(Exception):
    """Redis did not do what it was asked, or nobody knows whether it did."""

    may_be_done = False
    """True if it was asked, and its answer is lost."""


class ScriptMissing(RedisUnavailable):
    """The server does not know the script, and has done nothing."""


def packed(words: Command) -> bytes:
    """A command as a server reads it."""
    command: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub means tuples of one word
    return command


class SlotMoved(RedisUnavailable):
    """Another node of the Cluster has the keys, or is about to; this one has done nothing."""

    def __init__(self, said: str) -> None:
        super().__init__(said[:200])
        found = _MOVED.fullmatch(said)
        self.slot = 0 if found is None else int(found["slot"])
        """The slot of the keys; 0 where `owner` is None."""
        self.owner = None if found is None else Address(found["host"], int(found["port"]))
        """The node that has them. None while they are moving, and where the node's name is not told."""


_MOVED: Final = re.compile(r"MOVED (?P<slot>\d{1,5}) (?P<host>[^\s]{1,253}):(?P<port>\d{1,5})")

_POLICY: Final = re.compile(rb"^maxmemory_policy:([a-z-]{1,64})\r?$", re.MULTILINE)
"""Where a server's figures of its memory say what it does when it is full."""


class ReplySink(Protocol):
    """Where the answer to a call goes, as soon as it is read: a future, or what nobody waits for."""

    def done(self) -> bool:
        """True if no answer is wanted any more."""
        ...

    def set_result(self, reply: Any, /) -> None: ...

    def set_exception(self, error: RedisUnavailable, /) -> None: ...


class _Call(Struct, eq=False):
    answer: ReplySink
    command: bytes
    deadline_s: float
    """When it is late, by the loop's clock."""
    is_resent: bool = False


class Wire(asyncio.Protocol):
    """One TCP connection. Replies, errors as values, go to `heard`."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self.heard: Callable[[Any], None] = lambda _: None
        self.lost: Callable[[], None] = lambda: None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                self.heard(reply)
        except hiredis.ProtocolError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.lost()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def ask(self, *commands: Command) -> Any:
        """The reply to the last of the first commands on it. Raises ConnectionError where one of them is
        refused."""
        replies: asyncio.Queue[Any] = asyncio.Queue()
        self.heard, self.lost = replies.put_nowait, lambda: replies.put_nowait(None)
        self.write(b"".join(map(packed, commands)))
        reply: Any = None
        for _ in commands:
            reply = await replies.get()
            if reply is None or isinstance(reply, hiredis.ReplyError):
                raise ConnectionError(reply or "closed while it was greeted")
        return reply

    def abort(self) -> None:
        """Close it at once. Nothing more is heard of it."""
        self.heard, self.lost = (lambda _: None), (lambda: None)
        if self._transport is not None:
            self._transport.abort()


async def ask(server: Address, tls: ssl.SSLContext | None, *commands: Command) -> Any:
    """The reply to the last of some commands, on a connection of their own. Raises OSError."""
    wire = Wire()
    name = server.host if tls is not None else None
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: wire, *server, ssl=tls, server_hostname=name
        )
        return await wire.ask(*commands)
    finally:
        wire.abort()


class RedisLink:
    """Calls to one server: `await link.call(...)`."""

    def __init__(
        self,
        find: Callable[[], Awaitable[Address]],
        greeting: Callable[[], Awaitable[Sequence[Command]]],
        *,
        timeout_s: float,
        connect_s: float,
        tls: RenewableTls | None = None,
    ) -> None:
        """`find` tells where the server is at the moment. `greeting` gives what is sent first on each
        connection; an error in reply to any of it means that the connection is of no use. The files of `tls`
        are looked at for each, so that renewed ones are used once the old ones are refused."""
        self._find: Final = find
        self._greeting: Final = greeting
        self._timeout_s: Final = timeout_s
        self._connect_s: Final = connect_s
        self._tls: Final = tls
        self._context: Final = None if tls is None else tls.context
        self._loop: asyncio.AbstractEventLoop
        """The loop of the first probe, which comes before any call."""
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: deque[_Call] = deque()
        """Calls without an answer, in the order in which they were made."""
        self._unsent: list[bytes] = []
        """Commands of this turn of the loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._ahead_ms = self._ahead_before_ms = -math.inf
        """The server's clock less the loop's: the most since the last probe, and between the two before. A
        reply that the loop was late to read shows less."""
        self.is_up = False
        self.problem = "not asked yet"
        """Why it went down the last time."""
        self._told: Final[set[str]] = set()
        """The reasons that the log has since it was up last. One that was never up is told of, too."""

    def call(self, command: bytes) -> asyncio.Future[Any]:
        """The reply, a list that begins with the server's time in ms. Raises RedisUnavailable, here or in the
        future, and ScriptMissing."""
        answer = self._loop.create_future()
        self.send(command, answer)
        return answer

    def send(self, command: bytes, answer: ReplySink) -> None:
        """Send a command whose reply goes to an answer of the caller's own. Raises RedisUnavailable."""
        self.require_up()
        self._send(command, answer)

    async def probe(self, *words: Word) -> None:
        """Ask a server that may be down. If it answers, it is up. Raises RedisUnavailable."""
        self._loop = asyncio.get_running_loop()
        await self._connected()
        self._ahead_before_ms, self._ahead_ms = self._ahead_ms, -math.inf
        answer = self._loop.create_future()
        self._send(packed(words), answer)
        await answer
        if not self.is_up:
            log.info("redis.up")
        self.is_up = True
        self._told.clear()

    def require_up(self) -> None:
        """Raises RedisUnavailable when it is down."""
        if not self.is_up:
            raise RedisUnavailable(self.problem)

    @property
    def deadline_ms(self) -> float:
        """When a call that is made now is late, by the server's clock, in ms since the epoch. It is too early
        by the time that the fastest reply took."""
        ahead_ms = max(self._ahead_ms, self._ahead_before_ms)
        return (self._loop.time() + self._timeout_s) * 1000 + ahead_ms

    async def aclose(self) -> None:
        """Calls without an answer fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self._down("closed", is_expected=True)

    # -- calls ------------------------------------------------------------------------------------

    def _send(self, command: bytes, answer: ReplySink) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise RedisUnavailable("too many calls wait")
        deadline_s = self._loop.time() + self._timeout_s
        self._waiting.append(_Call(answer, command, deadline_s))
        if self._wire is None:
            self._connect_soon()
        else:
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent.append(command)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline_s, self._look)

    def _flush(self) -> None:
        if self._wire is not None and self._unsent:
            self._wire.write(b"".join(self._unsent))
            self._unsent.clear()

    def _heard(self, reply: Any) -> None:
        if not self._waiting:  # nobody asked
            self._down("a reply to no call")
            return
        call = self._waiting.popleft()
        answer = call.answer
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("READONLY") and not call.is_resent and self._wire is not None:
                self._waiting.appendleft(call)
                self._wire.abort()
                self._lost()
                return
            error = self._error(str(reply))
            error.may_be_done = call.is_resent
            if not answer.done():
                answer.set_exception(error)
            return
        if (ahead_ms := reply[0] - self._loop.time() * 1000) > self._ahead_ms:
            self._ahead_ms = ahead_ms
        if not answer.done():
            answer.set_result(reply)

    def _error(self, said: str) -> RedisUnavailable:
        code = said.partition(" ")[0]
        if code == "NOSCRIPT":
            return ScriptMissing(said)
        if code in ("MOVED", "ASK", "TRYAGAIN"):
            return SlotMoved(said)
        if code in REFUSALS:
            self._down(said[:200])
        return RedisUnavailable(said[:200])

    def _look(self) -> None:
        """Fail what is late, as the connection is stuck then (rule 1). An event loop that was held up reads
        its sockets before it runs its timers."""
        self._timer = None
        if not self._waiting:
            return
        deadline_s = self._waiting[0].deadline_s
        if self._loop.time() < deadline_s:
            self._timer = self._loop.call_at(deadline_s, self._look)
        else:
            self._down(f"no answer within {self._timeout_s:g} s")

    def _down(self, problem: str, *, is_expected: bool = False) -> None:
        """Take the link down: calls fail at once (rule 2). An attempt to connect goes on: it has a time of
        its own, which may be longer."""
        if not is_expected and problem not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(problem)
            log.error("redis.down", problem=problem)
        self.is_up, self.problem = False, problem
        if self._wire is not None:
            self._wire.abort()
            self._wire = None
        self._unsent.clear()
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            if not call.answer.done():
                call.answer.set_exception(_lost(problem))

    # -- the connection ---------------------------------------------------------------------------

    async def _connected(self) -> None:
        if self._wire is None:
            await asyncio.wait([self._connect_soon()])
        if self._wire is None:
            raise RedisUnavailable(self.problem)

    def _connect_soon(self) -> asyncio.Task[None]:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
        return self._connecting

    async def _connect(self) -> None:
        wire = Wire()
        try:
            async with asyncio.timeout(self._connect_s):
                if self._tls is not None:
                    await self._tls.look()
                greeting = await self._greeting()
                host, port = await self._find()
                name = host if self._tls is not None else None
                await self._loop.create_connection(
                    lambda: wire, host, port, ssl=self._context, server_hostname=name
                )
                await self._greet(wire, greeting)
            self._take(wire)
        except TimeoutError:
            self._down(f"no connection within {self._connect_s:g} s")
        except Exception as error:
            self._down(f"{type(error).__name__}: {error}"[:200])
        finally:
            if self._wire is not wire:
                wire.abort()
            self._connecting = None

    async def _greet(self, wire: Wire, greeting: Sequence[Command]) -> None:
        reply = await wire.ask(*greeting, ("TIME",))
        seconds, microseconds = map(int, reply)
        server_ms = seconds * 1000 + microseconds / 1000
        self._ahead_ms = self._ahead_before_ms = server_ms - self._loop.time() * 1000
        await _warn_of_eviction(wire)

    def _take(self, wire: Wire) -> None:
        """Use a new connection, and send once more what broke off with the last (rule 3)."""
        if not wire.is_open:
            self._down("closed as soon as it was open")
            return
        self._wire, wire.heard, wire.lost = wire, self._heard, self._lost
        self._waiting = deque(call for call in self._waiting if not call.answer.done())
        if self._waiting:
            wire.write(b"".join(call.command for call in self._waiting))

    def _lost(self) -> None:
        self._wire = None
        self._unsent.clear()
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            if call.is_resent and not call.answer.done():
                call.answer.set_exception(_lost("the connection broke twice"))
            elif not call.answer.done():
                call.is_resent = True
                self._waiting.append(call)
        if self.is_up or self._waiting:
            self._connect_soon()


async def _warn_of_eviction(wire: Wire) -> None:
    """Log that a server may take keys away to make room. Many a server's user may not ask for that: then
    nothing is said."""
    try:
        found = _POLICY.search(await wire.ask(("INFO", "memory")))
    except ConnectionError:  # where it is lost, whoever takes the wire sees it
        return
    if found is not None and found[1] != b"noeviction":
        log.warning("redis.may_evict", policy=found[1].decode(errors="replace"))


def _lost(problem: str) -> RedisUnavailable:
    """The error of a call that may have been sent, and has no answer."""
    error = RedisUnavailable(problem)
    error.may_be_done = True
    return error
