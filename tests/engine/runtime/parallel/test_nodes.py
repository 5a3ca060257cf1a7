"""Rank 0 gathers the others over the network. Strangers are kept out; a rank that does not fit is named."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.contract.messages import Plan, Want
from engine.runtime.parallel import nodes
from engine.runtime.parallel.nodes import Gathered, Hello, gather, join
from engine.runtime.parallel.ranks import Ranks
from engine.runtime.parallel.rendezvous import Rendezvous
from engine.runtime.parallel.wire import Closed, Execute, Goodbye, Here, RankEnd, Start
from engine.runtime.setup.model_errors import BadRunnerConfig, RankLost
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process.build import version
from tests.services import MODEL_DIR, PATIENCE_S, until

LOOPBACK = "127.0.0.1"
PLAN = Plan(7, [], [], [], [0], [0], [1], [Want.SAMPLE])
Gather = Callable[[], "Future[Gathered]"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    """Rank 0's, with a store that somebody else serves."""
    monkeypatch.setattr(nodes, "RETRY_S", 0.01)
    store = nodes.serve_store(LOOPBACK, 0)
    yield Rendezvous(0, 3, 0, 1, LOOPBACK, store.port, is_hosted=True)
    del store


@pytest.fixture
def gathering(place: Rendezvous) -> Gather:
    """Rank 0, in a thread that does not outlive the test's process: it would wait for ever."""

    def start() -> Future[Gathered]:
        done: Future[Gathered] = Future()

        def run() -> None:
            try:
                done.set_result(gather(place, MODEL_DIR, lambda stage: None))
            except BadRunnerConfig as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return done

    return start


def joining(place: Rendezvous, rank: int) -> socket.socket:
    return join(replace(place, rank=rank), MODEL_DIR, PATIENCE_S).wire


def introduce(place: Rendezvous, hello: Hello) -> socket.socket:
    """Connect as a rank that says this of itself."""
    control = control_of(place)
    wire = socket.create_connection((control.address, control.port), PATIENCE_S)
    wire.sendall(msgspec.json.encode(msgspec.structs.replace(hello, word=hello.word or control.word)) + b"\n")
    return wire


def control_of(place: Rendezvous) -> nodes.Control:
    store = nodes._stores.PrefixStore(f"penstock-{place.attempt}", nodes._client(place))
    until(lambda: bool(store.check(["control"])))
    return msgspec.json.decode(store.get("control"), type=nodes.Control)


def own(rank: int, size: int = 3) -> Hello:
    return Hello("", rank, size, version(), nodes.model_digest(MODEL_DIR))


@pytest.mark.parametrize("strangers", [3, nodes.GUESTS_MAX + 3])
def test_strangers_that_say_nothing_hold_nobody_up(
    place: Rendezvous, gathering: Gather, monkeypatch: pytest.MonkeyPatch, strangers: int
) -> None:
    """Each once was heard out alone, for as long as a rank has to introduce itself."""
    monkeypatch.setattr(nodes, "HELLO_DEADLINE_S", 3600.0)
    gathered = gathering()
    control = control_of(place)
    silent = [socket.create_connection((control.address, control.port), PATIENCE_S) for _ in range(strangers)]
    silent[-1].sendall(b"{")
    wires = [joining(place, rank) for rank in (1, 2)]
    met = gathered.result(PATIENCE_S)
    assert [wire.getpeername() for wire in met.wires] == [wire.getsockname() for wire in wires]
    for wire in (*silent, *wires, *met.wires):
        wire.close()


