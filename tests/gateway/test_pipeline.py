"""One request through all stages, against an engine that plays a script."""

from __future__ import annotations

from tests.gateway.conftest import House
from tests.gateway.fake_engine import chunk, closing, stream, unary


async def test_a_stream_comes_through_byte_for_byte(house: House) -> None:
    house.engine.script = stream(chunk("a"), chunk("b"))
    async with house.chat(stream=True) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert await answer.read() == chunk("a") + chunk("b") + b"data: [DONE]\n\n"
    line = await house.line()
    assert line["end_reason"] == "ok"
    assert line["status"] == 200
    assert line["prompt_tokens"] == 10
    assert line["completion_tokens"] == 3
    assert line["cached_tokens"] == 4
    assert line["settled_tokens"] == 13
    assert line["events"] == 3
    assert line["engine_queue_ms"] == 1.5
    await house.at_rest()
