"""An event loop whose time passes only when no task can run, and whose connections are buffers.

No thread, no socket and no clock of the machine decides what happens next, so a seed replays.

A connection is two ends. What one end writes waits in its buffer until the other end reads; the first
`KERNEL_LEN` bytes of it are taken for the kernel's, and what is above counts against the transport's
high-water mark, as it does with sockets. `Network.cut` breaks connections as a dead machine does: data on its
way are lost, and both ends are told.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

KERNEL_LEN: Final = 2048
"""Bytes that the kernel holds for a peer that does not read: few, so that small answers fill them."""
READ_LENS: Final = (64 * 1024, 64 * 1024, 1448, 100)
"""The most bytes that a protocol is given at once, drawn for each connection, so that one write may arrive in
pieces."""
LATENCIES_S: Final = (0.0, 0.0, 0.0005, 0.01)
"""The latency of one direction, drawn for each connection."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class Stuck(Exception):
    """All tasks wait, and no timer is set."""


class _Selector(selectors.SelectSelector):
    """A selector that waits by advancing the time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, rng: random.Random) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.network = Network(self, rng)

    def time(self) -> float:
        return self._virtual.now_s

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps, so it need not be woken."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def create_connection(  # type: ignore[override]  # only what our clients call it with
        self,
        protocol_factory: ProtocolFactory,
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Address | None = None,
        **_: Any,
    ) -> tuple[Transport, asyncio.BaseProtocol]:
        """Connect to `port`, or for aiohttp's client to that of `sock`, which `start_connection` returned."""
        port = port if sock is None else sock.port
        assert port is not None
        return await self.network.connect(port, protocol_factory)


class Address:
    """An object that aiohttp's client takes for a connected socket."""

    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None:
        pass


async def start_connection(addr_infos: list[Any], **_: Any) -> Address:
    """The replacement of `aiohappyeyeballs.start_connection`."""
    return Address(addr_infos[0][4][1])


def accepting(sock: socket.socket, _: int, protocol: ProtocolFactory, *__: Any, **___: Any) -> Listener:
    """The replacement of `Accepting` and `FairAccepting`. `sock` is bound, so that no other process has the
    port, and not listened on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.network.listen(sock, protocol)


class Listener:
    """The part of `FairAccepting` that the services use."""

    silent_count = 0

    def __init__(self, network: Network, sock: socket.socket) -> None:
        self._network = network
        self._sock = sock
        self.port: int = sock.getsockname()[1]

    async def aclose(self) -> None:
        self._network.unlisten(self.port)
        self._sock.close()


class Network:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._listeners: dict[int, ProtocolFactory] = {}
        self._links: dict[Transport, int] = {}
        """The port to which each connection's client end is connected."""
        self.silent: set[int] = set()
        """Ports that no answer comes from: who connects to one waits."""

    def listen(self, sock: socket.socket, factory: ProtocolFactory) -> Listener:
        listener = Listener(self, sock)
        self._listeners[listener.port] = factory
        return listener

    def unlisten(self, port: int) -> None:
        self._listeners.pop(port, None)

    async def connect(self, port: int, factory: ProtocolFactory) -> tuple[Transport, asyncio.BaseProtocol]:
        latency_s = self._rng.choice(LATENCIES_S)
        await asyncio.sleep(2 * latency_s)
        if port in self.silent:
            await self._loop.create_future()
        if (accept := self._listeners.get(port)) is None:
            raise ConnectionRefusedError(f"no listener on port {port}")
        read_len = self._rng.choice(READ_LENS)
        near, far = (Transport(self._loop, latency_s, read_len) for _ in range(2))
        near.peer, far.peer = far, near
        self._links[near] = port
        near.on_lost = lambda: self._links.pop(near, None)
        protocol = factory()
        far.begin(accept())
        near.begin(protocol)
        return near, protocol

    def cut(self, port: int) -> int:
        """Break all connections to a port. Returns how many there were."""
        cut = [near for near, to in self._links.items() if to == port]
        for near in cut:
            for end in (near, near.peer):
                end.lose(ConnectionResetError("the connection was cut"))
        return len(cut)


