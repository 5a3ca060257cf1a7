"""Whose work was before a request, and the tries of its SDK before it: what operators read first of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any

import pytest

from gateway.operators import around
from gateway.operators.around import AHEAD_MAX, AT_ONCE, LOOKED_MAX, PAUSE_MAX, TRIES_MAX
from gateway.request.record import RETRY_LEN_MAX, ExchangeRecord
from gateway.request.recorder import Recorder
from shared.telemetry.stages import Stages, Stamps
from shared.trace.axis import Axis
from shared.trace.request_records import RequestRecord, RequestSummary
from shared.wire.causes import Cause
from shared.wire.completed_line import GatewayLine
from shared.wire.end_reason import EndReason
from shared.wire.ids import RequestId
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import chunk, closing, refusal, stream
from tests.gateway.operators.test_admin import operator_keys
from tests.gateway.operators.test_requests_api import BEGUN, api_summary, ask, line

LIMITED = {
    "status": 429, "end_reason": EndReason.REFUSED, "error_code": "rate_limit_exceeded",
    "quota_meter": "tokens", "quota_scope": "tenant",
}  # fmt: skip


def ended(request_id: str, at_s: float, took_s: float, **fields: Any) -> GatewayLine:
    """The line of a request of acme's that ended so many seconds after the beginning."""
    at = BEGUN + timedelta(seconds=at_s)
    made = {"tenant": "acme", "key_id": "k", "model": "tiny", "replica": "e:1", **fields}
    return line(request_id, ts=at, total_ms=took_s * 1e3, **made)


def told(own: GatewayLine, *others: GatewayLine) -> tuple[str, ...]:
    """The causes of a request beside these."""
    recorder = Recorder(100)
    for one in (*others, own):
        recorder.add(one, Stamps(("wait", "relay"), (0.0, own.total_ms / 2e3, own.total_ms / 1e3)))
    [record] = recorder.find(own.request_id, 1)
    kept = [one for one in recorder.newest_first() if one.began_at >= around.since_of(record) - timedelta(1)]
    return around.told(record, kept).causes


def test_who_waits_for_a_quota_is_told_of_the_first_try() -> None:
    tries = [
        ended("try-1", 0.1, 0.1, **LIMITED, prompt_tokens=7),
        ended("others", 0.1, 0.1, **{**LIMITED, "key_id": "another"}),
        ended("try-2", 5.1, 0.1, **LIMITED, retry=1),
    ]
    first, *_ = told(ended("own", 10.038, 0.038, retry=2), *tries)
    assert first == (
        "10 s before it: most likely its first try, try-1, was refused by the tenant's quota of tokens "
        "(429 rate_limit_exceeded), and 1 more failed, and the SDK waited"
    )
    alone = told(ended("own", 10.0, 0.038, retry=2))
    assert "its SDK counts 2 tries before this one, each a request of its own" in alone


def test_tries_with_one_idempotency_key_are_told_for_sure() -> None:
    mine, other = "0123456789abcdef", "f" * 16
    tries = [
        ended("mine", 0.1, 0.1, **LIMITED, idempotency=mine),
        ended("anothers", 0.3, 0.1, **LIMITED, idempotency=other),
    ]
    first, *_ = told(ended("own", 9.0, 1.0, retry=1, idempotency=mine), *tries)
    assert first.startswith("8 s before it: its first try, mine, was refused")


def test_tries_are_looked_for_in_bounded_numbers() -> None:
    many = 2 * TRIES_MAX
    tries = [summary(ended(f"try-{n}", n, 0.5, **LIMITED, retry=n or None)) for n in range(many)]
    own = summary(ended("own", many, 0.5, retry=many))
    assert len(around.earlier_tries(own, tries)) == TRIES_MAX


def test_a_try_of_long_ago_is_none_of_it() -> None:
    long_s = PAUSE_MAX / timedelta(seconds=1)
    own = summary(ended("own", long_s + 2.0, 1.0, retry=1))
    near, far = (summary(ended("try", at_s, 0.1, **LIMITED)) for at_s in (1.5, 0.5))
    assert around.earlier_tries(own, [near]) == [near]
    assert around.earlier_tries(own, [far]) == []


def test_what_a_caller_says_of_its_tries_is_bounded() -> None:
    record = ExchangeRecord.begun(RequestId("r"), "POST", "/v1/chat/completions", Stages("gateway"))
    for text in ("9" * (RETRY_LEN_MAX + 1), "-1", "two", "\u0663", ""):
        record.one_of_several(text, None)
        assert (record.retry, record.idempotency) == (None, None)
    record.one_of_several("3", "x" * 10_000)
    assert record.retry == 3
    assert len(record.idempotency or "") == 16


def summary(of: GatewayLine) -> RequestSummary:
    recorder = Recorder(1)
    recorder.add(of, Stamps(("edge",), (0.0, 1.0)))
    return next(recorder.newest_first())


