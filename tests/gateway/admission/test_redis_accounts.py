"""Accounts in Redis: how long they are kept, and what clocks and earlier versions do to them."""

from __future__ import annotations

import asyncio
import struct
import uuid

from msgspec.structs import replace

from gateway.admission.quota import WEIGHT
from gateway.admission.redis_store import RENEWED_MAX
from gateway.admission.usage import Used
from gateway.config.quotas import QuotaLimits
from tests.fakes import VirtualClock
from tests.gateway.admission.test_redis_store import admitted, rid, tenant
from tests.gateway.redis_server import RedisServer, redis_store


async def test_what_has_drained_leaves_no_key_for_ever_and_a_spent_budget_does(redis: RedisServer) -> None:
    prefix = f"test-{uuid.uuid4().hex}"
    async with redis_store(redis, prefix=prefix) as store:
        for who in (tenant("drains", requests_per_min=5, tokens_per_min=9), tenant("spends", token_budget=9)):
            name = rid(who[0].tenant)
            await store.enter(name, who, needs_tokens=True)
            await store.reserve(name, who, 5, 5)
            await store.settle(name, Used(completion=5))
    names = ("drains", "spends")
    ttl = {name: redis.admin.pttl(f"{prefix}:{{{name}}}:tenant:{name}") for name in names}
    assert ttl["drains"] > 0
    assert ttl["spends"] == -1
    assert not redis.admin.exists(f"{prefix}:leases", f"{prefix}:reservations")


async def test_leases_and_reservations_that_nobody_renews_go_by_themselves(redis: RedisServer) -> None:
    prefix = f"test-{uuid.uuid4().hex}"
    async with redis_store(redis, prefix=prefix) as store:
        await store.reserve(rid(1), tenant(token_budget=9), 5, 5)
        await store.renew([rid(1)])
        assert all(redis.admin.pttl(f"{prefix}:{key}") > 0 for key in ("leases", "reservations"))


async def test_many_leases_are_renewed_in_calls_of_a_bounded_length(redis: RedisServer) -> None:
    async with redis_store(redis) as store:
        names = [rid(number) for number in range(2 * RENEWED_MAX + 1)]
        await asyncio.gather(*(store.reserve(name, tenant(token_budget=9), 0, 0) for name in names))
        before = redis.admin.info("commandstats")["cmdstat_evalsha"]["calls"]
        await asyncio.gather(*store._renewals(names))
        assert redis.admin.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 3


async def test_a_call_without_a_limit_does_not_shorten_the_life_of_what_it_counted(
    redis: RedisServer,
) -> None:
    prefix, debt_ms = f"test-{uuid.uuid4().hex}", 10_000 * 60_000
    async with redis_store(redis, prefix=prefix) as store:
        for name, who in (("spends", tenant(token_budget=9)), ("owes", tenant("owes", tokens_per_min=1))):
            await store.reserve(rid(name), who, 1, 1)
            await store.settle(rid(name), Used(completion=10_000))
            await admitted(store, f"{name} 2", (replace(who[0], limits=QuotaLimits(concurrent=1)),))
    assert redis.admin.pttl(f"{prefix}:{{acme}}:tenant:acme") == -1
    assert redis.admin.pttl(f"{prefix}:{{owes}}:tenant:owes") > debt_ms


async def test_a_clock_that_was_ahead_and_is_put_right_holds_nobody_up(redis: RedisServer) -> None:
    clock, who = VirtualClock(), tenant(requests_per_min=2, tokens_per_min=100, tokens_per_day=100)
    other = tenant(concurrent=9)
    clock.advance(3600)
    async with redis_store(redis, clock=clock) as store:
        for i in range(2):
            assert await admitted(store, i, who)
        assert (await store.reserve(rid(0), who, 100, 100)).refusal is None
        clock._wall -= 3600
        assert await admitted(store, "other", other)
        assert not await admitted(store, 2, who), "time that runs backwards drains nothing"
        clock.advance(30)
        assert await admitted(store, 3, who)
        assert not await admitted(store, 4, who)
        windows = await store.windows(who)
        assert windows.tokens is not None
        assert windows.day is not None
        assert (windows.tokens.remaining, windows.day.remaining) == (50, 0)


async def test_an_account_that_an_earlier_version_wrote_is_read(redis: RedisServer) -> None:
    """Its buckets had no times of their own."""
    prefix, clock, who = (
        f"test-{uuid.uuid4().hex}",
        VirtualClock(),
        tenant(requests_per_min=2, token_budget=9),
    )
    now_ms = round(clock.wall() * 1000)
    written = struct.pack(">7d", 2 * WEIGHT, 0, now_ms - 1000, 0, 5, 0, 0)
    redis.admin.set(f"{prefix}:{{acme}}:tenant:acme", written)
    async with redis_store(redis, prefix=prefix, clock=clock) as store:
        refusal = (await store.enter(rid(1), who, needs_tokens=False)).refusal
        assert refusal is not None
        assert refusal.retry_after_ms == 29_000
        clock.advance(29)
        refusal = (await store.reserve(rid(2), who, 5, 5)).refusal
        assert refusal is not None
        assert refusal.remaining == 4
