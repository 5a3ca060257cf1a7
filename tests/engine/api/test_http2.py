"""The same handlers over HTTP/2, on the same port."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.api.answer.exchange import METHOD_LEN_MAX
from engine.contract.messages import FinishReason
from gateway.relay.hop_errors import HopError
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import StreamFailed
from tests.engine.api.conftest import MODEL, PATIENCE_S, Served, until
from tests.shared.http2.pair import REQUEST, End

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 1}
VOLATILE = ("id", "created")


async def test_both_protocols_answer_alike(
    served: Served, http2: httpx.AsyncClient, lines: list[dict[str, Any]]
) -> None:
    served.says("the lazy dog")
    one, two = [await client.post("/v1/chat/completions", json=CHAT) for client in (served.http, http2)]
    assert (one.http_version, two.http_version) == ("HTTP/1.1", "HTTP/2")
    assert one.status_code == two.status_code == 200
    bodies = [{k: v for k, v in answer.json().items() if k not in VOLATILE} for answer in (one, two)]
    assert bodies[0] == bodies[1]
    assert set(two.headers) >= {"x-request-id", "server-timing", "x-penstock-tokenizer", "x-penstock-closing"}
    await http2.request("X" * 1000, "/v1/chat/completions")
    assert lines[-1]["method"] == "X" * METHOD_LEN_MAX
    missing = await http2.get("/nowhere", headers={"x-request-id": "r-2"})
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_url"
    assert missing.headers["x-request-id"] == "r-2"


async def test_many_streams_share_one_connection(served: Served, http2: httpx.AsyncClient) -> None:
    served.says("the quick brown fox")

    async def stream() -> str:
        async with http2.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            return (await answer.aread()).decode()

    answers = await asyncio.gather(*(stream() for _ in range(40)))
    assert all(answer.count("data: [DONE]") == 1 for answer in answers)
    assert served.engine.server._http2 is not None
    assert len(served.engine.server._http2.endpoints) == 1


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
async def test_the_client_leaves_and_its_connection_stays(
    served: Served, http2: httpx.AsyncClient, stage: str, streams: bool
) -> None:
    core = served.core
    if stage == "queue":
        core.admits = False
    elif stage == "prefill":
        core.script = lambda _: []
    else:
        served.says("the lazy dog", ends=False)
    call = asyncio.create_task(_read_all(http2, streams))
    await until(lambda: len(core.added) == 1)
    if stage != "queue":
        await until(lambda: len(core.running) == 1)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    await until(lambda: core.aborted == [1])
    await until(lambda: served.engine.state._working == 0)
    served.assert_nothing_leaks()
    assert (await http2.get("/livez")).status_code == 200
    assert served.engine.server._http2 is not None
    assert len(served.engine.server._http2.endpoints) == 1


async def test_a_stream_that_is_reset_in_the_turn_it_opens_has_its_line(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    """Its handler has not run by then, and tells of its end all the same."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    peer = End(client=True, config=ConnectionConfig())
    peer.flush()
    writer.write(peer.wire)
    while not peer.connection.greeted:
        peer.connection.receive(await reader.read(65536))
    peer.wire = b""
    peer.connection.open([*REQUEST, (b"x-request-id", b"r-reset")], end=False).reset()
    peer.flush()
    writer.write(peer.wire)
    await until(lambda: bool(lines))
    assert [(line["request_id"], line["end_reason"]) for line in lines] == [("r-reset", "client_cancel")]
    writer.close()


async def _read_all(http2: httpx.AsyncClient, streams: bool) -> None:
    async with http2.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": streams}) as answer:
        await answer.aread()


async def test_a_drain_lets_streams_finish_and_sends_new_ones_away(
    served: Served, http2: httpx.AsyncClient
) -> None:
    served.says("the lazy dog", ends=False)
    call = asyncio.create_task(_read_all(http2, streams=True))
    await until(lambda: len(served.core.running) == 1)
    drain = asyncio.create_task(served.engine.drain())
    await until(lambda: not served.engine.state.lifecycle.is_ready)
    with pytest.raises((HopError, StreamFailed)):
        await _until_refused(http2)
    assert not call.done()
    served.core.finish(1, FinishReason.LENGTH)
    await call
    await drain


async def _until_refused(http2: httpx.AsyncClient) -> None:
    """Until GOAWAY has arrived: then no stream is opened here any more."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await http2.get("/livez")


async def test_a_connection_that_said_nothing_ends_with_the_engine(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    await until(lambda: len(served.engine.server._silent) == 1)
    await served.engine.stop()
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    assert not served.engine.server._silent
