"""What a request is charged: what the engine says that it computed, whichever way the request ended, and
wherever it is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.admission.redis_store import RedisStore
from gateway.config.whole import KeyConfig
from gateway.identity.keys import hash_key
from gateway.request import pipeline
from shared.wire import sse
from shared.wire.errors import EngineFailed
from shared.wire.ids import KeyId
from tests.gateway.admission.test_quota_edge import limited
from tests.gateway.conftest import PATIENCE_S, House, Open
from tests.gateway.fake_engine import (
    CUT,
    HEADERS,
    UNREAD,
    FakeEngine,
    Script,
    byte_bundle,
    chunk,
    closing,
    refusal,
    stream,
    unary,
)
from tests.gateway.redis_server import RedisServer, redis_store
from tests.gateway.request.test_disconnect import RawClient, body

ENDS = closing(prompt=10, completion=5_000, reason="client_cancel")
IN_MEMORY = pytest.mark.parametrize("store", ["memory"], indirect=True)
EACH_API = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
BUDGET = 10**12
"""Never spent; a request without a limit has no lease in Redis."""


def asked(path: str, tokens_max: int, *, stream: bool = True) -> bytes:
    """A request of one of these APIs."""
    if path != "/v1/responses":
        return body(stream=stream, max_tokens=tokens_max)
    return json.dumps(
        {"model": "tiny", "input": "hi", "max_output_tokens": tokens_max, "stream": stream}
    ).encode()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[RedisStore | None]:
    """None: the gateway's own memory."""
    if request.param == "memory":
        yield None
        return
    async with redis_store(redis) as store:
        yield store


@pytest.fixture
def open_house(store: RedisStore | None, redis: RedisServer, open_house: Open) -> Open:
    """Houses whose first tenant has a budget, which is counted in both stores."""

    async def open_(*urls: str, tenant: dict[str, Any] | None = None, **sections: Any) -> House:
        tenant = {"limits": {"token_budget": BUDGET}, **(tenant or {})}
        house: House = await open_house(*urls, store=store, tenant=tenant, **sections)
        house.redis = None if store is None else redis
        return house

    return open_


def settled(line: dict[str, Any], protocol: str, used: int) -> None:
    """Over HTTP/2 the engine's last words are heard, over HTTP/1.1 they are not."""
    assert line["settled_tokens"] == (used if protocol == "http2" else line["reserved_tokens"])


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_whole_answer_is_charged_what_was_computed(house: House, streaming: bool) -> None:
    house.engine.script = stream(chunk("a"), end=closing(10, 33)) if streaming else unary(end=closing(10, 33))
    async with house.chat(stream=streaming) as answer:
        assert answer.status == 200
        await answer.read()
    assert (await house.line())["settled_tokens"] == 43
    await house.at_rest()


