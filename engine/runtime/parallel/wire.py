"""What rank 0 and another rank say to each other, and how: msgpack in frames, over a socket pair.

A frame is four bytes of length and the message. The socket pair has no name, so nobody else can connect.
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from engine.core.messages import Plan, RunnerInfo
from engine.runtime.config import RunnerConfig

FRAME_LEN_MAX: Final = 1 << 30
"""A plan that seats every slot with a full context is a tenth of it."""
RECEIVE_LEN: Final = 1 << 16
_LENGTH: Final = struct.Struct("!I")
assert FRAME_LEN_MAX.bit_length() <= 8 * _LENGTH.size


class Start(msgspec.Struct, array_like=True, frozen=True, tag="start"):
    """The first message to a rank."""

    config: RunnerConfig
    rank: int
    leader_pid: int
    store_file: str
    """Where ranks find each other: an open file that they all inherit."""


class Build(msgspec.Struct, array_like=True, frozen=True, tag="build"):
    """All shards are loaded: build a runner of these sizes."""

    info: RunnerInfo


class Execute(msgspec.Struct, array_like=True, frozen=True, tag="execute"):
    """Launch a plan."""

    plan: Plan


class Landed(msgspec.Struct, array_like=True, frozen=True, tag="landed"):
    """Collect the oldest plan that is launched. `digest`: of the tokens that it brought rank 0."""

    step: int
    digest: int


ToRank = Start | Build | Execute | Landed


class Here(msgspec.Struct, array_like=True, frozen=True, tag="here"):
    """Up, and about to look for the other ranks."""


class Loaded(msgspec.Struct, array_like=True, frozen=True, tag="loaded"):
    """The shard is in memory, and there is room for so many pages."""

    pages: int


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """With one `Build`, `Execute` or `Landed`, in their order."""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """Last words. `message` is for the operator and holds no prompt text."""

    message: str


FromRank = Here | Loaded | Done | Failed

encode = msgspec.msgpack.Encoder().encode
Message = TypeVar("Message")


class Closed(Exception):
    """The other end of the socket is."""


def digest_of(tokens: Sequence[int]) -> int:
    """What ranks compare instead of the tokens themselves."""
    return zlib.crc32(encode(tokens))


def frame(message: ToRank | FromRank) -> bytes:
    body = encode(message)
    assert len(body) <= FRAME_LEN_MAX
    return _LENGTH.pack(len(body)) + body


class Reader(Generic[Message]):
    """Bytes in any pieces become messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._decoder = decoder
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
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
    """A rank's end of the wire: blocking, as there is nothing else to wait for."""

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
        """Raises Closed when rank 0 is gone."""
        try:
            self._wire.sendall(frame(message))
        except OSError as error:
            raise Closed from error

    def wait_for_the_end(self) -> None:
        """Whatever still comes is passed over."""
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
