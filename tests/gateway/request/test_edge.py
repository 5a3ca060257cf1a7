"""The edge around the pipeline: probes, metrics, the drain, bounds of connections, what is not logged, and
engines that shut down while requests come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from yarl import URL

from gateway.client.blocked import BlockedSpan
from gateway.client.deadlines import Watch
from gateway.endpoints.dialect import Dialect
from gateway.endpoints.endpoint import Endpoint
from gateway.listen.listener import RECEIVE_BUFFER_LEN, SEND_BUFFER_LEN
from gateway.request.exchange import Exchange
from gateway.routing.health import Outcome, Reason
from gateway.routing.members import DrainCause
from shared.process.clock import SYSTEM_CLOCK
from shared.wire.errors import ApiError
from shared.wire.http import ClientGone
from tests.gateway.conftest import CHAT, CONVERSATIONS, KEY, PATIENCE_S, House, Open, error_of, until
from tests.gateway.fake_engine import FakeEngine, Script, Seen, byte_bundle, chunk, stream, unary
from tests.uncollected import uncollected

DONE = b"data: [DONE]\n\n"


async def test_a_name_that_chat_answers_is_a_model_by_itself(open_house: Open) -> None:
    """`*` takes any name, in either place."""
    house = await open_house(model={"aliases": ["*"]})
    async with house.chat(model="made-up") as answer:
        assert answer.status == 200
    async with house.get("/v1/models/made-up") as answer:
        assert (await answer.json())["id"] == "made-up"
    async with house.get("/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["tiny"]


@pytest.mark.parametrize("name", ["org/model", "a+b%", "water w\u00e4rme"])
async def test_a_models_name_may_be_escaped_in_its_path(open_house: Open, name: str) -> None:
    """As OpenAI's SDKs do, with every character that a segment of a path may not have."""
    house = await open_house(model={"aliases": [name]})
    escaped = quote(name, safe="")
    async with house.client.get(
        URL(f"{house.url}/v1/models/{escaped}", encoded=True), headers=house.headers
    ) as answer:
        assert (await answer.json())["id"] == name
    async with house.client.get(
        URL(f"{house.url}/v1/models/{escaped}x", encoded=True), headers=house.headers
    ) as answer:
        assert (await error_of(answer))["message"].startswith(f"The model '{name}x'")


@pytest.mark.parametrize(("chunk_len", "status"), [(1, 400), (64, 400), (2048, 200)])
async def test_a_body_in_chunks_of_a_few_bytes_is_refused(house: House, chunk_len: int, status: int) -> None:
    """Each costs as much as a large one. The long prompt of the second is what is refused there."""
    text = "x" * (20_000 if chunk_len < 2048 else 2_000)
    body = msgspec.json.encode({**CHAT, "messages": [{"role": "user", "content": text}]})
    pieces = [body[i : i + chunk_len] for i in range(0, len(body), chunk_len)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    await writer.drain()
    writer.write(framed)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert answer.split(b" ", 2)[1] == b"%d" % status
    writer.close()
    line = await house.line()
    assert (line.get("error_code") == "context_length_exceeded") == (chunk_len == 64)


async def test_probes_are_open(house: House) -> None:
    for path in ("/livez", "/readyz", "/startupz"):
        for method in ("GET", "HEAD", "OPTIONS"):
            async with house.client.request(method, house.url + path) as answer:
                assert answer.status == 200
                assert answer.headers["x-request-id"]


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_load_balancer_is_told_that_no_engine_is_left_where_it_is_to_know(
    open_house: Open, is_ready: bool
) -> None:
    """Drained by an operator or failed, and it is ready again when one comes back."""
    house = await open_house(listen={"port": 0, "ready_without_engines": is_ready})
    [replica] = house.gateway.replicas.members()

    async def status() -> int:
        async with house.get("/readyz") as answer:
            return int(answer.status)

    assert await status() == 200
    house.gateway.replicas.drain(replica, DrainCause.OPERATOR)
    assert await status() == (200 if is_ready else 503)
    house.gateway.replicas.undrain(replica, DrainCause.OPERATOR)
    await until(lambda: not house.gateway.replicas.are_all_away)
    assert await status() == 200
    replica.health.eject(Reason.SILENT, Outcome.LATE, int(1000 * SYSTEM_CLOCK.monotonic()))
    assert await status() == (200 if is_ready else 503)


async def test_metrics_are_on_the_admin_port_alone(open_house: Open) -> None:
    house = await open_house(admin={"port": 0})
    house.engine.script = unary()
    async with house.chat():
        pass
    await house.line()
    async with house.client.get(f"http://127.0.0.1:{house.gateway.admin_port}/metrics") as answer:
        text = await answer.text()
    assert 'penstock_gateway_requests_total{end_reason="ok",endpoint="/v1/chat/completions"' in text
    assert "penstock_gateway_requests_in_flight 0.0" in text
    async with house.get("/metrics") as answer:
        assert answer.status == 404


async def test_open_streams_finish_while_the_gateway_drains(house: House) -> None:
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on, chunk("b"))
    async with house.chat(stream=True) as answer:
        drain = asyncio.create_task(house.gateway.drain())
        await until(lambda: not house.gateway.lifecycle.is_ready)
        with pytest.raises(aiohttp.ClientConnectorError):
            await house.chat()
        assert not drain.done()
        go_on.set()
        assert await answer.read() == chunk("a") + chunk("b") + DONE
    await drain