def test_all_are_gathered_in_order_and_strangers_are_not(place: Rendezvous, gathering: Gather) -> None:
    gathered = gathering()
    stranger = introduce(place, msgspec.structs.replace(own(1), word="a guess"))
    mute = socket.create_connection(stranger.getpeername(), PATIENCE_S)
    mute.shutdown(socket.SHUT_WR)
    loud = socket.create_connection(stranger.getpeername(), PATIENCE_S)
    loud.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 2 * nodes.HELLO_LEN_MAX)
    garbled = socket.create_connection(stranger.getpeername(), PATIENCE_S)
    garbled.sendall(b'["hello","\xff",1,3,"",""]\n')
    for wire in (stranger, mute, loud, garbled):
        with wire, contextlib.suppress(ConnectionResetError):
            assert wire.recv(1) == b""
    first, second = joining(place, 2), joining(place, 1)
    wires = gathered.result(PATIENCE_S).wires
    assert [wire.getpeername() for wire in wires] == [second.getsockname(), first.getsockname()]
    for wire in (first, second, *wires):
        wire.close()


def test_a_rank_that_comes_again_takes_its_own_place(place: Rendezvous, gathering: Gather) -> None:
    gathered = gathering()
    before = joining(place, 1)
    again, other = joining(place, 1), joining(place, 2)
    wires = gathered.result(PATIENCE_S).wires
    assert wires[0].getpeername() == again.getsockname()
    assert before.recv(1) == b""
    for wire in (before, again, other, *wires):
        wire.close()


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        (own(3), r"RANK: must be from 1 to 2, got 3"),
        (own(1, size=2), r"WORLD_SIZE: must be the same for all ranks, and is 2 for rank 1 and 3 for rank 0"),
        (msgspec.structs.replace(own(1), model_digest="0"), r"rank 1 has another model than rank 0"),
        (msgspec.structs.replace(own(1), version="9"), r"rank 1 is of version 9, rank 0 of"),
    ],
)
def test_a_rank_that_does_not_fit_is_named(
    place: Rendezvous, gathering: Gather, hello: Hello, problem: str
) -> None:
    gathered = gathering()
    with introduce(place, hello), pytest.raises(BadRunnerConfig, match=problem):
        gathered.result(PATIENCE_S)


def test_the_address_must_be_this_machines(place: Rendezvous) -> None:
    elsewhere = replace(place, address="192.0.2.1", is_hosted=False)
    with pytest.raises(BadRunnerConfig, match=r"MASTER_PORT: cannot listen on 192\.0\.2\.1"):
        gather(elsewhere, MODEL_DIR, lambda stage: None)


def test_nobody_waits_for_rank_0_for_ever(place: Rendezvous) -> None:
    with pytest.raises(RankLost, match=f"MASTER_ADDR, MASTER_PORT: rank 0 cannot be reached at {LOOPBACK}"):
        join(replace(place, rank=1), MODEL_DIR, 0.05)


def test_models_differ_by_their_weights_too(tmp_path: Path) -> None:
    digests = set()
    for weights in (b"base", b"tuned"):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(weights)
        digests.add(nodes.model_digest(tmp_path))
    assert len(digests) == 2


class Joined:
    """Rank 0's view of one rank that somebody else has started, and that rank's end."""

    def __init__(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            self.wire = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        self.end = RankEnd(self.wire)
        self.reasons: list[str] = []
        self.told = threading.Event()
        self.ranks = Ranks(RunnerConfig("any", tensor_parallel_size=2), self._hear, joined=[theirs])
        assert isinstance(self.end.receive(), Start)
        self.end.send(Here())
        assert self.ranks.answers(Here) == [Here()]

    def _hear(self, reason: str) -> None:
        self.reasons.append(reason)
        self.told.set()


def test_a_rank_that_is_gone_is_named() -> None:
    joined = Joined()
    joined.ranks.serve()
    joined.wire.close()
    assert joined.told.wait(PATIENCE_S)
    assert joined.reasons == ["rank 1 has closed its connection, or cannot be reached"]
    with pytest.raises(RankLost, match="rank 1"):
        joined.ranks.send(Execute(PLAN))
    joined.ranks.close()


def test_only_a_served_rank_is_told_goodbye() -> None:
    joined = Joined()
    joined.ranks.serve()
    joined.ranks.close()
    assert joined.end.receive() == Goodbye()
    with joined.wire, pytest.raises(Closed):
        joined.end.receive()
    joined = Joined()
    joined.ranks.close()  # the start has failed
    with joined.wire, pytest.raises(Closed):
        joined.end.receive()
