from __future__ import annotations

import asyncio
import errno
import inspect
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
from collections import Counter
from typing import cast

import pytest
import trustme

from shared.process import accepting, descriptors
from shared.process.accepting import ACCEPTS_FAILED, HANDSHAKES_MAX, Accepting
from tests.fakes import captured_logs
from tests.loops import on_both_loops
from tests.waiting import PATIENCE_S, until

CALLERS = 5
REFUSALS = 3


class Short(socket.socket):
    """A listening socket of a process that may open no more files a few times."""

    refusals = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Few(Short):
    """A socket that accepts one connection, and then one more each time that it is allowed."""

    allowed = 1

    def allow_one(self) -> bool:
        self.allowed += 1
        return True

    def accept(self) -> tuple[socket.socket, object]:
        if not self.allowed:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.allowed -= 1
        return super().accept()


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


async def echoed(sock: Short) -> None:
    """Several connect at once, and each is answered."""
    address = sock.getsockname()
    connected = [await asyncio.open_connection(*address) for _ in range(CALLERS)]
    async with asyncio.timeout(PATIENCE_S):
        for reader, writer in connected:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            writer.close()


@on_both_loops
async def test_who_comes_while_no_file_can_be_opened_is_served_once_one_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "PAUSE_S", 0.0)
    before = ACCEPTS_FAILED.value()
    with captured_logs() as lines, Short() as sock:
        sock.bind(("127.0.0.1", 0))
        served = Accepting(sock, CALLERS, Echo)
        for _ in range(2):
            sock.refusals = REFUSALS
            await echoed(sock)
        await served.aclose()
    assert ACCEPTS_FAILED.value() - before == 2 * REFUSALS
    told = [line for line in lines if line["event"] == "listener.accept_failed"]
    assert [line["error"] for line in told] == [os.strerror(errno.EMFILE)], "it is told now and then"


@on_both_loops
async def test_those_that_came_at_once_are_set_up_before_one_is_closed_for_another() -> None:
    """None of them can be closed before, and nobody waits for that."""
    before, set_up = ACCEPTS_FAILED.value(), list[Echo]()

    class Held(Echo):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            set_up.append(self)

    def displace() -> bool:
        return bool(set_up) and sock.allow_one()

    with Few() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(CALLERS)
        held = [await asyncio.open_connection(*sock.getsockname()) for _ in range(CALLERS)]
        served = Accepting(sock, CALLERS, Held, displace=displace)
        await until(lambda: len(set_up) == CALLERS)
        for _, writer in held:
            writer.close()
        await served.aclose()
    assert ACCEPTS_FAILED.value() == before


@on_both_loops
async def test_handshakes_that_do_not_go_on_are_bounded_and_keep_out_nobody() -> None:
    """Above the bound the oldest is cut, and whoever goes on is served."""
    authority, server = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    with captured_logs() as lines, Short() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(CALLERS)
        held = [await asyncio.open_connection(*sock.getsockname()) for _ in range(CALLERS)]
        served = Accepting(sock, CALLERS, Echo, server, handshake_s=10 * PATIENCE_S, handshakes_max=2)
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in held[:-2]:
                assert await reader.read() == b""
            reader, writer = await asyncio.open_connection(*sock.getsockname(), ssl=client)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        for _, one in [*held, (reader, writer)]:
            one.close()
        await served.aclose()
    assert [line["event"] for line in lines] == ["listener.handshakes_full"], "it is told now and then"


def test_a_listener_has_no_more_handshakes_than_memory_is_reckoned_for() -> None:
    assert inspect.signature(Accepting).parameters["handshakes_max"].default == HANDSHAKES_MAX


@on_both_loops
async def test_nothing_is_tried_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "PAUSE_S", 10 * PATIENCE_S)
    with Short() as sock, socket.socket() as client:
        sock.bind(("127.0.0.1", 0))
        sock.refusals = REFUSALS
        served = Accepting(sock, CALLERS, Echo)
        client.connect(sock.getsockname())
        async with asyncio.timeout(PATIENCE_S):
            while sock.refusals == REFUSALS:  # noqa: ASYNC110 -- what it watches sets no event
                await asyncio.sleep(0)
        served._resume()
        for _ in range(10):
            await asyncio.sleep(0)
        assert sock.refusals == REFUSALS - 1
        await served.aclose()


@on_both_loops
async def test_no_turn_accepts_more_than_its_part_of_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "ACCEPT_MAX", 2)
    turn, taken = 0, Counter[int]()

    class Noting(Accepting):
        def _take(self, sock: socket.socket, host: str) -> None:
            taken[turn] += 1
            super()._take(sock, host)

    with Short() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(CALLERS)
        clients = [socket.create_connection(sock.getsockname()) for _ in range(CALLERS)]
        served = Noting(sock, CALLERS, Echo)
        async with asyncio.timeout(PATIENCE_S):
            while taken.total() < CALLERS:
                turn += 1
                await asyncio.sleep(0)
        await served.aclose()
        for client in clients:
            client.close()
    assert max(taken.values()) == 2


@on_both_loops
async def test_what_was_accepted_when_it_closes_is_set_up() -> None:
    with Short() as sock, socket.socket() as client:
        sock.bind(("127.0.0.1", 0))
        made: list[asyncio.BaseTransport] = []

        class Guest(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(transport)

        served = Accepting(sock, CALLERS, Guest)
        client.connect(sock.getsockname())
        async with asyncio.timeout(PATIENCE_S):
            while not served._beginning:  # noqa: ASYNC110 -- what it watches sets no event
                await asyncio.sleep(0)
        await served.aclose()
        assert len(made) == 1
        with pytest.raises(ConnectionRefusedError), socket.socket() as late:
            late.connect(client.getpeername())
        made[0].close()


CHILD = """
import os, resource
from shared.process import descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
descriptors.raise_limit()
held = []
def fill():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return max(held) + 1
most = fill()
with descriptors.reserve():
    operators = os.open(os.devnull, os.O_RDONLY)
os.close(operators)
print(most, operators, fill(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_all_but_a_few_are_taken_and_these_come_back_to_operators_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    most = 64 - descriptors.RESERVED
    assert done.stdout.split(" ", 3) == [f"{most}", f"{most}", f"{most}", f"({most}, 64)\n"]


@pytest.mark.parametrize("connections", [1, 4_096, 16_384])
def test_what_is_asked_for_where_they_are_few_is_enough(
    monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    [needed] = set(re.findall(r"\d+", descriptors.few(connections)))
    hard = int(needed) - descriptors.RESERVED
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert descriptors.fitting(connections) == connections


@pytest.mark.parametrize(
    ("limit", "asked", "fits"),
    [(20_736, 16_384, 16_384), (1_008, 16_384, 604), (1_008, 100, 100), (16, 100, 9), (1, 5, 1)],
)
def test_clients_have_what_engines_and_files_leave(
    monkeypatch: pytest.MonkeyPatch, limit: int, asked: int, fits: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.fitting(asked) == fits
