"""Every way a request can end: one log line, nothing left behind, and a client that knows."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from engine.api.answer.exchange import EngineExchange
from engine.api.answer.outputs import ChoiceOutput, RequestOutput
from engine.api.core.client import CoreDied
from engine.api.http.generate import Generation
from engine.api.http.server import Engine, StartFailed
from engine.api.http.service import Service
from engine.config import EngineConfig
from engine.contract.messages import CoreFailed, CoreInput, FinishReason
from shared.wire.http import ClientGone
from tests.engine.api import apis
from tests.engine.api.apis import Api, each_api
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve, Served, until
from tests.engine.api.fake_core import FakeCore
from tests.uncollected import uncollected

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def send_head(
    served: Served,
    body: bytes,
    *,
    content_len: int | None = None,
    request_id: str = "r-1",
    path: str = apis.CHAT.path,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw request, so that the test decides when to leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\n"
    writer.write(f"{head}Content-Length: {content_len or len(body)}\r\n\r\n".encode() + body)
    return reader, writer


def body_of(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
@each_api
async def test_the_client_leaves(
    served: Served, lines: list[dict[str, Any]], api: Api, stage: str, streams: bool, how: str
) -> None:
    core, state, count = served.core, served.engine.state, api.count
    if stage == "queue":
        core.admits = False
    elif stage == "prefill":
        core.script = lambda _: []
    else:
        served.says("the lazy dog", ends=False)
    asked = json.dumps({**api.asked, **api.choices, "stream": streams}).encode()
    _, writer = await send_head(served, asked, path=api.path)
    await until(lambda: len(core.added) == count)
    if stage != "queue":
        await until(lambda: len(core.running) == count)
    if stage == "decode":
        await until(lambda: all(row.sent == len(row.script) for row in core.running.values()))
        await until(lambda: core._messages.empty())
    if stage == "prefill":
        await until(lambda: state.core.waiting == 0)
    if how == "reset":
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: bool(lines))
    assert sorted(core.aborted) == [1, 2][:count]
    served.assert_nothing_leaks()
    [line] = lines
    assert (line["status"], line["end_reason"], line["stage"]) == (499, "client_cancel", stage)
    assert line["request_id"] == "r-1"
    assert (line["prompt_tokens"] > 0) == (stage != "queue"), "a prompt counts once it has begun"
    if stage == "decode":
        assert line["completion_tokens"] == count * len(served.ids("the lazy dog"))


async def test_the_client_leaves_while_sending(served: Served, lines: list[dict[str, Any]]) -> None:
    _, writer = await send_head(served, b"{", content_len=100)
    await until(lambda: served.engine.state._working == 1)
    writer.transport.abort()
    await until(lambda: bool(lines))
    assert (lines[0]["end_reason"], lines[0]["stage"]) == ("client_cancel", "body")
    served.assert_nothing_leaks()


async def test_the_client_leaves_while_we_tokenize(
    served: Served, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = asyncio.Event()

    async def never(*_: object) -> list[list[int]]:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(served.engine.state.threads, "run", never)
    _, writer = await send_head(served, body_of())
    await asyncio.wait_for(entered.wait(), PATIENCE_S)
    writer.transport.abort()
    await until(lambda: bool(lines))
    assert (lines[0]["end_reason"], lines[0]["stage"]) == ("client_cancel", "tokenize")
    assert served.core.added == []


class HangsUp:
    """A client in memory that hangs up once it has seen `[DONE]`: the SDKs read no further."""

    method, path = "POST", "/v1/chat/completions"
    headers: Mapping[str, str] = {}
    started = False

    def __init__(self) -> None:
        self.received = b""

    async def body(self, **_: object) -> bytes:
        return body_of(stream=True)

    def report(self, data: bytes) -> None:
        self.reported = data

    def tell_load(self, data: bytes) -> None:
        raise AssertionError("the headers of a stream do")

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        raise AssertionError(body)

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        self.received += data

    async def finish(self) -> None:
        raise ClientGone

    def abort(self) -> None:
        raise AssertionError("the service has nothing left to abort")


async def test_a_client_that_leaves_with_everything_has_been_served(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    served.says("hello")
    client = HangsUp()
    await Service(served.engine.state).handle(client, client)
    assert b"[DONE]" in client.received
    assert [(line["status"], line["end_reason"]) for line in lines] == [(200, "ok")]
    said = client.reported.removesuffix(b"}")
    assert said in client.received, "the report says what the closing comment says, but for the load"


async def test_an_answer_logs_one_line(served: Served, lines: list[dict[str, Any]]) -> None:
    served.says("hello")
    response = await served.http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-penstock-tenant": "acme"}
    )
    await until(lambda: bool(lines))
    [line] = lines
    assert (line["status"], line["end_reason"], line["tenant"]) == (200, "ok", "acme")
    assert line["request_id"] == response.headers["x-request-id"]
    assert line["completion_tokens"] == response.json()["usage"]["completion_tokens"]
    assert {"tokenize_ms", "queue_ms", "prefill_ms", "decode_ms", "total_ms"} <= set(line)
    assert "hello" not in json.dumps(line, default=str)


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (body_of(model="other"), 404), (body_of(temperature=9), 400)]
)
async def test_a_refusal_logs_one_line(
    served: Served, lines: list[dict[str, Any]], body: bytes, status: int
) -> None:
    await served.http.post("/v1/chat/completions", content=body)
    await until(lambda: bool(lines))
    assert [(line["status"], line["end_reason"]) for line in lines] == [(status, "refused")]


# -- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
async def test_a_request_that_has_ended_is_gone_without_a_garbage_collection(
    served: Served, streams: bool
) -> None:
    body, core = {**CHAT, "stream": streams, "n": 2}, served.core
    with uncollected(EngineExchange, Generation, RequestOutput, ChoiceOutput) as left:
        served.says("the lazy dog")
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
        served.says("the lazy dog", ends=False)
        _, writer = await send_head(served, body_of(stream=streams, n=2))
        await until(lambda: len(core.running) == 2)
        await until(lambda: all(row.sent == len(row.script) for row in core.running.values()))
        writer.transport.abort()
        await until(lambda: not left())


@pytest.mark.parametrize("streams", [True, False])
async def test_abort_by_exact_id(served: Served, lines: list[dict[str, Any]], streams: bool) -> None:
    served.says("the dog", ends=False)
    reader, writer = await send_head(served, body_of(stream=streams, n=2), request_id="req-10")
    await until(lambda: len(served.core.running) == 2)
    for name in ("req-1", "req-100", "req", "10"):
        assert (await served.http.delete(f"/v1/requests/{name}")).json() == {"id": name, "aborted": 0}
    assert served.core.aborted == []
    assert (await served.http.delete("/v1/requests/req-10")).json() == {"id": "req-10", "aborted": 1}
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    if streams:
        rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
        assert b'"code":"request_aborted"' in rest
        assert b"[DONE]" not in rest
        assert b": penstock {" in rest
    else:
        assert b" 499 " in head.split(b"\r\n")[0]
    assert sorted(served.core.aborted) == [1, 2]
    assert (await served.http.delete("/v1/requests/req-10")).json() == {"id": "req-10", "aborted": 0}
    writer.close()
    await until(lambda: "aborted" in [line["end_reason"] for line in lines])


async def test_a_tenants_abort_ends_no_other_tenants_request(served: Served) -> None:
    """Both may have chosen the same id. Without a tenant it is everybody's."""
    served.says("the dog", ends=False)

    async def ask(tenant: str) -> httpx.Response:
        headers = {"x-request-id": "same", "x-penstock-tenant": tenant}
        return await served.http.post("/v1/chat/completions", json=CHAT, headers=headers)

    async def abort(**headers: str) -> int:
        response = await served.http.delete("/v1/requests/same", headers=headers)
        return int(response.json()["aborted"])

    asked = {tenant: asyncio.create_task(ask(tenant)) for tenant in ("a", "victim", "c")}
    await until(lambda: len(served.core.running) == 3)
    assert await abort(**{"x-penstock-tenant": "nobody"}) == 0
    assert await abort(**{"x-penstock-tenant": "a"}) == 1
    assert (await asked["a"]).status_code == 499
    assert not asked["victim"].done()
    assert await abort() == 2
    await asyncio.gather(*asked.values())


