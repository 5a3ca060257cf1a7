"""Connections that come in hundreds are set up in turns, so that another caller's is not behind them all.

No client runs while these tests do: each connects, and sends, before the loop looks at its sockets.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gateway.identity.caller import network_of
from gateway.identity.callers import KnownCallers
from gateway.listen import accepting
from gateway.listen.accepting import SET_UP_MAX, FairAccepting
from shared.wire.ids import TenantId
from tests.gateway.conftest import KEY, PATIENCE_S, House
from tests.gateway.fake_engine import unary
from tests.loops import on_both_loops
from tests.waiting import until

FLOOD = 48 * SET_UP_MAX
ATTACKER, VICTIM = TenantId("attacker"), TenantId("victim")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer %b\r\n"
ELSEWHERE = "127.0.0.2"
HANDSHAKE_S = 10.0


class Door:
    """A listening socket, those who have connected to it, and the order in which they were set up."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._sock = stack.enter_context(socket.socket())
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(2 * FLOOD)
        self._address = self._sock.getsockname()[:2]
        self.known = KnownCallers()
        for tenant in (ATTACKER, VICTIM):
            self.known.note(f"Bearer {tenant}", tenant)
        self._names: dict[int, str] = {}
        """What was connected as, by the client's port."""
        self.turn = 0
        self.made: list[tuple[int, str]] = []
        """The turn in which each connection was set up, and its name."""
        self.lost = 0
        self.silent_s = 10 * PATIENCE_S
        self.silent_max = 2 * FLOOD

    def connect(self, name: str, key: str = "", host: str = "127.0.0.1") -> socket.socket:
        """Connect from an address, and send a head with this key, if there is one."""
        client = self._stack.enter_context(socket.socket())
        client.bind((host, 0))
        client.connect(self._address)
        self._names[client.getsockname()[1]] = name
        if key:
            client.sendall(HEAD % key.encode())
        return client

    def open(self) -> FairAccepting:
        """Begin to accept."""
        asyncio.get_running_loop().call_soon(self._count)

        times = HANDSHAKE_S, self.silent_s
        self._served = FairAccepting(
            *(self._sock, 2 * FLOOD, lambda: _Guest(self), self.known, None, *times),
            on_silent=self._bound,
        )
        return self._served

    def _bound(self) -> None:
        if self._served.silent_count > self.silent_max:
            self._served.close_first_silent()

    def _count(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._count)

    def enter(self, port: int) -> None:
        self.made.append((self.turn, self._names[port]))

    @property
    def order(self) -> list[str]:
        return [name for _, name in self.made]

    async def all_in(self) -> None:
        """All that connected are set up."""
        await until(lambda: len(self.made) == len(self._names))


