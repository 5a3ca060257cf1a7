"""The edge around the pipeline: probes, metrics, the drain, bounds of connections, and what is not logged."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from yarl import URL

from gateway.endpoints.endpoint import Endpoint
from gateway.exchange import Exchange
from gateway.listener import RECEIVE_BUFFER_LEN
from tests.gateway.conftest import CHAT, KEY, PATIENCE_S, House, Open, error_of, until
from tests.gateway.fake_engine import (
    chunk,
    stream,
    unary,
)

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
        [transport] = house.gateway._public._server._connections.values()
        accepted = transport.get_extra_info("socket")
        bounds = [accepted.getsockopt(socket.SOL_SOCKET, it) for it in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
    assert bounds == [2 * RECEIVE_BUFFER_LEN, 2 * house.gateway.config.limits.send_buffer_len]


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
