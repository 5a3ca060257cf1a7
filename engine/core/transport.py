"""The core's two ends of the wire to the API process: ZeroMQ PULL and PUSH, msgpack inside.

The API process binds both endpoints, `ipc://` in a private directory; the core connects. ZeroMQ
keeps messages whole and in order, and moves bytes in a thread of its own. Never pickle.

Bounds. Inward, the sockets hold at most a high-water mark of messages on either side, then the API
process must wait; one step takes at most `RECEIVE_MAX` of them, and none after `RECEIVE_LEN_MAX` bytes.
Outward, there is at most one message with tokens per step, and one row in it per slot. The API process says
how many messages it has read (`Read`). While it is `UNREAD_MAX` behind, `receive` waits for it: nothing is
dropped, nothing piles up, and no token is computed that nobody takes. ZeroMQ's own marks would not do, since
the kernel's buffer between the two processes holds thousands of small messages. That wait ends with any other
message, as whoever sends is about to read, and when the API process dies, as every wait here does, because
each checks the parent's process id once a second. (ZeroMQ itself would wait for a peer's return for ever.)
"""

from __future__ import annotations

import contextlib
import math
import os
import select
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq

from engine.contract.messages import READ_EVERY, CoreInput, CoreOutput, Read
from engine.core.loop import Disconnected
from shared.process.clock import SYSTEM_CLOCK

UNREAD_MAX: Final = 4 * READ_EVERY
"""The number of messages by which the API process may be behind."""
NO_MARK: Final = 0
"""The high-water mark of the socket outward: `UNREAD_MAX` bounds it."""
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


class _Unread:
    """The messages that the API process has not read, as far as it has said."""

    __slots__ = ("read", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.read = 0

    @property
    def are_too_many(self) -> bool:
        return self.sent - self.read >= UNREAD_MAX


class _Bell:
    """A pipe by which other threads of this process end a wait for messages."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of rings that were not heard
            os.write(self._end, b"!")

    def hush(self) -> None:
        """Forget the rings until now."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, select.PIPE_BUF)


class ZmqInbox:
    """The PULL socket on which the API process's messages arrive."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, unread: _Unread) -> None:
        self._parent = _Parent()
        self._unread = unread
        self._decoder = msgspec.msgpack.Decoder(CoreInput | Read)
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(RECEIVE_MAX)
        self._socket.connect(endpoint)
        self._bell = _Bell()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell.descriptor, zmq.POLLIN)

    def ring(self) -> None:
        """End a wait for messages, the present one or the next. For any thread."""
        self._bell.ring()

    def receive(self, wait_s: float) -> list[CoreInput]:
        """Implements `loop.Inbox`. Raises `Disconnected` when the API process is gone."""
        self._parent.check()
        until = SYSTEM_CLOCK.monotonic() + wait_s
        while True:
            messages = self._take()
            left_s = math.inf if self._unread.are_too_many else until - SYSTEM_CLOCK.monotonic()
            if messages or left_s <= 0:
                return messages
            ready = dict(self._poller.poll(math.ceil(min(left_s * 1e3, PARENT_CHECK_MS))))
            if self._bell.descriptor in ready:
                self._bell.hush()
                if not self._unread.are_too_many:
                    return self._take()
            elif not ready:
                self._parent.check()

    def _take(self) -> list[CoreInput]:
        """The messages that are there, up to the bounds."""
        messages: list[CoreInput] = []
        size = 0
        while len(messages) < RECEIVE_MAX and size < RECEIVE_LEN_MAX and self._socket.poll(0):
            frame = self._socket.recv()
            size += len(frame)
            message = self._decoder.decode(frame)
            if isinstance(message, Read):
                self._unread.read = message.messages
            else:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close the socket. Threads may go on ringing: the bell stays until the process ends."""
        self._socket.close(linger=0)


class ZmqOutbox:
    """The PUSH socket on which messages to the API process leave."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, unread: _Unread) -> None:
        self._unread = unread
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(NO_MARK)
        self._socket.connect(endpoint)

    def send(self, message: CoreOutput) -> None:
        """Implements `loop.Outbox`."""
        self._socket.send(self._encoder.encode(message))
        self._unread.sent += 1

    def close(self) -> None:
        self._socket.close(linger=LINGER_MS)


def say_once(endpoint: str, message: CoreOutput) -> None:
    """Send one message by a socket of its own, from any thread. Returns when it has left."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = ZmqOutbox(context, endpoint, _Unread())
    try:
        outbox.send(message)
    finally:
        outbox.close()
        context.term()


class CoreTransport:
    """An inbox and an outbox, opened and closed together."""

    def __init__(self, inbox_endpoint: str, outbox_endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        unread = _Unread()
        self.inbox = ZmqInbox(self._context, inbox_endpoint, unread)
        self.outbox = ZmqOutbox(self._context, outbox_endpoint, unread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inbox.close()
        self.outbox.close()
        self._context.term()