async def test_requests_that_outlast_the_drain_end_with_an_error(open_house: Open) -> None:
    house = await open_house(timeouts={"drain_s": 0.05})
    house.engine.script = stream(chunk("a"), asyncio.Event())
    async with house.chat(stream=True) as answer:
        await house.gateway.drain()
        body = await answer.read()
    assert b"gateway_stopped" in body
    assert DONE not in body
    assert (await house.line())["end_reason"] == "drain"
    await house.at_rest()


async def test_more_requests_than_allowed_are_refused_at_once(open_house: Open) -> None:
    house = await open_house(limits={"live_max": 1})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    async with house.chat(stream=True) as answer:
        async with house.chat() as refused:
            assert refused.status == 503
            assert (await error_of(refused))["code"] == "queue_full"
        go_on.set()
        await answer.read()


async def test_what_the_kernel_holds_of_a_connection_is_bounded(house: House) -> None:
    """Bytes that were received and not read yet are as bounded as those that were sent and not read."""
    async with house.get("/v1/models") as answer:
        assert answer.status == 200
        assert house.gateway._public is not None
        [connection] = house.gateway._public._server.connections
        assert connection.transport is not None
        accepted = connection.transport.get_extra_info("socket")
        bounds = [accepted.getsockopt(socket.SOL_SOCKET, it) for it in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
    assert bounds == [2 * RECEIVE_BUFFER_LEN, 2 * SEND_BUFFER_LEN]


async def test_idle_connections_are_closed_to_make_room_for_new_ones(open_house: Open) -> None:
    house = await open_house(limits={"connections_max": 2})
    held = [await asyncio.open_connection("127.0.0.1", house.gateway.port) for _ in range(20)]
    async with house.get("/v1/models") as answer:
        assert answer.status == 200
    async with asyncio.timeout(PATIENCE_S):
        for reader, _ in held[:-1]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    await until(lambda: "gateway.connections_full" in house.log.getvalue())
    assert house.log.getvalue().count("gateway.connections_full") == 1
    for _, writer in held:
        writer.transport.abort()


async def test_silent_connections_keep_out_no_idle_ones(open_house: Open) -> None:
    """A caller that keeps its connection has it beside a flood of those that say nothing."""
    house = await open_house(limits={"connections_max": 2})
    request = f"GET /v1/models HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
    kept, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    for _ in range(3):
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            assert (await kept.readuntil(b"]}")).startswith(b"HTTP/1.1 200")
            held = [await asyncio.open_connection("127.0.0.1", house.gateway.port) for _ in range(20)]
            for reader, _ in held[:-1]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, sent in held:
            sent.transport.abort()
    writer.transport.abort()


async def test_where_every_connection_has_a_request_a_new_one_is_closed(open_house: Open) -> None:
    house = await open_house(limits={"connections_max": 1})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    async with house.chat(stream=True) as answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()
        go_on.set()
        assert (await answer.read()).endswith(DONE)


async def test_no_prompt_text_and_no_answer_text_is_logged(house: House) -> None:
    house.engine.script = stream(chunk("canary-answer"))
    async with house.chat(stream=True, messages=[{"role": "user", "content": "canary-prompt"}]) as answer:
        await answer.read()
    async with house.chat(messages=[{"role": "user", "content": ["canary-prompt"]}]) as answer:
        assert answer.status == 400
        assert "canary" not in await answer.text()
    await house.lines(2)
    assert "canary" not in house.log.getvalue()
    assert KEY not in house.log.getvalue()


async def test_a_request_that_meets_a_bug_ends_as_a_500_and_others_do_not_notice(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the traceback's place; the caller is told nothing of it."""
    house.engine.script = unary()
    pipeline, run = house.gateway._edge._pipeline, house.gateway._edge._pipeline.run

    async def buggy(exchange: Exchange, endpoint: Endpoint) -> None:
        if exchange.request_id == "req_bug":
            raise ZeroDivisionError("a secret")
        await run(exchange, endpoint)

    monkeypatch.setattr(pipeline, "run", buggy)
    async with house.chat(headers={"x-request-id": "req_bug"}) as answer:
        assert (answer.status, "secret" in await answer.text()) == (500, False)
    async with house.chat() as answer:
        assert answer.status == 200
    assert [line["status"] for line in await house.lines(2)] == [500, 200]
    assert "request.crashed" in house.log.getvalue()
    await house.at_rest()


# -- callers without a socket ---------------------------------------------------------------------


@dataclass
class NoSocket:
    """The connection, the body and the sink of a caller that has no socket."""

    rest: bytes
    """What is left of the body."""
    leaves_at: int = 1_000_000
    """The bytes of the answer after which the caller is gone."""
    tenant: str = ""
    transport: None = None
    status: int | None = None
    finished: bool = False
    is_chunked: bool = False
    slow_client_s: float = 5.0
    blocked: Sequence[BlockedSpan] = ()
    answer: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    error: ApiError | None = None

    def is_eof(self) -> bool:
        return True

    def at_eof(self) -> bool:
        return not self.rest

    async def readany(self) -> bytes:
        rest, self.rest = self.rest, b""
        return rest

    @property
    def is_gone(self) -> bool:
        return len(self.answer) >= self.leaves_at

    async def go_on(self) -> None:
        raise AssertionError("nobody asked for this")

    async def begin(self, status: int, headers: Mapping[str, str], body: bytes, *, whole: bool) -> None:
        self.status, self.headers = status, headers
        self.write_nowait(body)

    def write_nowait(self, data: bytes) -> bool:
        if self.is_gone:
            raise ClientGone
        self.answer += data
        return False

    write_framed = write_nowait

    async def write(self, data: bytes) -> None:
        self.write_nowait(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def finish(self) -> None:
        self.finished = True

    async def fail(self, error: ApiError, event: bytes | None) -> None:
        self.error = error

    def refuse(self, error: ApiError, headers: Mapping[str, str], dialect: Dialect, *, closes: bool) -> None:
        self.error, self.headers = error, headers


async def ask_without_socket(
    house: House, *, key: str = KEY, leaves_at: int = 1_000_000, **body: Any
) -> NoSocket:
    """A chat through the edge, as a batch would ask it."""
    caller, edge = NoSocket(msgspec.json.encode({**CHAT, **body}), leaves_at), house.gateway._edge
    headers = {"authorization": f"Bearer {key}", "x-request-id": "batch.1"}
    path = "/v1/chat/completions"
    await edge.answer(edge.open("POST", path, headers, caller, caller, caller, Watch(5.0)))
    return caller


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_without_a_socket_is_answered_as_any_other(house: House, streams: bool) -> None:
    house.engine.script = stream(chunk("a"), chunk("b")) if streams else unary()
    async with house.chat(stream=streams) as answer:
        expected = await answer.read()
    caller = await ask_without_socket(house, stream=streams)
    assert (caller.status, caller.finished, caller.tenant) == (200, True, "acme")
    assert caller.answer == expected
    assert caller.headers["x-request-id"] == "batch.1"
    by_socket, without = await house.lines(2)
    same = "endpoint", "status", "end_reason", "tenant", "stage", "prompt_tokens", "settled_tokens", "stream"
    assert [without[name] for name in same] == [by_socket[name] for name in same]
    await house.at_rest()


async def test_a_caller_without_a_socket_is_refused_as_any_other(house: House) -> None:
    caller = await ask_without_socket(house, key="wrong")
    assert caller.status is None
    assert caller.error is not None
    assert (caller.error.status, caller.headers["x-request-id"]) == (401, "batch.1")
    caller = await ask_without_socket(house, temperature="hot")
    assert caller.error is not None
    assert (caller.error.status, caller.error.param) == (400, "temperature")
    assert [line["status"] for line in await house.lines(2)] == [401, 400]
    await house.at_rest()


async def test_when_a_caller_without_a_socket_is_gone_its_answer_is_ended(house: House) -> None:
    more = asyncio.Event()
    house.engine.script = stream(chunk("a"), more, chunk("b"), asyncio.Event())
    asking = asyncio.create_task(ask_without_socket(house, stream=True, leaves_at=1))
    await until(lambda: any(one.client.status for one in house.gateway.live))
    more.set()
    with pytest.raises(ClientGone):
        await asking
    assert (await house.line())["end_reason"] == "client_cancel"
    await house.at_rest()


@pytest.mark.hop("http2")
async def test_a_drain_of_the_only_engine_is_503_with_retry_after(house: House) -> None:
    """Streams that run are finished; new requests are refused, with when to come back."""
    go_on = asyncio.Event()

    def script(seen: Seen) -> Script:
        return stream(chunk("a"), go_on, chunk("b")) if seen is house.engine.seen[0] else stream(chunk("c"))

    house.engine.script = script
    async with asyncio.timeout(PATIENCE_S), house.chat(stream=True) as running:
        await running.content.readuntil(b"\n\n")
        house.engine.drain()
        while True:
            async with house.chat(stream=True) as late:
                if late.status == 200:
                    continue
                assert late.status == 503
                assert late.headers["retry-after"] == "1"
                assert late.headers["x-should-retry"] == "true"
                assert (await late.json())["error"]["code"] == "not_ready"
                break
        go_on.set()
        assert (await running.read()).endswith(b"data: [DONE]\n\n")
    lines = await house.lines(len(house.engine.seen) + 1)
    [refused] = [line for line in lines if line["status"] == 503]
    assert refused["end_reason"] == "refused"
    assert refused["settled_tokens"] == 0
    await house.at_rest()


@pytest.mark.hop("http2")
async def test_requests_to_a_draining_engine_are_retried_on_another(open_house: Open) -> None:
    async with FakeEngine(bundle=byte_bundle()) as other:
        house: House = await open_house(other.url)
        house.engine.drain()
        async with asyncio.timeout(PATIENCE_S):
            while len(other.seen) < CONVERSATIONS:
                async with house.chat(stream=True, prompt_cache_key=f"{len(other.seen)}") as answer:
                    assert answer.status == 200
        lines = await house.lines(len(other.seen) + len(house.engine.seen))
        assert any(line["attempts"] == 2 for line in lines), "the one that drains was asked first"
        await house.at_rest()


@pytest.mark.parametrize("protocol", ["http1", "http2"])
async def test_a_request_retried_on_another_engine_leaks_nothing(open_house: Open) -> None:
    """What the first engine's failure refers to goes with the request, without a garbage collection."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        house: House = await open_house(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with uncollected(Exchange) as left:
            for i in range(CONVERSATIONS):
                async with house.chat(stream=True, prompt_cache_key=f"{i}") as answer:
                    assert answer.status == 200
                    await answer.read()
            assert any(line["attempts"] == 2 for line in await house.lines(CONVERSATIONS))
            await house.at_rest()
            await until(lambda: not left())
