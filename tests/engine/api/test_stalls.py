"""A client that stops reading: its sequences pause, nobody else's do, and every end has its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest

from engine.api.outputs import UNSENT_TOKENS_MAX
from engine.core.messages import FinishReason, PauseSequences, ResumeSequences
from shared.http2.client import Http2Transport
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve, Served, until
from tests.engine.api.fake_core import FakeCore

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8000}
CORE = {"max_model_len": 10_000, "pages": 2000}
BYTES_MAX = 300 * 1024
EVENT_LEN_MIN = 150


async def connect(served: Served, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream whose client reads its head, and from then on nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port, limit=2048)
    body = json.dumps({**CHAT, "stream": True, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    return reader, writer  # the reader's own limit stops the transport


def text_of(stream: bytes) -> str:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def until_stalled(core: FakeCore, handles: set[int]) -> None:
    """Until these stay paused. Before the buffers on the way are full, a pause is over in a moment."""
    quiet = 0
    async with asyncio.timeout(PATIENCE_S):
        while quiet < 100:
            await asyncio.sleep(0)
            quiet = quiet + 1 if core.paused == handles and core._messages.empty() else 0


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """The payload of a chunked body."""
    payload = b""
    while size := int(await reader.readline(), 16):
        payload += (await reader.readexactly(size + 2))[:-2]
    return payload


async def test_its_sequence_pauses_and_resumes_and_no_token_is_lost(serve: Serve) -> None:
    async with serve(core=CORE) as served:
        core, state = served.core, served.engine.state
        [token] = served.ids("the")
        core.script = lambda _: [token] * 8000
        reader, writer = await connect(served)
        await until_stalled(core, {1})
        sent = core.running[1].sent
        assert sent * EVENT_LEN_MIN < 2 * BYTES_MAX
        for _ in range(100):
            await asyncio.sleep(0)
        assert core.running[1].sent == sent, "nothing more is computed"

        answer = await served.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 50})
        assert answer.json()["usage"]["completion_tokens"] == 50, "nobody else is paused"

        stream = await asyncio.wait_for(rest_of(reader), PATIENCE_S)
        assert text_of(stream) == "the" * 8000
        assert core.pauses[0] == PauseSequences([1])
        assert core.pauses[1] == ResumeSequences([1])
        assert [type(message) for message in core.pauses[::2]] == [PauseSequences] * (len(core.pauses) // 2)
        assert state.core._paused == set()
        writer.close()


async def test_over_http2_only_the_stream_that_is_not_read_pauses(serve: Serve) -> None:
    async with serve(core=CORE) as served:
        core = served.core
        [token] = served.ids("the")
        core.script = lambda _: [token] * 3000
        url = f"http://127.0.0.1:{served.engine.port}"
        body = {**CHAT, "max_tokens": 3000, "stream": True}
        async with (
            httpx.AsyncClient(base_url=url, transport=Http2Transport(), timeout=20) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as slow,
        ):
            await until_stalled(core, {1})
            assert core.running[1].sent * EVENT_LEN_MIN < BYTES_MAX
            async with http.stream("POST", "/v1/chat/completions", json=body) as fast:
                assert text_of(await fast.aread()) == "the" * 3000
            assert core.paused == {1}
            assert text_of(await slow.aread()) == "the" * 3000


async def test_every_choice_that_is_behind_pauses(serve: Serve) -> None:
    async with serve(core=CORE) as served:
        core = served.core
        [token] = served.ids("the")
        core.script = lambda _: [token] * 3000
        reader, writer = await connect(served, n=3, max_tokens=3000)
        await until_stalled(core, {1, 2, 3})
        await asyncio.wait_for(rest_of(reader), PATIENCE_S)
        assert core.paused == set()
        writer.close()


async def test_a_unary_answer_never_pauses(serve: Serve) -> None:
    async with serve(core=CORE) as served:
        [token] = served.ids("the")
        served.core.script = lambda _: [token] * 1000
        answer = await served.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1000})
        assert answer.json()["usage"]["completion_tokens"] == 1000 > UNSENT_TOKENS_MAX
        assert served.core.pauses == []


@pytest.mark.parametrize("returns", [True, False])
async def test_the_stall_deadline_ends_it(
    serve: Serve, lines: list[MutableMapping[str, Any]], returns: bool
) -> None:
    async with serve(core=CORE) as served:
        core, state = served.core, served.engine.state
        [token] = served.ids("the")
        core.script = lambda _: [token] * 8000
        reader, writer = await connect(served)
        await until_stalled(core, {1})
        core.finish(1, FinishReason.STALLED)
        await until(lambda: state.core.live == 0)
        if returns:
            stream = await asyncio.wait_for(rest_of(reader), PATIENCE_S)
            *_, error, closing, _ = stream.split(b"\n\n")
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "slow_client"
            assert json.loads(closing.removeprefix(b": penstock "))["end_reason"] == "stalled"
            assert b"[DONE]" not in stream
        else:
            writer.transport.abort()
        await until(lambda: bool(lines))
        [line] = lines
        assert (line["status"], line["end_reason"], line["code"]) == (200, "stalled", "slow_client")
        assert line["stalled_ms"] == 7.0
        assert core.aborted == []
        served.assert_nothing_leaks()
        writer.close()


async def test_a_client_that_leaves_while_it_is_stalled(
    serve: Serve, lines: list[MutableMapping[str, Any]]
) -> None:
    async with serve(core=CORE) as served:
        core = served.core
        [token] = served.ids("the")
        core.script = lambda _: [token] * 8000
        _, writer = await connect(served)
        await until_stalled(core, {1})
        writer.transport.abort()
        await until(lambda: bool(lines))
        [line] = lines
        assert (line["status"], line["end_reason"], line["left_in"]) == (499, "client_gone", "stalled")
        assert core.aborted == [1]
        served.assert_nothing_leaks()


async def test_what_was_aborted_while_it_was_stalled_is_logged_as_aborted(
    serve: Serve, lines: list[MutableMapping[str, Any]]
) -> None:
    async with serve(core=CORE) as served:
        core = served.core
        [token] = served.ids("the")
        core.script = lambda _: [token] * 8000
        _, writer = await connect(served)
        await until_stalled(core, {1})
        [request_id] = served.engine.state._generations
        assert (await served.http.delete(f"/v1/requests/{request_id}")).json()["aborted"] == 1
        writer.transport.abort()
        await until(lambda: len(lines) == 2)
        assert (lines[1]["end_reason"], lines[1]["code"]) == ("aborted", "request_aborted")
        served.assert_nothing_leaks()


async def test_the_gauge_says_who_is_stalled(serve: Serve) -> None:
    async with serve(core=CORE) as served:
        [token] = served.ids("the")
        served.core.script = lambda _: [token] * 8000
        _, writer = await connect(served)
        await until_stalled(served.core, {1})
        served.core.step()
        await until(served.core._messages.empty)
        assert "penstock_engine_stalled_sequences 1.0" in (await served.http.get("/metrics")).text
        writer.close()