@EACH_API
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_disconnect_before_the_first_token_is_charged_what_was_computed(
    house: House, protocol: str, streaming: bool, path: str
) -> None:
    house.engine.script, house.engine.reports = Script([asyncio.Event()]), ENDS
    client = await RawClient.posting(house, asked(path, 6_000 // 2, stream=streaming), path=path)
    await house.engine.arrived.wait()
    client.leave()
    settled(await house.line(), protocol, 5_010)
    await house.at_rest()


@EACH_API
async def test_a_disconnect_in_the_middle_is_charged_what_was_computed(
    house: House, protocol: str, path: str
) -> None:
    house.engine.script, house.engine.reports = stream(chunk("a"), asyncio.Event()), ENDS
    client = await RawClient.posting(house, asked(path, 9), path=path)
    await client.reader.readuntil(b"\n\n")
    client.leave()
    settled(await house.line(), protocol, 5_010)
    await house.at_rest()


@EACH_API
async def test_a_slow_client_timeout_is_charged_what_was_computed(
    open_house: Open, protocol: str, path: str
) -> None:
    house = await open_house(timeouts={"slow_client_s": 0.05})
    house.engine.script, house.engine.reports = Script([chunk("x" * 1000)] * 20_000), ENDS
    client = await RawClient.of(house, receive_buffer_len=4096)
    client.post(asked(path, 9), path=path)
    line = await house.line()
    assert line["end_reason"] == "slow_client"
    settled(line, protocol, 5_010)
    client.leave()
    await house.at_rest()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_timeout_of_the_gateways_is_charged_what_was_computed(
    open_house: Open, protocol: str, streaming: bool
) -> None:
    house = await open_house(timeouts={"total_s": 0.1, "first_token_s": 0.1})
    house.engine.script, house.engine.reports = Script([asyncio.Event()]), ENDS
    async with house.chat(stream=streaming) as answer:
        assert answer.status == 504
    settled(await house.line(), protocol, 5_010)
    await house.at_rest()


async def test_a_timeout_of_the_callers_is_charged_what_was_computed(house: House) -> None:
    """The engine answers with an error, and says what it had computed until then."""
    told = {sse.CLOSING_HEADER: sse.encode_closing(closing(10, 40_256, "request_timeout")).decode()}
    house.engine.script = refusal(504, "request_timeout", **{sse.CLOSING_HEADER.replace("-", "_"): ""})
    house.engine.script.headers = told
    async with house.chat() as answer:
        assert answer.status == 504
    line = await house.line()
    assert line["end_reason"] == "request_timeout"
    assert line["settled_tokens"] == 40_266
    await house.at_rest()


async def test_an_abort_is_charged_what_was_computed(house: House, protocol: str) -> None:
    house.engine.script, house.engine.reports = stream(chunk("a"), asyncio.Event()), ENDS
    async with house.chat(stream=True, headers={"x-request-id": "mine"}) as answer:
        await answer.content.readuntil(b"\n\n")
        async with house.client.delete(f"{house.url}/v1/requests/mine", headers=house.headers) as aborted:
            assert aborted.status == 200
        assert b"request_aborted" in await answer.read()
    lines = {line["endpoint"]: line for line in await house.lines(2)}
    settled(lines["/v1/chat/completions"], protocol, 5_010)
    await house.at_rest()


async def test_a_stream_of_a_revoked_key_is_charged_what_was_computed(
    open_house: Open, protocol: str
) -> None:
    """The key is one of a directory's, whose tenant has its streams ended."""
    house = await open_house(tenant={"on_revoke": "end"})
    house.engine.script, house.engine.reports = stream(chunk("a"), asyncio.Event()), ENDS
    house.gateway.accounts.put_keys([KeyConfig("made", hash_key("made"), "acme")])
    async with house.chat(stream=True, headers={"authorization": "Bearer made"}) as answer:
        await answer.content.readuntil(b"\n\n")
        house.gateway.accounts.put_keys((), [KeyId("made")])
        rest = await answer.read()
    assert b'"code":"key_revoked"' in rest
    assert b"[DONE]" not in rest
    line = await house.line()
    assert (line["end_reason"], line["key_id"]) == ("key_revoked", "made")
    settled(line, protocol, 5_010)
    await house.at_rest()


async def test_a_stream_that_a_drain_cuts_is_charged_what_was_computed(
    open_house: Open, protocol: str
) -> None:
    house = await open_house(timeouts={"drain_s": 0.05})
    house.engine.script, house.engine.reports = stream(chunk("a"), asyncio.Event()), ENDS
    async with house.chat(stream=True) as answer:
        await answer.content.readuntil(b"\n\n")
        assert not await house.gateway.drain()
        assert b"gateway_stopped" in await answer.read()
    line = await house.line()
    assert line["end_reason"] == "drain"
    settled(line, protocol, 5_010)
    await house.at_rest()


async def test_a_connection_lost_in_the_middle_is_charged_the_reservation(house: House) -> None:
    house.engine.script = stream(chunk("a"), CUT)
    async with house.chat(stream=True) as answer:
        assert b'"error"' in await answer.read()
    line = await house.line()
    assert line["settled_tokens"] == line["reserved_tokens"] > 0
    await house.at_rest()


async def test_a_connection_lost_before_the_answer_is_charged_the_reservation(house: House) -> None:
    house.engine.script = Script([CUT, HEADERS])
    async with house.chat() as answer:
        assert answer.status == 502
    line = await house.line()
    assert line["settled_tokens"] == line["reserved_tokens"], "nobody knows what it computed"
    await house.at_rest()


@pytest.mark.parametrize("code", ["invalid_value", "queue_full", "not_ready", "engine_failed"])
async def test_a_refusal_costs_nothing(house: House, code: str) -> None:
    house.engine.script = refusal(503 if code in ("queue_full", "not_ready") else 400, code)
    async with house.chat() as answer:
        assert answer.status >= 400
    assert (await house.line())["settled_tokens"] == 0
    await house.at_rest()


async def test_a_refusal_with_a_cost_is_not_retried_elsewhere(open_house: Open) -> None:
    """The engine was drained in the middle of the answer. Another would compute all of it once more."""
    async with FakeEngine(bundle=byte_bundle()) as other:
        house = await open_house(other.url)
        cost = sse.encode_closing(closing(10, 230, "drain")).decode()
        for engine in (house.engine, other):
            engine.script = refusal(503, "not_ready")
            engine.script.headers[sse.CLOSING_HEADER] = cost
        async with house.chat() as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "not_ready"
        assert len(house.engine.seen) + len(other.seen) == 1
        line = await house.line()
        assert (line["attempts"], line["settled_tokens"]) == (1, 240)
        await house.at_rest()


async def test_a_stream_that_fails_before_its_first_token_says_afterwards_what_it_has_cost(
    house: House,
) -> None:
    later = asyncio.Event()
    error = sse.error_event(EngineFailed("The model's output was not finite."))
    house.engine.script = Script([error, later, sse.closing_comment(closing(10, 2, "engine_failed"))])
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(house.chat(stream=True).__aenter__())
        await house.engine.arrived.wait()
        await asyncio.sleep(0)
        later.set()
    assert asked.result().status == 500
    asked.result().release()
    assert (await house.line())["settled_tokens"] == 12
    await house.at_rest()


async def test_the_wait_for_an_engines_report_times_out(house: House, protocol: str) -> None:
    house.engine.script = stream(chunk("a"), asyncio.Event())
    client = await RawClient.posting(house, body(stream=True))
    await client.reader.readuntil(b"\n\n")
    client.leave()
    line = await house.line()
    assert line["settled_tokens"] == line["reserved_tokens"]
    waited_ms = pipeline.REPORT_S * 1000 if protocol == "http2" else 0
    assert line["settle_ms"] >= waited_ms * 0.9


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_no_report_is_waited_for_where_no_token_is_computed(
    house: House, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request on the connection would wait as well. An engine reports on generations alone."""
    monkeypatch.setattr(pipeline, "REPORT_S", 2 * PATIENCE_S)
    house.engine.script = Script([HEADERS, b"{}"], 200, "application/json")
    asked = {"model": "tiny", "prompt": "hi"} if path == "/tokenize" else {"model": "tiny", "tokens": [1]}
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            async with house.client.post(house.url + path, json=asked, headers=house.headers) as answer:
                assert (answer.status, await answer.read()) == (200, b"{}")
    assert [line["settled_tokens"] for line in await house.lines(2)] == [0, 0]
    await house.at_rest()


@IN_MEMORY
@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_what_an_engine_has_not_looked_at_is_not_charged(house: House) -> None:
    house.engine.script = Script([UNREAD, HEADERS])
    async with house.chat(stream=True) as answer:
        assert answer.status == 502
    line = await house.line()
    assert (line["end_reason"], line["settled_tokens"]) == ("upstream_unreachable", 0)
    assert house.engine.seen
    await house.at_rest()


# -- what may be generated is what was reserved ---------------------------------------------------


@IN_MEMORY
@pytest.mark.parametrize("limits", [{"tokens_per_min": 400}, {"token_budget": 2000}])
@pytest.mark.parametrize("n", [1, 64])
async def test_a_request_without_a_maximum_is_given_one_where_tokens_are_limited(
    open_house: Open, limits: dict[str, int], n: int
) -> None:
    house = await limited(open_house, limits, {})
    async with house.chat(n=n, ignore_eos=True) as answer:
        assert answer.status == 200
    line = await house.line()
    sent = house.engine.seen[-1].body
    prompt = len(sent["penstock"]["prompt_ids"][0])
    assert prompt + n * sent["max_tokens"] <= line["reserved_tokens"]
    assert line["reserved_tokens"] <= max(limits.values())
    await house.at_rest()


@IN_MEMORY
async def test_a_stated_maximum_and_a_caller_without_limits_are_left_alone(open_house: Open) -> None:
    house = await limited(open_house, {"tokens_per_min": 10_000}, {})
    async with house.chat(max_completion_tokens=9):
        pass
    assert "max_tokens" not in house.engine.seen[-1].body
    free = await open_house(tenant={"limits": {}})
    free.engine.script = unary()
    async with free.chat():
        pass
    assert "max_tokens" not in free.engine.seen[-1].body


@IN_MEMORY
async def test_a_request_without_a_maximum_leaves_some_budget_to_the_next(open_house: Open) -> None:
    house = await limited(open_house, {"token_budget": 100_000}, {})
    for _ in range(3):
        async with house.chat() as answer:
            assert answer.status == 200
    reserved = [line["reserved_tokens"] for line in await house.lines(3)]
    assert all(tokens <= 25_000 for tokens in reserved)
    assert house.engine.seen[0].body["max_tokens"] > 1_000, (
        "a budget that has room is no reason for short answers"
    )


@IN_MEMORY
async def test_a_budget_says_what_is_left_of_it(open_house: Open) -> None:
    house = await limited(open_house, {"token_budget": 100}, {})
    async with house.chat(max_tokens=90) as answer:
        assert answer.status == 429
        message = (await answer.json())["error"]["message"]
    assert "100 left" in message
    assert "max_tokens" in message


@IN_MEMORY
async def test_a_caller_without_a_token_left_is_refused_before_dispatch(open_house: Open) -> None:
    """The seat is refused, so the body is not read: no work before its reservation."""
    house = await limited(open_house, {"token_budget": 0}, {})
    client = await RawClient.posting(house, b'{"model":', length=1000)
    async with asyncio.timeout(PATIENCE_S):
        head = await client.reader.readuntil(b"\r\n\r\n")
    assert b" 429 " in head
    assert (await house.line())["stage"] == "seat"
    client.leave()
