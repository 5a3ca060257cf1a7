"""What is secret stays so: prompts, answers and keys are in no log line, metric, error, span or repr.

Each is a *canary*: a text that nothing else contains. The run takes the ways in which a request can end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import pytest

from gateway.config.whole import KeyConfig
from gateway.identity.keys import KeyTable, mint_key
from gateway.routing.sessions import SESSION_HEADERS
from shared.apis.chat import AssistantMessage, ChatChoice, ChatDelta, ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.validation import parse
from shared.process import logs
from shared.telemetry import tracing
from shared.telemetry.tracing import TracePolicy, Tracing
from tests import canary_heads as heads
from tests.gateway.conftest import CHAT, KEY, OTHER_KEY, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import CUT, HEADERS, Script, Seen, chunk, refusal, stream, unary
from tests.gateway.identity.issuers import EC
from tests.span_sink import KeptSpans, collecting

PROMPT: Final = "canary-of-a-prompt"
ANSWER: Final = "canary-of-an-answer"
WRONG_KEY: Final = "sk_prod_abcdefghijkl_canaryofakeycanaryofakeycanary00"
TOKEN: Final = EC.token(sub="canary-of-a-subject", email="canary-of-a-claim")
CANARIES: Final = ("canary", WRONG_KEY, KEY, OTHER_KEY, TOKEN.split(".")[1], TOKEN.split(".")[2])
OURS: Final = ("gateway.", "shared.")
"""The modules whose objects are looked at."""

Fields = dict[str, Any]
SAYS: Final = [{"role": "user", "content": PROMPT}]
REFUSED: Final[list[Fields | bytes]] = [
    {"messages": [{"role": "user", "content": [PROMPT]}]},
    {"messages": [{"role": PROMPT, "content": "x"}]},
    {"messages": PROMPT},
    {"messages": SAYS, "temperature": PROMPT},
    {"messages": SAYS, "tools": [{"function": {"name": PROMPT}}]},
    {"messages": SAYS, "stop": [PROMPT * 40]},
    {"messages": SAYS, "service_tier": PROMPT},
    {"messages": SAYS, "penstock": {"tokenizer": PROMPT, "prompt_ids": []}},
    {"messages": [{"role": "user", "content": PROMPT * 5000}]},
    {"messages": SAYS, "max_tokens": 10**6},
    {"messages": SAYS, "response_format": {"type": PROMPT}},
    json.dumps({**CHAT, "messages": SAYS}).encode()[:-2],
    json.dumps({**CHAT, "messages": SAYS}).encode() + b"{}",
    b'{"model": "tiny", "messages": "%b\xff"}' % PROMPT.encode(),
    b'{"model": "tiny", "messages": "%b\\ud800"}' % PROMPT.encode(),
    b'{"model": "tiny", "model": "%b"}' % PROMPT.encode(),
]
"""Bodies that the gateway refuses."""
SERVED: Final[list[Fields]] = [
    {"messages": SAYS},
    {"messages": SAYS, "stream": True},
    {"messages": SAYS, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
    {"messages": SAYS, "user": PROMPT, "metadata": {"a": PROMPT}, "stop": PROMPT, "cache_salt": PROMPT},
    {"messages": SAYS, "zzz": PROMPT, "prompt_cache_key": PROMPT},
]
"""Bodies that reach an engine."""
FAILURES: Final = (
    refusal(400, "invalid_value", f"bad: {ANSWER}"),
    refusal(500, "engine_failed", ANSWER),
    refusal(503, "queue_full", ANSWER),
    Script([HEADERS, ANSWER.encode()], 200, "application/json"),
    Script([ANSWER.encode()], 502, "text/plain"),
    Script([chunk(ANSWER), CUT]),
    Script([chunk(ANSWER)]),
    Script([ANSWER.encode(), CUT]),
    Script([b'data: {"error": {"message": "%b"}}\n\n' % ANSWER.encode()]),
)
"""Ways in which an engine fails."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    """Takes the spans of all requests."""
    recorder = KeptSpans()
    tracing = Tracing(TracePolicy(ratio=1.0), recorder)
    monkeypatch.setattr("gateway.app.tracing_of", lambda *_: tracing)
    return recorder


@pytest.fixture
async def house(open_house: Open, recorder: KeptSpans) -> House:
    house = await open_house(
        admin={"port": 0},
        timeouts={"body_s": 0.1, "total_s": 300},
        tenant={"limits": {"requests_per_min": 500}},
    )
    assert isinstance(house, House)
    return house


async def ask(house: House, body: Fields | bytes, **headers: str) -> tuple[int, str]:
    """The status of the answer, and its text."""
    async with asyncio.timeout(PATIENCE_S):
        return await answered(house, body, headers)


async def answered(house: House, body: Fields | bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps({**CHAT, **body}).encode()
    url = f"{house.url}/v1/chat/completions"
    async with house.client.post(url, data=data, headers={**house.headers, **headers}) as answer:
        with contextlib.suppress(Exception):  # an answer that is cut off
            return answer.status, await answer.text()
        return answer.status, ""


async def strangers(house: House) -> AsyncIterator[tuple[int, str]]:
    """Requests whose caller is not known, or that name nothing that there is."""
    for authorization in (
        f"Bearer {WRONG_KEY}",
        f"Bearer {TOKEN}",
        PROMPT,
        f"Basic {PROMPT}",
        f"Bearer \t{PROMPT}",
    ):
        yield await ask(house, {}, authorization=authorization)
    yield await ask(house, {}, **{"x-request-id": f"{PROMPT} with spaces", "x-queue-timeout": PROMPT})
    yield await ask(
        house, {}, traceparent=PROMPT, baggage=f"a={PROMPT}", tracestate=f"a={PROMPT}", cookie=PROMPT
    )
    for header in SESSION_HEADERS:
        yield await ask(house, {}, **{header: PROMPT})
    for path in (
        f"/{PROMPT}",
        f"/v1/chat/completions?q={PROMPT}",
        f"/v1/models?{PROMPT}",
        f"/v1/chat/{PROMPT}%ff",
    ):
        async with house.get(path) as answer:
            yield answer.status, ""  # a 404 tells its caller the path
    async with house.client.delete(f"{house.url}/v1/requests/no%20{PROMPT}", headers=house.headers) as answer:
        yield answer.status, ""


async def leave(house: House) -> None:
    """Leave in the middle of a stream, and in the middle of a body."""
    house.engine.script = stream(chunk(ANSWER), asyncio.Event())
    async with house.chat(stream=True, messages=SAYS) as answer:
        await answer.content.readany()
    _, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}content-length: 1000\r\n\r\n{PROMPT}".encode())
    await writer.drain()
    writer.close()


@pytest.fixture(autouse=True)
def newer() -> Iterator[None]:
    """What was made before is not looked at: in a process that has run other tests, a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def shown_while_it_runs(house: House) -> list[str]:
    """The reprs of all objects that show a canary while a stream and a unary request are in progress."""
    gate = asyncio.Event()

    def script(seen: Seen) -> Script:
        return stream(chunk(ANSWER), gate) if seen.body.get("stream") else unary(ANSWER, before=[gate])

    house.engine.script = script
    async with house.chat(stream=True, messages=SAYS) as answer:
        await answer.content.readany()
        unary_task = asyncio.create_task(answered(house, {"messages": SAYS}, {}))
        await until(lambda: house.engine.active == 2)
        tracked = gc.get_objects()
        found = {id(one): one for one in (*tracked, *gc.get_referents(*tracked)) if _is_ours(one)}
        assert len(found) > 500, "the objects are looked at"
        shown = {type(one).__qualname__ for one in found.values() if "canary" in repr(one)}
        gate.set()
        await unary_task
        await answer.read()
    return sorted(shown)