class _Guest(asyncio.Protocol):
    def __init__(self, door: Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._door.enter(transport.get_extra_info("peername")[1])

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.lost += 1


async def is_closed(client: socket.socket) -> None:
    """The server has closed the connection of this client, to which it sent nothing."""
    client.setblocking(False)
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


@contextmanager
def door() -> Iterator[Door]:
    with ExitStack() as stack:
        yield Door(stack)


@on_both_loops
async def test_no_turn_sets_up_more_than_its_part_of_a_flood() -> None:
    with door() as at:
        for _ in range(FLOOD):
            at.connect("a", ATTACKER)
        at.open()
        await at.all_in()
    assert max(Counter(turn for turn, _ in at.made).values()) <= SET_UP_MAX


@pytest.mark.parametrize(
    ("key", "host"),
    [(VICTIM, "127.0.0.1"), ("made up", ELSEWHERE)],
    ids=["by its key", "by its address, with a key that is not known"],
)
@pytest.mark.parametrize("attack", ["known", "made up", "silent"])
@on_both_loops
async def test_who_comes_behind_a_flood_goes_next(key: str, host: str, attack: str) -> None:
    """Whether the attackers show a key that is known, one for each that is not, or none."""
    with door() as at:
        for i in range(FLOOD):
            at.connect("a", {"known": ATTACKER, "made up": f"key-{i}", "silent": ""}[attack])
        at.connect("victim", key, host)
        served = at.open()
        await until(lambda: len(at.made) + served.silent_count == FLOOD + 1)
    assert served.silent_count == (FLOOD if attack == "silent" else 0)
    assert at.order.index("victim") <= 3 * SET_UP_MAX < FLOOD


@on_both_loops
async def test_silent_ones_hold_up_nobody_and_are_set_up_when_something_comes() -> None:
    with door() as at:
        clients = [at.connect("a") for _ in range(FLOOD)]
        victim = at.connect("victim")
        served = at.open()
        await until(lambda: served.silent_count == FLOOD + 1)
        for client in clients:
            client.sendall(HEAD % ATTACKER.encode())
        victim.sendall(HEAD % VICTIM.encode())
        await at.all_in()
    assert at.order.index("victim") <= 4 * SET_UP_MAX < FLOOD
    assert not served.silent_count


@on_both_loops
async def test_silent_ones_are_closed_after_a_time() -> None:
    with door() as at:
        at.silent_s = 0.0
        clients = [at.connect("a") for _ in range(FLOOD)]
        served = at.open()
        for client in clients:
            await is_closed(client)
        assert not served.silent_count
        assert not at.made


@on_both_loops
async def test_of_too_many_silent_ones_the_oldest_is_closed() -> None:
    with door() as at:
        at.silent_max = 1
        *others, last = [at.connect("a") for _ in range(FLOOD)]
        served = at.open()
        for client in others:
            await is_closed(client)
        last.sendall(HEAD % VICTIM.encode())
        await until(lambda: len(at.made) == 1)
        assert not served.silent_count


@on_both_loops
async def test_a_silent_one_that_leaves_is_forgotten() -> None:
    with door() as at:
        clients = [at.connect("a") for _ in range(FLOOD)]
        served = at.open()
        await until(lambda: served.silent_count == FLOOD)
        for client in clients:
            client.close()
        await until(lambda: not served.silent_count)
        assert not at.made


@on_both_loops
async def test_those_of_one_address_without_a_known_key_keep_their_order() -> None:
    with door() as at:
        names = [f"{i}" for i in range(FLOOD)]
        for name in names:
            at.connect(name, f"key-{name}")
        at.open()
        await at.all_in()
    assert at.order == names


@on_both_loops
async def test_more_than_may_wait_stay_in_the_kernel_and_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "WAITING_MAX", SET_UP_MAX)
    most = 0
    with door() as at:
        for _ in range(FLOOD):
            at.connect("a", ATTACKER)
        served = at.open()

        def are_in() -> bool:
            nonlocal most
            most = max(most, len(served._waiting))
            return len(at.made) == FLOOD

        await until(are_in)
    assert most == SET_UP_MAX


@on_both_loops
async def test_those_who_wait_or_are_silent_when_the_listener_closes_are_set_up() -> None:
    with door() as at:
        for _ in range(4 * SET_UP_MAX):
            at.connect("a", ATTACKER)
            at.connect("a")
        served = at.open()
        await until(lambda: len(served._waiting) > SET_UP_MAX)
        await served.aclose()
        assert len(at.made) == len(at._names)
        with pytest.raises(ConnectionRefusedError):
            at.connect("late")


@on_both_loops
async def test_who_has_left_while_it_waited_holds_nothing() -> None:
    with door() as at:
        clients = [at.connect("a", ATTACKER) for _ in range(FLOOD)]
        served = at.open()
        await until(lambda: bool(served._waiting))
        for client in clients:
            client.close()
        at.connect("victim", VICTIM)
        await until(lambda: "victim" in at.order)
        await until(lambda: at.lost >= len(at.made) - 1 and not served._waiting)
        assert not served._beginning


async def test_the_network_of_an_ipv6_address_counts() -> None:
    one, other, elsewhere = "2001:db8:0:1::1", "2001:db8:0:1:ffff::2%eth0", "2001:db8:0:2::1"
    assert network_of(one) == network_of(other)
    assert network_of(one) != network_of(elsewhere)
    assert network_of("::ffff:192.0.2.1") != network_of("::ffff:192.0.2.2")
    assert network_of("192.0.2.1") != network_of("192.0.2.2")


async def test_a_caller_is_known_once_its_key_was_let_in(house: House) -> None:
    house.engine.script = unary()
    known = house.gateway._known
    assert known.tenant_of(f"Bearer {KEY}") is None
    async with house.chat() as answer:
        assert answer.status == 200
    assert known.tenant_of(f"Bearer {KEY}") == "acme"
    async with house.chat(headers={"authorization": "Bearer made-up"}) as answer:
        assert answer.status == 401
    assert known.tenant_of("Bearer made-up") is None