async def test_what_is_aborted_while_we_tokenize_does_not_reach_the_core(
    served: Served, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*_: object) -> list[list[int]]:
        entered.set()
        await go_on.wait()
        return [[1]]

    monkeypatch.setattr(served.engine.state.threads, "run", slowly)
    task = asyncio.create_task(
        served.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "early"})
    )
    await asyncio.wait_for(entered.wait(), PATIENCE_S)
    assert (await served.http.delete("/v1/requests/early")).json() == {"id": "early", "aborted": 1}
    go_on.set()
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_aborted")
    assert served.core.added == []
    await until(lambda: "aborted" in [line["end_reason"] for line in lines])


async def test_an_abort_reaches_the_core_though_the_client_does_not_read(served: Served) -> None:
    """The stream's own task waits in a write; the abort must not wait with it."""
    served.core.is_held = True
    token = served.ids("the")[0]
    served.core.script = lambda _: [token] * 200
    _, writer = await send_head(
        served, body_of(stream=True, n=64, logprobs=True, top_logprobs=20, max_tokens=200), request_id="stuck"
    )
    assert isinstance(writer.transport, asyncio.Transport)
    writer.transport.pause_reading()
    await until(lambda: len(served.core.added) == 64)
    for _ in range(100):
        served.core.step()
    await until(served.core._messages.empty)
    assert (await served.http.delete("/v1/requests/stuck")).json()["aborted"] == 1
    assert len(served.core.aborted) == 64
    assert served.engine.state._working == 1
    assert served.engine.state.core.live == 0
    writer.transport.abort()
    await until(lambda: served.engine.state._working == 0)


