"""Requests with mistakes of all kinds: a corpus of good ones, mutated byte by byte, from a seed.

`Connection` hands bytes to the public listener's protocol in memory: 40,000 requests take five seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any, Final

from gateway.listener import BoundedServer

KEY: Final = "dev-key"
MUTATIONS_MAX: Final = 4
"""The most mutations of one request."""
PIECES: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b'"', b"\\", b"{", b"[", b"}", b"]"),
    *(b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"\x7f", b"%2f", b"%00", b"../", b";", b"\x0b"),
    *(b"null", b"true", b"-1", b"0", b"1e999", b"9" * 400, b"NaN", b"Infinity", b"-0.0", b"00"),
    *(b"chunked", b"identity", b"transfer-encoding: chunked\r\n", b"content-length: 0\r\n", b"host: b\r\n"),
    *(
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"expect: 100-continue\r\n",
        b"[" * 2000,
    ),
    *(b'"n":65,', b'"model":"m",', b'"penstock":{},', b'"tools":[1],', b'"stream":true,', b"\r\n\r\n"),
)
"""Pieces that parsers are known to differ about."""

CHAT: Final[dict[str, Any]] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/chat/completions", CHAT),
    (
        "/v1/chat/completions",
        {**CHAT, "n": 2, "stream": True, "stop": ["a", "b"], "logit_bias": {"5": 1.5}, "temperature": 0.5},
    ),
    (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [{"role": "system", "content": [{"type": "text", "text": "é\U0001f600"}]}],
            "tools": None,
            "response_format": {"type": "text"},
            "metadata": {"a": "b"},
            "max_completion_tokens": 5,
        },
    ),
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2, 3], [4]], "seed": -7, "min_p": 0.1, "user": "u"}),
    ("/tokenize", {"model": "tiny", "prompt": "hi", "add_special_tokens": False}),
    ("/detokenize", {"model": "tiny", "tokens": [1, 2, 3]}),
)
"""Path and body of good requests that have one."""


def _heads() -> Iterator[bytes]:
    tail = f"host: gateway\r\nauthorization: Bearer {KEY}\r\nx-request-id: r-1\r\n\r\n".encode()
    for line in (
        "GET /v1/models",
        "HEAD /v1/models/tiny",
        "DELETE /v1/requests/r-1",
        "GET /livez",
        "OPTIONS *",
    ):
        yield f"{line} HTTP/1.1\r\n".encode() + tail


def _with_bodies() -> Iterator[bytes]:
    for path, fields in BODIES:
        if not path.startswith("/v1/"):  # the others are asked of an engine whatever quotas say
            continue
        body = json.dumps(fields, ensure_ascii=False).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n".encode()
        yield head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        yield head + b"x-request-timeout: 1.5\r\ntransfer-encoding: chunked\r\n\r\n" + chunks


CORPUS: Final = (*_heads(), *_with_bodies())
"""Whole requests, each of which is answered as it stands."""


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to `MUTATIONS_MAX` mistakes in them."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, MUTATIONS_MAX)):
        at, end = sorted(draw.randrange(len(changed) + 1) for _ in range(2))
        match draw.randrange(7):
            case 0:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                changed[at:at] = draw.choice(PIECES)
            case 2:
                del changed[at : at + draw.randint(1, 8)]
            case 3:
                changed[at:at] = changed[at : min(end, at + 64)]
            case 4:
                other = draw.choice(CORPUS)
                start = draw.randrange(len(other))
                changed[at : at + draw.randint(0, 32)] = other[start : start + 64]
            case 5:
                changed[at:end] = draw.choice(PIECES) if end - at < 64 else changed[at:end]
            case 6:
                del changed[max(at, 1) :]
    return bytes(changed)


class Connection(asyncio.Transport):
    """A client's connection to a public listener, in memory: bytes go in, and what is answered is kept."""

    def __init__(self, server: BoundedServer) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 2)})
        self.answer = bytearray()
        self.is_open = True
        self._protocol = server()
        self._protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if self.is_open:
            self._protocol.data_received(data)

    def leave(self) -> None:
        """The client's end is closed."""
        self.is_open = False
        self._protocol.connection_lost(None)

    def write(self, data: Any) -> None:
        self.answer += data

    def is_closing(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        self.is_open = False

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits here."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """All has been sent already."""

    def resume_reading(self) -> None:
        """All has been sent already."""

    def is_reading(self) -> bool:
        return True
