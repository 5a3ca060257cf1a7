"""Draws a world from a seed: its services, its requests, how each of them ends, and what breaks when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from gateway.identity.keys import hash_key

Json = dict[str, Any]

MODEL: Final = "tiny"
TENANTS: Final = ("free", "budget", "rate", "seats")
BUDGET: Final = 4_000
ARRIVALS_S: Final = 1.0
"""The time in which all requests of a world arrive."""
WORDS: Final = (
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "pack", "my", "box", "with", "five"),
    *("dozen", "liquor", "jugs", "héllo", "日本"),
)
UNANSWERABLE: Final[tuple[Json, ...]] = (
    {"model": "none"},
    {"n": 0},
    {"max_tokens": 5_000},
    {"messages": [], "prompt": []},
)
"""Fields of requests that are refused."""


class End(StrEnum):
    """The intended end of a request. A deadline, a full queue or a dead engine may come before it."""

    WHOLE = "whole"
    LEAVES_BEFORE_BODY = "leaves before its body"
    LEAVES_IN_BODY = "leaves in its body"
    BODY_NEVER_COMES = "its body never comes"
    LEAVES_LATER = "leaves some time after it has asked"
    LEAVES_AT_HEAD = "leaves at the first bytes of its answer"
    LEAVES_AT_EVENT = "leaves at a later event"
    STOPS_READING = "stops reading"
    PAUSES_READING = "stops reading for a while"
    QUEUE_DEADLINE = "bounds its wait for the engine"
    REQUEST_DEADLINE = "bounds its wait for the whole answer"
    ABORTS_AT_GATEWAY = "aborts by its id"
    ABORTS_AT_ENGINE = "is aborted by its id at the engine"
    REVOKED = "has its key revoked"
    REFUSED = "asks for what cannot be had"


ENDS: Final = {
    End.WHOLE: 35,
    End.REVOKED: 5,
    End.LEAVES_BEFORE_BODY: 2,
    End.LEAVES_IN_BODY: 2,
    End.BODY_NEVER_COMES: 1,
    End.LEAVES_LATER: 22,
    End.LEAVES_AT_HEAD: 5,
    End.LEAVES_AT_EVENT: 8,
    End.STOPS_READING: 2,
    End.PAUSES_READING: 2,
    End.QUEUE_DEADLINE: 4,
    End.REQUEST_DEADLINE: 6,
    End.ABORTS_AT_GATEWAY: 4,
    End.ABORTS_AT_ENGINE: 3,
    End.REFUSED: 3,
}
"""The relative frequency of each end."""
SLOW: Final = (End.STOPS_READING, End.PAUSES_READING)
ANSWERED: Final = (*SLOW, End.LEAVES_AT_EVENT, End.REFUSED)
"""The ends of requests that are for an answer: for its stream, or with a field that only they have."""
UNSAMPLED_SHARE: Final = 0.12
"""The share of the other requests that are for vectors, or for decisions."""


class Trouble(StrEnum):
    """A trouble of an engine, or with `GATEWAY_DRAINS` of the gateway."""

    CUT = "its connections are cut"
    KILLED = "its processes are killed"
    CORE_DIES = "its core is killed"
    CORE_FAILS = "its core fails"
    HANGS = "its core hangs"
    DRAINS = "it drains"
    STOPS = "it drains and stops"
    GATEWAY_DRAINS = "the gateway drains"


@dataclass(frozen=True, slots=True)
class History:
    """One request, and how it ends."""

    request_id: str
    at_s: float
    """The time of its arrival."""
    tenant: str
    path: str
    headers: dict[str, str]
    body: bytes
    end: End
    after_s: float
    """The time after which its client disconnects, aborts or reads again, or its key is revoked."""
    events: int
    """Events that its client reads before it disconnects or stops reading."""

    @property
    def key(self) -> str:
        """The key that it shows, which is also the key's id: the tenant's, or one that nobody else has."""
        return self.request_id if self.end is End.REVOKED else self.tenant


@dataclass(frozen=True, slots=True)
class Setting:
    """The limits, requests and troubles of a world."""

    seed: int
    protocol: str
    replicas: int
    pages: int
    page_size: int
    slots: int
    step_tokens_max: int
    step_s: float
    overlap: bool
    max_queue_len: int
    stall_deadline_s: float
    prefix_cache: bool
    drafts_max: int
    """The most drafts that a row verifies; 0: none."""
    timeouts: dict[str, float]
    completion_estimate: int
    histories: tuple[History, ...]
    troubles: tuple[tuple[float, Trouble, int], ...]
    """The time, the trouble, and the number of the replica."""

    def gateway(self, urls: list[str]) -> Json:
        """The gateway's configuration, as parsed from TOML."""
        limits: dict[str, Json] = {
            "free": {},
            "budget": {"token_budget": BUDGET},
            "rate": {"tokens_per_min": 3_000, "requests_per_min": 40, "token_budget": 1_000_000},
            "seats": {"concurrent": 6, "token_budget": 1_000_000},
        }
        tiers = {"free": "priority", "budget": "default", "rate": "flex", "seats": "priority"}
        tenants = [
            {"id": name, "limits": limits[name], "service_tier": tiers[name], "on_revoke": "end"}
            for name in TENANTS
        ]
        return {
            "listen": {"port": 0},
            "models": [{"name": MODEL, "replicas": urls, "protocol": self.protocol}],
            "tenants": tenants,
            "keys": [{"id": name, "hash": hash_key(name), "tenant": name} for name in TENANTS],
            "timeouts": self.timeouts,
            "admission": {"completion_estimate": self.completion_estimate},
        }


