"""Redis servers that benches start, and make fail."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from tests.bench.services import free_port
from tests.bench.streams import BenchFailed

START_S: Final = 20.0
FAIL_OVER_S: Final = 60.0
SENTINELS: Final = 3
PRIMARY: Final = "penstock"
"""The Sentinels' name of the primary."""
_POLL_S: Final = 0.01
_KEEPS_NOTHING: Final = ("--save", "", "--appendonly", "no")


class RedisMachine:
    """A server in a process that can be killed, stopped, and started anew: empty, on the same port."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        command = shutil.which("redis-server")
        if command is None:
            raise BenchFailed("there is no redis-server: apt-get install redis-server")
        self.port: Final = free_port()
        own = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory))
        self._argv: Final = (command, *arguments, *own)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Return when it listens. Raises BenchFailed."""
        self.spawn()
        await eventually(self._listens, START_S, "redis-server does not listen")

    def spawn(self) -> None:
        """Start it, and do not wait."""
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: nothing is said good-bye to."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def ask(self, *words: str | int) -> Any:
        """Its answer to a command. Raises RedisError."""
        async with Redis(port=self.port, decode_responses=True, retry=Retry(NoBackoff(), 0)) as client:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), START_S):
            return True
        return False


@contextlib.asynccontextmanager
async def redis_machine(*options: str) -> AsyncIterator[RedisMachine]:
    """A running server that keeps nothing on disk. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="penstock-redis-") as directory:
        async with _running(RedisMachine(Path(directory), *_KEEPS_NOTHING, *options)) as machine:
            yield machine


class Group:
    """A primary, its replica, and three Sentinels that watch them."""

    def __init__(self, primary: RedisMachine, replica: RedisMachine, sentinels: list[RedisMachine]) -> None:
        self.primary: Final = primary
        self.replica: Final = replica
        self._sentinels: Final = sentinels

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{one.port}" for one in self._sentinels)

    async def failed_over(self) -> None:
        """Return when the Sentinels have made the replica the primary."""
        await eventually(self._is_failed_over, FAIL_OVER_S, "the Sentinels do not replace the primary")

    async def is_formed(self) -> bool:
        """True if the Sentinels know each other and the replica."""
        for one in self._sentinels:
            told = await one.ask("SENTINEL", "MASTER", PRIMARY)
            state = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
            if int(state["num-slaves"]) != 1 or int(state["num-other-sentinels"]) != 2:
                return False
        return True

    async def _is_failed_over(self) -> bool:
        with contextlib.suppress(RedisError, OSError):
            role = await self.replica.ask("ROLE")
            named = [await one.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY) for one in self._sentinels]
            ports = {int(address[1]) for address in named}
            return role[0] == "master" and ports == {self.replica.port}
        return False


@contextlib.asynccontextmanager
async def sentinel_group() -> AsyncIterator[Group]:
    """Raises BenchFailed."""
    async with contextlib.AsyncExitStack() as stack:
        primary = await stack.enter_async_context(redis_machine())
        replica = await stack.enter_async_context(
            redis_machine("--replicaof", "127.0.0.1", str(primary.port), "--repl-diskless-sync-delay", "0")
        )
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-sentinel-")))
        sentinels = [_sentinel(directory, primary.port) for _ in range(SENTINELS)]
        for one in sentinels:
            await stack.enter_async_context(_running(one))
        group = Group(primary, replica, sentinels)
        await eventually(group.is_formed, START_S, "the Sentinels do not find each other")
        yield group


def _sentinel(directory: Path, primary_port: int) -> RedisMachine:
    config = directory / f"{free_port()}.conf"
    config.write_text(
        f"sentinel monitor {PRIMARY} 127.0.0.1 {primary_port} 2\n"
        f"sentinel down-after-milliseconds {PRIMARY} 300\n"
        f"sentinel failover-timeout {PRIMARY} 5000\n"
    )
    return RedisMachine(directory, str(config), "--sentinel")


@contextlib.asynccontextmanager
async def _running(machine: RedisMachine) -> AsyncIterator[RedisMachine]:
    try:
        await machine.start()
        yield machine
    finally:
        machine.kill()


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float, problem: str) -> None:
    """Return when the condition holds. Raises BenchFailed when it does not within the time."""
    deadline_s = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline_s:
            raise BenchFailed(problem)
        await asyncio.sleep(_POLL_S)
