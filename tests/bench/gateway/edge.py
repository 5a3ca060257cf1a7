"""`python -m tests.bench edge`: the public listener and callers that are slow, too large, malformed or
guessing.

A gateway with its default limits stands before an engine with no model. A victim asks it for short answers,
one after another, beside each attack and alone, before it and when it is over:

    slow heads, bodies    a byte each second of a request's headers, or of its body
    slow readers          streams that are not read
    bodies too large      one byte more than is allowed, as their headers say
    hostile JSON          depth, digits, NaN, lone surrogates, repeated fields

`mutations` sends 100,000 requests with mistakes of all kinds (`tests.bench.gateway.mutations`).
`rotation` counts false 401s at 200 requests per second, while issuers and API keys rotate, and then beside
made-up keys (`tests.bench.gateway.rotation`).
`revoking` tells how long a key that is created, or revoked, at one gateway takes to count at another one
(`tests.bench.gateway.revoking`).
`keys` compares, in this process, the time of looking up keys that are wrong in different places: the absolute
t of Welch's test, whose target leaves one in a hundred thousand to chance. An id is no secret, so which of
them exist has no target. Times are the machine's: compare them within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import random
import statistics
import string
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from gateway.config.edge import LimitsConfig
from gateway.config.timeouts import TimeoutsConfig
from gateway.config.whole import KeyConfig
from gateway.identity.keys import SECRET_LEN, KeyTable, MintedKey, mint_key
from shared.wire.errors import Unauthenticated
from tests.bench.figures import Figure, Target, at_most, figure, quantile
from tests.bench.gateway.mutations import mutations
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.revoking import revoking
from tests.bench.gateway.rotation import rotation
from tests.bench.gateway.subjects import ServerUnderTest, gateway, paced_engine
from tests.bench.gateway.unary import checked
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

ROWS: Final = ("heads", "bodies", "readers", "large", "json", "mutations", "rotation", "revoking", "keys")
TIMEOUTS: Final = TimeoutsConfig()
BODY_LEN_MAX: Final = LimitsConfig().body_len_max
SLOW: Final = 500
READERS: Final = 200
LARGE: Final = 100
AT_ONCE: Final = 10
DRIP_S: Final = 1.0
GRACE_S: Final = 2.0
"""The time beyond a time limit within which a connection must be closed, in seconds."""
RECEIVE_LEN: Final = 4096
EVENT_LEN: Final = 1024
VICTIM_S: Final = 20.0
"""How long the victim asks beside an attack, in seconds, and alone, half before it and half after it. Beside
one that is ended earlier it asks for `VICTIM_SHARE` of that time."""
VICTIM_SHARE: Final = 2 / 3
VICTIM_GAP_S: Final = 0.01
BESIDE_TARGET: Final = at_most(1.1)
STREAM_TARGET: Final = at_most(256)
TOO_LARGE_TARGET: Final = at_most(50)
JSON_TARGET: Final = at_most(100)
LONG_JSON_TARGET: Final = at_most(250)
T_TARGET: Final = at_most(4.5)
KEYS: Final = 1000
SAMPLES: Final = 100_000
WARM: Final = 2000

_HEAD: Final = '{"model": "%b", "messages": [{"role": "user", "content": "hi"}], '.replace("%b", MODEL)
HOSTILE: Final = {
    "100,000 brackets": _HEAD + '"zzz": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "10,000 digits": _HEAD + '"seed": ' + "9" * 10_000 + "}",
    "NaN": _HEAD + '"temperature": NaN}',
    "a lone surrogate": _HEAD + r'"user": "\ud800"}',
    "a repeated field": _HEAD + '"n": 1, "n": 1}',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the module's docstring has a list
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="look-ups of each kind of key")


async def run(options: argparse.Namespace) -> list[Figure]:
    rows = set(options.rows)
    figures: list[Figure] = []
    if rows & _MEASURES.keys():
        async with paced_engine(2.0) as engine, gateway(engine) as subject:
            for row, measure in _MEASURES.items():
                if row in rows:
                    figures += await measure(subject)
    if "rotation" in rows:
        async with paced_engine(2.0) as engine:
            figures += await rotation(engine)
    if "revoking" in rows:
        async with paced_engine(20.0) as engine:
            figures += await revoking(engine)
    if "keys" in rows:
        figures += await asyncio.to_thread(key_timing, options.samples)
    return figures


# -- callers that are slow ------------------------------------------------------------------------


@dataclass(slots=True)
class _Slow:
    """Connections that an attack holds, and how long each of them lived, in seconds."""

    subject: ServerUnderTest
    lived_s: list[float] = field(default_factory=list)

    async def drip(self, first: bytes, number: int) -> None:
        """Send `first`, and then a byte each second until the gateway closes the connection. The bytes of so
        many connections are spread over the second: sent at once they would hold up this process, which the
        victim shares."""
        await asyncio.sleep(DRIP_S * number / SLOW)
        reader, writer = await self._connect()
        began_s = time.perf_counter()
        writer.write(first)
        ended = asyncio.ensure_future(_to_the_end(reader))
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=DRIP_S)
                writer.write(b"a")
        finally:
            self.lived_s.append(time.perf_counter() - began_s)
            writer.transport.abort()

    async def do_not_read(self, request: bytes) -> None:
        """Ask for a stream and read nothing of it until the gateway closes the connection."""
        reader, writer = await self._connect()
        began_s = time.perf_counter()
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of any transport that reads
        writer.write(request)
        try:
            while not writer.is_closing() and not reader.at_eof():
                await asyncio.sleep(DRIP_S)
                with contextlib.suppress(ConnectionError):  # a byte after the request shows a reset
                    writer.write(b"\r\n")
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.lived_s.append(time.perf_counter() - began_s)
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self.subject.endpoint.url)
        return await asyncio.open_connection(address.hostname, address.port, limit=RECEIVE_LEN)


async def _to_the_end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(RECEIVE_LEN):
            pass


async def _heads(subject: ServerUnderTest) -> list[Figure]:
    slow = _Slow(subject)
    head = _head(subject, "x-slow: ", whole=False)
    return await _beside(
        subject, f"{SLOW} slow heads", slow, [slow.drip(head, n) for n in range(SLOW)], TIMEOUTS.head_s
    )


async def _bodies(subject: ServerUnderTest) -> list[Figure]:
    slow = _Slow(subject)
    head = _head(subject, "content-length: 100000\r\n\r\n")
    return await _beside(
        subject, f"{SLOW} slow bodies", slow, [slow.drip(head, n) for n in range(SLOW)], TIMEOUTS.body_s
    )


async def _readers(subject: ServerUnderTest) -> list[Figure]:
    slow = _Slow(subject)
    request = subject.chat(event_len=EVENT_LEN)
    attack = [slow.do_not_read(request) for _ in range(READERS)]
    return await _beside(subject, f"{READERS} slow readers", slow, attack, 2 * TIMEOUTS.slow_client_s)


def _head(subject: ServerUnderTest, end: str, *, whole: bool = True) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: gateway"]
    lines += [f"authorization: Bearer {subject.endpoint.key}"] if whole else []
    return ("\r\n".join(lines) + "\r\n" + end).encode()


async def _beside(
    subject: ServerUnderTest, name: str, slow: _Slow, attack: Sequence[Awaitable[None]], limit_s: float
) -> list[Figure]:
    seconds = min(VICTIM_S, VICTIM_SHARE * limit_s)
    alone_ms = await _victim_ms(subject, seconds / 2)
    before_mb = subject.resident_mb()
    attacking = asyncio.gather(*attack)
    await asyncio.sleep(GRACE_S)  # all of them are connected
    beside_ms = await _victim_ms(subject, seconds)
    grown_kib = (subject.resident_mb() - before_mb) * 1e6 / 1024 / len(attack)
    await attacking
    alone_ms += await _victim_ms(subject, seconds / 2)
    p99 = quantile(beside_ms, 0.99) / quantile(alone_ms, 0.99)
    return [
        figure(f"{name}: the last was closed after", max(slow.lived_s), "s", at_most(limit_s + GRACE_S)),
        figure(f"{name}: victim's p99, beside / alone", p99, "x", BESIDE_TARGET),
        figure(f"{name}: victim's p99 beside", quantile(beside_ms, 0.99), "ms"),
        figure(f"{name}: memory", grown_kib, "KiB/connection", STREAM_TARGET),
    ]


async def _victim_ms(subject: ServerUnderTest, seconds: float) -> list[float]:
    """The times of short requests, one after another, in milliseconds."""
    request, times_ms = subject.chat(1, stream=False), []
    connection = await subject.endpoint.connect()
    until_s = time.perf_counter() + seconds
    try:
        while time.perf_counter() < until_s:
            done = checked(await connection.exchange(request))
            times_ms.append(1e3 * (done.ended_at - done.sent_at))
            await asyncio.sleep(VICTIM_GAP_S)
    finally:
        connection.close()
    return times_ms


# -- requests that are refused --------------------------------------------------------------------


async def _large(subject: ServerUnderTest) -> list[Figure]:
    head = _head(subject, f"content-length: {BODY_LEN_MAX + 1}\r\n\r\n")
    times_ms: list[float] = []
    for _ in range(LARGE // AT_ONCE):  # each is closed a second after its answer, so that the client sees it
        times_ms += await asyncio.gather(*(_refused_ms(subject, head, b"413") for _ in range(AT_ONCE)))
    name = f"{LARGE} bodies too large: refused and closed, p99"
    return [figure(name, quantile(times_ms, 0.99), "ms", TOO_LARGE_TARGET)]


async def _json(subject: ServerUnderTest) -> list[Figure]:
    figures = []
    for name, body, target in _hostile():
        head = _head(subject, f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n")
        times_ms = [await _refused_ms(subject, head + body.encode(), b"400") for _ in range(5)]
        figures.append(figure(f"JSON, {name}: refused", max(times_ms), "ms", target))
    return figures


def _hostile() -> Iterator[tuple[str, str, Target]]:
    """Names, bodies and the most that their refusals may take."""
    yield from ((name, body, JSON_TARGET) for name, body in HOSTILE.items())
    escapes = r"\u0041" * ((BODY_LEN_MAX - len(_HEAD) - 10) // 6)
    yield "8 MiB of escapes that end too early", f'{_HEAD}"user": "{escapes}"', LONG_JSON_TARGET


async def _refused_ms(subject: ServerUnderTest, request: bytes, status: bytes) -> float:
    """From sending the request to the end of the connection. Raises BenchFailed at any other answer."""
    address = urlsplit(subject.endpoint.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        began_s = time.perf_counter()
        writer.write(request)
        answer = await reader.read(4096)
        taken_ms = 1e3 * (time.perf_counter() - began_s)
        if answer.split(b" ", 2)[1] != status:
            raise BenchFailed(f"not refused with {status.decode()}: {answer[:200]!r}")
        await _to_the_end(reader)
        return taken_ms
    finally:
        writer.transport.abort()


_MEASURES: Final[dict[str, Callable[[ServerUnderTest], Awaitable[list[Figure]]]]] = {
    "heads": _heads,
    "bodies": _bodies,
    "readers": _readers,
    "large": _large,
    "json": _json,
    "mutations": mutations,
}


# -- keys that are guessed ------------------------------------------------------------------------


def key_timing(samples: int = SAMPLES) -> list[Figure]:
    """The times of keys with a wrong id, with a wrong secret (in its first and in its last letter) and of
    right ones, and the absolute t of Welch's test between those that are refused."""
    keys = [mint_key("bench") for _ in range(KEYS)]
    table = KeyTable([KeyConfig(key.id, key.hash, "bench") for key in keys])
    taken_ns = _timed(table, keys, samples)
    figures = [figure(f"key, {kind}: median", statistics.median(ns), "ns") for kind, ns in taken_ns.items()]
    for one, target in (("wrong at first", T_TARGET), ("wrong id", None)):
        t = abs(welch_t(_trimmed(taken_ns[one]), _trimmed(taken_ns["wrong at last"])))
        figures.append(figure(f"keys, {one} and wrong at last: |t|", t, "", target))
    return figures


