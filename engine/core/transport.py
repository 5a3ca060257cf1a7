"""The core's two ends of the wire to the API process: ZeroMQ PULL and PUSH, msgpack inside.

The API process binds both endpoints, `ipc://` in a private directory; the core connects. ZeroMQ
keeps messages whole and in order, and moves bytes in a thread of its own. Never pickle.

Bounds. Inward, the sockets hold at most a high-water mark of messages on either side, then the API
process must wait; one step takes at most `RECEIVE_MAX` of them, and none after `RECEIVE_LEN_MAX` bytes.
Outward, there is one message per step with at most one row per slot. When the API process is
`HIGH_WATER_MARK` steps behind, `send` waits for it: nothing is dropped, nothing piles up, and no token is
computed that nobody takes. That wait cannot be a deadlock as long as the API process keeps reading while it
waits to write, which it must; and it ends when that process dies, as every wait here does, because each
checks the parent's
process id once a second. (ZeroMQ itself would wait for a peer's return for ever.)
"""

from __future__ import annotations

import contextlib
import math
import os
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq

from engine.core.loop import Disconnected
from engine.core.messages import CoreInput, CoreOutput
from shared.clock import SYSTEM_CLOCK

HIGH_WATER_MARK: Final = 128
"""Messages that the socket outward queues."""
RECEIVE_MAX: Final = 1024
"""Messages that the socket inward queues, and that one step takes in. A message behind more than the socket
queues waits for a step more."""
RECEIVE_LEN_MAX: Final = 4 * 1024 * 1024
"""The bytes of messages after which one step takes in no other: a million token ids, in some milliseconds."""
PARENT_CHECK_MS: Final = 1000
LINGER_MS: Final = 2000
"""The time that messages may take to leave after `close`, in milliseconds."""


class _Parent:
    """A check whether the process that started this one is still running."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    def check(self) -> None:
        if os.getppid() != self._pid:
            raise Disconnected("the API process is gone")


class ZmqInbox:
    """The PULL socket on which the API process's messages arrive."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._parent = _Parent()
        self._decoder = msgspec.msgpack.Decoder(CoreInput)
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(RECEIVE_MAX)
        self._socket.connect(endpoint)

    def receive(self, wait_s: float) -> list[CoreInput]:
        """Implements `loop.Inbox`. Raises `Disconnected` when the API process is gone."""
        self._parent.check()
        until, left_s = SYSTEM_CLOCK.monotonic() + wait_s, wait_s
        while left_s > 0 and not self._socket.poll(math.ceil(min(left_s * 1e3, PARENT_CHECK_MS))):
            self._parent.check()
            left_s = until - SYSTEM_CLOCK.monotonic()
        messages: list[CoreInput] = []
        size = 0
        while len(messages) < RECEIVE_MAX and size < RECEIVE_LEN_MAX and self._socket.poll(0):
            frame = self._socket.recv()
            size += len(frame)
            messages.append(self._decoder.decode(frame))
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class ZmqOutbox:
    """The PUSH socket on which messages to the API process leave."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._parent = _Parent()
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.connect(endpoint)

    def send(self, message: CoreOutput) -> None:
        """Implements `loop.Outbox`. Raises `Disconnected` when the API process is gone."""
        frame = self._encoder.encode(message)
        while True:
            with contextlib.suppress(zmq.Again):  # nearly never: asking first costs as much as sending
                self._socket.send(frame, zmq.NOBLOCK)
                return
            while not self._socket.poll(PARENT_CHECK_MS, zmq.POLLOUT):
                self._parent.check()

    def close(self) -> None:
        self._socket.close(linger=LINGER_MS)


def say_once(endpoint: str, message: CoreOutput) -> None:
    """Send one message by a socket of its own, from any thread. Returns when it has left."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = ZmqOutbox(context, endpoint)
    try:
        outbox.send(message)
    finally:
        outbox.close()
        context.term()


class CoreTransport:
    """An inbox and an outbox, opened and closed together."""

    def __init__(self, inbox_endpoint: str, outbox_endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = ZmqInbox(self._context, inbox_endpoint)
        self.outbox = ZmqOutbox(self._context, outbox_endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inbox.close()
        self.outbox.close()
        self._context.term()
