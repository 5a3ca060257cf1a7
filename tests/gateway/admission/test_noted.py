"""Requests of tenants without limits, where billing lines are written: what a killed gateway had open has its
line, each is counted once, and none waits for Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.admission.guarded_store import GuardedStore
from gateway.admission.quota import LEASE_TTL_MS
from gateway.admission.redis_store import RedisStore
from gateway.admission.usage import Totals, Used
from gateway.app import Gateway as App
from gateway.config.whole import load
from gateway.redis.link import RedisUnavailable, ReplySink
from tests.fakes import VirtualClock
from tests.gateway.admission.quota_calls import rid
from tests.gateway.admission.test_accounting import PAYER, rows
from tests.gateway.billing.test_unsettled import Gateway
from tests.gateway.conftest import settings, until
from tests.gateway.redis_server import RedisServer, redis_store

TTL_S: Final = LEASE_TTL_MS / 1000
USED: Final = Used(prompt=4, cached=1, completion=5)
ONCE: Final = [Totals(1, 4, 1, 5)]
ESTIMATED: Final = [Totals(1, 0, 0, 0, 1, 100)]


class Noting:
    """A gateway that writes billing lines, and what its Redis knows."""

    def __init__(self, store: RedisStore, clock: VirtualClock) -> None:
        self.store = store
        self.guarded = GuardedStore(store, clock=clock, notes_all=True)
        self.link = store._links.of(PAYER.tenant)

    def begin(self, name: object = 1) -> None:
        """Reserve for a request. Nothing is waited for."""
        call = self.guarded.reserve(rid(name), (), 100, 100, PAYER)
        with pytest.raises(StopIteration) as caught:
            call.send(None)
        assert caught.value.value.granted == 100

    async def answered(self) -> None:
        """Wait until Redis has answered what it was sent."""
        await self.guarded.renew([])

    async def settle(self, used: Used = USED, name: object = 1) -> None:
        await self.guarded.settle(rid(name), used)
        await self.store.settled()

    async def counted(self) -> list[Totals]:
        return [row.totals for row in await rows(self.guarded, "t")]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def house(redis: RedisServer, clock: VirtualClock) -> AsyncIterator[Noting]:
    async with redis_store(redis, clock=clock) as store:
        yield Noting(store, clock)


async def test_what_a_killed_gateway_had_open_has_its_line_and_is_counted(
    house: Noting, clock: VirtualClock, tmp_path: Path
) -> None:
    house.begin()
    await house.answered()
    clock.advance(TTL_S)
    living = Gateway(house.store, tmp_path / "lines", PAYER.tenant)
    await living.turn()
    assert [(line.id, line.estimated_tokens, line.request_id) for line in living.lines] == [("1", 100, None)]
    assert (living.lines[0].tenant, living.lines[0].key_id, living.lines[0].model) == ("t", "k", "org/m")
    other = GuardedStore(house.store, clock=clock)
    assert [row.totals for row in await rows(other, "t")] == ESTIMATED


async def test_a_long_request_of_a_living_gateway_has_its_own_line_alone(
    house: Noting, clock: VirtualClock, tmp_path: Path
) -> None:
    house.begin()
    await house.answered()
    for _ in range(9):
        clock.advance(TTL_S / 3)
        await house.guarded.renew([rid(1)])
    await house.settle()
    clock.advance(TTL_S)
    gateway = Gateway(house.store, tmp_path / "lines", PAYER.tenant)
    await gateway.turn()
    assert gateway.lines == []
    assert await house.counted() == ONCE


async def test_one_that_lived_after_all_replaces_the_estimate(house: Noting, clock: VirtualClock) -> None:
    """As of a process that was stopped for a while. Its own reservation has run out as well."""
    house.begin()
    await house.answered()
    clock.advance(TTL_S)
    assert len(await house.store.lapsed([PAYER.tenant], [])) == 1
    assert await house.counted() == ESTIMATED
    await house.settle()
    assert await house.counted() == ONCE


def deaf(answer: ReplySink) -> Any:
    """In its place: one that does not hear what Redis says."""

    class Deaf:
        def done(self) -> bool:
            return answer.done()

        def set_result(self, reply: object, /) -> None:
            answer.set_exception(RedisUnavailable("no answer came"))

        def set_exception(self, error: RedisUnavailable, /) -> None:
            answer.set_exception(error)

    return Deaf()


async def ends_at_once(house: Noting, redis: RedisServer) -> None:
    house.begin()


async def ends_later(house: Noting, redis: RedisServer) -> None:
    house.begin()
    await house.answered()


async def loses_the_answer(house: Noting, redis: RedisServer) -> None:
    send = house.link.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house.link, "send", lambda command, answer: send(command, deaf(answer)))
        house.begin()
    await house.answered()


async def forgets_the_script(house: Noting, redis: RedisServer) -> None:
    redis.admin.script_flush()
    house.begin()
    await house.answered()


async def forgets_the_script_and_ends_at_once(house: Noting, redis: RedisServer) -> None:
    redis.admin.script_flush()
    house.begin()


async def is_down(house: Noting, redis: RedisServer) -> None:
    house.link._down("a test")
    house.begin()
    await house.guarded.renew([])


async def goes_down_meanwhile(house: Noting, redis: RedisServer) -> None:
    house.begin()
    await house.answered()
    house.link._down("a test")
    await house.settle()
    await house.guarded.renew([])


async def breaks_on_the_way(house: Noting, redis: RedisServer) -> None:
    """The connection, after the call was sent on it: it goes again on the next one."""
    house.begin()
    house.link._flush()
    redis.admin.client_kill_filter(_type="normal", skipme=True)
    await house.answered()


WAYS: Final = (
    ends_at_once,
    ends_later,
    loses_the_answer,
    forgets_the_script,
    forgets_the_script_and_ends_at_once,
    is_down,
    goes_down_meanwhile,
    breaks_on_the_way,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_request_counts_once_whatever_redis_hears_of_it(
    own: RedisServer, clock: VirtualClock, tmp_path: Path, way: Callable[..., Any]
) -> None:
    async with redis_store(own, clock=clock) as store:
        house = Noting(store, clock)
        await way(house, own)
        await house.settle()
        await house.guarded.post()
        assert await house.counted() == ONCE
        assert not house.store._held
        assert house.guarded._local.live == 0
        assert house.guarded._local.ledger.outstanding == 0
        clock.advance(TTL_S)
        gateway = Gateway(store, tmp_path / "lines", PAYER.tenant)
        await gateway.turn()
        assert gateway.lines == [], "nothing is left that could lapse"
        assert await house.counted() == ONCE


async def test_a_redis_that_does_not_answer_costs_no_request_anything(
    own: RedisServer, clock: VirtualClock
) -> None:
    """Neither before it is known to be down, nor afterwards; and each is counted when it is back."""
    async with redis_store(own, clock=clock, timeout_s=0.2) as store:
        house = Noting(store, clock)
        own.stop_still()
        for name in range(50):
            house.begin(name)
        await until(lambda: not store.is_well)
        for name in range(50, 100):
            house.begin(name)
        assert not house.link._waiting, "nothing is kept for a server that is down"
        for name in range(100):
            await house.guarded.settle(rid(name), USED)
        own.go_on()
        while not store.is_well or store._held:
            await house.guarded.renew([])
            await store.settled()
        assert await house.counted() == [Totals(100, 400, 100, 500)]


async def test_without_billing_lines_nothing_is_asked_of_redis(house: Noting, clock: VirtualClock) -> None:
    def send(*_: object) -> None:
        pytest.fail("Redis was asked")

    guarded = GuardedStore(house.store, clock=clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house.link, "send", send)
        await guarded.enter(rid(1), (), needs_tokens=True)
        await guarded.reserve(rid(1), (), 100, 100, PAYER)
        await guarded.settle(rid(1), USED)
    assert [row.totals for row in await rows(guarded, "t")] == ONCE


@pytest.mark.parametrize("file", [None, "lines.jsonl"])
def test_a_gateway_notes_them_where_it_writes_lines(
    redis: RedisServer, tmp_path: Path, file: str | None
) -> None:
    accounting = {} if file is None else {"file": str(tmp_path / file)}
    sections: dict[str, Any] = {"redis": {"url": redis.url}, "quotas": {"store": "redis"}}
    guarded = App(load(settings("http://a", accounting=accounting, **sections), {}))._guarded
    assert guarded is not None
    assert guarded._notes_all == (file is not None)
