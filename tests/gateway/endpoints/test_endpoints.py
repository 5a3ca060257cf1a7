"""The endpoint table: what an API says of itself there is all that the gateway goes by."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest

from gateway.endpoints import routes
from gateway.endpoints.dialect import Dialect, LimitHeaders
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.table import ENDPOINTS
from shared.apis.generation import GenerationRequest
from shared.wire.errors import ApiError, FirstTokenDeadline, FirstTokenTimeout, InterTokenTimeout
from shared.wire.sse import closing_comment, event
from tests.added_api import ALIVE, OPEN, OVER, EchoAnswer, EchoRequest, error_body, error_event
from tests.gateway.conftest import House, Open
from tests.gateway.fake_engine import CUT, HEADERS, Script, Step, closing, unary

LIMITS: Final = LimitHeaders(*(tuple(f"echo-{of}-{what}" for what in "abc") for of in "rtdm"))  # type: ignore[arg-type]


class EchoDialect(Dialect, frozen=True):
    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error, request_id)

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return error_event(error, request_id)


ECHOES: Final = Endpoint(
    shape=EchoRequest,
    answer=EchoAnswer,
    event=EchoAnswer,
    summary="Repeat a text.",
    passes=frozenset({"model", "text", "stream"}),
    maxima=("max_output_tokens",),
    dialect=EchoDialect(OVER, LIMITS, "Events.", silent=(b"event: open\n", b"event: alive\n")),
)
TIMEOUTS: Final = {"first_token": FirstTokenTimeout, "inter_token": InterTokenTimeout}
PIECE: Final = event(b'{"text":"a"}')
pytestmark = pytest.mark.hop("http2")


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ENDPOINTS, dict)
    monkeypatch.setitem(ENDPOINTS, ECHOES.path, ECHOES)
    monkeypatch.setitem(
        routes.RESOURCES, ECHOES.path, routes.resources([routes.proxied(ECHOES)])[ECHOES.path]
    )


async def echo(house: House, **fields: Any) -> tuple[int, Any, bytes]:
    body = {"model": "tiny", **fields}
    async with house.client.post(house.url + ECHOES.path, json=body, headers=house.headers) as answer:
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=list(ENDPOINTS))
def test_what_generates_reserves_tokens(endpoint: Endpoint) -> None:
    assert endpoint.generates == issubclass(endpoint.shape, GenerationRequest)


async def test_an_added_api_is_counted_bounded_and_answered(open_house: Open) -> None:
    house = await open_house(tenant={"limits": {"tokens_per_min": 1000}})
    house.engine.script = unary()
    status, headers, _ = await echo(house, text="hello there", max_output_tokens=20)
    assert (status, headers["echo-t-a"], "x-ratelimit-limit-tokens" in headers) == (200, "1000", False)
    line = await house.line()
    assert (line["endpoint"], line["prompt_tokens"], line["reserved_tokens"]) == (ECHOES.path, 10, 11 + 20)
    [seen] = house.engine.seen
    assert (seen.path, seen.body["text"]) == (ECHOES.path, "hello there")
    assert [*map(len, seen.body["penstock"]["prompt_ids"])] == [11]
    await house.at_rest()


async def test_its_maximum_is_set_by_its_own_name(open_house: Open) -> None:
    house = await open_house(tenant={"limits": {"tokens_per_min": 1000}})
    house.engine.script = unary()
    assert (await echo(house, text="hello there"))[0] == 200
    assert "max_output_tokens" in house.engine.seen[0].body
    assert "max_tokens" not in house.engine.seen[0].body


async def test_another_make_is_sent_what_its_endpoint_lists(open_house: Open) -> None:
    house = await open_house(bundle=None)
    house.engine.script = unary()
    status, headers, _ = await echo(house, text="hi", max_output_tokens=5, top_k=3)
    assert (status, headers["x-penstock-ignored-fields"]) == (200, "top_k")
    assert house.engine.seen[0].body == {"model": "tiny", "text": "hi", "max_output_tokens": 5}


async def test_its_errors_are_its_own(house: House) -> None:
    status, headers, body = await echo(house)
    own = {"type": "error", "problem": "invalid_value", "of": headers["x-request-id"]}
    assert (status, json.loads(body)) == (400, own)
    status, _, body = await echo(house, text="")
    assert (status, json.loads(body)["type"]) == (400, "error")


async def test_its_streams_end_as_it_says(house: House) -> None:
    house.engine.script = Script([PIECE, OVER, closing_comment(closing())])
    assert (await echo(house, text="hi", stream=True))[2] == PIECE + OVER
    house.engine.script = Script([PIECE, CUT])
    body = (await echo(house, text="hi", stream=True))[2]
    assert body.startswith(PIECE + b"event: failed\n")
    assert "ok" in {line["end_reason"] for line in await house.lines(2)}
    await house.at_rest()


# -- streams that open before there is a token ----------------------------------------------------

OPENING: Final = OPEN % 10
WHOLE: Final = (PIECE, OVER, closing_comment(closing()))


def opened(house: House, *steps: Step) -> Any:
    """The answer of an engine that has admitted the request, and then takes these steps."""
    house.engine.script = Script([HEADERS, b": keep-alive\n\n", OPENING, *steps])
    body = {"model": "tiny", "text": "hi", "stream": True}
    return house.client.post(house.url + ECHOES.path, json=body, headers=house.headers)


async def test_an_opening_is_passed_on_and_is_no_first_token(house: House) -> None:
    first_events, computed = house.gateway.replicas.first_events("tiny"), asyncio.Event()
    async with opened(house, computed, ALIVE, *WHOLE) as answer:
        begun = await answer.content.readuntil(OPENING)
        [exchange] = house.gateway.live
        assert (begun, exchange.stages.now) == (b": keep-alive\n\n" + OPENING, "wait")
        assert exchange.record.first_byte_ms is None
        assert not first_events._samples
        computed.set()
        assert await answer.content.read() == ALIVE + PIECE + OVER
    assert len(first_events._samples) == 1
    line = await house.line()
    assert line["first_byte_ms"] >= line["wait_ms"]
    assert line["events"] == 2
    await house.at_rest()


@pytest.mark.parametrize(("bound", "before"), [("first_token", []), ("inter_token", [PIECE])])
async def test_keepalives_hide_no_hung_engine(open_house: Open, bound: str, before: list[bytes]) -> None:
    house = await open_house(timeouts={f"{bound}_s": 0.5, "total_s": 30.0})
    async with opened(house, *before, *[ALIVE] * 1_000_000) as answer:
        body = await answer.read()
        assert body.endswith(error_event(TIMEOUTS[bound]("Late."), answer.headers["x-request-id"]))
    line = await house.line()
    assert (line["status"], line["end_reason"]) == (200, f"{bound}_timeout")
    await house.at_rest()


async def test_an_engines_error_behind_its_opening_is_the_requests(house: House) -> None:
    code, is_read = FirstTokenDeadline.code, asyncio.Event()
    failure = event(b'{"error":{"message":"Late.","code":"%b"}}' % code.encode())
    end = failure, closing_comment(closing(0, 0, "first_token_deadline"))
    async with opened(house, is_read, *end) as answer:
        await answer.content.readuntil(OPENING)
        is_read.set()
        told = error_event(FirstTokenDeadline("Late."), answer.headers["x-request-id"])
        assert await answer.content.read() == told
    async with opened(house, b"".join((OPENING, *end))) as answer:  # nothing was passed on
        assert answer.status == FirstTokenDeadline.status
    for line in await house.lines(2):
        assert (line["error_code"], line["settled_tokens"], line["attempts"]) == (code, 0, 1)
    await house.at_rest()


async def test_who_waits_in_a_queue_is_told_nothing(house: House) -> None:
    """So the engine's error has a status of its own."""
    house.engine.script = Script([HEADERS, b": keep-alive\n\n", event(b'{"error":{"code":"overloaded"}}')])
    assert (await echo(house, text="hi", stream=True))[0] == 503
