"""What happens to live streams when a service stops, dies or comes back, and when a thousand clients leave.

Real processes: the engine on the demo model, the gateway, HTTP/2 between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.effort import drawn
from tests.services import (
    KEY,
    MODEL,
    PATIENCE_S,
    Service,
    admin_url,
    engine,
    engine_at_rest,
    engine_url,
    gateway,
    gateway_at_rest,
    gateway_url,
    gauges,
    stop,
    until,
)

pytestmark = pytest.mark.slow

STREAMS = 50
DONE = b"data: [DONE]\n\n"
HEADERS = {"authorization": f"Bearer {KEY}"}
ERROR_WITHIN_S = 1.0
"""After an engine's death, until the last of its streams has its error event."""


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Go on."}],
        "ignore_eos": True,
        "max_tokens": 120,
        **fields,
    }


class Streams:
    """Live streams through the gateway: each has had its first event, none its last."""

    def __init__(self, answers: list[aiohttp.ClientResponse]) -> None:
        self._answers = answers

    async def rest(self) -> list[bytes]:
        """What is left of each, to its end."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*(answer.read() for answer in self._answers))


@asynccontextmanager
async def live_streams(url: str, count: int = STREAMS) -> AsyncIterator[Streams]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=HEADERS, timeout=timeout, connector=connector) as session:

        async def begun() -> aiohttp.ClientResponse:
            answer = await session.post(f"{url}/v1/chat/completions", json=chat(stream=True))
            assert answer.status == 200, await answer.read()
            await answer.content.readuntil(b"\n\n")
            return answer

        async with asyncio.timeout(PATIENCE_S):
            yield Streams(await asyncio.gather(*(begun() for _ in range(count))))


def ask(url: str, **fields: Any) -> httpx.Response:
    body = chat(**{"max_tokens": 3, **fields})
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS, timeout=PATIENCE_S)


# -- services that stop or die --------------------------------------------------------------------


async def test_a_drain_of_the_engine_cuts_no_stream(short_tmp: Path) -> None:
    with engine(short_tmp) as served, gateway(short_tmp, engine_url(served)) as front:
        url = gateway_url(front)
        async with live_streams(url) as streams:
            served.signal(signal.SIGTERM)
            assert served.line("engine.draining")["open_sequences"] == STREAMS
            late = await asyncio.to_thread(ask, url)
            assert late.status_code == 503, late.text
            assert late.json()["error"]["code"] == "not_ready"
            assert int(late.headers["retry-after"]) >= 1
            assert [rest[-len(DONE) :] for rest in await streams.rest()] == [DONE] * STREAMS
        assert served.wait() == 0
        until(lambda: gateway_at_rest(admin_url(front)))


async def test_a_killed_engine_ends_its_streams_with_an_error_and_may_come_back(
    short_tmp: Path,
) -> None:
    with engine(short_tmp) as first, gateway(short_tmp, engine_url(first)) as front:
        url, engine_at = gateway_url(front), engine_url(first)
        async with live_streams(url) as streams:
            first.signal(signal.SIGKILL)
            async with asyncio.timeout(ERROR_WITHIN_S):
                rests = await streams.rest()
        for rest in rests:
            assert DONE not in rest
            last = rest.rstrip().rpartition(b"data: ")[2]
            assert json.loads(last)["error"]["code"] == "upstream_failed"
        assert (await asyncio.to_thread(ask, url)).status_code == 502
        until(lambda: gateway_at_rest(admin_url(front)))
        with engine(short_tmp, *("--port", engine_at.rpartition(":")[2])) as second:
            assert engine_url(second) == engine_at
            assert (await asyncio.to_thread(ask, url)).status_code == 200
            assert front.process.poll() is None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An engine that outlives its tests."""
    with engine(tmp_path_factory.mktemp("e")) as running:
        yield running
        stop(running)


async def test_a_drain_of_the_gateway_cuts_no_stream(served: Service, short_tmp: Path) -> None:
    with gateway(short_tmp, engine_url(served)) as front:
        async with live_streams(gateway_url(front)) as streams:
            front.signal(signal.SIGTERM)
            assert front.line("gateway.draining")["live"] == STREAMS
            assert [rest[-len(DONE) :] for rest in await streams.rest()] == [DONE] * STREAMS
        assert front.wait() == 0
        assert {line["end_reason"] for line in front.completed} == {"ok"}
        until(lambda: engine_at_rest(engine_url(served)))


