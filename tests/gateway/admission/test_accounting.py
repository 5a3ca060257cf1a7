"""Accounting: what each store counts."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from gateway.admission import redis_calls, usage
from gateway.admission.guarded_store import POSTED_MAX, GuardedStore
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import DAY_MS, LEASE_TTL_MS, QuotaStore, Scope, StoreUnavailable, Subject
from gateway.admission.redis_calls import SCRIPT
from gateway.admission.redis_store import RedisStore
from gateway.admission.usage import Payer, Totals, UsageRow, Used
from gateway.config.quotas import QuotaFail, QuotaLimits
from shared.wire.errors import QuotaUnavailable
from shared.wire.ids import KeyId, TenantId
from tests.fakes import VirtualClock
from tests.gateway.admission.quota_calls import Both, remaining, rid, subject, take
from tests.gateway.redis_server import RedisServer
from tests.gateway.redis_server import redis_store as open_store

ROWS_MAX: Final = usage.ROWS_MAX
SMALL_SCRIPT: Final = SCRIPT.replace(f"local ROWS_MAX = {ROWS_MAX} ", "local ROWS_MAX = 3 ")
assert SMALL_SCRIPT != SCRIPT, "both stores have the same bound"
PAYER: Final = Payer(TenantId("t"), KeyId("k"), "org/m")
TODAY: Final = 1_700_000_000 // 86_400


async def rows(store: QuotaStore, tenant: str = "t", first: int = TODAY, last: int = TODAY) -> list[UsageRow]:
    found = [row async for row in store.usage(TenantId(tenant), first, last)]
    return sorted(found, key=lambda row: (row.day, row.key, row.model))


async def used_by(store: QuotaStore, name: object, used: Used | None, payer: Payer = PAYER) -> None:
    """One request that reserves 100 tokens, and is settled unless `used` is None."""
    who = [Subject(Scope.TENANT, payer.tenant, QuotaLimits(token_budget=10**6), payer.tenant)]
    await store.enter(rid(name), who, needs_tokens=True)
    await store.reserve(rid(name), who, 100, 100, payer)
    if used is not None:
        await store.settle(rid(name), used)


async def test_usage_is_counted_once_with_each_settlement(clock_and_store: Both) -> None:
    _, store = clock_and_store
    await used_by(store, 1, Used(prompt=10, cached=4, completion=30))
    await store.settle(rid(1), Used(prompt=10, cached=4, completion=30))
    await used_by(store, 2, Used(estimated=100))
    await used_by(store, 3, Used())
    await used_by(store, 4, Used(prompt=1), Payer(TenantId("t"), KeyId("k2"), "org/m"))
    assert await rows(store) == [
        UsageRow(TenantId("t"), KeyId("k"), "org/m", TODAY, Totals(3, 10, 4, 30, 1, 100)),
        UsageRow(TenantId("t"), KeyId("k2"), "org/m", TODAY, Totals(1, 1, 0, 0, 0, 0)),
    ]


async def test_whoever_has_usage_on_a_day_is_told(clock_and_store: Both) -> None:
    """However many keys of others lie between them, and whatever a tenant is called."""
    _, store = clock_and_store
    many = [TenantId(f"t {n}:{{%}}é") for n in range(600)]
    assert await store.payers(0, TODAY) == set()
    for number, tenant in enumerate(many):
        await used_by(store, number, Used(prompt=1), Payer(tenant, KeyId("k"), "m"))
    assert await store.payers(TODAY, TODAY) == set(many)
    assert await store.payers(TODAY - 1, TODAY + 1) == set(many)
    assert await store.payers(TODAY + 1, TODAY + 2) == await store.payers(0, TODAY - 1) == set()


async def test_a_lease_that_ran_out_is_counted_as_an_estimate(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    await used_by(store, "dead", None)
    await store.enter(rid("never reserved"), [subject(concurrent=5)], needs_tokens=True)
    clock.advance(LEASE_TTL_MS / 1000)
    await store.settle(rid("never reserved"), Used())
    assert [row.totals for row in await rows(store)] == [Totals(1, 0, 0, 0, 1, 100)]


async def test_a_settlement_that_comes_after_its_lease_replaces_the_estimate(clock_and_store: Both) -> None:
    """As of a gateway that was stopped, or cut off from Redis, for longer."""
    clock, store = clock_and_store
    who = [Subject(Scope.TENANT, PAYER.tenant, QuotaLimits(token_budget=1000, concurrent=9), PAYER.tenant)]
    for name in "late", "beside":
        await store.enter(rid(name), who, needs_tokens=True)
        await store.reserve(rid(name), who, 100, 100, PAYER)
    clock.advance(LEASE_TTL_MS / 1000 - 1)
    await store.renew([rid("beside")])
    clock.advance(1)
    await store.renew([])
    for _ in range(2):  # the first answer may have been lost
        await store.settle(rid("late"), Used(prompt=7, cached=3, completion=5))
    assert [row.totals for row in await rows(store)] == [Totals(1, 7, 3, 5, 0, 0)]
    refusal = (await take(store, rid("next"), who, 889, 889)).refusal
    assert refusal is not None
    assert refusal.remaining == 1000 - 12 - 100
    assert (await take(store, rid("next"), who, 888, 888)).refusal is None
    await store.settle(rid("beside"), Used(completion=1))
    await store.settle(rid("next"), Used())
    many = [await store.enter(rid(number), who, needs_tokens=True) for number in range(10)]
    assert [seat.refusal is None for seat in many] == [True] * 9 + [False], "each seat was given back once"


async def test_a_request_counts_on_the_day_on_which_its_tokens_were_reserved(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    clock.advance((TODAY + 1) * 86_400 - clock.wall() - 1)
    await used_by(store, "late", None)
    await used_by(store, "dead", None)
    clock.advance(2)
    await store.settle(rid("late"), Used(completion=7))
    clock.advance(LEASE_TTL_MS / 1000)
    await used_by(store, "next", Used(completion=5))
    found = {row.day: row.totals for row in await rows(store, last=TODAY + 1)}
    assert found == {TODAY: Totals(2, 0, 0, 7, 1, 100), TODAY + 1: Totals(1, 0, 0, 5, 0, 0)}


async def test_keys_beyond_the_most_rows_share_one_and_the_sum_is_exact(
    clock_and_store: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 keys of a tenant have rows of their own."""
    _, store = clock_and_store
    if not isinstance(store, MemoryStore):
        monkeypatch.setattr(redis_calls, "SCRIPT", SMALL_SCRIPT)
        monkeypatch.setattr(redis_calls, "SCRIPT_SHA", "0" * 40)
    monkeypatch.setattr(usage, "ROWS_MAX", 3)
    assert ROWS_MAX >= 10_000
    for i in range(6):
        for _ in range(2):
            payer = Payer(TenantId("t"), KeyId(f"k{i}"), "m")
            await used_by(store, f"{i}-{_}", Used(completion=5), payer)
    found = {(row.key, row.model): row.totals.requests for row in await rows(store)}
    assert found == {("k0", "m"): 2, ("k1", "m"): 2, ("k2", "m"): 2, ("*", "*"): 6}


