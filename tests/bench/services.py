"""Starts and stops the services that a bench measures, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import socket
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import httpx

START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 10.0
_POLL_S: Final = 0.05
_LOG_TAIL_LEN: Final = 2000


class ServiceFailed(Exception):
    """A service did not start; the message holds the end of its log."""


def free_port() -> int:
    """A port of this machine's own address for a server that sets SO_REUSEADDR, as servers do. For a minute
    the kernel gives it to no one else: it remembers a connection that this side has closed first
    (TIME_WAIT)."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listening.accept()[0].close()
    return port


def demo_model() -> str:
    """The directory of the built-in model. Raises ModuleNotFoundError where no engine is installed."""
    return str(importlib.resources.files("engine.demo") / "model")


@contextlib.asynccontextmanager
async def service(
    argv: Sequence[str], ready_url: str, directory: Path | None = None
) -> AsyncIterator[Process]:
    """Run `argv` in `directory` until the block is left. The block begins once `ready_url` answers 200."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log, cwd=directory)
        try:
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    while not await _is_ready(ready_url):
                        if process.returncode is not None:
                            raise ServiceFailed(
                                f"{argv} exited with {process.returncode}:\n{_tail(log.name)}"
                            )
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                late = f"{argv} was not ready within {START_DEADLINE_S:g} s"
                raise ServiceFailed(f"{late}:\n{_tail(log.name)}") from None
            yield process
        finally:
            await _stop(process)


async def get(url: str) -> bytes:
    """The body of the answer to a GET. Raises httpx.HTTPError, also for an error status."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(url)).raise_for_status().content


async def _is_ready(url: str) -> bool:
    try:
        await get(url)
    except httpx.HTTPError:
        return False
    return True


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(path: str) -> str:
    return Path(path).read_text(errors="replace")[-_LOG_TAIL_LEN:]