def test_a_tenants_timeout_cancels_the_request_in_the_engine(served: Service, short_tmp: Path) -> None:
    with gateway(short_tmp, engine_url(served), tenant="timeouts = { total_s = 0.5 }") as front:
        answer = ask(gateway_url(front), stream=True, max_tokens=1900, n=8)
        assert "total_timeout" in answer.text
        assert DONE.decode() not in answer.text
        until(lambda: engine_at_rest(engine_url(served)))
        until(lambda: bool(front.completed))
        [line] = front.completed
        assert line["end_reason"] == "total_timeout"
        [engines] = [one for one in served.completed if one["request_id"] == line["request_id"]]
        assert engines["end_reason"] == "client_cancel"


# -- clients that leave ---------------------------------------------------------------------------

VISITS = drawn(150, whole=1000)
TOGETHER = 64
SEED = 20
TURNS_MAX = 300
"""Turns of the event loop, in each of which all the other visits move: random moments without a clock."""
READ_LEN_MAX = 4000
MOMENTS = ("before the body", "in the body", "before the answer", "never")
STREAM_MOMENTS = (*MOMENTS, "in the answer")
WAYS = ("close", "reset", "half-close")


@dataclass
class Visit:
    """A client that leaves at its moment, in its way."""

    number: int
    stream: bool
    moment: str
    way: str
    turns: int
    read_len: int
    read: bytes = b""

    @classmethod
    def drawn(cls, number: int, draw: random.Random) -> Visit:
        stream = draw.random() < 0.7
        return cls(
            number,
            stream,
            draw.choice(STREAM_MOMENTS if stream else MOMENTS),
            draw.choice(WAYS),
            draw.randrange(TURNS_MAX),
            draw.randrange(1, READ_LEN_MAX),
        )

    @property
    def request_id(self) -> str:
        return f"visit-{self.number}"

    @property
    def stays(self) -> bool:
        return self.moment == "never"

    async def run(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(self._sent())
            for _ in range(self.turns):
                await asyncio.sleep(0)
            await self._receive(reader)
            await self._leave(reader, writer)
        writer.close()

    def _sent(self) -> bytes:
        tokens = 16 if self.stays else 1900  # which nobody is there to read
        body = json.dumps(chat(stream=self.stream, max_tokens=tokens)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"authorization: Bearer {KEY}\r\nx-request-id: {self.request_id}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        sent = {"before the body": 0, "in the body": self.read_len % len(body)}.get(self.moment, len(body))
        return head.encode() + body[:sent]

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        read_len = {"in the answer": self.read_len, "never": 1 << 30}.get(self.moment, 0)
        while len(self.read) < read_len and (chunk := await reader.read(1 << 16)):
            self.read += chunk

    def check_answer(self) -> None:
        """All of it came."""
        assert self.read.startswith(b"HTTP/1.1 200"), self
        assert (DONE if self.stream else b'"finish_reason":"length"') in self.read, self

    async def _leave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match self.way:
            case "reset":
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case "half-close":
                writer.write_eof()
                self.read += await reader.read()


async def storm(port: int) -> list[Visit]:
    draw = random.Random(SEED)
    visits = [Visit.drawn(number, draw) for number in range(VISITS)]
    together = asyncio.Semaphore(TOGETHER)

    async def come(visit: Visit) -> None:
        async with together:
            await visit.run(port)

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*map(come, visits))
    return visits


async def test_a_thousand_disconnects_leak_nothing(served: Service, short_tmp: Path) -> None:
    limits = f"limits = {{ concurrent = {2 * TOGETHER} }}"  # leaks would refuse; who left awaits a report
    with gateway(short_tmp, engine_url(served), tenant=limits) as front:
        url, engine_at = gateway_url(front), engine_url(served)
        assert ask(url).status_code == 200
        files = open_files(front), open_files(served)

        visits = await storm(int(url.rpartition(":")[2]))

        until(lambda: engine_at_rest(engine_at))
        until(lambda: gateway_at_rest(admin_url(front)))
        until(lambda: open_files(front) <= files[0] and open_files(served) <= files[1])
        for visit in visits:
            if visit.stays:
                visit.check_answer()
        check_lines(front, served, visits)
        assert ask(url).status_code == 200


def check_lines(front: Service, served: Service, visits: list[Visit]) -> None:
    """One line for each request that was read, in each service that it came to, and they agree."""
    until(lambda: requests_of(admin_url(front)) == len(front.completed))  # a thread writes the lines
    fronts, engines = by_id(front), by_id(served)
    for visit in visits:
        ours, theirs = fronts.get(visit.request_id), engines.get(visit.request_id)
        assert ours is not None or not (visit.read or theirs), "it was read"
        if ours is None:
            continue
        assert ours["status"] == (200 if visit.stays else 499), visit
        if theirs is not None:
            assert theirs["end_reason"] == ("ok" if visit.stays else "client_cancel"), visit
        elif ours["stage"] == "relay":
            raise AssertionError(f"no engine tells of {visit}")
        if ours.get("completion_tokens") is not None:
            assert theirs is not None
            # the engine's line of a request that left before it was read through has no counts
            prompt_tokens, completion_tokens = (
                theirs.get(count, 0) for count in ("prompt_tokens", "completion_tokens")
            )
            assert (ours["prompt_tokens"], ours["completion_tokens"]) == (prompt_tokens, completion_tokens), (
                visit
            )
            assert ours["settled_tokens"] == prompt_tokens + completion_tokens, visit


def requests_of(url: str) -> float:
    """The requests that came to their end, as a service counts them."""
    return sum(value for name, value in gauges(url).items() if name.startswith("requests:"))


def by_id(service: Service) -> dict[str, Any]:
    """The completed lines, of which there is one for each request."""
    lines = {line["request_id"]: line for line in service.completed}
    assert len(lines) == len(service.completed)
    return lines


def open_files(service: Service) -> int:
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


# -- what is not logged ---------------------------------------------------------------------------

CANARY = "canary-8241-of-a-prompt"


async def test_no_canary_is_in_a_log_or_a_metric_of_either_service(short_tmp: Path) -> None:
    """At the lowest level of both logs, and also where a core dies with the prompt in its hands. Answers
    repeat it, with `echo`."""
    with (
        engine(short_tmp, "--log-level", "debug") as served,
        gateway(short_tmp, engine_url(served), PENSTOCK_GATEWAY_LOG_LEVEL="debug") as front,
    ):
        url, prompt = gateway_url(front), {"model": MODEL, "prompt": CANARY}
        says: list[Any] = [{"role": "user", "content": CANARY}]
        async with httpx.AsyncClient(
            base_url=url, headers=HEADERS, timeout=PATIENCE_S, trust_env=False
        ) as http:
            for path, body in (
                ("/v1/chat/completions", chat(messages=says, max_tokens=3)),
                (
                    "/v1/chat/completions",
                    chat(messages=says, max_tokens=3, stream=True, user=CANARY, stop=CANARY),
                ),
                ("/v1/completions", {**prompt, "echo": True, "logprobs": 2, "max_tokens": 2}),
                ("/v1/completions", {**prompt, "max_tokens": 10**6}),
                ("/v1/completions", {**prompt, "n": CANARY}),
                ("/v1/completions", {"model": MODEL, "prompt": CANARY * 2000}),
                ("/v1/chat/completions", chat(messages=[{"role": CANARY, "content": CANARY}])),
                ("/tokenize", prompt),
            ):
                for base in (url, engine_url(served)):  # the engine's own port, too
                    await http.post(f"{base}{path}", json=body)
            assert CANARY in (await http.post("/v1/completions", json={**prompt, "echo": True})).text
            asked = asyncio.create_task(http.post("/v1/chat/completions", json=chat(messages=says, n=8)))
            await asyncio.to_thread(until, lambda: gauges(engine_url(served))["running_sequences"] > 0)
            metrics = [
                (await http.get(f"{base}/metrics")).text for base in (admin_url(front), engine_url(served))
            ]
            os.kill(served.line("core.started")["pid"], signal.SIGKILL)
            assert (await asked).status_code >= 500
        assert len(front.completed) >= 9
        for text in (front.text, served.text, *metrics):
            assert CANARY not in text
            assert KEY not in text