class Transport(asyncio.Transport):
    """One end of a connection."""

    peer: Transport

    def __init__(self, loop: VirtualLoop, latency_s: float, read_len: int) -> None:
        super().__init__()
        self._loop = loop
        self._latency_s = latency_s
        self._read_len = read_len
        self._protocol: asyncio.Protocol | asyncio.BufferedProtocol | None = None
        self._sent: deque[bytes] = deque()
        self._sent_len = 0
        self._high_len, self._low_len = 64 * 1024, 16 * 1024
        self._is_paused = False
        """Whether its protocol was told to stop writing."""
        self._reads = True
        self._carrying = False
        self._closing = False
        self._lost = False
        self.on_lost: Callable[[], object] = lambda: None

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self.set_protocol(protocol)
        protocol.connection_made(self)

    # -- asyncio.Transport ------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.Protocol | asyncio.BufferedProtocol:
        assert self._protocol is not None
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self.peer.carry()

    def is_reading(self) -> bool:
        return self._reads

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_len = 64 * 1024 if high is None else high
        self._low_len = self._high_len // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return max(0, self._sent_len - KERNEL_LEN)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing() or not data:
            return
        self._sent.append(bytes(data))
        self._sent_len += len(data)
        self.carry()
        if not self._is_paused and self.get_write_buffer_size() > self._high_len:
            self._is_paused = True
            self.get_protocol().pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self.is_closing():
            self._closing = True
            self.carry()

    def abort(self) -> None:
        self.lose(None)
        self.peer.lose(ConnectionResetError("the peer reset the connection"))

    # -- the wire ---------------------------------------------------------------------------------

    def carry(self, *, is_next: bool = False) -> None:
        """Schedule the delivery of sent data, and at last of their end, to a peer that reads; without latency
        when `is_next`, because they follow data that have just arrived."""
        if self._carrying or self._lost or not (self._sent or self._closing):
            return
        if self._sent and not (self.peer._reads or self.peer._lost):
            return
        self._carrying = True
        if self._latency_s and not is_next:
            self._loop.call_later(self._latency_s, self._deliver)
        else:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._carrying = False
        peer = self.peer
        if peer._lost:
            self.lose(ConnectionResetError("the peer is gone"))
        if self._lost:
            return
        if self._sent and peer._reads:
            _give(peer.get_protocol(), self._take())
            self._resume()
        if self._closing and not self._sent:
            self._end()
        else:
            self.carry(is_next=True)

    def _take(self) -> bytes:
        """The data that the other end reads at once."""
        pieces, room = [self._sent.popleft()], self._read_len
        while (room := room - len(pieces[-1])) > 0 and self._sent:
            pieces.append(self._sent.popleft())
        if room < 0:
            self._sent.appendleft(pieces[-1][room:])
            pieces[-1] = pieces[-1][:room]
        data = b"".join(pieces)
        self._sent_len -= len(data)
        return data

    def _resume(self) -> None:
        if self._is_paused and not self._lost and self.get_write_buffer_size() <= self._low_len:
            self._is_paused = False
            self.get_protocol().resume_writing()

    def _end(self) -> None:
        """Close this end, since all data were sent."""
        peer = self.peer
        if not peer._lost and not peer.get_protocol().eof_received():
            peer.close()
        self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """Break this end: nothing is sent or delivered any more."""
        if self._lost:
            return
        self._lost = True
        self._sent.clear()
        self._sent_len = 0
        self.on_lost()
        self._loop.call_soon(self._tell_lost, error)
        self.peer.carry()  # which finds that this end is gone

    def _tell_lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        assert protocol is not None
        protocol.connection_lost(error)


def _give(protocol: asyncio.Protocol | asyncio.BufferedProtocol, data: bytes) -> None:
    """Hand a protocol what has arrived, in its own buffer if it has one."""
    if isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
        return
    while data:
        buffer = memoryview(protocol.get_buffer(len(data)))
        taken = min(len(buffer), len(data))
        buffer[:taken] = data[:taken]
        protocol.buffer_updated(taken)
        data = data[taken:]
