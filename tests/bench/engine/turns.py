"""A conversation of many turns: how long the first token of each takes, and how much of its prompt was found.

Every turn's prompt is the one before it, its answer and `ASKED_LEN` tokens more. Of two servers each has a
conversation of its own with prompts of the same lengths, and they take turns. So a model with states is
compared with one of its size whose pages alone are the prefix.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tests.bench.engine.load import BenchFailed, Server, alone, completion_body, finished, random_prompt
from tests.bench.figures import Figure, at_most, figure, quantile

TURNS: Final = 20
ASKED_LEN: Final = 60
ANSWER_LEN: Final = 36
RATIO_TARGET: Final = at_most(1.3)


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


@dataclass(slots=True)
class Conversation:
    """One server's, as its client saw it."""

    tokens: list[int] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    """The time to the first token, by turn."""
    computed_len: list[int] = field(default_factory=list)
    """The prompt tokens that were not found, by turn."""

    async def go_on(self, server: Server, asked: Sequence[int]) -> None:
        self.tokens += asked
        body = completion_body(server, self.tokens, ANSWER_LEN) | {"return_token_ids": True}
        connection = await server.endpoint.connect()
        try:
            request = server.endpoint.request("/completions", msgspec.json.encode(body))
            connection.begin(request, keeps_events=True)
            done = await finished(connection)
        finally:
            connection.close()
        if done.usage is None or done.events is None:
            raise BenchFailed(f"{server.name}tells no usage")
        self.first_ms.append(1e3 * (done.event_times[0] - done.sent_at))
        self.computed_len.append(done.usage.computed - done.usage.completion_tokens + 1)
        events = [msgspec.json.decode(raw.removeprefix(b"data: "), type=_Event) for raw in done.events]
        self.tokens += [token for event in events for choice in event.choices for token in choice.token_ids]


async def turns(servers: Sequence[Server], rng: random.Random) -> list[Figure]:
    """The figures of a conversation on each server. The first turn, which finds nothing, does not count."""
    seen = [Conversation() for _ in servers]
    for _ in range(TURNS):
        asked = random_prompt(rng, ASKED_LEN)
        for server, conversation in zip(servers, seen, strict=True):
            with alone(server, servers):
                await conversation.go_on(server, asked)
    name, figures = f"turns 2 to {TURNS}", list[Figure]()
    for server, conversation in zip(servers, seen, strict=True):
        later = conversation.first_ms[1:], conversation.computed_len[1:]
        figures += [
            figure(f"{server.name}{name}: TTFT p50", quantile(later[0], 0.5), "ms"),
            figure(f"{server.name}{name}: TTFT p99", quantile(later[0], 0.99), "ms"),
            figure(f"{server.name}{name}: prompt tokens computed p50", quantile(later[1], 0.5), "tokens"),
        ]
    if len(seen) == 2:
        ratios = [ours / theirs for ours, theirs in zip(*(each.first_ms[1:] for each in seen), strict=True)]
        figures.append(figure(f"{name}: TTFT, ratio p50", quantile(ratios, 0.5), "x", RATIO_TARGET))
    return figures
