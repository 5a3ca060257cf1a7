"""Engines that shut down while requests come: they say so by GOAWAY, and nothing is lost.

What is sent before the GOAWAY is heard is still served, so that the tests ask until it was.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.request.exchange import Exchange
from tests.gateway.conftest import CONVERSATIONS, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import FakeEngine, Script, Seen, byte_bundle, chunk, stream
from tests.uncollected import uncollected


@pytest.fixture
def protocol() -> str:
    return "http2"


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
