"""A worker as a child process.

It leads a process group of its own, so that a Ctrl-C in the terminal reaches the supervisor alone, which then
drains all workers once. Should the supervisor die, the kernel tells it, and it drains
(`shared.process.lifecycle.die_with_parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Protocol

import msgspec

from gateway.workers.channel import WorkerClient, WorkerStart
from shared.process.child_python import environment


class Worker(Protocol):
    """A running worker, as its place knows it."""

    @property
    def pid(self) -> int: ...

    @property
    def client(self) -> WorkerClient: ...

    async def wait(self) -> int:
        """Wait for its end. Returns its exit status, of a signal the negative number."""

    def signal(self, number: int) -> None:
        """Send a signal, if it is still there."""

    async def aclose(self) -> None:
        """Give up what is held for it, once it has ended."""


class ChildWorker:
    """The `Worker` that is a process."""

    def __init__(self, process: Process, client: WorkerClient, socket: Path) -> None:
        self._process = process
        self._socket = socket
        self.client = client

    @classmethod
    async def start(cls, start: WorkerStart, file: Path) -> ChildWorker:
        """Start one. `file` is what it reads again when it is told to. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "gateway",
            "--config",
            str(file),
            "--parent-pid",
            str(os.getpid()),
            "--worker",
            stdin=asyncio.subprocess.PIPE,
            env=environment(),
            preexec_fn=os.setpgrp,
        )
        stdin = process.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):  # it has died already, which `wait` says
            stdin.write(msgspec.json.encode(start))
            await stdin.drain()
        stdin.close()
        return cls(process, WorkerClient(start.socket), Path(start.socket))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def aclose(self) -> None:
        await self.client.aclose()
        self._socket.unlink(missing_ok=True)