# -- what a gateway counts by itself, and posts ---------------------------------------------------


async def lost_once(store: RedisStore, operation: str, call: Callable[[], Awaitable[object]]) -> None:
    """Make a call of which the store loses the answer after Redis has done it."""
    ask = store._ask

    async def deaf(tenant: TenantId, command: bytes) -> list[Any]:
        reply = await ask(tenant, command)
        if f"\r\n{operation}\r\n".encode() in command:
            raise StoreUnavailable("no answer came")
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_ask", deaf)
        await call()


def limited(fail: QuotaFail = "local") -> list[Subject]:
    return [Subject(Scope.TENANT, "t", QuotaLimits(tokens_per_day=1000), TenantId("t"), fail)]


async def test_a_reservation_whose_answer_is_lost_is_counted_once(redis: RedisServer) -> None:
    """This gateway grants the tokens itself then, and Redis may have done so, too."""
    clock = VirtualClock()
    async with open_store(redis, clock=clock) as store:
        guarded = GuardedStore(store, clock=clock)
        await guarded.enter(rid(1), limited(), needs_tokens=True)
        await lost_once(store, "reserve", lambda: guarded.reserve(rid(1), limited(), 10, 10, PAYER))
        await guarded.settle(rid(1), Used(prompt=4, completion=5))
        assert [row.totals for row in await rows(guarded)] == [Totals(1, 4, 0, 5)]


async def test_a_reservation_that_is_refused_because_its_answer_is_lost_counts_nowhere(
    redis: RedisServer,
) -> None:
    clock = VirtualClock()
    async with open_store(redis, clock=clock) as store:
        guarded = GuardedStore(store, clock=clock)
        await guarded.enter(rid(1), limited("closed"), needs_tokens=True)
        with pytest.raises(QuotaUnavailable):
            await lost_once(
                store, "reserve", lambda: guarded.reserve(rid(1), limited("closed"), 10, 10, PAYER)
            )
        await guarded.settle(rid(1), Used())
        assert await rows(guarded) == []
        assert remaining((await guarded.windows(limited())).day) == 1000


