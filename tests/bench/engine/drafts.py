"""The row `drafts`: two engines side by side, one that drafts and one that does not, on the same prompts.

Both have the model of `tests.bench.draft_model`, and take turns, the other one stopped. Each stream asks one
question of `tests.bench.draft_texts` a turn, with a seed of its own, and the answer ends where the learned
one does. The tokens must be equal. A gap is the time between two events of a stream: one with drafts brings
several tokens at times. What is measured is decoding: all prompts are computed beforehand and found in the
prefix cache, and a rate counts from a turn's first token to its last.

With `--against` engines of other makes take turns with them, each with drafts of its own: they have the same
checkpoint, the same prompts as token ids and the same lengths. Their tokens are those of their usage, and
their answers are compared with those that were learned. All are greedy then: vLLM's CPU build says other
things once it verifies drafts of an answer that is sampled. `tests.bench.against_drafts` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from tests.bench.client import TimedRequest
from tests.bench.draft_texts import KINDS, folder, is_made, prompt, texts
from tests.bench.engine.load import BenchFailed, Server, alone, finished
from tests.bench.engine.tiers import engine
from tests.bench.figures import Figure, Target, at_least, at_most, figure, quantile
from tests.bench.services import get

STREAMS: Final = (1, 8, 32)
TURNS: Final = {1: 8, 8: 5, 32: 3}
TURNS_OTHERWISE: Final = 3
TEMPERATURE: Final = 0.1
"""Where no engine of another make takes part."""
OFF: Final = ("--max-drafts", "0")
OURS: Final = 2
"""The first of the engines side by side."""
TARGETS: Final[dict[tuple[str, int], Target]] = {
    ("edits", 1): at_least(2.5),
    ("edits", 8): at_least(1.5),
    **{("prose", streams): at_least(0.98) for streams in STREAMS},
}
AHEAD: Final = at_least(1)
"""Beside another make."""
GAP_TARGET: Final = at_most(100.0)
"""The default of `--gap-target-ms`."""


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured: kinds of texts, each at several numbers of streams."""

    kinds: Sequence[str] = tuple(KINDS)
    streams: Sequence[int] = STREAMS
    turns: int | None = None
    """None: by the streams."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the answer that was learned."""

    prompt: list[int]
    answer: str
    answer_len: int
    """In tokens."""
    temperature: float


@dataclass(slots=True)
class Side:
    """What one engine did under a load."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second, by turn."""
    gaps_ms: list[float] = field(default_factory=list)
    drafted: float = 0.0
    accepted: float = 0.0
    unlearned: int = 0
    """Answers other than those that were learned."""


async def draft_figures(
    options: Sequence[str], wanted: Wanted, others: Sequence[Server] = ()
) -> list[Figure]:
    """The figures of what is wanted. `others` are engines of other makes. Raises `BenchFailed`."""
    model = folder()
    if not is_made(model):
        raise BenchFailed(f"no model in {model}: make it by `python -m tests.bench.draft_model`")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    figures: list[Figure] = []
    async with engine(str(model), options) as drafting, engine(str(model), [*options, *OFF]) as plain:
        servers = (drafting, plain, *others)
        for kind in wanted.kinds:
            questions = _questions(kind, tokenizer, 0.0 if others else TEMPERATURE)
            for at, server in enumerate(servers):
                with alone(server, servers):
                    first = [replace(each, answer_len=2) for each in questions]
                    await _turn(server, first, 0, Side(), is_ours=at < OURS)
            for streams in wanted.streams:
                turns = wanted.turns or TURNS.get(streams, TURNS_OTHERWISE)
                figures += await _in_turns(servers, kind, questions, streams, turns)
    return figures


def _questions(kind: str, tokenizer: Tokenizer, temperature: float) -> list[Question]:
    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    return [
        Question(ids(prompt(question)), answer, len(ids(answer)), temperature)
        for question, answer in texts(kind)
    ]


async def _in_turns(
    servers: Sequence[Server], kind: str, questions: Sequence[Question], streams: int, turns: int
) -> list[Figure]:
    sides, differing = [Side() for _ in servers], 0
    for turn in range(turns + 1):
        first = turn * streams % len(questions)
        asked = [questions[(first + at) % len(questions)] for at in range(streams)]
        answers: dict[int, list[list[int]]] = {}
        order = range(len(servers))
        for at in order if turn % 2 else reversed(order):
            with alone(servers[at], servers):
                into = sides[at] if turn else Side()
                answers[at] = await _turn(servers[at], asked, turn, into, is_ours=at < OURS)
        differing += sum(a != b for a, b in zip(answers[0], answers[1], strict=True))
    name = f"drafts, {kind}, {streams} stream{'s' if streams > 1 else ''}"
    figures = _figures(name, TARGETS.get((kind, streams)), *sides[:OURS])
    for server, theirs in zip(servers[OURS:], sides[OURS:], strict=True):
        figures += _beside(f"{name}: {server.name}", sides[0], theirs)
    return [*figures, figure(f"{name}: answers that differ", differing, "", at_most(0))]