def draw_setting(seed: int, requests: int) -> Setting:
    rng = random.Random(seed)
    page_size = rng.choice([4, 8, 16])
    slots = rng.choice([2, 4, 8])
    hasty = rng.random() < 0.25
    timeouts = {
        "total_s": rng.uniform(0.2, 1.0) if hasty else 20.0,
        "first_token_s": rng.uniform(0.05, 0.4) if hasty else 8.0,
        "inter_token_s": rng.uniform(0.03, 0.1) if hasty else 8.0,
        "slow_client_s": rng.choice([0.3, 1.5]),
        "body_s": 0.5,
        "connect_s": 0.5,
        "drain_s": 0.1,
    }
    return Setting(
        seed=seed,
        protocol="http1" if rng.random() < 0.15 else "http2",
        replicas=rng.choice([1, 1, 2, 3]),
        pages=rng.randint(320, 900) // page_size,
        page_size=page_size,
        slots=slots,
        step_tokens_max=slots + rng.choice([8, 40, 200]),
        step_s=rng.choice([0.001, 0.004]),
        overlap=rng.random() < 0.3,
        max_queue_len=rng.choice([6, 200, 200]),
        stall_deadline_s=rng.choice([0.4, 1.0]),
        prefix_cache=rng.random() < 0.8,
        drafts_max=(0, 3, 15)[seed % 3],
        timeouts=timeouts,
        completion_estimate=rng.choice([4, 30]),
        histories=tuple(_history(rng, f"h{seed}-{number}") for number in range(requests)),
        troubles=tuple(_troubles(rng, seed)),
    )


