"""A client that stops reading: its sequences pause, nobody else's do, and every end has its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from engine.api.answer.outputs import UNSENT_TOKENS_MAX
from engine.api.http.service import Service
from engine.contract.messages import FinishReason, PauseSequences, ResumeSequences, StepOutput
from gateway.relay.http2_client import Http2Transport
from shared.http2.connection_errors import StreamFailed
from shared.wire.http import ClientGone
from tests.engine.api import apis
from tests.engine.api.apis import Api, each_api
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve, Served, until
from tests.shared.http2.loopback import OverHttp2

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3000}
CORE = {"max_model_len": 10_000, "pages": 2000}
WINDOW_LEN = 64 * 1024
EVENT_LEN_MIN = 150


async def let_pass(seconds: float) -> None:
    """Let everybody else run for so long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    await until(lambda: loop.time() > end)


class Client:
    """Both ends of a request that never was on a socket: it reads when the test says so."""

    method = "POST"

    def __init__(self, served: Served, api: Api = apis.CHAT, **fields: Any) -> None:
        self.path = api.path
        self.headers: Mapping[str, str] = {"x-request-id": "slow"}
        self.started = False
        self.received = b""
        self.is_gone = False
        self._body = json.dumps({**api.asked, api.maximum: 3000, "stream": True, **fields}).encode()
        self._reads = asyncio.Event()
        self._task = asyncio.create_task(Service(served.engine.state).handle(self, self))

    async def body(self, **_: object) -> bytes:
        return self._body

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        raise AssertionError("every answer here is a stream")

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        self.received += data
        await self._reads.wait()
        if self.is_gone:
            raise ClientGone

    async def finish(self) -> None:
        pass

    def report(self, data: bytes) -> None:
        """Nobody hears it."""

    def tell_load(self, data: bytes) -> None:
        """Nor this."""

    def abort(self) -> None:
        self.is_gone = True
        self._reads.set()

    async def read(self) -> bytes:
        """From now on it keeps up. Returns the whole stream."""
        self._reads.set()
        await asyncio.wait_for(self._task, PATIENCE_S)
        return self.received

    async def leave(self) -> None:
        self.abort()
        await self.read()


text_of = apis.CHAT.streamed_text


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """An engine that has 3,000 tokens for everybody."""
    async with serve(core=CORE) as served:
        served.core.script = lambda _: served.ids("the") * 3000
        yield served
        served.assert_nothing_leaks()


@each_api
async def test_its_sequence_pauses_and_resumes_and_no_token_is_lost(served: Served, api: Api) -> None:
    core, state = served.core, served.engine.state
    slow = Client(served, api)
    await until(lambda: bool(core.paused))
    await until(core._messages.empty)
    unsent = state.core._live[1]._unsent_tokens
    assert core.running[1].sent <= UNSENT_TOKENS_MAX + 4, "what is unsent, with the writer, on its way"

    fast = await served.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 500})
    assert fast.json()["usage"]["completion_tokens"] == 500, "nobody else is paused"
    assert state.core._live[1]._unsent_tokens == unsent, "and nothing came for it"

    assert api.streamed_text(await slow.read()) == "the" * 3000
    assert core.pauses[:2] == [PauseSequences([1]), ResumeSequences([1])]
    assert not core.paused
    assert state.core._paused == set()


async def test_a_pause_is_asked_for_once(served: Served) -> None:
    """Tokens that were on their way when it was told to pause do not tell it again."""
    core = served.core
    core.is_held = True
    slow = Client(served, max_tokens=200)
    await until(lambda: bool(core.waiting))
    for _ in range(150):
        core.step()
    await until(lambda: bool(core.paused))
    await until(core._messages.empty)
    assert core.pauses == [PauseSequences([1])]
    core.release()
    assert text_of(await slow.read()) == "the" * 200
    assert core.pauses == [PauseSequences([1]), ResumeSequences([1])]


