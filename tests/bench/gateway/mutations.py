"""Requests with mistakes of all kinds: good ones, mutated byte by byte, from a seed.

The row `mutations` of `python -m tests.bench edge` sends a hundred thousand of them over sockets, each on a
connection of its own, beside a victim that asks for short answers. The rest of a request that is cut short
never comes: so an answer is waited for during `PATIENCE_S` and no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from tests.bench.figures import Figure, at_most, figure
from tests.bench.gateway.subjects import ServerUnderTest
from tests.bench.gateway.unary import checked

REQUESTS: Final = 100_000
AT_ONCE: Final = 64
PATIENCE_S: Final = 0.1
ANSWER_LEN: Final = 64 * 1024
SEED: Final = 20261127
WARM_SHARE: Final = 0.1
"""The share of the requests after which memory is first looked at: by then each of the gateway's caches has
seen some."""
VICTIM_GAP_S: Final = 0.1
NONE_TARGET: Final = at_most(0)
GROWTH_TARGET: Final = at_most(50)

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


def bodies(model: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Path and body of good requests that have one."""
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return (
        ("/v1/chat/completions", chat),
        (
            "/v1/chat/completions",
            {
                **chat,
                "n": 2,
                "stream": True,
                "stop": ["a", "b"],
                "logit_bias": {"5": 1.5},
                "temperature": 0.5,
            },
        ),
        (
            "/v1/chat/completions",
            {
                **chat,
                "messages": [{"role": "system", "content": [{"type": "text", "text": "é\U0001f600"}]}],
                "tools": None,
                "response_format": {"type": "text"},
                "metadata": {"a": "b"},
                "max_completion_tokens": 5,
            },
        ),
        ("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 3, "logprobs": 2, "echo": True}),
        (
            "/v1/completions",
            {"model": model, "prompt": [[1, 2, 3], [4]], "seed": -7, "min_p": 0.1, "user": "u"},
        ),
        ("/tokenize", {"model": model, "prompt": "hi", "add_special_tokens": False}),
        ("/detokenize", {"model": model, "tokens": [1, 2, 3]}),
    )


def corpus(key: str, model: str) -> tuple[bytes, ...]:
    """Whole requests, each of which is answered as it stands."""
    return (*_heads(key, model), *_with_bodies(key, model))


def _heads(key: str, model: str) -> Iterator[bytes]:
    tail = f"host: gateway\r\nauthorization: Bearer {key}\r\nx-request-id: r-1\r\n\r\n".encode()
    for line in (
        "GET /v1/models",
        f"HEAD /v1/models/{model}",
        "DELETE /v1/requests/r-2",  # another id than theirs: one that waits would be ended by it
        "GET /livez",
        "OPTIONS *",
    ):
        yield f"{line} HTTP/1.1\r\n".encode() + tail


def _with_bodies(key: str, model: str) -> Iterator[bytes]:
    for path, fields in bodies(model):
        if not path.startswith("/v1/"):  # the others are asked of an engine whatever quotas say
            continue
        body = json.dumps(fields, ensure_ascii=False).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n".encode()
        yield head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        yield head + b"x-request-timeout: 1.5\r\ntransfer-encoding: chunked\r\n\r\n" + chunks


def mutated(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """The bytes with one to `MUTATIONS_MAX` mistakes in them, some of which are pieces of `others`."""
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
                other = draw.choice(others)
                start = draw.randrange(len(other))
                changed[at : at + draw.randint(0, 32)] = other[start : start + 64]
            case 5:
                changed[at:end] = draw.choice(PIECES) if end - at < 64 else changed[at:end]
            case 6:
                del changed[max(at, 1) :]
    return bytes(changed)


# -- over sockets ---------------------------------------------------------------------------------


async def mutations(
    subject: ServerUnderTest, requests: int = REQUESTS, patience_s: float = PATIENCE_S
) -> list[Figure]:
    """The figures of so many mutated requests, each of which is answered within `patience_s` or not at all.
    Raises BenchFailed when the victim is not served."""
    assert subject.endpoint.key is not None
    good, draw = corpus(subject.endpoint.key, subject.model), random.Random(SEED)
    outcomes: Counter[str] = Counter()
    victim = asyncio.create_task(_victim(subject))
    began_s = time.perf_counter()
    first = int(requests * WARM_SHARE)
    await _send(subject, good, draw, first, patience_s, outcomes)
    before_mb = subject.resident_mb()
    await _send(subject, good, draw, requests - first, patience_s, outcomes)
    taken_s, grown_mb = time.perf_counter() - began_s, subject.resident_mb() - before_mb
    victim.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await victim
    name = f"{requests:,} mutated requests"
    count = {kind: sum(n for outcome, n in outcomes.items() if outcome.startswith(kind)) for kind in "245"}
    return [
        figure(f"{name}: answered with 5xx", count["5"], "", NONE_TARGET),
        figure(f"{name}: answered with what is no HTTP", outcomes[_NO_HTTP], "", NONE_TARGET),
        figure(f"{name}: memory", grown_mb, "MB", GROWTH_TARGET),
        figure(f"{name}: answered with 2xx", count["2"], ""),
        figure(f"{name}: answered with 4xx", count["4"], ""),
        figure(f"{name}: rate", requests / taken_s, "requests/s"),
    ]


async def _send(
    subject: ServerUnderTest,
    good: Sequence[bytes],
    draw: random.Random,
    count: int,
    patience_s: float,
    outcomes: Counter[str],
) -> None:
    """Send so many, `AT_ONCE` at any moment, and count how they were answered."""
    left = count

    async def one_by_one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            request = mutated(draw.choice(good), draw, good)
            outcomes[await _outcome(subject, request, patience_s)] += 1

    await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))


_NO_HTTP: Final = "no HTTP"
_UNANSWERED: Final = "unanswered"
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] (?:100 [^\r]*\r\n\r\nHTTP/1\.[01] )?(\d{3}) ")
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)
"""A connection that is closed so leaves no port behind that cannot be used again for a minute."""


async def _outcome(subject: ServerUnderTest, request: bytes, patience_s: float) -> str:
    """The status that a request is answered with, or what came instead of an answer."""
    address = urlsplit(subject.endpoint.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=ANSWER_LEN)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
    try:
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(ANSWER_LEN), patience_s)
    except (TimeoutError, ConnectionError):
        return _UNANSWERED
    finally:
        writer.transport.abort()
    if not answer:
        return _UNANSWERED
    status = _STATUS_LINE.match(answer)
    return _NO_HTTP if status is None else status[1].decode()


async def _victim(subject: ServerUnderTest) -> None:
    """Ask for a short answer again and again. Raises BenchFailed when one does not come."""
    request = subject.chat(1, stream=False)
    connection = await subject.endpoint.connect()
    try:
        while True:
            checked(await connection.exchange(request))
            await asyncio.sleep(VICTIM_GAP_S)
    finally:
        connection.close()
