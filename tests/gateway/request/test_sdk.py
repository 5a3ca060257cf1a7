"""The official OpenAI SDK, its strict response validation on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.gateway.conftest import KEY, House, Open
from tests.gateway.fake_engine import CUT, Script, chunk, refusal, unary

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def sdk(house: House) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_the_sdk_raises_when_a_stream_breaks(house: House, sdk: AsyncOpenAI) -> None:
    house.engine.script = Script([chunk("a"), CUT])
    events = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="broke off") as cut:
        [event async for event in events]
    assert isinstance(cut.value.body, dict)
    assert cut.value.body["request_id"] == (await house.line())["request_id"]


@pytest.mark.parametrize(
    ("script", "raises"),
    [
        (refusal(400, "invalid_value"), openai.BadRequestError),
        (refusal(404, "model_not_found"), openai.NotFoundError),
        (refusal(413, "request_too_large"), openai.APIStatusError),
        (refusal(500, "engine_failed"), openai.InternalServerError),
        (refusal(503, "queue_full"), openai.InternalServerError),
        (Script([CUT]), openai.InternalServerError),
    ],
    ids=range(6),
)
async def test_the_engines_errors(
    house: House, sdk: AsyncOpenAI, script: Script, raises: type[openai.APIStatusError]
) -> None:
    house.engine.script = script
    with pytest.raises(raises) as caught:
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.request_id
    assert caught.value.code


async def test_the_gateways_errors(house: House, sdk: AsyncOpenAI) -> None:
    create = sdk.chat.completions.create
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").chat.completions.create(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        await create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"


async def test_a_quota_is_a_rate_limit_error(open_house: Open) -> None:
    limits = {"requests_per_min": 1, "token_budget": 10_000}
    house = await open_house(tenants=[{"id": "acme", "limits": limits}, {"id": "other"}])
    house.engine.script = unary("hello")
    async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=0) as sdk:
        raw = await sdk.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after-ms"]) <= 60_000
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_a_budget_that_is_spent_is_not_retried(open_house: Open) -> None:
    house = await open_house(tenants=[{"id": "acme", "limits": {"token_budget": 3}}, {"id": "other"}])
    async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key=KEY, max_retries=5) as sdk:
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.code == "insufficient_quota"
    assert len(await house.lines(1)) == 1
