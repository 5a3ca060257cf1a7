"""A client that stops reading, all the way: its socket, the kernel, both processes, a model.

The kernel fills its buffers in its own time (a sender probes a closed window every 200 ms and more), so
that an engine counts as at rest when its counters have not moved for a second.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.effort import some
from tests.engine.test_engine_process import LONG
from tests.services import (
    KEY,
    PATIENCE_S,
    Service,
    client,
    engine,
    engine_url,
    gateway,
    gateway_url,
    gauges,
    until,
)

pytestmark = pytest.mark.slow

REST_S = 1.0
MAX_TOKENS = 1900
BODY = {**LONG, "temperature": 0, "max_tokens": MAX_TOKENS}
RECEIVE_BUFFER_LEN = 4096
"""The client's own share of what is buffered, which is not the engine's to bound."""
TOKENS_MAX = 1700
"""Computed for a client that reads nothing: what the buffers on its way hold, about 600. They hold more where
events were merged, as they are while the processes share their cores with other work: 1,450 was seen."""
assert MAX_TOKENS > TOKENS_MAX


class Reader:
    """Sends a request for a stream, reads the head of the answer, and then nothing until it is told."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(PATIENCE_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_LEN)
        self._socket.connect(("127.0.0.1", port))
        body = json.dumps(BODY).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {KEY}\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert self._socket.recv(12) == b"HTTP/1.1 200"

    def read(self) -> bytes:
        """The rest of the stream, until the engine closes."""
        chunks = []
        while chunk := self._socket.recv(1 << 16):
            chunks.append(chunk)
        return unchunked(b"".join(chunks).partition(b"\r\n\r\n")[2])

    def close(self) -> None:
        self._socket.close()


@contextmanager
def reader(url: str | httpx.URL) -> Iterator[Reader]:
    port = httpx.URL(url).port
    assert port is not None
    slow = Reader(port)
    try:
        yield slow
    finally:
        slow.close()


def unchunked(body: bytes) -> bytes:
    payload = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        payload += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return bytes(payload)


def text_of(stream: bytes) -> str:
    events: list[dict[str, Any]] = [
        json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b'data: {"id"')
    ]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def at_rest(http: httpx.Client) -> dict[str, float]:
    """The gauges, once they have stopped moving with one sequence stalled."""
    deadline = time.monotonic() + PATIENCE_S
    seen, since = gauges(http.base_url), time.monotonic()
    while time.monotonic() < since + REST_S:
        assert time.monotonic() < deadline, "it never came to rest"
        time.sleep(0.05)  # between two looks, which cost the engine some ms each
        now = gauges(http.base_url)
        if now.get("generated_tokens") != seen.get("generated_tokens") or now.get("stalled_sequences") != 1:
            since = time.monotonic()
        seen = now
    return seen


@contextmanager
def front_of(directory: Path, process: Service) -> Iterator[str]:
    with gateway(directory, engine_url(process)) as front:
        yield gateway_url(front)


@pytest.mark.parametrize("through_gateway", some([True, False], usual=1))
def test_nothing_is_computed_for_a_client_that_stopped_reading(
    short_tmp: Path, through_gateway: bool
) -> None:
    with (
        # Drafts would have several tokens in an event, and so a whole answer in the buffers.
        engine(short_tmp, "--dtype", "float32", "--max-drafts", "0") as process,
        client(process) as http,
        front_of(short_tmp, process) if through_gateway else nullcontext(engine_url(process)) as url,
    ):
        whole = http.post("/v1/chat/completions", json={**BODY, "stream": False}).json()
        before = gauges(http.base_url)["generated_tokens"]
        with reader(url) as slow:
            rest = at_rest(http)
            assert rest["generated_tokens"] - before < TOKENS_MAX
            assert (rest["running_sequences"], rest["open_sequences"]) == (0, 1)
            assert rest["kv_pages:owned"] > 0, "its pages stay"

            # others are served meanwhile, and nothing more comes for it
            other = http.post("/v1/chat/completions", json={**BODY, "stream": False, "max_tokens": 50})
            assert other.json()["usage"]["completion_tokens"] == 50
            later = gauges(http.base_url)
            assert later["generated_tokens"] - rest["generated_tokens"] == 50
            assert later["kv_pages:owned"] == rest["kv_pages:owned"]

            # it reads again, and has missed nothing
            stream = slow.read()
        assert text_of(stream) == whole["choices"][0]["message"]["content"]
        assert b"data: [DONE]" in stream
        until(lambda: gauges(http.base_url)["kv_pages:owned"] == 0)
        assert gauges(http.base_url)["stalled_sequences"] == 0
        assert gauges(http.base_url)["preemptions:pages"] == 0


@pytest.mark.nightly
def test_at_the_stall_deadline_it_ends_and_its_pages_come_back(short_tmp: Path) -> None:
    with engine(short_tmp, "--stall-deadline-s", "0.5") as process, client(process) as http:
        with reader(http.base_url) as slow:
            until(lambda: gauges(http.base_url)["open_sequences"] == 1)
            until(lambda: gauges(http.base_url)["open_sequences"] == 0)
            after = gauges(http.base_url)
            assert (after["kv_pages:owned"], after["stalled_sequences"]) == (0, 0)
            assert after["generated_tokens"] < TOKENS_MAX
            *_, error, closing, _ = slow.read().split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "slow_client"
        assert json.loads(closing.removeprefix(b": penstock "))["end_reason"] == "slow_client"
        until(lambda: gauges(http.base_url).get("requests:slow_client") == 1)
