"""The core as a child process: started, talked to over two ZeroMQ sockets, watched, ended.

The sockets live in a directory that only this user can enter, and that goes when the core has gone.
The child leads a session of its own, so that a Ctrl-C in the terminal reaches this process alone,
which drains before it ends the core; should this process die, the kernel tells the child.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from engine.api.core_client import CoreDied
from engine.config import CoreStart, EngineConfig
from engine.core.messages import CoreInput, CoreOutput
from shared import logs

SEND_QUEUE_LEN_MAX: Final = 65536
"""Messages to the core that it has not taken yet. Far more than may wait, so reaching it means that
the core no longer reads."""
TERMINATE_S: Final = 2.0
"""Between SIGTERM and SIGKILL."""


log = logs.get(__name__)


class CoreProcess:
    """A `CoreLink` to a real core."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self._plain_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._receiver: zmq.asyncio.Socket | None = None
        self._sender: zmq.Socket[bytes] | None = None
        self._process: Process | None = None
        self._directory: Path | None = None
        self._decoder = msgspec.msgpack.Decoder(CoreOutput)
        self._encoder = msgspec.msgpack.Encoder()

    async def start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))  # 0700
        start = CoreStart(
            config=self._config,
            inbox=f"ipc://{self._directory}/in",
            outbox=f"ipc://{self._directory}/out",
            parent_pid=os.getpid(),
        )
        self._bind(start)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "core", stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        await self._process.stdin.drain()
        self._process.stdin.close()
        log.info("core.started", pid=self._process.pid)

    def _bind(self, start: CoreStart) -> None:
        self._receiver = self._context.socket(zmq.PULL)
        self._sender = self._plain_context.socket(zmq.PUSH)
        self._sender.set_hwm(SEND_QUEUE_LEN_MAX)
        try:
            self._receiver.bind(start.outbox)
            self._sender.bind(start.inbox)
        except zmq.ZMQError as error:  # such as a temporary directory whose name is too long for a socket
            raise CoreDied(f"{self._directory}: {error}") from error

    async def receive(self) -> CoreOutput:
        assert self._receiver is not None
        try:
            message: CoreOutput = self._decoder.decode(await self._receiver.recv())
        except (msgspec.DecodeError, zmq.ZMQError) as error:
            raise CoreDied(f"a message from the core could not be read: {error}") from error
        return message

    async def died(self) -> str:
        assert self._process is not None
        status = await self._process.wait()
        if status < 0:
            return f"the core process was ended by {signal.Signals(-status).name}"
        return f"the core process exited with status {status}"

    def send(self, message: CoreInput) -> None:
        assert self._sender is not None
        try:
            self._sender.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise CoreDied(f"the core takes no messages: {error}") from error

    async def close(self, grace_s: float) -> None:
        await self._end_process(grace_s)
        for socket in (self._receiver, self._sender):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _end_process(self, grace_s: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        for end, wait_s in ((None, grace_s), (process.terminate, TERMINATE_S), (process.kill, None)):
            if end is not None:
                end()
            try:
                async with asyncio.timeout(wait_s):
                    await process.wait()
                return
            except TimeoutError:
                continue