def _wrong_id(key: MintedKey, draw: random.Random) -> str:
    other = "".join(draw.choices(string.ascii_lowercase + string.digits, k=len(key.id)))
    return key.text.replace(key.id, other)


def _wrong_at_first(key: MintedKey, draw: random.Random) -> str:
    return key.text[:-SECRET_LEN] + _other(key.text[-SECRET_LEN], draw) + key.text[1 - SECRET_LEN :]


def _wrong_at_last(key: MintedKey, draw: random.Random) -> str:
    return key.text[:-1] + _other(key.text[-1], draw)


def _other(letter: str, draw: random.Random) -> str:
    return draw.choice(string.ascii_letters.replace(letter, ""))


_KINDS: Final[dict[str, Callable[[MintedKey, random.Random], str]]] = {
    "wrong id": _wrong_id,
    "wrong at first": _wrong_at_first,
    "wrong at last": _wrong_at_last,
    "right": lambda key, _: key.text,
}


def _timed(table: KeyTable, keys: list[MintedKey], samples: int) -> dict[str, list[int]]:
    """The times of each kind in ns, in random order so that what else the machine does meets all. All texts
    differ, so that none is at the same place of a dict each time, and are made before, so that how they are
    made plays no part."""
    draw, now = random.Random(0), time.perf_counter_ns
    order = [kind for kind in _KINDS for _ in range(samples)]
    draw.shuffle(order)
    order = [*draw.choices(list(_KINDS), k=WARM), *order]
    texts = [f"Bearer {_KINDS[kind](draw.choice(keys), draw)}" for kind in order]
    taken_ns: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    gc.disable()
    try:
        for kind, made in zip(order, texts, strict=True):
            text = made.encode().decode()  # in the caches, whatever its kind
            began = now()
            with contextlib.suppress(Unauthenticated):
                table.authenticate(text, 0.0)
            taken_ns[kind].append(now() - began)
    finally:
        gc.enable()
    return {kind: ns[-samples:] for kind, ns in taken_ns.items()}


def _trimmed(values: Iterable[int]) -> list[int]:
    """Without the slowest tenth, which is other work of the machine's."""
    ordered = sorted(values)
    return ordered[: len(ordered) * 9 // 10]


def welch_t(a: list[int], b: list[int]) -> float:
    """Welch's t of two samples: the difference of their means in units of its standard error."""
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return (statistics.fmean(a) - statistics.fmean(b)) / error if error else 0.0
