"""The messages between rank 0 and another rank: msgpack in frames, over a socket pair or, to another machine,
over TCP (`nodes`).

A frame is four bytes of length and the message. A socket pair has no name, so no other process can connect.
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from engine.contract.messages import Plan, RunnerInfo
from engine.runtime.setup.runner_config import RunnerConfig

FRAME_LEN_MAX: Final = 1 << 30
"""The most bytes of a message. A plan that seats every slot with a full context is a tenth of it."""
RECEIVE_LEN: Final = 1 << 16
_LENGTH: Final = struct.Struct("!I")
assert FRAME_LEN_MAX.bit_length() <= 8 * _LENGTH.size


class Start(msgspec.Struct, array_like=True, frozen=True, tag="start"):
    """The first message to a rank."""

    config: RunnerConfig
    rank: int
    leader_pid: int
    store_file: str
    """The open file, inherited by all ranks, by which they find each other. Empty for ranks that met over the
    network."""


class Build(msgspec.Struct, array_like=True, frozen=True, tag="build"):
    """Tells a rank that all shards are loaded, and to build a runner of these sizes."""

    info: RunnerInfo


class Execute(msgspec.Struct, array_like=True, frozen=True, tag="execute"):
    """Tells a rank to launch a plan."""

    plan: Plan


class Landed(msgspec.Struct, array_like=True, frozen=True, tag="landed"):
    """Tells a rank to collect the oldest launched plan. `digest`: `digest_of` rank 0's tokens."""

    step: int
    digest: int


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag="goodbye"):
    """Tells a rank that somebody else started that rank 0 ends as it should."""


ToRank = Start | Build | Execute | Landed | Goodbye


class Here(msgspec.Struct, array_like=True, frozen=True, tag="here"):
    """The rank has started, and is about to look for the other ranks."""


class Loaded(msgspec.Struct, array_like=True, frozen=True, tag="loaded"):
    """The rank's shard is in memory, with room for so many pages beside it."""

    pages: int


class RankDone(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """The rank has finished one `Build`, `Execute` or `Landed`, in their order."""


class RankFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The rank's last message. `message` is for the operator and holds no prompt text."""

    message: str


FromRank = Here | Loaded | RankDone | RankFailed

encode = msgspec.msgpack.Encoder().encode
Message = TypeVar("Message")


class Closed(Exception):
    """The other end of the socket is closed."""


def digest_of(tokens: Sequence[int]) -> int:
    """A checksum of tokens, which ranks compare instead of the tokens themselves."""
    return zlib.crc32(encode(tokens))


def frame(message: ToRank | FromRank) -> bytes:
    body = encode(message)
    assert len(body) <= FRAME_LEN_MAX
    return _LENGTH.pack(len(body)) + body


class Reader(Generic[Message]):
    """Assembles messages from bytes that arrive in any pieces."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._decoder = decoder
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`."""
        self._bytes += data
        messages, start = [], 0
        with memoryview(self._bytes) as view:
            while (body := start + _LENGTH.size) <= len(view):
                (length,) = _LENGTH.unpack_from(view, start)
                assert length <= FRAME_LEN_MAX, "not a frame"
                if body + length > len(view):
                    break
                messages.append(self._decoder.decode(view[body : body + length]))
                start = body + length
        del self._bytes[:start]
        return messages


class RankEnd:
    """A rank's end of the socket pair. Its calls block, as a rank waits for nothing else."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._reader = Reader(msgspec.msgpack.Decoder(ToRank))
        self._messages: list[ToRank] = []

    def receive(self) -> ToRank:
        """The next message. Raises Closed when rank 0 is gone."""
        while not self._messages:
            self._messages = self._reader.feed(self._receive_bytes())
            self._messages.reverse()
        return self._messages.pop()

    def send(self, message: FromRank) -> None:
        """Send a message. Raises Closed when rank 0 is gone."""
        try:
            self._wire.sendall(frame(message))
        except OSError as error:
            raise Closed from error

    def wait_for_the_end(self) -> None:
        """Wait until rank 0 is gone, and ignore its messages."""
        try:
            while True:
                self._receive_bytes()
        except Closed:
            return

    def _receive_bytes(self) -> bytes:
        try:
            data = self._wire.recv(RECEIVE_LEN)
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        return data
