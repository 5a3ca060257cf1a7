"""Floods of every kind at once, on a gateway to which the kernel gives no more memory than the formula of
gateway/README.md states: none ends it, none is an error of its own, and another tenant is served meanwhile.

The limit is RLIMIT_DATA, which every Linux has and nobody needs a right for. It counts all memory that a
process has mapped to write to, so it is harsher than a container's limit, which counts what has been used of
it; and what is beyond it fails at once.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from gateway.config.edge import TlsConfig
from gateway.config.whole import ModelConfig
from shared.process.setting_values import to_toml
from tests.bench.client import ApiServer
from tests.bench.gateway.attack import BODY_LEN, CHATS, COMPLETION_HEAD, MODEL, Attack, Ends, Law, Who, chat
from tests.bench.gateway.attackers import named, send
from tests.bench.gateway.issuing import Certificate
from tests.bench.gateway.neighbourhood import (
    CONNECTIONS_MAX,
    REQUEST_MEMORY,
    TOKENIZER_THREADS,
    data_bytes,
    forget_peak,
    gateway_config,
    peak_bytes,
    rest_bytes,
)
from tests.bench.gateway.paced_engine import MODEL as PACED
from tests.bench.gateway.subjects import ServerUnderTest, paced_engine
from tests.bench.memory_sums import gateway_memory_max
from tests.effort import drawn, some
from tests.services import (
    PATIENCE_S,
    Service,
    admin_url,
    gateway_at_rest,
    gateway_url,
    gauges,
    service,
    until,
)

SLOW: Final = drawn(100, whole=500)
READERS: Final = drawn(40, whole=200)
LIVE_MAX: Final = 1024
SUMMANDS: Final = REQUEST_MEMORY, LIVE_MAX, TOKENIZER_THREADS, CONNECTIONS_MAX
FULL: Final = REQUEST_MEMORY * 3 // 4
"""Bytes of bodies after which there is room for no other one of 8 MiB of the same tenants."""
HELD_S: Final = 600.0
"""The gateway's patience with slow callers: on no machine is one cut off before all are there."""
TWO: Final = (Who.ATTACKER, Who.ACCOMPLICE)
CLIMB: Final = 8
"""The part of the formula by which the second flood may leave the gateway larger than the first. What is
freed lies between what is kept, with buffers of TLS in all sizes more than without; after five floods nothing
grows."""
HALF_HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n" + b"".join(
    b"x-%d: %b\r\n" % (number, b"a" * 7900) for number in range(4)
)
"""Almost as much of a head as may come without its end."""


def digits(length: int) -> bytes:
    """A completion request of `length` bytes."""
    head = f'{COMPLETION_HEAD}, "prompt": "'.encode()
    return head + b"7" * (length - len(head) - 2) + b'"}'


UNREAD: Final = Attack(
    "streams that are not read",
    Law.BYTES,
    chat(max_tokens=100_000, stream=True, event_len=1024),
    CHATS,
    count=READERS,
    at_once=READERS,
    who=TWO,
    statuses=frozenset({200, 503}),
    ends=Ends.ON_CUE,
    reads=False,
)
GUESSES: Final = Attack(
    "keys that are guessed",
    Law.RESERVATION,
    partial(digits, 1000),
    count=drawn(100, whole=500),
    at_once=50,
    who=(Who.STRANGER,),
    statuses=frozenset({401}),
)
HOSTILE: Final = tuple(
    replace(named(name), count=2, at_once=2, statuses=frozenset({200, 400, 503}))
    for name in ("700,000 fields", "2,000,000 prompts", "emoji of 8 MiB", "prompts of 200,000 ids")
)
SLOW_BODIES: Final = Attack(
    "slow bodies",
    Law.BYTES,
    partial(digits, 100_000),
    count=SLOW,
    at_once=SLOW,
    who=TWO,
    statuses=frozenset({503}),
    ends=Ends.ON_CUE,
    share_sent=0.5,
)
LARGEST: Final = replace(
    SLOW_BODIES, name="largest bodies", body=partial(digits, BODY_LEN), count=48, at_once=48, share_sent=0.95
)
"""More of them than fit."""


@contextmanager
def no_more_memory(pid: int, size: int) -> Iterator[None]:
    """The process may map `size` bytes more than it has now."""
    limits = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid) + size, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_DATA, limits)


@asynccontextmanager
async def half_heads(url: str) -> AsyncIterator[None]:
    """As many connections as slow bodies that have sent half of a request's head."""
    address = urlsplit(url)
    tls = ssl._create_unverified_context() if address.scheme == "https" else None
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        for _ in range(SLOW):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, (address.hostname, address.port))
            host = None if tls is None else address.hostname
            transport, _ = await loop.create_connection(
                asyncio.Protocol, sock=sock, ssl=tls, server_hostname=host
            )
            stack.callback(transport.abort)
            transport.write(HALF_HEAD)
        yield