def _is_ours(one: object) -> bool:
    return str(type(one).__module__).startswith(OURS)  # a type may have any attribute of that name


async def test_no_canary_is_shown_anywhere(
    house: House, recorder: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "STAGE_S_MIN", 0.0)  # every visit has a span, however fast the machine
    told: list[tuple[int, str]] = [await ask(house, body) for body in REFUSED]
    assert {status for status, _ in told} == {400}
    told += [answer async for answer in strangers(house)]
    house.engine.script = lambda seen: stream(chunk(ANSWER)) if seen.body.get("stream") else unary(ANSWER)
    assert {(await ask(house, body))[0] for body in SERVED} == {200}
    for script in FAILURES:
        house.engine.script = script
        for streams in (True, False):
            await ask(house, {"messages": SAYS, "stream": streams})
    await leave(house)
    assert await shown_while_it_runs(house) == []
    await until(lambda: not len(house.gateway.live))
    async with house.client.get(f"http://127.0.0.1:{house.gateway.admin_port}/metrics") as answer:
        metrics = await answer.text()
    spans = str([(span.name, span.attributes) for span in recorder.spans])
    await until(lambda: house.log.getvalue().count('"request.completed"') > 45)  # they are written behind
    lines = house.log.getvalue()
    assert len(recorder.spans) > 200
    for canary in CANARIES:
        for name, text in (("log", lines), ("metrics", metrics), ("spans", spans), ("errors", str(told))):
            at = text.find(canary)
            assert at < 0, f"{canary} in the {name}: {text[max(0, at - 400) : at + 100]}"


async def test_no_library_logs_what_is_in_a_head(
    open_house: Open,
) -> None:
    """Libraries have logs of their own, and spans pass through OpenTelemetry's."""
    with collecting() as collector:
        house = await open_house(tracing={"endpoint": collector.url, "ratio": 1.0})
        told = [await heads.answered(house.gateway.port, head) for head in heads.heads_with("canary", KEY)]
        assert sum(answer.startswith(b"HTTP/1.1 200") for answer in told) > 30, told
        await until(lambda: len({span.trace_id + span.span_id for span in collector.spans}) > 30)
    logs.close()
    assert "request.completed" in house.log.getvalue()
    assert "canary" not in house.log.getvalue()


def test_a_request_and_an_answer_show_nothing_of_their_text() -> None:
    body = {
        **CHAT,
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "user": PROMPT,
    }
    parsed = parse(json.dumps(body).encode(), ChatRequest)
    completion = parse(json.dumps({"model": "m", "prompt": PROMPT}).encode(), CompletionRequest)
    choice = ChatChoice(0, AssistantMessage(ANSWER), "stop")
    for one in (parsed, parsed.request, completion, completion.request, choice, ChatDelta(content=ANSWER)):
        assert "canary" not in repr(one)


def test_a_minted_key_is_not_in_its_repr() -> None:
    key = mint_key("prod")
    assert key.text not in repr(key)
    assert key.text.rpartition("_")[2] not in repr(KeyTable([KeyConfig(key.id, key.hash, "acme")]))
