"""An attack as a value: what is sent, by whom, how often, and how it ends; and bodies to attack with."""

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
PLAIN_ID: Final = 50
"""A token id that every vocabulary has."""

Body = Callable[[], bytes]
"""Makes a body when it is needed: some are megabytes."""


class Law(StrEnum):
    """What an attack would break."""

    RESERVATION = "no work before its reservation"
    BYTES = "bytes are bounded per tenant"
    LOOPS = "loops are never held long"
    THREADS = "threads are shared fairly"
    SEATS = "seats are shared"
    CHARGES = "charged is what was computed"


class Who(StrEnum):
    """The tenants of the attacked gateway, each with one key."""

    STRANGER = "stranger"
    """Nobody: a key that the gateway does not know."""
    VICTIM = "victim"
    ATTACKER = "attacker"
    """Without limits of its own."""
    ACCOMPLICE = "accomplice"
    """Another one without limits."""
    ZERO = "zero"
    """With `requests_per_min = 0`."""
    SEATLESS = "seatless"
    """With `concurrent = 0`."""
    BROKE = "broke"
    """With `token_budget = 0`."""
    POOR = "poor"
    """With a few tokens a minute, and a few thousand in all."""


POOR_TOKENS_PER_MIN: Final = 400
POOR_TOKEN_BUDGET: Final = 2000


class Ends(Enum):
    """When the sender of a request hangs up."""

    ANSWERED = "answered"
    """At the end of the answer."""
    AT_ONCE = "at once"
    """As soon as the request is sent."""
    ON_CUE = "on cue"
    """When it is told to, unless the answer has ended before."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    law: Law
    body: Body
    path: str = COMPLETIONS
    count: int = 1
    """Requests in all."""
    at_once: int = 1
    """Requests at a time. All of them at once where they end on cue."""
    who: tuple[Who, ...] = (Who.ATTACKER,)
    """Who sends them, in turns."""
    statuses: frozenset[int] = frozenset({200})
    """What an answered request may get."""
    ends: Ends = Ends.ANSWERED
    share_sent: float = 1.0
    """The fraction of the body that is ever sent."""
    reads: bool = True
    """Whether the sender reads its answer while it waits for its cue."""
    chunk_len: int | None = None
    """Bytes of each chunk of a chunked body; None for a body of a stated length."""
    headers: Mapping[str, str] = field(default_factory=dict)


def chat(**fields: object) -> Body:
    """A short chat that goes on until it has all its tokens."""
    messages = [{"role": "user", "content": "Go on."}]
    return partial(encoded, {"model": MODEL, "messages": messages, "ignore_eos": True, **fields})


def completion(**fields: object) -> Body:
    return partial(encoded, {"model": MODEL, "prompt": "Go on.", "ignore_eos": True, **fields})


def encoded(fields: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(fields)


def padded(head: str, item: str, tail: str, count: int | None = None, between: str = ",") -> Body:
    """`head`, as many of `item` as fit into a body (or `count`), `tail`."""
    most = (BODY_LEN - len(head.encode()) - len(tail)) // len((item + between).encode())
    return lambda: (head + between.join([item] * (count or most)) + tail).encode()


CHAT_HEAD: Final = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1'
COMPLETION_HEAD: Final = f'{{"model": "{MODEL}", "max_tokens": 1'


def with_fields(head: str, count: int, value: str, tail: str) -> Body:
    """`head`, so many fields of this value, `tail`."""
    return lambda: (head + ",".join(f'"{i}":{value}' for i in range(count)) + tail).encode()


def text(character: str) -> Body:
    """A prompt of one character, 8 MiB of it."""
    return padded(f'{COMPLETION_HEAD}, "prompt": "', character, '"}', between="")