@dataclass(frozen=True, slots=True)
class Flooded:
    """The gateway, and the victim's way to it."""

    front: Service
    url: str
    admin: str
    victim: ServerUnderTest
    memory_max: int
    """Bytes above rest, as the formula has it."""

    @property
    def pid(self) -> int:
        return self.front.process.pid

    async def ask(self) -> None:
        """A short request of the victim, on a new connection. It is served."""
        connection = await self.victim.endpoint.connect()
        try:
            answer = await connection.exchange(self.victim.chat(8, stream=False), PATIENCE_S)
        finally:
            connection.close()
        assert (answer.status, answer.error) == (200, None), answer.body

    async def send(self, attacks: Sequence[Attack], cue: asyncio.Event) -> None:
        """Run attacks at once. Each request is answered as it may be, or not before the cue."""
        found = await asyncio.gather(*(send(one, self.url, cue, "flood") for one in attacks))
        for attack, outcomes in zip(attacks, found, strict=True):
            for outcome in outcomes:
                assert outcome.status in {None, *attack.statuses}, f"{attack.name}: {outcome}"

    async def reached(self, name: str, least: int) -> None:
        """Wait until a gauge is as high."""
        await asyncio.to_thread(until, lambda: gauges(self.admin)[name] >= least)

    async def flood(self) -> None:
        """Begin one flood after the other, and hold them until all are there."""
        cue = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.send([UNREAD], cue))
            await self.reached("http2_streams", READERS)
            await self.send(HOSTILE, cue)
            group.create_task(self.send([SLOW_BODIES], cue))
            await self.reached("requests_in_flight", READERS + SLOW)
            group.create_task(self.send([LARGEST], cue))
            await self.reached("held_bytes", FULL)
            async with half_heads(self.url):
                await self.send([GUESSES, *HOSTILE], cue)
                now = gauges(self.admin)
            cue.set()
        assert now["http2_streams"] >= READERS, "all of it is there at once"
        assert now["requests_in_flight"] >= READERS + SLOW

    async def beside(self) -> None:
        """The floods, while the victim asks, and the gateway's rest."""
        flooding = asyncio.create_task(self.flood())
        while not flooding.done():
            await self.ask()
        await flooding
        await asyncio.to_thread(until, self.is_at_rest)

    def is_at_rest(self) -> bool:
        return not gauges(self.admin)["held_bytes"] and gateway_at_rest(self.admin)


@pytest.fixture(params=some(["https", "http"], usual=1))
async def flooded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Flooded]:
    certificate = Certificate.made(tmp_path) if request.param == "https" else None
    async with paced_engine(2.0) as engine:
        config = gateway_config([engine.url])
        limits = replace(config.limits, live_max=LIVE_MAX)
        timeouts = replace(config.timeouts, head_s=HELD_S, body_s=HELD_S, slow_client_s=HELD_S)
        models = (ModelConfig(MODEL, (engine.url,), upstream_model=PACED),)
        tls = None if certificate is None else TlsConfig(cert=certificate.cert, key=certificate.key)
        listen = replace(config.listen, tls=tls)
        file = tmp_path / "gateway.toml"
        file.write_text(
            to_toml(replace(config, listen=listen, limits=limits, timeouts=timeouts, models=models))
        )
        with service(["gateway", "--config", str(file)]) as front:
            url = (await asyncio.to_thread(gateway_url, front)).replace("http", request.param)
            authority = None if certificate is None else certificate.cert
            server = ApiServer(f"{url}/v1", Who.VICTIM.value, authority)
            most = gateway_memory_max(*SUMMANDS, has_tls=certificate is not None)
            yield Flooded(front, url, admin_url(front), ServerUnderTest(server, MODEL), most)


async def test_all_floods_at_once_fit_the_memory_that_the_formula_states(flooded: Flooded) -> None:
    await flooded.ask()
    rest, pid, left = rest_bytes(flooded.pid), flooded.pid, []
    forget_peak(pid)
    with no_more_memory(pid, flooded.memory_max):
        for _ in range(2):
            await flooded.beside()
            left.append(rest_bytes(pid))
        await flooded.ask()
    assert flooded.front.process.poll() is None
    assert "MemoryError" not in flooded.front.text
    assert FULL <= peak_bytes(pid) - rest <= flooded.memory_max
    assert left[1] - left[0] <= flooded.memory_max // CLIMB, "what a flood leaves is of use to the next one"