async def test_tokens_of_one_step_ask_for_one_pause(served: Served) -> None:
    """A step that verified drafts brings several tokens of a sequence, of which more than one find the client
    behind."""
    core = served.core
    core.is_held = True
    slow = Client(served, max_tokens=3 * UNSENT_TOKENS_MAX)
    await until(lambda: bool(core.waiting))
    core.step()
    await until(lambda: bool(slow.received))
    tokens = core.running[1].script[: 2 * UNSENT_TOKENS_MAX]
    core.say(StepOutput(1, [1] * len(tokens), tokens, [], [], [], [], core._stats()))
    await until(lambda: bool(core.paused))
    assert core.pauses == [PauseSequences([1])]
    assert served.engine.state.core.failure is None
    await slow.leave()


async def test_the_last_token_is_no_reason_to_pause(served: Served) -> None:
    """It passes the mark, and the sequence's end comes in the same message."""
    core = served.core
    core.is_held = True
    slow = Client(served, max_tokens=1 + UNSENT_TOKENS_MAX)
    await until(lambda: bool(core.waiting))
    core.step()
    await until(lambda: bool(slow.received))
    for _ in range(UNSENT_TOKENS_MAX):
        core.step()
    await until(lambda: served.engine.state.core.live == 0)
    assert text_of(await slow.read()) == "the" * (1 + UNSENT_TOKENS_MAX)
    assert core.pauses == []
    assert served.engine.state.core.failure is None