def queued(request_id: str) -> GatewayLine:
    """A request that was queued from 1 s to 9 s at the engine e:1."""
    cause = Cause(code="waited_slots", ms=8000.0, requests=2)
    times = {"engine_queue_ms": 8000.0, "engine_first_byte_ms": 8000.0, "first_byte_ms": 8000.0}
    return ended(request_id, 10.0, 9.0, causes=(cause,), engine_end_reason="ok", **times, wait_ms=8000.0)


def test_whose_work_was_before_it_in_the_queue_is_told() -> None:
    others = [
        ended("gone", 0.9, 0.5),
        ended("elsewhere", 8.0, 7.0, replica="e:2"),
        ended("long", 9.5, 9.4, tenant="other", prompt_tokens=14_510, completion_tokens=200),
        ended("short", 5.0, 2.0, prompt_tokens=1, service_tier="priority"),
    ]
    first, *_ = told(queued("own"), *others)
    assert first == (
        "queued 8 s: no slot (2 sequences run); that engine had tenant other's long (prompt 14,510 "
        "tokens, answer 200), tenant acme's short (priority, prompt 1 token)"
    )


def test_who_may_have_taken_its_place_is_told_those_of_a_higher_class_first() -> None:
    cause = Cause(code="preempted_class", ms=8000.0)
    own = ended("own", 10.0, 9.0, causes=(cause,), engine_preempted_ms=8000.0, relay_ms=8500.0)
    first, *_ = told(own, ended("equal", 9.5, 9.4), ended("higher", 5.0, 2.0, service_tier="priority"))
    assert first.startswith("preempted for 8 s")
    assert 0 < first.index("higher (priority") < first.index("equal (")


def test_of_many_a_few_are_named() -> None:
    first, *_ = told(queued("own"), *(ended(f"r{number}", 9.5, 9.4) for number in range(AHEAD_MAX + 7)))
    assert first.count("acme's r") == AHEAD_MAX
    assert first.endswith(" and 7 more")


async def test_a_bounded_number_is_looked_at_and_others_have_their_turn() -> None:
    one, turns = api_summary(), 0

    def kept() -> Iterator[RequestSummary]:
        return repeat(one)

    looking = asyncio.create_task(around.looked_at(kept(), BEGUN - timedelta(hours=1)))
    while not looking.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(looking.result()) == LOOKED_MAX
    assert turns >= LOOKED_MAX // AT_ONCE
    assert await around.looked_at(kept(), BEGUN + timedelta(hours=1)) == []


# -- a running gateway ----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_a_retry_finds_the_try_before_it(open_house: Open) -> None:
    house: House = await open_house(admin=operator_keys())
    same = {"idempotency-key": "a name of the caller's own"}
    first = {"x-request-id": "first", "x-stainless-retry-count": "0", **same}
    house.engine.script = refusal(503, "queue_full")
    async with house.chat(headers=first) as answer:
        assert answer.status == 503
    house.engine.script = stream(chunk("a"), end=closing())
    retry = {"x-request-id": "second", "x-stainless-retry-count": "1", **same}
    async with house.chat(stream=True, headers=retry) as answer:
        await answer.read()
    await until(lambda: len(house.gateway._recorder) == 2)
    [record] = (await ask(house, "/second"))["data"]
    assert any("its first try, first, was refused (503 queue_full)" in one for one in record["causes"])
    refused, answered = await house.lines(2)
    assert (refused.get("retry"), answered["retry"]) == (None, 1)
    assert refused["idempotency"] == answered["idempotency"]
    assert "own" not in refused["idempotency"]


def waits_at(house: House, number: int) -> bool:
    return [one.stages.now for one in house.gateway.live].count("wait") == number


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_a_live_request_is_told_what_it_waits_for(open_house: Open) -> None:
    house: House = await open_house(admin=operator_keys())
    gate = asyncio.Event()
    house.engine.script = stream(gate, chunk("a"), end=closing())
    async with asyncio.TaskGroup() as tasks:
        asking = []
        for number, name in enumerate(("before", "mine"), 1):
            chat = house.chat(stream=True, headers={"x-request-id": name})
            asking.append(tasks.create_task(chat.__aenter__()))
            await until(partial(waits_at, house, number))
        [record] = (await ask(house, "/mine"))["data"]
        waits = (
            f"so far: {house.engine.url[7:]} had not begun to answer; that engine had tenant acme's before ("
        )
        assert waits in record["causes"][0]
        [record] = (await ask(house, "/before"))["data"]
        assert "that engine had" not in record["causes"][0]
        gate.set()
    for one in asking:
        await one.result().read()
    await house.at_rest()


def test_a_live_request_has_no_line_to_tell_of() -> None:
    record = RequestRecord(summary=api_summary(), axis=Axis(()))
    assert around.told(record, []) is record
