"""`python -m tests.bench routing --agents`: agents' sessions beside chats, on CPU engines behind a real
gateway, by several rules of choosing a replica.

Each session is a chat with tools, names itself in a header as agents do, and has `TURNS` turns: a prompt is
the whole history, which grows to some 10,000 tokens, the answer is short, and the next turn comes when a tool
has run. All times are an eighth of what they are (`tests.bench.engine.agents`): those of tools, and that for
which the engines keep pages. Chats of the same tenant come at random meanwhile, whatever answers take. The
model is tiny, and its weights are random.

Every rule has engines and a gateway of its own, one after the other. Cached tokens are the engines' own, from
`usage`. *Possible* is what a turn's prompt has of the last turn's in whole pages, for a first turn nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.bench.client import ApiServer, TimedRequest
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.bench.found_share import Seen
from tests.bench.gateway.routing_live import MODEL, OWN, PAGE, WORDS, gateway_by, text_of, usage_of
from tests.bench.gateway.unary import checked
from tests.bench.services import free_port, service

SHAPE: Final = "0.9M"
CONTEXT_LEN: Final = 16_384
ENGINES: Final = 2
SESSIONS: Final = 8
TURNS: Final = 40
CACHE_LEN: Final = 64_000
"""Tokens that one engine's cache holds. All sessions have 80,000 in the end."""
TOOL_S: Final = 0.5
"""The median time that a tool runs."""
TOOL_S_MAX: Final = 5.0
KEEP_S: Final = 4.0
STARTS_S: Final = 2.0
CHATS_PER_S: Final = 3.0
CHAT_WORDS: Final = (20, 200)
RESULT_WORDS: Final = (20, 160)
SYSTEM_WORDS: Final = 200
ANSWER_TOKENS: Final = 24
REQUEST_S: Final = 300.0
"""The time in which a request must be answered, in seconds: machines are shared."""
SESSION_HEADER: Final = "x-session-id"
TEMPLATE: Final = (
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Have the machine {name} something, and see what comes of it.",
            "parameters": {"type": "object", "properties": {"input": {"type": "string"}}},
        },
    }
    for name in ("read", "write", "edit", "search", "run", "fetch", "list", "plan")
)
HIT_TARGET: Final = at_least(0.95)


@dataclass(frozen=True, slots=True)
class Subject:
    """A rule, and what the engines keep."""

    rule: str
    keep_s: float = KEEP_S

    @property
    def name(self) -> str:
        return self.rule if self.keep_s else f"{self.rule}, nothing kept"


SUBJECTS: Final = (Subject(OWN), Subject(OWN, 0.0), Subject("round robin"), Subject("least load"))


@dataclass(frozen=True, slots=True)
class Beside:
    """What came of one subject."""

    sessions: Seen
    chats: Seen
    longest: int
    """Tokens of the longest prompt."""


async def run_agents(turns: int = TURNS, seed: int = 1) -> list[Figure]:
    """The figures of all subjects. Raises BenchFailed."""
    from tests.bench.models import SHAPES, make_model  # torch

    shape = SHAPES[SHAPE]
    token_bytes = 4 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / SHAPE, shape, CONTEXT_LEN)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        found = {}
        for subject in SUBJECTS:
            found[subject] = await _measured(model, CACHE_LEN * token_bytes, subject, turns, seed)
        return figures_of(found)


def figures_of(found: dict[Subject, Beside]) -> list[Figure]:
    """Ours beside the others."""
    own, figures = found[Subject(OWN)], list[Figure]()
    figures.append(figure("agents: longest prompt", max(one.longest for one in found.values()), "tokens"))
    for subject, one in found.items():
        target = HIT_TARGET if one is own else None
        figures += [
            figure(f"agents: hits of the possible, {subject.name}", one.sessions.share, "of 1", target),
            figure(f"agents: TTFT p50, {subject.name}", 1e3 * one.sessions.ttft(0.5), "ms"),
            figure(f"agents: TTFT p99, {subject.name}", 1e3 * one.sessions.ttft(0.99), "ms"),
            figure(f"agents: chats' TTFT p50 beside, {subject.name}", 1e3 * one.chats.ttft(0.5), "ms"),
            figure(f"agents: chats' TTFT p99 beside, {subject.name}", 1e3 * one.chats.ttft(0.99), "ms"),
        ]
    for subject, one in found.items():
        if subject.rule != OWN:
            for q in (0.5, 0.99):
                ratio = own.sessions.ttft(q) / one.sessions.ttft(q)
                title = f"agents: TTFT p{100 * q:g} / {subject.name}"
                figures.append(figure(title, ratio, "x", at_most(1.0)))
    return figures


