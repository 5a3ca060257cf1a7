"""The type of an attack (its requests, their tenants, their number, their end), and bodies for attacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import Final

import msgspec

MODEL: Final = "demo"
"""The name by which the attacked engine serves its model."""
KIB: Final = 1024
MIB: Final = 1024 * KIB
BODY_LEN: Final = 8 * MIB - KIB
"""Bytes of a body that is nearly as large as the gateway takes."""
CHATS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
PLAIN_ID: Final = 50
"""A token id that every vocabulary has."""

Body = Callable[[], bytes]
"""A function that makes a request's body, which may have megabytes, when it is needed."""


class Law(StrEnum):
    """The promise that an attack tries to break."""

    RESERVATION = "no work before its reservation"
    BYTES = "bytes are bounded per tenant"
    LOOPS = "loops are never held long"
    THREADS = "threads are shared fairly"
    SEATS = "seats are shared"
    CHARGES = "charged is what was computed"
    PAGES = "cached pages are their tenant's own"
    HASTE = "haste is paid for by the hasty"
    GRAMMARS = "a late mask delays its own row"
    REPLICAS = "a replica harms its own model alone"


class Rogue(StrEnum):
    """The models whose only replica does what it can against the gateway
    (`tests.bench.gateway.rogue_engine`)."""

    LOOPS = "loops"
    LENGTH = "length"
    BUNDLE = "bundle"
    MISTAKE = "mistake"


class Who(StrEnum):
    """The tenants of the attacked gateway, each with one key."""

    STRANGER = "stranger"
    """A caller whose key the gateway does not know."""
    VICTIM = "victim"
    ATTACKER = "attacker"
    """A tenant without limits."""
    ACCOMPLICE = "accomplice"
    """A second tenant without limits."""
    ZERO = "zero"
    """A tenant with `requests_per_min = 0`."""
    SEATLESS = "seatless"
    """A tenant with `concurrent = 0`."""
    BROKE = "broke"
    """A tenant with `token_budget = 0`."""
    POOR = "poor"
    """A tenant with a few tokens per minute, and a few thousand in all."""
    HASTY = "hasty"
    """A tenant without limits to whom a stream's first token is of use for `HASTY_S` only."""


POOR_TOKENS_PER_MIN: Final = 400
POOR_TOKEN_BUDGET: Final = 2000
HASTY_S: Final = 0.25


class Ends(Enum):
    """The moment at which the sender of a request closes its connection."""

    ANSWERED = "answered"
    """The sender closes at the end of the answer."""
    AT_ONCE = "at once"
    """The sender closes as soon as the request is sent."""
    ON_CUE = "on cue"
    """The sender closes on the cue, or at the end of the answer if that comes before."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    law: Law
    body: Body
    path: str = COMPLETIONS
    count: int = 1
    """The number of requests in all."""
    at_once: int = 1
    """The number of requests at a time; all of them where they end on cue."""
    who: tuple[Who, ...] = (Who.ATTACKER,)
    """The tenants that send the requests, in turns."""
    statuses: frozenset[int] = frozenset({200})
    """The statuses that an answered request may have."""
    ends: Ends = Ends.ANSWERED
    share_sent: float = 1.0
    """The fraction of the body that is sent."""
    reads: bool = True
    """True if the sender reads its answer while it waits for its cue."""
    chunk_len: int | None = None
    """The bytes of each chunk of a chunked body. None for a body with a Content-Length."""
    headers: Mapping[str, str] = field(default_factory=dict)


def chat(**fields: object) -> Body:
    """A short chat that goes on until it has all its tokens."""
    messages = [{"role": "user", "content": "Go on."}]
    return partial(encoded, {"model": MODEL, "messages": messages, "ignore_eos": True, **fields})


def completion(**fields: object) -> Body:
    return partial(encoded, {"model": MODEL, "prompt": "Go on.", "ignore_eos": True, **fields})


def response(**fields: object) -> Body:
    return partial(encoded, {"model": MODEL, "input": "Go on.", "ignore_eos": True, **fields})


def embedding(**fields: object) -> Body:
    return partial(encoded, {"model": MODEL, **fields})


def encoded(fields: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(fields)


def padded(head: str, item: str, tail: str, count: int | None = None, between: str = ",") -> Body:
    """A body of `head`, `count` items and `tail`. Without a count, as many items as a body may hold."""
    most = (BODY_LEN - len(head.encode()) - len(tail)) // len((item + between).encode())
    return lambda: (head + between.join([item] * (count or most)) + tail).encode()


CHAT_HEAD: Final = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1'
COMPLETION_HEAD: Final = f'{{"model": "{MODEL}", "max_tokens": 1'


def with_fields(head: str, count: int, value: str, tail: str) -> Body:
    """A body of `head`, `count` fields of this value and `tail`."""
    return lambda: (head + ",".join(f'"{i}":{value}' for i in range(count)) + tail).encode()


def text(character: str) -> Body:
    """A completion request whose prompt is one character repeated to 8 MiB."""
    return padded(f'{COMPLETION_HEAD}, "prompt": "', character, '"}', between="")