# -- the core's failures --------------------------------------------------------------------------


def events(data: bytes) -> list[bytes]:
    return [event for event in data.split(b"\n\n") if event]


@pytest.mark.parametrize("how", ["killed", "last words"])
async def test_the_core_dies(serve: Serve, lines: list[dict[str, Any]], how: str) -> None:
    async with serve() as served:
        served.says("the dog", ends=False)
        urls = [
            served.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
            for _ in range(2)
        ]
        unary = asyncio.create_task(served.http.post("/v1/chat/completions", json=CHAT))
        async with urls[0] as first, urls[1] as second:
            await until(lambda: len(served.core.running) == 3)
            if how == "killed":
                served.core.die()
            else:
                served.core.say(CoreFailed("CUDA error: out of memory"))
            for response in (first, second):
                data = await asyncio.wait_for(response.aread(), PATIENCE_S)
                error, closing = events(data)[-2:]
                assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
                assert closing.startswith(b': penstock {"end_reason":"engine_failed"')
                assert b"[DONE]" not in data
                assert b"CUDA" not in data
        answer = await asyncio.wait_for(unary, PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        await until(lambda: not served.engine.state.lifecycle.is_live)
        for probe, status in (("/livez", 500), ("/readyz", 503), ("/startupz", 503)):
            answer = await served.http.get(probe)
            told = answer.json()
            assert (answer.status_code, told["phase"], told["ok"]) == (status, "failed", False)
            assert any("CUDA" in problem for problem in told["problems"]) == (how == "last words")
        late = await served.http.post("/v1/chat/completions", json=CHAT)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready"), "another may serve it"
        await until(lambda: served.engine.state._working == 0)
        served.assert_nothing_leaks()
        reasons = [line["end_reason"] for line in lines if line["endpoint"].endswith("completions")]
        assert reasons == ["engine_failed"] * 3 + ["refused"]
        assert any("CUDA" in str(line.get("error_detail")) for line in lines) == (how == "last words")


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.NUMERIC, 500, "engine_failed"),
        (FinishReason.REJECTED, 503, "queue_full"),
        (FinishReason.ABORTED, 500, "engine_failed"),
    ],
)
async def test_the_core_ends_one_request(
    served: Served, reason: FinishReason, status: int, code: str
) -> None:
    served.says("the", ends=False)
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json={**CHAT, "n": 2}))
    await until(lambda: len(served.core.running) == 2)
    served.core.finish(1, reason)
    response = await asyncio.wait_for(task, PATIENCE_S)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert served.core.aborted == [2]
    served.says("fine")
    assert (await served.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_bug_in_one_answer_spares_the_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.core.script = lambda add: [-1] if add.handle == 1 else served.ids("fine<|end|>")
    served.core.is_held = True
    tasks = [asyncio.create_task(served.http.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
    await until(lambda: len(served.core.added) == 2)
    served.core.release()
    statuses = sorted([(await asyncio.wait_for(task, PATIENCE_S)).status_code for task in tasks])
    assert statuses == [200, 500]
    assert 1 in served.core.aborted


async def test_a_bug_in_routing_ends_all_and_leaves_nobody_waiting(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        served.core.admits = False
        task = asyncio.create_task(served.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: served.engine.state.core.waiting == 1)
        monkeypatch.setattr(served.engine.state.metrics, "on_step", lambda _: 1 / 0)
        served.core.step()
        assert (await asyncio.wait_for(task, PATIENCE_S)).json()["error"]["code"] == "engine_failed"
        await until(lambda: not served.engine.state.lifecycle.is_live)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_core_that_takes_nothing_has_failed_and_how_its_process_ended_says_why(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """What is sent finds a dead core's socket closed before its end is heard of."""
    async with serve() as served:

        def refuse(_: CoreInput) -> None:
            if dies:
                served.core.die()
            raise CoreDied("the core takes no messages")

        monkeypatch.setattr(served.core, "send", refuse)
        answer = await served.http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["error"]["code"] == "engine_failed"
        expected = "the core process was ended by SIGKILL" if dies else "the core takes no messages"
        assert served.engine.state.core.failure == expected


@pytest.mark.parametrize("error", [CoreDied("no socket"), OSError("no process"), zmq.ZMQError(errno.EMFILE)])
async def test_a_core_that_cannot_be_started_ends_the_start_at_once(
    config: EngineConfig, model_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(_: FakeCore) -> None:
        raise error

    monkeypatch.setattr(FakeCore, "start", fail)
    engine = Engine(config, lambda _: model_dir, lambda *_: FakeCore(lambda _: []))
    try:
        with pytest.raises(StartFailed, match=f"{type(error).__name__}: {error}"):
            await asyncio.wait_for(engine.start(), PATIENCE_S)
    finally:
        await engine.stop()


# -- drain ----------------------------------------------------------------------------------------


async def test_a_drain_lets_open_answers_finish(serve: Serve) -> None:
    async with serve() as served:
        served.core.is_held = True
        served.says("the lazy dog")
        async with served.http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            drain = asyncio.create_task(served.engine.drain())
            await until(lambda: not served.engine.state.lifecycle.is_ready)
            assert (await served.http.get("/readyz")).status_code == 503
            assert (await served.http.get("/livez")).status_code == 200
            refused = await served.http.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert not drain.done()
            served.core.release()
            assert b"[DONE]" in await response.aread()
        await asyncio.wait_for(drain, PATIENCE_S)
        await served.engine.stop()
        assert served.core.is_stopped
        assert served.core.is_closed
        with pytest.raises(httpx.ConnectError):
            await served.http.get("/livez")


async def test_a_drain_ends_what_takes_too_long(serve: Serve) -> None:
    async with serve(drain_timeout_s=0.05) as served:
        served.says("the", ends=False)
        async with served.http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            await until(lambda: len(served.core.running) == 1)
            await served.engine.drain()
            data = await asyncio.wait_for(response.aread(), PATIENCE_S)
        assert b'"code":"not_ready"' in data
        assert b"[DONE]" not in data
        assert b'"end_reason":"drain"' in data
        assert served.core.aborted == [1]
        served.assert_nothing_leaks()