# -- the services -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _engine(model: Path, cache_bytes: int, keep_s: float) -> AsyncIterator[str]:
    port = free_port()
    argv = [sys.executable, "-m", "engine", "serve", "--model", str(model), "--served-model-name", MODEL]
    argv += ["--port", str(port), "--threads", "1", "--dtype", "float32", "--swap-memory", "0"]
    argv += ["--page-size", str(PAGE), "--kv-cache-memory", str(cache_bytes)]
    argv += ["--answer-format", "qwen3", "--session-keep-s", str(keep_s)]
    async with service(argv, f"http://127.0.0.1:{port}/readyz"):
        yield f"http://127.0.0.1:{port}"


async def _measured(model: Path, cache_bytes: int, subject: Subject, turns: int, seed: int) -> Beside:
    async with contextlib.AsyncExitStack() as stack:
        starting = [_engine(model, cache_bytes, subject.keep_s) for _ in range(ENGINES)]
        engines = [await stack.enter_async_context(one) for one in starting]
        server = await stack.enter_async_context(gateway_by(subject.rule, engines))
        return await _Traffic(server, turns, seed).run()


# -- the traffic ------------------------------------------------------------------------------------------


class _Traffic:
    def __init__(self, server: ApiServer, turns: int, seed: int) -> None:
        self._server, self._turns, self._seed = server, turns, seed
        self._sessions, self._chats = Seen(), Seen()
        self._longest = 0

    async def run(self) -> Beside:
        for number in range(2 * ENGINES):  # so that nothing is done for the first time
            await self._ask([_message("user", f"{number} warm")], None)
        chats = list[asyncio.Task[None]]()
        sending = asyncio.create_task(self._send_chats(chats))
        try:
            await asyncio.gather(*map(self._session, range(SESSIONS)))
        finally:
            sending.cancel()
            await asyncio.gather(*chats)
        return Beside(self._sessions, self._chats, self._longest)

    async def _session(self, number: int) -> None:
        draw, computed = random.Random(f"{self._seed} session {number}"), 0
        await asyncio.sleep(draw.uniform(0.0, STARTS_S))
        system = _words(random.Random(self._seed), SYSTEM_WORDS)
        messages = [_message("system", system), _message("user", f"{number} {_words(draw, 50)}")]
        for _ in range(self._turns):
            done = await self._ask(messages, f"session-{self._seed}-{number}")
            computed = _note(self._sessions, done, computed)
            self._longest = max(self._longest, computed)
            messages.append(_message("assistant", text_of(done)))
            messages.append(_message("user", f"result {_words(draw, draw.randint(*RESULT_WORDS))}"))
            await asyncio.sleep(min(TOOL_S_MAX, draw.lognormvariate(math.log(TOOL_S), 1.0)))

    async def _send_chats(self, sent: list[asyncio.Task[None]]) -> None:
        draw = random.Random(f"{self._seed} chats")
        for number in itertools.count():
            prompt = f"{number} {_words(draw, draw.randint(*CHAT_WORDS))}"
            sent.append(asyncio.create_task(self._chat(prompt)))
            await asyncio.sleep(draw.expovariate(CHATS_PER_S))

    async def _chat(self, prompt: str) -> None:
        _note(self._chats, await self._ask([_message("user", prompt)], None), 0)

    async def _ask(self, messages: Sequence[dict[str, str]], session: str | None) -> TimedRequest:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {}
        if session is not None:
            body["tools"], headers[SESSION_HEADER] = TOOLS, session
        connection = await self._server.connect()
        try:
            sent = self._server.request("/chat/completions", msgspec.json.encode(body), headers)
            connection.begin(sent, keeps_events=True)
            return checked(await connection.finished(REQUEST_S))
        finally:
            connection.close()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def _note(seen: Seen, done: TimedRequest, computed: int) -> int:
    """Note an answer to a prompt of which so many tokens were computed before. Returns the prompt's own."""
    usage = usage_of(done)
    possible = computed // PAGE * PAGE
    seen.possible += possible
    seen.found += min(possible, usage.prompt_tokens_details.cached_tokens)
    seen.first_s.append(done.event_times[0] - done.sent_at)
    return usage.prompt_tokens
