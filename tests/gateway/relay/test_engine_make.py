"""Whose an engine is: what it is told of a tenant, also as long as nobody knows."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.app import Gateway
from gateway.config.whole import ModelConfig, load
from gateway.relay.engines import EngineProfile, Known
from shared.wire import sse
from shared.wire.envelope import ErrorBody, ErrorEnvelope
from shared.wire.http import HttpRequest, Responder
from shared.wire.ids import SERVICE_TIER_HEADER, TENANT_HEADER
from shared.wire.room import Room
from tests.gateway.conftest import House, error_of, settings
from tests.gateway.fake_engine import FakeEngine, Script, byte_bundle, chunk, closing, stream

OURS = EngineProfile(byte_bundle().hash, Room(4096), None)
THEIRS = EngineProfile(None, None, None)
USAGE = sse.event(
    msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 4}})
)
NOT_READY = msgspec.json.encode(ErrorEnvelope(ErrorBody("It loads.", "server_error", None, "not_ready")))


class Untold(FakeEngine):
    """An engine that does not tell what it is, and serves all the same."""

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        if request.path in ("/v1/models", "/penstock/tokenizer"):
            await responder.send(503, {"content-type": "application/json"}, NOT_READY)
        else:
            await super()._handle(request, responder)


class Opened(House):
    async def streamed(self, **fields: Any) -> bytes:
        async with self.chat(stream=True, max_tokens=50, **fields) as answer:
            assert answer.status == 200
            return await answer.read()


@pytest.fixture(params=["ours", "theirs"])
async def untold(
    request: pytest.FixtureRequest, protocol: str, log: io.StringIO
) -> AsyncIterator[tuple[Opened, bool]]:
    """A gateway before an engine of which it knows nothing, and whether that is one of ours."""
    is_ours = request.param == "ours"
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Untold(bundle=byte_bundle() if is_ours else None))
        config = load(settings(engine.url, protocol=protocol), {})
        gateway = await stack.enter_async_context(Gateway(config))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Opened(gateway, engine, client, log), is_ours


async def test_an_engine_that_nobody_knows_is_sent_what_suits_the_likelier_make(
    untold: tuple[Opened, bool], protocol: str
) -> None:
    house, is_ours = untold
    end = closing(21, 4)
    house.engine.script = (
        stream(chunk("a"), USAGE, end=end) if is_ours else Script([chunk("a"), USAGE, sse.DONE])
    )
    for turn in range(2):
        answer = await house.streamed()
        seen = house.engine.seen[-1]
        counts_as_ours = is_ours if turn else protocol == "http2"  # its first answer tells
        assert (TENANT_HEADER in seen.headers) == (SERVICE_TIER_HEADER in seen.headers) == counts_as_ours
        assert ("stream_options" in seen.body) != counts_as_ours
        assert answer == chunk("a") + (USAGE if counts_as_ours else b"") + sse.DONE
    assert [line["settled_tokens"] for line in await house.lines(2)] == [25, 25]
    await house.at_rest()


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_an_engine_that_nobody_knows_is_sent_no_image_that_it_might_fetch(
    untold: tuple[Opened, bool],
) -> None:
    house, _ = untold
    part = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}
    async with house.chat(messages=[{"role": "user", "content": [part]}]) as answer:
        assert answer.status == 400
        assert (await error_of(answer))["param"] == "messages[0].content[0].image_url.url"
    assert not house.engine.seen


async def test_tools_are_not_refused_before_an_engine_that_may_know_them(untold: tuple[Opened, bool]) -> None:
    house, _ = untold
    tools = [{"type": "function", "function": {"name": "f"}}]
    await house.streamed(tools=tools)
    assert house.engine.seen[-1].body["tools"] == tools


def model(**fields: Any) -> ModelConfig:
    return ModelConfig("m", ("http://a:1",), **fields)


@pytest.mark.parametrize(
    ("config", "at_first"),
    [
        (model(), True),
        (model(protocol="http1"), False),
        (model(api_key="env:KEY"), False),
        (model(api_key="file:key"), False),
        (model(engine="openai"), False),
    ],
)
def test_what_an_engine_tells_of_itself_counts_over_what_it_seemed_to_be(
    config: ModelConfig, at_first: bool
) -> None:
    known = Known.at_first(config)
    assert known.counts_as_ours == at_first
    assert (known.is_ours, known.is_foreign) == (False, config.engine == "openai")
    for profile in (OURS, THEIRS):
        known.learn(profile)
        is_ours = profile is OURS
        assert (known.is_ours, known.is_foreign, known.counts_as_ours) == (is_ours, not is_ours, is_ours)


def test_what_is_configured_as_ours_is_ours_from_the_beginning() -> None:
    known = Known.at_first(model(engine="penstock", protocol="http1", api_key="env:KEY"))
    assert (known.is_ours, known.is_foreign, known.counts_as_ours) == (True, False, True)


def test_an_engine_that_is_said_to_be_of_another_make_is_not_asked_again_for_a_hash() -> None:
    """No tokenizer is looked for there, so that none of its hashes would be that of the one in use."""
    known = Known.at_first(model(engine="openai"))
    known.observe(byte_bundle().hash)
    assert not known.stale.is_set()
    assert not known.counts_as_ours


def test_the_answers_of_an_engine_tell_what_it_is() -> None:
    known = Known.at_first(model())
    known.observe(None)
    assert not known.counts_as_ours
    known.observe(byte_bundle().hash)
    assert known.counts_as_ours
    assert known.stale.is_set(), "it is asked again"