def _figures(name: str, target: Target | None, drafting: Side, plain: Side) -> list[Figure]:
    ratio = statistics.median(a / b for a, b in zip(drafting.rates, plain.rates, strict=True))
    return [
        figure(f"{name}: tokens/s with drafts", statistics.median(drafting.rates), "/s"),
        figure(f"{name}: tokens/s without", statistics.median(plain.rates), "/s"),
        figure(f"{name}: with / without", ratio, "x", target),
        figure(f"{name}: gap p99 with drafts", quantile(drafting.gaps_ms, 0.99), "ms", GAP_TARGET),
        figure(f"{name}: gap p99 without", quantile(plain.gaps_ms, 0.99), "ms"),
        figure(f"{name}: drafted", drafting.drafted, "tokens"),
        figure(f"{name}: accepted", drafting.accepted, "tokens"),
        figure(f"{name}: answers not as learned", drafting.unlearned, ""),
    ]


def _beside(name: str, ours: Side, theirs: Side) -> list[Figure]:
    """The figures of an engine of another make."""
    ratio = statistics.median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))
    return [
        figure(f"{name}tokens/s with drafts", statistics.median(theirs.rates), "/s"),
        figure(f"{name}tokens/s with drafts, ours / theirs", ratio, "x", AHEAD),
        figure(f"{name}gap p99 with drafts", quantile(theirs.gaps_ms, 0.99), "ms"),
        figure(f"{name}answers not as learned", theirs.unlearned, ""),
    ]


async def _turn(
    server: Server, asked: Sequence[Question], turn: int, into: Side, *, is_ours: bool
) -> list[list[int]]:
    """Ask all questions at once. Returns the answers, where they are told as tokens."""
    right, wrong = await _drafts(server) if is_ours else (0.0, 0.0)
    done = await asyncio.gather(
        *(_asked(server, each, 100 * turn + at, is_ours=is_ours) for at, each in enumerate(asked))
    )
    tokens = [_tokens(exchange) for exchange in done]
    times = [exchange.event_times for exchange in done]
    took_s = max(each[-1] for each in times) - min(each[0] for each in times)
    into.rates.append(sum(map(len, tokens) if is_ours else map(_used, done)) / took_s)
    answers = [_text(exchange) for exchange in done]
    into.unlearned += sum(each.answer != text for each, text in zip(asked, answers, strict=True))
    into.gaps_ms += (1e3 * (b - a) for each in times for a, b in itertools.pairwise(each))
    if not is_ours:
        return tokens
    right_now, wrong_now = await _drafts(server)
    into.accepted += right_now - right
    into.drafted += right_now - right + wrong_now - wrong
    return tokens


async def _asked(server: Server, question: Question, seed: int, *, is_ours: bool) -> TimedRequest:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": question.prompt,
        "max_tokens": question.answer_len,
        "temperature": question.temperature,
        "seed": seed,
        "stream": True,
    }
    body |= {"return_token_ids": True} if is_ours else {"stream_options": {"include_usage": True}}
    connection = await server.endpoint.connect()
    with contextlib.closing(connection):
        request = server.endpoint.request("/completions", msgspec.json.encode(body))
        connection.begin(request, keeps_events=True)
        return await finished(connection)


def _events(exchange: TimedRequest) -> list[_Event]:
    return [msgspec.json.decode(raw.removeprefix(b"data: "), type=_Event) for raw in exchange.events or []]


def _used(exchange: TimedRequest) -> int:
    """The tokens that an answer's usage tells."""
    return max((event.usage.completion_tokens for event in _events(exchange) if event.usage), default=0)


def _tokens(exchange: TimedRequest) -> list[int]:
    events = _events(exchange)
    return [token for event in events for choice in event.choices for token in choice.token_ids or ()]


def _text(exchange: TimedRequest) -> str:
    return "".join(choice.text or "" for event in _events(exchange) for choice in event.choices)


async def _drafts(server: Server) -> tuple[float, float]:
    """The drafts that were right and those that were wrong, so far."""
    metrics = (await get(server.endpoint.url.removesuffix("/v1") + "/metrics")).decode()
    return counted(metrics, "right"), counted(metrics, "wrong")


def counted(metrics: str, outcome: str) -> float:
    """The counter of drafts with this outcome; 0 where it is not there yet."""
    found = re.search(
        rf'^penstock_engine_drafts(?:_total)?{{outcome="{outcome}"}} (\S+)$', metrics, re.MULTILINE
    )
    return float(found[1]) if found else 0.0