def _troubles(rng: random.Random, seed: int) -> list[tuple[float, Trouble, int]]:
    """The troubles of a world: every second world has one kind in turn, and some have another. Those that end
    all requests come late, so that most requests end otherwise."""
    kinds = list(Trouble)
    troubles = [kinds[seed // 2 % len(kinds)]] if seed % 2 else []
    if rng.random() < 0.3:
        troubles.append(rng.choice(kinds))
    late = (Trouble.KILLED, Trouble.STOPS, Trouble.GATEWAY_DRAINS, Trouble.CORE_DIES, Trouble.CORE_FAILS)
    return [(rng.uniform(0.7 if it in late else 0.2, 1.1), it, rng.randrange(3)) for it in troubles]


def _history(rng: random.Random, request_id: str) -> History:
    end = rng.choices(list(ENDS), list(ENDS.values()))[0]
    path, fields = _asked(rng, end)
    headers = {}
    if end is End.QUEUE_DEADLINE:
        headers["x-queue-timeout"] = f"{rng.uniform(0.001, 0.15):.4f}"
    if end is End.REQUEST_DEADLINE:
        headers["x-request-timeout"] = f"{rng.uniform(0.005, 0.4):.4f}"
    if end is End.REFUSED:
        fields |= rng.choice(UNANSWERABLE)
    return History(
        request_id=request_id,
        at_s=rng.uniform(0.0, ARRIVALS_S),
        tenant=rng.choice(TENANTS),
        path=path,
        headers=headers,
        body=msgspec.json.encode(fields),
        end=end,
        after_s=rng.expovariate(1 / rng.choice([0.005, 0.05, 0.3])),
        events=rng.randint(1, 12),
    )


def _asked(rng: random.Random, end: End) -> tuple[str, Json]:
    stream = end in SLOW or end is End.LEAVES_AT_EVENT or rng.random() < 0.5
    fields: Json = {"model": MODEL, "seed": rng.randrange(2**63), "stream": stream}
    if stream and rng.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    if rng.random() < 0.2:
        fields["n"] = rng.randint(2, 3)
    if rng.random() < 0.85:
        fields["max_tokens"] = rng.randint(1, 16)
    if rng.random() < 0.3:
        fields["ignore_eos"] = True
    if rng.random() < 0.15:
        fields["stop"] = rng.choice(["e", ["o", "th"]])
    if rng.random() < 0.3:
        fields["service_tier"] = rng.choice(["flex", "default", "priority"])
    if rng.random() < 0.1:
        fields["return_token_ids"] = True
    path, more = (_chat if rng.random() < 0.5 else _completion)(rng, end in SLOW)
    fields |= more
    if end in SLOW:
        fields |= {"max_tokens": rng.choice([60, 120]), "ignore_eos": True, "n": 1, "return_token_ids": True}
        fields.pop("stop", None)
    own = random.Random(-1 - fields["seed"])  # the other requests are the same without
    if end not in ANSWERED and own.random() < UNSAMPLED_SHARE:
        return (_embeddings if own.random() < 0.6 else _decisions)(own)
    return path, fields


def _chat(rng: random.Random, slow: bool) -> tuple[str, Json]:
    fields: Json = {"messages": [{"role": "user", "content": _text(rng)}]}
    if slow or rng.random() < 0.1:
        fields |= {"logprobs": True, "top_logprobs": 20 if slow else rng.randint(0, 2)}
    own = random.Random(rng.getstate()[1][0])  # the other requests are the same without
    if own.random() < 0.4:
        fields["prediction"] = {"type": "content", "content": _text(own)}
    return "/v1/chat/completions", fields


def _completion(rng: random.Random, slow: bool) -> tuple[str, Json]:
    kind = rng.random()
    fields: Json = {"prompt": _text(rng)}
    if kind < 0.3:
        fields["prompt"] = [_text(rng) for _ in range(rng.randint(2, 3))]
    elif kind < 0.5:
        fields["prompt"] = [rng.randrange(10, 300) for _ in range(rng.randint(1, 60))]
    if rng.random() < 0.25:
        fields["echo"] = True
    if slow:
        fields["logprobs"] = 20
    elif rng.random() < 0.25:
        fields["logprobs"] = rng.randint(0, 2)
        if "echo" in fields and rng.random() < 0.3:
            fields |= {"max_tokens": 0, "n": 1}
    return "/v1/completions", fields


def _embeddings(rng: random.Random) -> tuple[str, Json]:
    texts = [_text(rng) for _ in range(rng.choice([1, 2, 5, 20]))]
    ids = [[rng.randrange(10, 300) for _ in range(rng.randint(1, 60))] for _ in texts]
    given: list[Any] = rng.choice([texts, ids])
    fields: Json = {"model": MODEL, "input": given if len(given) > 1 else given[0]}
    if rng.random() < 0.5:
        fields["encoding_format"] = rng.choice(["float", "base64"])
    if rng.random() < 0.2:
        fields["truncate_prompt_tokens"] = rng.randint(1, 20)
    return "/v1/embeddings", fields


def _decisions(rng: random.Random) -> tuple[str, Json]:
    questions: list[Json] = [
        {"type": "predicate", "instructions": _text(rng)},
        {"type": "choice", "instructions": "Who?", "choices": [{"value": word} for word in WORDS[2:6]]},
        {"type": "score", "instructions": "Lazy?", "levels": [{"label": word} for word in WORDS[:3]]},
    ]
    asked = [rng.choice(questions) for _ in range(rng.choice([1, 2, 6]))]
    return "/v1/decisions", {"model": MODEL, "input": _text(rng), "questions": asked}


def _text(rng: random.Random) -> str:
    """Random words; many texts have a common beginning."""
    shared = WORDS[: rng.choice([0, 4, 8, 14])]
    return " ".join([*shared, *(rng.choice(WORDS) for _ in range(rng.randint(1, 16)))])