async def test_who_reads_in_time_keeps_its_connection(serve: Serve) -> None:
    async with serve(core=CORE, stall_deadline_s=0.02) as served:
        served.says("the")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(2):
            writer.write(head.encode() + body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert b"the" in await reader.readexactly(length)
            await let_pass(0.1)
        writer.close()


async def test_who_reads_a_whole_answer_steadily_may_take_longer_for_all_of_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes less than the deadline, and all together many times as long."""
    loop, writes = asyncio.get_running_loop(), 0
    now_s = loop.time

    async def write(self: Client, data: bytes) -> None:
        nonlocal writes
        writes += 1
        await asyncio.sleep(0)  # what is due comes first
        self.received += data
        if self.is_gone:
            raise ClientGone

    monkeypatch.setattr(Client, "write", write)
    monkeypatch.setattr(loop, "time", lambda: now_s() + writes * 0.6)
    async with serve(core=CORE, stall_deadline_s=1.0) as served:
        served.core.script = lambda _: served.ids("the") * 3000
        slow = Client(served, logprobs=True, top_logprobs=20, max_tokens=500, stream=False)
        answer = json.loads(await slow.read())
        assert answer["usage"]["completion_tokens"] == 500
        assert not slow.is_gone
        assert writes > 5


async def test_over_http2_only_the_stream_that_is_not_read_pauses(served: Served) -> None:
    core = served.core
    url = f"http://127.0.0.1:{served.engine.port}"
    body = {**CHAT, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, transport=OverHttp2(Http2Transport()), timeout=20) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as slow,
    ):
        async with http.stream("POST", "/v1/chat/completions", json=body) as fast:
            assert text_of(await fast.aread()) == "the" * 3000
        assert core.paused == {1}, "while a whole answer went by on the same connection"
        assert core.running[1].sent <= WINDOW_LEN / EVENT_LEN_MIN + 3 * UNSENT_TOKENS_MAX
        assert text_of(await slow.aread()) == "the" * 3000


async def test_every_choice_that_is_behind_pauses(served: Served) -> None:
    core = served.core
    slow = Client(served, n=3)
    await until(lambda: core.paused == {1, 2, 3})
    assert len(text_of(await slow.read())) == 3 * len("the" * 3000)
    assert core.paused == set()


async def test_a_unary_answer_never_pauses(served: Served) -> None:
    answer = await served.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1000})
    assert answer.json()["usage"]["completion_tokens"] == 1000 > UNSENT_TOKENS_MAX
    assert served.core.pauses == []


@pytest.mark.parametrize("returns", [True, False])
async def test_the_stall_deadline_ends_it(served: Served, lines: list[dict[str, Any]], returns: bool) -> None:
    core = served.core
    slow = Client(served)
    await until(lambda: core.paused == {1})
    core.finish(1, FinishReason.STALLED)
    await until(lambda: served.engine.state.core.live == 0)
    if returns:
        *events, error, closing, _ = (await slow.read()).split(b"\n\n")
        assert len(text_of(b"\n".join(events))) > UNSENT_TOKENS_MAX, "all that was computed, first"
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "slow_client"
        told = json.loads(closing.removeprefix(b": penstock "))
        assert (told["end_reason"], told["stalled_ms"]) == ("slow_client", 7.0)
        assert b"[DONE]" not in slow.received
    else:
        await slow.leave()
    [line] = lines
    assert (line["status"], line["end_reason"], line["error_code"]) == (200, "slow_client", "slow_client")
    assert 0 < line["stalled_ms"] <= 7.0, "no more than there was"
    assert core.aborted == []


@pytest.mark.parametrize("how", ["deadline", "last token"])
async def test_who_never_reads_the_end_is_cut_off(
    serve: Serve, lines: list[dict[str, Any]], how: str
) -> None:
    async with serve(core=CORE, stall_deadline_s=0.05) as served:
        core = served.core
        core.script = lambda _: served.ids("the") * 3000
        slow = Client(served, max_tokens=3000 if how == "deadline" else 20)
        if how == "deadline":
            await until(lambda: core.paused == {1})
            core.finish(1, FinishReason.STALLED)
        await until(lambda: slow.is_gone)
        await until(lambda: bool(lines))
        assert (lines[0]["end_reason"], lines[0]["error_code"]) == ("slow_client", "slow_client")
        served.assert_nothing_leaks()


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
async def test_it_is_cut_off_on_either_protocol(
    serve: Serve, lines: list[dict[str, Any]], protocol: str
) -> None:
    """What is unsent is more than any kernel takes for a client that does not read."""
    async with serve(core=CORE, stall_deadline_s=0.05) as served:
        core = served.core
        core.is_held = True
        core.script = lambda _: served.ids("the") * 3000
        url = f"http://127.0.0.1:{served.engine.port}"
        transport = OverHttp2(Http2Transport()) if protocol == "HTTP/2" else None
        body = {**CHAT, "stream": True, "n": 40, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}
        async with (
            httpx.AsyncClient(base_url=url, transport=transport, timeout=20) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as slow,
        ):
            await until(lambda: len(core.waiting) == 40)
            for _ in range(UNSENT_TOKENS_MAX):
                core.step()
            for handle in list(core.running):
                core.finish(handle, FinishReason.STALLED)
            await until(lambda: bool(lines))
            with pytest.raises((httpx.HTTPError, StreamFailed)):
                await slow.aread()
        assert lines[0]["end_reason"] == "slow_client"
        served.assert_nothing_leaks()


async def test_a_client_that_leaves_while_it_is_stalled(served: Served, lines: list[dict[str, Any]]) -> None:
    core = served.core
    slow = Client(served)
    await until(lambda: core.paused == {1})
    await slow.leave()
    [line] = lines
    assert (line["status"], line["end_reason"], line["stage"]) == (499, "client_cancel", "stalled")
    assert line["stalled_ms"] > 0
    assert core.aborted == [1]


async def test_what_was_aborted_while_it_was_stalled_is_logged_as_aborted(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    core = served.core
    slow = Client(served)
    await until(lambda: core.paused == {1})
    assert (await served.http.delete("/v1/requests/slow")).json()["aborted"] == 1
    await slow.leave()
    assert [line["end_reason"] for line in lines] == ["ok", "aborted"]
    assert lines[1]["error_code"] == "request_aborted"


async def test_the_core_dies_while_a_client_is_stalled(served: Served) -> None:
    core = served.core
    slow = Client(served)
    await until(lambda: core.paused == {1})
    core.die()
    await until(lambda: served.engine.state.core.failure is not None)
    assert b'"code":"engine_failed"' in await slow.read()


async def test_the_gauge_says_who_is_stalled(served: Served) -> None:
    slow = Client(served)
    await until(lambda: bool(served.core.paused))
    served.core.step()
    await until(served.core._messages.empty)
    core = served.engine.state.core
    await until(lambda: core.stats is not None and core.stats.stalled == 1)
    assert "penstock_engine_stalled_sequences 1.0" in (await served.http.get("/metrics")).text
    await slow.leave()
