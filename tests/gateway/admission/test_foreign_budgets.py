"""A budget before an engine of another make is passed by one request's bound at most: whatever fields are
used, whatever the engine tells, however many requests run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from gateway.admission.tokens import TokenCount, span
from gateway.config.quotas import QuotaLimits
from shared.apis.chat import ChatRequest
from shared.apis.validation import parse
from tests.gateway.admission.quota_calls import Both, of_limits, rid, subject
from tests.gateway.conftest import CHAT, OTHER_KEY, House, Open
from tests.gateway.fake_engine import HEADERS, Script, Seen, chunk
from tests.gateway.request.test_disconnect import RawClient, body

BUDGET: Final = 2_300
LEN: Final = 900
MAX_TOKENS: Final = 8
LIMITED: Final = {"limits": {"token_budget": BUDGET}}
BESIDE: Final = 300
"""More than the bound of all that a request has beside the long text."""
BOUND: Final = LEN + MAX_TOKENS + BESIDE

Fields = dict[str, Any]
PLACES: Final[dict[str, Callable[[str], Fields]]] = {
    "content": lambda text: {"messages": [{"role": "user", "content": text}]},
    "tools": lambda text: {"tools": [{"type": "function", "function": {"name": "f", "description": text}}]},
    "tool calls": lambda text: {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}],
            }
        ]
    },
}
places = pytest.mark.parametrize("place", PLACES)
pytestmark = pytest.mark.hop("http1")  # what engines of other makes speak


def read_by(engine_body: Fields, letter: str) -> int:
    """The tokens that the engine computes: one for each of these letters, as no tokenizer reads more."""
    return msgspec.json.encode(engine_body).count(letter.encode())


def answer(prompt_tokens: int | None, *before: asyncio.Event) -> Script:
    told: Fields = {"choices": [{"index": 0, "message": {"content": "a"}}]}
    if prompt_tokens is not None:
        told["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": MAX_TOKENS}
    return Script([*before, HEADERS, msgspec.json.encode(told)], 200, "application/json")


@places
async def test_many_at_once_pass_a_budget_by_one_of_them_at_most(open_house: Open, place: str) -> None:
    """Letters are estimated at a third of what this engine makes of them."""
    house = await open_house(bundle=None, tenant=LIMITED)
    go = asyncio.Event()
    house.engine.script = lambda seen: answer(read_by(seen.body, "x"), go)
    fields = {**PLACES[place]("x" * LEN), "max_tokens": MAX_TOKENS}

    async def one() -> int:
        async with house.chat(**fields) as got:
            if got.status != 200:
                go.set()
            return int(got.status)

    statuses = await asyncio.gather(*(one() for _ in range(10)))
    assert set(statuses) == {200, 429}
    settled = sum(line["settled_tokens"] for line in await house.lines(10))
    assert BUDGET - BOUND < settled <= BUDGET + BOUND
    async with house.chat(headers={"authorization": f"Bearer {OTHER_KEY}"}) as got:
        assert got.status == 200, "another tenant's is whole"


async def until_refused(house: House, send: Callable[[], Any]) -> None:
    for _ in range(10):
        if await send() == 429:
            return
    raise AssertionError("the budget has no end")


def computed(seen: list[Seen]) -> int:
    return sum(read_by(one.body, "7") + MAX_TOKENS for one in seen)


def hidden(seen: Seen) -> Script:
    """An answer whose usage is far from both of its ends, as vLLM writes it before `prompt_logprobs`."""
    usage = {"prompt_tokens": read_by(seen.body, "7"), "completion_tokens": MAX_TOKENS}
    body = {"logprobs": "x" * 300_000, "usage": usage, "prompt_logprobs": "x" * 100_000}
    return Script([HEADERS, msgspec.json.encode(body)], 200, "application/json")


@pytest.mark.parametrize("script", [answer(None), hidden], ids=["none", "hidden"])
@places
async def test_without_a_usage_what_was_sent_is_paid(
    open_house: Open, place: str, script: Script | Callable[[Seen], Script]
) -> None:
    house = await open_house(bundle=None, tenant=LIMITED)
    house.engine.script = script

    async def send() -> int:
        async with house.chat(**PLACES[place]("7" * LEN), max_tokens=MAX_TOKENS) as got:
            await got.read()
            return int(got.status)

    await until_refused(house, send)
    assert computed(house.engine.seen) <= BUDGET + BOUND
    assert house.store.ledger.settled >= computed(house.engine.seen)


@places
async def test_who_leaves_before_the_usage_pays_for_what_was_sent(open_house: Open, place: str) -> None:
    house = await open_house(bundle=None, tenant=LIMITED)
    house.engine.script = Script([chunk("a"), asyncio.Event()])
    asked = body(**PLACES[place]("7" * LEN), max_tokens=MAX_TOKENS, stream=True)

    async def send() -> int:
        client = await RawClient.posting(house, asked)
        head = await client.reader.readuntil(b"\r\n\r\n")
        if b" 200 " in head:
            await client.reader.readuntil(b"\n\n")
        client.leave()
        await house.at_rest()
        return int(head.split()[1])

    await until_refused(house, send)
    assert computed(house.engine.seen) <= BUDGET + BOUND
    assert house.store.ledger.settled >= computed(house.engine.seen)


async def test_what_is_set_aside_for_a_budget_is_not_what_is_charged(open_house: Open) -> None:
    house = await open_house(bundle=None, tenant=LIMITED)
    house.engine.script = answer(None)
    async with house.chat(**PLACES["content"]("x" * LEN), max_tokens=MAX_TOKENS) as got:
        assert got.status == 200
    line = await house.line()
    assert line["reserved_tokens"] == 8 + LEN + MAX_TOKENS
    assert line["settled_tokens"] == 8 + LEN // 3 + MAX_TOKENS


# -- what is granted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        QuotaLimits(token_budget=100),
        QuotaLimits(tokens_per_day=100),
        QuotaLimits(tokens_per_month=100, token_budget=200),
    ],
)
async def test_the_last_one_is_granted_all_that_is_left(clock_and_store: Both, limits: QuotaLimits) -> None:
    _, store = clock_and_store
    who = [of_limits(limits)]
    granted = []
    for name in range(4):
        decision = await store.reserve(rid(name), who, 10, 40, wanted=40)
        granted.append(decision.granted if decision.refusal is None else None)
    assert granted == [40, 40, 20, None]


async def test_what_is_wanted_is_granted_where_little_is_left_and_a_share_where_much_is(
    clock_and_store: Both,
) -> None:
    _, store = clock_and_store
    who = [subject(token_budget=1000)]
    assert (await store.reserve(rid(1), who, 10, 900, wanted=40)).granted == 250
    assert (await store.reserve(rid(2), who, 10, 900, wanted=600)).granted == 600
    assert (await store.reserve(rid(3), who, 10, 900, wanted=60)).granted == 60


@pytest.mark.parametrize("is_budgeted", [False, True])
@pytest.mark.parametrize("stated", [None, 20])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_span_sets_the_bound_aside_where_a_budget_counts(
    is_budgeted: bool, stated: int | None, choices: int
) -> None:
    fields = {**CHAT, "n": choices} | ({} if stated is None else {"max_tokens": stated})
    request = parse(msgspec.json.encode(fields), ChatRequest).request
    count = TokenCount(100, 100, 1, None, 300)
    asked = span(request, count, None, 20, 10_000, is_budgeted=is_budgeted)
    assert asked.least == 100 + choices * 20
    assert asked.wanted == (300 if is_budgeted else 100) + choices * 20
    assert asked.most >= asked.wanted >= asked.least
    for granted in (asked.least, asked.wanted, asked.most):
        each = asked.maximum_each(granted)
        assert each >= 20
        assert asked.estimated(granted) == 100 + choices * (each if stated is None else stated)
        if granted >= asked.wanted:
            assert asked.prompt_most + choices * each <= max(granted, asked.most)


async def test_a_chat_that_is_estimated_on_the_high_side_has_room_for_its_answer(open_house: Open) -> None:
    """Of an agent's JSON an estimate makes twice what it is, which would leave nothing of the context."""
    house = await open_house(bundle=None, tenant={"limits": {"token_budget": 100_000}}, max_model_len=4096)
    house.engine.script = answer(None)
    row = {"name": "x", "id": 17, "tags": ["a", "b"]}
    async with house.chat(
        messages=[{"role": "tool", "content": msgspec.json.encode([row] * 200).decode()}]
    ) as got:
        assert got.status == 200
    [seen] = house.engine.seen
    assert (await house.line())["prompt_tokens"] > 4096
    assert seen.body["max_tokens"] > 1000
