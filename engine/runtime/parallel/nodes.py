"""The meeting of ranks that somebody else started, on several machines: rank 0 gathers them, the others join.

    rank 0   serves torch's store at MASTER_PORT (or uses that of torchrun's agent), listens for connections
             at a port that the kernel chooses, and puts this port and a random word into the store
    rank r   waits for the store, reads both, connects, and introduces itself with the word, its number and a
             digest of its model

Rank 0 listens on the address of MASTER_ADDR alone, and for connections only until all are there. The word
keeps out a stray connection, no more: the store, the messages and gloo's or NCCL's data are neither encrypted
nor authenticated, as with every engine that uses torch.distributed. So these ports belong on a network that
only the ranks of one model can reach.

A rank may come again while the others are awaited: then its new connection counts. Models are compared,
because ranks with different weights would agree with each other on wrong tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import torch.distributed

from engine.runtime.collective.group import Meeting
from engine.runtime.parallel.rendezvous import Rendezvous
from engine.runtime.setup.model_errors import BadRunnerConfig, RankLost
from shared.process import logs
from shared.process.build import version
from shared.process.files import open_regular
from shared.wire.undecodable import UNDECODABLE

HELLO_LEN_MAX: Final = 1024
"""Bytes of an introduction."""
HELLO_DEADLINE_S: Final = 5.0
"""The time in which who connects has to introduce itself."""
GUESTS_MAX: Final = 64
"""The most connections that are heard at once."""
RETRY_S: Final = 0.5
"""The rest between two attempts to reach another machine."""
TOLD_EVERY_S: Final = 15.0
"""The time after which it is said again who is awaited."""
STORE_TIMEOUT: Final = timedelta(seconds=20)
SILENCE_S: Final = 30
"""The time after which a machine that does not answer the kernel's probes counts as gone."""
DIGESTED_LEN: Final = 1 << 20
"""Bytes at the beginning of each file of weights that are compared."""
_CONTROL: Final = "control"
_stores: Final[Any] = torch.distributed  # its stubs do not export what its documentation does

log = logs.get(__name__)


class Control(msgspec.Struct, frozen=True):
    """The entry that rank 0 puts into the store."""

    address: str
    port: int
    word: str


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """A rank's introduction."""

    word: str
    rank: int
    world_size: int
    version: str
    model_digest: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """The other ranks, met by rank 0."""

    meeting: Meeting
    wires: list[socket.socket]
    """A connection to each, from rank 1 on."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Rank 0, met by another rank."""

    meeting: Meeting
    wire: socket.socket


def model_digest(directory: Path) -> str:
    """A digest of what tells models apart: the configuration, and the beginning of each file of weights."""
    digest = hashlib.sha256()
    files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    for path in files:
        with open_regular(path) as file:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + file.read(DIGESTED_LEN))
    return digest.hexdigest()


# -- rank 0 ---------------------------------------------------------------------------------------


def gather(place: Rendezvous, model: Path, progress: Callable[[str], None]) -> Gathered:
    """Wait for all other ranks, without a limit of its own: the engine's start has one. Raises
    BadRunnerConfig."""
    own = _own_address(place, progress)
    store = _store(place, own)
    with _listen(own, 0) as listener:
        word = secrets.token_hex(16)
        control = Control(own, listener.getsockname()[1], word)
        store.set(_CONTROL, msgspec.json.encode(control).decode())
        expected = Hello(word, 0, place.world_size, version(), model_digest(model))
        wires = _accept_all(listener, expected, progress)
    meeting = Meeting(store, own, place.local_rank, place.local_world_size)
    return Gathered(meeting, [wires[rank] for rank in sorted(wires)])


def _own_address(place: Rendezvous, progress: Callable[[str], None]) -> str:
    """The number of MASTER_ADDR. A cluster's names may take a while to be known."""
    told_s = 0.0
    while True:
        try:
            return _numbers_of(place.address)[0]
        except OSError as error:
            if time.monotonic() - told_s > TOLD_EVERY_S:
                told_s = time.monotonic()
                progress(f"MASTER_ADDR: {place.address}: {error.strerror}")
        time.sleep(RETRY_S)


