"""Real Redis servers for tests: `apt-get install redis-server`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import redis
import trustme

from gateway.admission.quota import LEASE_TTL_MS, StoreUnavailable
from gateway.admission.redis_store import DAYS_KEPT, RedisStore, open_store
from gateway.config.redis import RedisConfig
from shared.process.clock import Clock
from tests.bench.services import free_port

START_S: Final = 30.0
SERVER: Final = "redis-server"
PATIENT_S: Final = 5.0
"""The time limit of a store's calls where none is to be late, however busy the machine is."""


def redis_command() -> str:
    found = shutil.which(SERVER)
    assert found is not None, "apt-get install redis-server"
    return found


def tls_options(directory: Path) -> dict[str, str]:
    """Options of a server that asks for certificates. The directory gets its authority (`ca.pem`) and a
    client's certificate (`own.pem`)."""
    authority, server = trustme.CA(), str(directory / "server.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    for name in ("server", "own"):
        chain = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
        chain.write_to_path(directory / f"{name}.pem")
    return {"tls-ca-cert-file": str(directory / "ca.pem"), "tls-cert-file": server, "tls-key-file": server}


def as_words(options: dict[str, str]) -> list[str]:
    """Options as a command line has them."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


class RedisServer:
    """A server of its own on a free port, which keeps nothing on disk."""

    def __init__(self, directory: Path, *options: str, tls: bool = False) -> None:
        """`tls`: instead of plain text; the options name the certificates."""
        self.port = free_port()
        self.bus_port = 0
        """A Cluster node's other port."""
        self._ports = ["--port", "0", "--tls-port"] if tls else ["--port"]
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @classmethod
    def at(cls, port: int, process: subprocess.Popen[bytes] | None = None) -> RedisServer:
        """One that is not started here, or not as others are."""
        server = cls.__new__(cls)
        server.port, server._process = port, process
        return server

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def admin(self) -> redis.Redis:
        """redis-py's client, for what tests arrange and look at."""
        return redis.Redis(port=self.port, decode_responses=True, socket_timeout=START_S)

    @property
    def raw(self) -> redis.Redis:
        """As `admin`, with values that are no text."""
        return redis.Redis(port=self.port, socket_timeout=START_S)

    def start(self) -> None:
        """Listening when this returns, and empty."""
        options = [*self._ports, str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        options += ["--dir", str(self._directory), "--daemonize", "no", *self._options]
        with open(self._directory / f"{self.port}.log", "ab") as log:
            self._process = subprocess.Popen([redis_command(), *options], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), START_S):
                return
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL: nothing is said good-bye to."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop_still(self) -> None:
        """SIGSTOP: it listens, and does not answer."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@contextlib.contextmanager
def redis_server(*options: str, tls: bool = False) -> Iterator[RedisServer]:
    """A running server, and a directory that is gone with it."""
    with tempfile.TemporaryDirectory(prefix="penstock-redis-") as directory:
        server = RedisServer(Path(directory), *options, tls=tls)
        try:
            yield server
        finally:
            server.kill()


async def until_well(store: RedisStore) -> None:
    """Renew until it is, as a gateway does."""
    async with asyncio.timeout(START_S):
        while not store.is_well:
            with contextlib.suppress(StoreUnavailable):
                await store.renew([])
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def redis_store(
    server: RedisServer,
    *,
    clock: Clock | None = None,
    prefix: str | None = None,
    lease_ttl_ms: int = LEASE_TTL_MS,
    days_kept: int = DAYS_KEPT,
    one_node: bool = False,
    **settings: Any,
) -> AsyncIterator[RedisStore]:
    """A store that is up, with keys that no other test has. `settings`: of `[redis]`."""
    key_prefix = f"test-{uuid.uuid4().hex}" if prefix is None else prefix
    told = {"url": server.url, "timeout_s": PATIENT_S, "key_prefix": key_prefix, **settings}
    kept: dict[str, Any] = {"lease_ttl_ms": lease_ttl_ms, "days_kept": days_kept, "clock": clock}
    store = open_store(RedisConfig(**told), os.environ, one_node=one_node, **kept)
    try:
        await until_well(store)
        yield store
    finally:
        await store.aclose()
