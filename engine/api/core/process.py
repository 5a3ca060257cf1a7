"""The core as a child process: started, talked to over two ZeroMQ sockets, watched, ended.

The sockets live in a directory that only this user can enter (`shared.process.socket_directory`). The child
leads a process group of its own from its first moment, so that a Ctrl-C in the terminal reaches this process
alone, which drains before it ends the core; nor does the child heed a SIGTERM that is meant for all of a
service's processes. Should this process die, the kernel ends the child. It stays in our session: Linux
shares cores out between sessions first, and lets priorities count only within one.

A core that is faster than this process always has a message ready. So after `TURN_S` of messages everybody
else on the loop has a turn. Until then they are taken in one go: tokens that came together are written
together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from typing import Final

import msgspec
import zmq

from engine.api.core.client import CoreDied
from engine.config import CoreStart, EngineConfig, ModelTokens
from engine.contract.messages import READ_EVERY, CoreInput, CoreOutput, Read
from shared.process import logs
from shared.process.child_python import environment
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.socket_directory import SocketDirectory

SOCKETS_PREFIX: Final = "penstock-core-"
INBOX: Final = "in"
OUTBOX: Final = "out"
SEND_QUEUE_LEN_MAX: Final = 65536
"""The most messages that may wait for the core. It is far more than the queue's bounds allow, so reaching it
means that the core no longer reads."""

TURN_S: Final = 0.002
"""The time for which messages are taken before others have a turn."""

log = logs.get(__name__)


class CoreProcess:
    """The `CoreLink` to a real core process."""

    def __init__(
        self,
        config: EngineConfig,
        tokens: ModelTokens,
        clock: Clock = SYSTEM_CLOCK,
        *,
        module: str = "engine",
    ) -> None:
        """`module core` is the child's command, after `python -m`."""
        self._config = config
        self._module = module
        self._tokens = tokens
        self._clock = clock
        self._turn_ends_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._receiver: zmq.Socket[bytes] | None = None
        self._arrival: asyncio.Future[None] | None = None
        """Done when the receiver's file descriptor becomes readable; None while no `receive`
        waits."""
        self._is_watched = False
        self._sender: zmq.Socket[bytes] | None = None
        self._read = 0
        """The number of messages that were received."""
        self._process: Process | None = None
        self._directory: SocketDirectory | None = None
        self._decoder = msgspec.msgpack.Decoder(CoreOutput)
        self._encoder = msgspec.msgpack.Encoder()

    async def start(self) -> None:
        self._directory = SocketDirectory.make(SOCKETS_PREFIX)
        start = CoreStart(
            config=self._config,
            inbox=self._directory.endpoint(INBOX),
            outbox=self._directory.endpoint(OUTBOX),
            parent_pid=os.getpid(),
            tokens=self._tokens,
        )
        self._bind(start)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            "core",
            stdin=asyncio.subprocess.PIPE,
            env=environment(),
            preexec_fn=os.setpgrp,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(start.encode())
        await self._process.stdin.drain()
        self._process.stdin.close()
        log.info("core.started", pid=self._process.pid)

    def _bind(self, start: CoreStart) -> None:
        self._receiver = self._context.socket(zmq.PULL)
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.set_hwm(SEND_QUEUE_LEN_MAX)
        try:
            self._receiver.bind(start.outbox)
            self._sender.bind(start.inbox)
        except zmq.ZMQError as error:  # for instance, the temporary directory's name is too long for a socket
            raise CoreDied(f"{start.inbox}: {error}") from error

    async def receive(self) -> CoreOutput:
        """The next message. `zmq.asyncio` is not used: its three callbacks and two futures for a
        message cost more than everything else that is done with it."""
        assert self._receiver is not None
        if self._clock.monotonic() >= self._turn_ends_at:
            await asyncio.sleep(0)
            self._turn_ends_at = self._clock.monotonic() + TURN_S
        try:
            while True:
                with contextlib.suppress(zmq.Again):
                    frame = self._receiver.recv(zmq.NOBLOCK)
                    break
                await self._wait()
                self._turn_ends_at = self._clock.monotonic() + TURN_S
            message: CoreOutput = self._decoder.decode(frame)
        except (msgspec.DecodeError, zmq.ZMQError) as error:
            raise CoreDied(f"a message from the core could not be read: {error}") from error
        self._read += 1
        if not self._read % READ_EVERY:
            self._say_read()
        return message

    async def _wait(self) -> None:
        """Wait until a message may have arrived. ZeroMQ's descriptor signals only changes, and is not
        signalled anew until a `recv` has found nothing: so call this after such a `recv`."""
        assert self._receiver is not None
        loop = asyncio.get_running_loop()
        if not self._is_watched:
            self._is_watched = True
            loop.add_reader(self._receiver.fileno(), self._on_arrival)
        self._arrival = loop.create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _on_arrival(self) -> None:
        if self._arrival is None:  # no `receive` waits, and the loop would call this again and again
            self._stop_watching()
        elif not self._arrival.done():
            self._arrival.set_result(None)

    def _stop_watching(self) -> None:
        if self._is_watched:
            self._is_watched = False
            assert self._receiver is not None
            asyncio.get_running_loop().remove_reader(self._receiver.fileno())

    async def died(self) -> str:
        assert self._process is not None
        status = await self._process.wait()
        if status < 0:
            return f"the core process was ended by {signal.Signals(-status).name}"
        return f"the core process exited with status {status}"

    def _say_read(self) -> None:
        """Say how much was read. The core may be gone, and have left more to read."""
        assert self._sender is not None
        with contextlib.suppress(zmq.ZMQError):
            self._sender.send(self._encoder.encode(Read(self._read)), zmq.NOBLOCK)

    def send(self, message: CoreInput) -> None:
        assert self._sender is not None
        try:
            self._sender.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise CoreDied(f"the core takes no messages: {error}") from error

    async def close(self, grace_s: float) -> None:
        await self._end_process(grace_s)
        self._stop_watching()
        for socket in (self._receiver, self._sender):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    async def _end_process(self, grace_s: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