def _numbers_of(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        what = f"MASTER_PORT: cannot listen on {address}:{port}" if port else f"MASTER_ADDR: {address}"
        raise BadRunnerConfig(
            f"{what}: {error.strerror}; rank 0 must run on the host that MASTER_ADDR names"
        ) from error


def _store(place: Rendezvous, own: str) -> Any:
    """torch's store, served by this process unless the runner does."""
    try:
        store = _client(place) if place.is_hosted else serve_store(own, place.port)
    except RuntimeError as error:
        raise BadRunnerConfig(f"MASTER_ADDR, MASTER_PORT: {_first_line(error)}") from error
    return _stores.PrefixStore(f"penstock-{place.attempt}", store)


def serve_store(address: str, port: int) -> Any:
    """torch's store, on this address alone: by itself it listens on all. Port 0 takes any free one."""
    with _listen(address, port) as listener:
        port = listener.getsockname()[1]
        fd = listener.detach()
    return _stores.TCPStore(address, port, None, True, STORE_TIMEOUT, False, False, fd)


def _client(place: Rendezvous) -> Any:
    return _stores.TCPStore(place.address, place.port, None, False, STORE_TIMEOUT, False)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _accept_all(
    listener: socket.socket, expected: Hello, progress: Callable[[str], None]
) -> dict[int, socket.socket]:
    """A connection to each rank, by its number."""
    wires: dict[int, socket.socket] = {}
    try:
        with _Lobby(listener) as lobby:
            while missing := sorted(set(range(1, expected.world_size)) - wires.keys()):
                progress(f"waiting for rank {', '.join(map(str, missing))}")
                if (guest := lobby.introduced(TOLD_EVERY_S)) is not None:
                    _admit(guest, expected, wires)
    except BadRunnerConfig:
        for wire in wires.values():
            wire.close()
        raise
    return wires


def _admit(guest: _Guest, expected: Hello, wires: dict[int, socket.socket]) -> None:
    """Add a rank that has introduced itself. Raises BadRunnerConfig."""
    try:
        hello = guest.hello
        if hello is None or not hmac.compare_digest(hello.word.encode(), expected.word.encode()):
            log.warning("rank.stranger", address=guest.address)
            return
        _refuse(hello, expected)
        if hello.rank in wires:
            wires.pop(hello.rank).close()
        wires[hello.rank] = _watched(guest.wire.dup())
    finally:
        guest.wire.close()


@dataclass(slots=True)
class _Guest:
    """One that has connected."""

    wire: socket.socket
    address: str
    deadline_s: float
    said: bytes = b""

    def listen(self) -> bool:
        """Take what has come. Returns True once no more is awaited."""
        try:
            more = self.wire.recv(HELLO_LEN_MAX)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.said += more
        return not more or self.said.endswith(b"\n") or len(self.said) > HELLO_LEN_MAX

    @property
    def hello(self) -> Hello | None:
        """Its introduction; None when it is none."""
        try:
            return msgspec.json.decode(self.said, type=Hello)
        except UNDECODABLE:
            return None


class _Lobby:
    """Ranks that have connected and not introduced themselves yet: all are heard at once, so that nobody who
    is silent holds a rank up. There are at most `GUESTS_MAX`, and the one that has been silent for longest
    leaves for one more: a rank says who it is as it connects."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener: Final = listener
        self._selector: Final = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._guests: Final[dict[socket.socket, _Guest]] = {}
        """In the order in which they came, which is that of their deadlines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in self._guests.values():
            guest.wire.close()
        self._selector.close()

    def introduced(self, wait_s: float) -> _Guest | None:
        """The next that has said who it is, or has not done so in time. None after `wait_s` without one."""
        until_s = time.monotonic() + wait_s
        while (now_s := time.monotonic()) < until_s:
            oldest = next(iter(self._guests.values()), None)
            if oldest is not None and oldest.deadline_s <= now_s:
                return self._leaves(oldest)
            wake_s = until_s if oldest is None else min(until_s, oldest.deadline_s)
            ready = {key.fileobj for key, _ in self._selector.select(wake_s - now_s)}
            for guest in [guest for wire, guest in self._guests.items() if wire in ready]:
                if guest.listen():
                    return self._leaves(guest)
            if self._listener in ready and (longest := self._let_in()) is not None:
                return longest
        return None

    def _let_in(self) -> _Guest | None:
        """Let in who has connected. Returns the guest that must leave for it, if any."""
        try:
            wire, peer = self._listener.accept()
        except OSError:  # it has gone again
            return None
        wire.setblocking(False)
        self._selector.register(wire, selectors.EVENT_READ)
        self._guests[wire] = _Guest(wire, peer[0], time.monotonic() + HELLO_DEADLINE_S)
        if len(self._guests) <= GUESTS_MAX:
            return None
        return self._leaves(next(iter(self._guests.values())))

    def _leaves(self, guest: _Guest) -> _Guest:
        self._selector.unregister(guest.wire)
        return self._guests.pop(guest.wire)


def _refuse(hello: Hello, expected: Hello) -> None:
    """Raise BadRunnerConfig for a rank with which this one cannot work."""
    who = f"rank {hello.rank}"
    if hello.version != expected.version:
        raise BadRunnerConfig(f"{who} is of version {hello.version or '?'}, rank 0 of {expected.version}")
    if hello.world_size != expected.world_size:
        raise BadRunnerConfig(
            f"WORLD_SIZE: must be the same for all ranks, and is {hello.world_size} for {who} and "
            f"{expected.world_size} for rank 0"
        )
    if not 1 <= hello.rank < expected.world_size:
        raise BadRunnerConfig(f"RANK: must be from 1 to {expected.world_size - 1}, got {hello.rank}")
    if hello.model_digest != expected.model_digest:
        raise BadRunnerConfig(f"{who} has another model than rank 0: its files differ")


# -- the other ranks ------------------------------------------------------------------------------


def join(place: Rendezvous, model: Path, timeout_s: float) -> Joined:
    """Wait for rank 0. Raises RankLost after `timeout_s`."""
    own = Hello("", place.rank, place.world_size, version(), model_digest(model))
    deadline_s, told_s = time.monotonic() + timeout_s, 0.0
    while True:
        try:
            return _joined(place, own)
        except (OSError, RuntimeError, ValueError, msgspec.DecodeError) as error:
            now_s = time.monotonic()
            where = f"MASTER_ADDR, MASTER_PORT: rank 0 cannot be reached at {place.address}:{place.port}"
            if now_s > deadline_s:
                raise RankLost(f"{where}: {_first_line(error)}") from error
            if now_s - told_s > TOLD_EVERY_S:
                told_s = now_s
                log.info("rank.waiting", reason=f"{where}: {_first_line(error)}")
        time.sleep(RETRY_S)


def _joined(place: Rendezvous, own: Hello) -> Joined:
    """One attempt."""
    # torch's client waits long and tells at length why; this finds out quietly whether anybody is there
    socket.create_connection((place.address, place.port), HELLO_DEADLINE_S).close()
    store = _stores.PrefixStore(f"penstock-{place.attempt}", _client(place))
    if not store.check([_CONTROL]):
        raise ValueError("rank 0 has not said yet where it listens")
    control = msgspec.json.decode(store.get(_CONTROL), type=Control)
    wire = socket.create_connection((control.address, control.port), HELLO_DEADLINE_S)
    hello = msgspec.structs.replace(own, word=control.word)
    wire.sendall(msgspec.json.encode(hello) + b"\n")
    address = wire.getsockname()[0]
    return Joined(Meeting(store, address, place.local_rank, place.local_world_size), _watched(wire))


def _watched(wire: socket.socket) -> socket.socket:
    """The connection, set up so that the end of the other machine is noticed and no message waits."""
    wire.settimeout(None)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    return wire
