"""What a caller predicts, at the gateway: reserved beforehand, sent along as ids, and charged as the engine
reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.admission.tokens import TokenCount, span
from gateway.billing.lines import BillingLine
from gateway.identity.keys import hash_key
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.prediction import Prediction
from shared.text.tokenizer import Tokenizer
from shared.wire import sse
from shared.wire.room import Room
from tests.gateway.conftest import KEY, PROMPT, House, Open, error_of, until
from tests.gateway.fake_engine import byte_bundle, chunk, stream, unary

TEXT = "def f(x): return x"
PREDICTION = {"type": "content", "content": TEXT}
LIMIT = 6000


def byte_ids(text: str) -> list[int]:
    return Tokenizer(byte_bundle()).encode(text, add_special_tokens=False)


def told(rejected: int, accepted: int = 7) -> sse.Closing:
    return sse.Closing(
        end_reason="ok",
        prompt_tokens=len(PROMPT),
        completion_tokens=9 + rejected,
        drafted_tokens=20,
        accepted_tokens=8,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )


async def limited(open_house: Open, limits: dict[str, int], **more: Any) -> House:
    house: House = await open_house(
        keys=[{"id": "k1", "hash": hash_key(KEY), "tenant": "acme", "limits": limits}], **more
    )
    house.engine.script = unary(end=told(5))
    return house


@pytest.mark.parametrize("choices", [1, 3])
async def test_it_is_reserved_for_each_choice_and_what_was_right_comes_back(
    open_house: Open, choices: int
) -> None:
    house = await limited(open_house, {"tokens_per_min": LIMIT})
    reserved = len(PROMPT) + choices * (50 + len(TEXT))
    async with house.chat(max_tokens=50, n=choices, prediction=PREDICTION) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(LIMIT - reserved)
    line = await house.line()
    assert line["reserved_tokens"] == reserved
    assert line["settled_tokens"] == len(PROMPT) + 9 + 5
    assert (line["completion_tokens"], line["accepted_prediction_tokens"]) == (14, 7)
    assert line["rejected_prediction_tokens"] == 5
    assert (line["drafted_tokens"], line["accepted_tokens"]) == (20, 8)
    assert house.engine.seen[-1].body["penstock"]["predicted_ids"] == byte_ids(TEXT)
    await house.at_rest()


async def test_a_caller_whose_budget_lacks_its_tokens_is_refused(open_house: Open) -> None:
    budget = len(PROMPT) + 10 + len(TEXT) - 1
    house = await limited(open_house, {"token_budget": budget})
    async with house.chat(max_tokens=10, prediction=PREDICTION) as answer:
        assert answer.status == 429
        assert (await error_of(answer))["code"] == "insufficient_quota"
    async with house.chat(max_tokens=10) as answer:
        assert answer.status == 200


async def test_a_maximum_that_the_gateway_gives_leaves_room_for_it(open_house: Open) -> None:
    house = await limited(open_house, {"tokens_per_min": 200})
    async with house.chat(prediction=PREDICTION) as answer:
        assert answer.status == 200
    line = await house.line()
    given = house.engine.seen[-1].body["max_tokens"]
    assert given == line["reserved_tokens"] - len(PROMPT) - len(TEXT)


@pytest.mark.parametrize("streams", [False, True])
async def test_billing_lines_tell_it(open_house: Open, tmp_path: Path, streams: bool) -> None:
    file = tmp_path / "lines"
    house = await limited(open_house, {}, accounting={"file": str(file)})
    house.engine.script = stream(chunk("a"), end=told(5)) if streams else unary(end=told(5))
    async with house.chat(prediction=PREDICTION, stream=streams) as answer:
        await answer.read()
    house.engine.script = unary()
    async with house.chat() as answer:
        await answer.read()
    await until(lambda: file.exists() and file.read_bytes().count(b"\n") == 2)
    with_it, without = file.read_bytes().splitlines()
    line = msgspec.json.decode(with_it, type=BillingLine)
    assert line.completion_tokens == 14
    assert (line.accepted_prediction_tokens, line.rejected_prediction_tokens) == (7, 5)
    assert b"prediction" not in without


@pytest.mark.parametrize("tokens_max", [None, 400])
def test_what_is_reserved_has_the_prediction_at_every_size(tokens_max: int | None) -> None:
    request = ChatRequest(
        model="tiny",
        messages=[ChatMessage("user", "hi")],
        n=2,
        prediction=Prediction("content", TEXT),
    )
    count = TokenCount(10, 10, 1, None, 10, predicted=30)
    own = TokenCount(10, 10, 1, None, 10)
    asked = span(request, count, Room(500, 500), 40, tokens_max, is_budgeted=False)
    without = span(request, own, Room(500, 500), 40, tokens_max, is_budgeted=False)
    for name in ("least", "wanted", "most"):
        assert getattr(asked, name) == getattr(without, name) + 2 * 30
    for granted in range(without.least, without.most + 1, 7):
        assert asked.maximum_each(granted + 60) == without.maximum_each(granted)
        assert asked.estimated(granted + 60) == without.estimated(granted) + 60


async def test_one_that_is_too_long_is_refused_before_anything_is_sent(open_house: Open) -> None:
    house = await limited(open_house, {})
    long = {"type": "content", "content": "x" * 131_073}
    async with house.chat(prediction=long) as answer:
        assert answer.status == 400
        assert (await error_of(answer))["param"] == "prediction.content"
    assert not house.engine.seen