@pytest.mark.parametrize("fail", ["local", "closed"])
async def test_nor_does_it_count_where_the_outage_outlasts_its_lease(
    redis: RedisServer, fail: QuotaFail
) -> None:
    clock = VirtualClock()
    async with open_store(redis, clock=clock) as store:
        guarded = GuardedStore(store, clock=clock)
        await guarded.enter(rid(1), limited(fail), needs_tokens=True)

        async def ask() -> None:
            with contextlib.suppress(QuotaUnavailable):
                await guarded.reserve(rid(1), limited(fail), 10, 10, PAYER)

        await lost_once(store, "reserve", ask)
        clock.advance(LEASE_TTL_MS / 1000)
        await used_by(store, "somebody", Used())  # by now it is an estimate
        await guarded.settle(rid(1), Used(prompt=4, completion=5) if fail == "local" else Used())
        counted = Totals(2, 4, 0, 5) if fail == "local" else Totals(1)
        assert [row.totals for row in await rows(guarded)] == [counted]
        assert await store.lapsed([TenantId("t")], []) == []


async def test_a_settlement_whose_answer_is_lost_is_counted_once(redis: RedisServer) -> None:
    clock = VirtualClock()
    async with open_store(redis, clock=clock) as store:
        guarded = GuardedStore(store, clock=clock)
        await guarded.enter(rid(1), limited(), needs_tokens=True)
        await guarded.reserve(rid(1), limited(), 10, 10, PAYER)
        held = store._held[rid(1)]
        await guarded.settle(rid(1), Used(prompt=7))
        await store.settled()
        store._held[rid(1)] = held
        await guarded.renew([])
        assert [row.totals for row in await rows(guarded)] == [Totals(1, 7)]


async def test_a_post_whose_answer_is_lost_counts_once(redis: RedisServer) -> None:
    clock = VirtualClock()
    async with open_store(redis, clock=clock) as store:
        guarded = GuardedStore(store, clock=clock)
        for number in range(250):  # more than one post takes
            payer = Payer(TenantId("t"), KeyId(f"k{number}"), "m")
            await guarded.reserve(rid(number), [], 10, 10, payer)
            await guarded.settle(rid(number), Used(prompt=1))
        for _ in range(2):
            await lost_once(store, "post", guarded.post)
        [waiting] = guarded._unposted.values()
        assert max(len(one.sheet) for one in waiting) == POSTED_MAX
        with pytest.raises(StoreUnavailable):  # whether all is there is not known
            await lost_once(store, "post", lambda: rows(guarded))
        found = await rows(guarded)
        assert (len(found), {row.totals.requests for row in found}) == (250, {1})


async def test_many_rows_are_read_page_by_page(redis: RedisServer) -> None:
    clock = VirtualClock()
    async with open_store(redis, clock=clock) as store:
        sheet = {(KeyId(f"key-{number}"), "m"): Totals(1, number) for number in range(3000)}
        await store.post("gateway", 1, TenantId("t"), TODAY, sheet)
        calls: list[int] = []
        ask = store._ask

        async def counted(tenant: TenantId, command: bytes) -> list[Any]:
            reply = await ask(tenant, command)
            calls.append(len(reply))
            return reply

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_ask", counted)
            found = await rows(store)
        assert {(row.key, row.model): row.totals for row in found} == sheet
        assert max(calls) < 3000 * 7 / 2


async def test_a_day_is_kept_in_memory_as_long_as_it_shall_be() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock, days_kept=3)
    for number in range(5):
        await used_by(store, number, Used(prompt=1))
        clock.advance(86_400)
    assert [row.day for row in await rows(store, first=0, last=10**6)] == [TODAY + i for i in (2, 3, 4)]


async def test_a_day_is_kept_in_redis_as_long_as_it_shall_be(redis: RedisServer) -> None:
    clock = VirtualClock()
    async with open_store(redis, clock=clock, days_kept=3) as store:
        await used_by(store, 1, Used(prompt=1))
        await store.settled()
        left_ms = redis.admin.pttl(f"{store._usage_key(TenantId('t'))}{TODAY}")
    expected_ms = (TODAY + 3) * DAY_MS - round(clock.wall() * 1000)
    assert 0 <= expected_ms - left_ms < 60_000
