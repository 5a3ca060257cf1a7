"""Quotas in Redis: equal to those in memory, exact over several stores, and what outages do. What any store
does is in `test_quota.py`, several gateway processes are in `test_gateways.py`."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec.structs import replace

from gateway.admission.guarded_store import GuardedStore
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import QuotaStore, ReservationId, Scope, Settlement, StoreUnavailable, Subject
from gateway.admission.redis_store import RedisStore
from gateway.admission.store_failures import FAILURES
from gateway.admission.usage import Payer, UsageRow, Used
from gateway.config.quotas import QuotaFail, QuotaLimits
from shared.wire.errors import QuotaUnavailable
from shared.wire.ids import KeyId, TenantId
from tests.effort import drawn
from tests.fakes import VirtualClock
from tests.gateway.conftest import until
from tests.gateway.redis_server import RedisServer, redis_server, redis_store
from tests.loops import on_both_loops
from tests.waiting import PATIENCE_S

T = TypeVar("T")

ACME: Final = TenantId("acme")


def tenant(id_: str = "acme", fail: QuotaFail = "closed", **limits: int | None) -> tuple[Subject, ...]:
    return (Subject(Scope.TENANT, id_, QuotaLimits(**limits), TenantId(id_), fail),)


def rid(name: object) -> ReservationId:
    return ReservationId(str(name))


async def admitted(store: QuotaStore, name: object, who: tuple[Subject, ...]) -> bool:
    return (await store.enter(rid(name), who, needs_tokens=False)).refusal is None


# -- equal to the store in memory -----------------------------------------------------------------


NEW_YEAR_MS: Final = 1_798_761_600_000  # 2027-01-01
LEAP_MARCH_MS: Final = 1_835_481_600_000  # 2028-03-01
DAYS_KEPT: Final = 3


class Twins(RuleBasedStateMachine):
    """The stores in memory and in Redis, told the same, answer the same, and have counted the same."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.names = 0

    @initialize(
        month_end=st.sampled_from([NEW_YEAR_MS, LEAP_MARCH_MS]), before_ms=st.integers(0, 2 * 86_400_000)
    )
    def begin(self, month_end: int, before_ms: int) -> None:
        self.clock = VirtualClock(wall=(month_end - before_ms) / 1000)
        self.memory = MemoryStore(self.clock, DAYS_KEPT)
        opened = redis_store(self.server, clock=self.clock, days_kept=DAYS_KEPT)
        self.redis: RedisStore = self.runner.run(self.stack.enter_async_context(opened))

    def both(self, call: Callable[[QuotaStore], Awaitable[T]]) -> T:
        async def awaited(store: QuotaStore) -> T:
            return await call(store)

        expected = self.runner.run(awaited(self.memory))
        assert self.runner.run(awaited(self.redis)) == expected
        return expected

    def subjects(self, which: int, limits: list[QuotaLimits]) -> tuple[Subject, ...]:
        both = (Subject(Scope.KEY, "k é", limits[0], ACME), Subject(Scope.TENANT, ACME, limits[1], ACME))
        return both[:which] if which else both[1:]

    def with_model(self, who: tuple[Subject, ...], limits: list[QuotaLimits]) -> tuple[Subject, ...]:
        scopes = (Scope.KEY_MODEL, "k é/m"), (Scope.TENANT_MODEL, "acme/m"), (Scope.MODEL, "m")
        more = zip(scopes, limits, strict=False)
        return who + tuple(Subject(scope, id_, limit, ACME) for (scope, id_), limit in more)

    limits = st.builds(
        QuotaLimits,
        st.none() | st.integers(0, 40),
        st.none() | st.integers(0, 9000),
        st.none() | st.integers(0, 4),
        st.none() | st.integers(0, 60_000),
        st.none() | st.integers(0, 20_000),
        st.none() | st.integers(0, 40_000),
    )
    some = st.lists(limits, min_size=2, max_size=2)
    tokens = st.integers(0, 9000)
    used = st.builds(Used, tokens, tokens, tokens) | st.builds(Used, estimated=tokens)
    payers = st.sampled_from([None, Payer(ACME, KeyId("k é"), "m"), Payer(ACME, KeyId("k"), "org/m x")])

    @rule(which=st.integers(0, 2), limits=some, needs_tokens=st.booleans())
    def enter(self, which: int, limits: list[QuotaLimits], needs_tokens: bool) -> None:
        self.names += 1
        who, name = self.subjects(which, limits), rid(self.names)
        self.both(lambda store: store.enter(name, who, needs_tokens=needs_tokens))

    @rule(
        back=st.integers(0, 5),
        limits=some,
        model=st.lists(limits, max_size=3),
        least=st.integers(0, 6000),
        more=st.integers(0, 9000),
        payer=payers,
        wanted=st.integers(0, 20_000),
    )
    def reserve(
        self,
        back: int,
        limits: list[QuotaLimits],
        model: list[QuotaLimits],
        least: int,
        more: int,
        payer: Payer | None,
        wanted: int = 0,
    ) -> None:
        name = rid(self.names - back)
        entry, held = self.memory._reservations.get(name), self.redis._held.get(name)
        who = self.subjects(2, limits) if held is None else held.subjects
        if entry is None or not any("model" in subject.scope for subject in entry.subjects):
            who = self.with_model(tuple(s for s in who if "model" not in s.scope), model)
        else:
            who = entry.subjects  # it was granted
        self.both(lambda store: store.reserve(name, who, least, least + more, payer, wanted=wanted))

    @rule(back=st.integers(0, 8), used=used)
    def settle(self, back: int, used: Used) -> None:
        async def settled() -> None:
            name = rid(self.names - back)
            expected, told = await self.memory.settle(name, used), await self.redis.settle(name, used)
            await self.redis.settled()
            assert name not in self.redis._held
            if expected is not None:  # otherwise its lease may have lapsed, which Redis alone knows
                assert told == expected

        self.runner.run(settled())

    @rule(back=st.integers(0, 8))
    def renew(self, back: int) -> None:
        names = [rid(self.names - i) for i in range(back)]
        self.both(lambda store: store.renew(names))

    @rule(limits=some, model=st.lists(limits, max_size=3))
    def windows(self, limits: list[QuotaLimits], model: list[QuotaLimits]) -> None:
        who = self.with_model(self.subjects(2, limits), model)
        self.both(lambda store: store.windows(who))

    @rule()
    def usage(self) -> None:
        today = int(self.clock.wall()) // 86_400

        noticing = rid(1_000_000), self.subjects(2, [QuotaLimits(), QuotaLimits()])

        async def rows(store: QuotaStore) -> list[UsageRow]:
            await store.reserve(*noticing, 0, 0, None)  # each notices the leases that have run out
            await store.settle(noticing[0], Used())
            await self.redis.settled()
            found = [row async for row in store.usage(ACME, today - 1, today)]
            return sorted(found, key=lambda row: (row.day, row.key, row.model))

        self.both(rows)

    @rule(ms=st.integers(0, 500) | st.integers(0, 90_000) | st.sampled_from([3_600_000, 86_400_000]))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms / 1000)

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


@pytest.mark.slow
def test_memory_and_redis_answer_alike_step_by_step(redis: RedisServer) -> None:
    Twins.server = redis
    run_state_machine_as_test(
        Twins, settings=settings(max_examples=drawn(20, whole=300), stateful_step_count=40, deadline=None)
    )


def test_who_asks_again_after_its_lease_and_is_refused_still_settles_what_it_had(redis: RedisServer) -> None:
    Twins.server = redis
    twins = Twins()
    try:
        twins.begin(month_end=NEW_YEAR_MS, before_ms=0)
        enough, too_little = QuotaLimits(tokens_per_min=100), QuotaLimits(tokens_per_min=10)
        payer = Payer(ACME, KeyId("k é"), "m")
        twins.reserve(back=0, limits=[enough] * 2, model=[], least=71, more=0, payer=payer)
        twins.wait(ms=3_600_000)
        twins.reserve(back=0, limits=[enough] * 2, model=[too_little], least=71, more=0, payer=payer)
        twins.settle(back=0, used=Used(estimated=30))
        twins.usage()
    finally:
        twins.teardown()


# -- exact over several gateways ------------------------------------------------------------------


async def test_a_thousand_callers_of_three_stores_share_a_hundred_requests_a_minute(
    redis: RedisServer,
) -> None:
    prefix, clock, who = f"test-{uuid.uuid4().hex}", VirtualClock(), tenant(requests_per_min=100)
    async with AsyncExitStack() as stack:
        one = [redis_store(redis, prefix=prefix, clock=clock) for _ in range(3)]
        stores = [await stack.enter_async_context(store) for store in one]
        asked = (admitted(stores[i % 3], i, who) for i in range(1000))
        assert sum(await asyncio.gather(*asked)) == 100


async def test_leases_of_a_process_that_died_are_gone_within_their_time_to_live(redis: RedisServer) -> None:
    prefix, who = f"test-{uuid.uuid4().hex}", tenant(concurrent=2, token_budget=100)
    clock = VirtualClock()
    async with redis_store(redis, prefix=prefix, clock=clock, lease_ttl_ms=1000) as dead:
        await admitted(dead, "a", who)
        await dead.reserve(rid("a"), who, 60, 60)
        await admitted(dead, "b", who)
    async with redis_store(redis, prefix=prefix, clock=clock, lease_ttl_ms=1000) as store:
        assert not await admitted(store, 1, who)
        clock.advance(1)
        assert await admitted(store, 2, who)
        assert await admitted(store, 3, who)
        refusal = (await store.reserve(rid(2), who, 41, 41)).refusal
        assert refusal is not None, "what it had reserved counts as used"
        assert refusal.remaining == 40


async def test_a_settlement_that_is_sent_twice_settles_once(redis: RedisServer) -> None:
    """As a store does that did not hear the answer to the first."""
    who = tenant(token_budget=100)
    async with redis_store(redis) as store:
        await admitted(store, 1, who)
        await store.reserve(rid(1), who, 50, 50)
        held = store._held[rid(1)]
        assert await store.settle(rid(1), Used(completion=20)) == Settlement(50, 20)
        assert await store.settle(rid(1), Used(completion=20)) is None
        await store.settled()
        assert not store._held
        store._held |= {rid(1): held, rid("nobody's"): replace(held)}
        await store.renew([])
        await store.settled()
        assert not store._held, "of one that Redis does not know it hears that, too"
        assert (await store.reserve(rid(2), who, 80, 80)).refusal is None
        assert (await store.reserve(rid(3), who, 1, 1)).refusal is not None


async def test_a_settlement_comes_before_the_next_call_of_its_process(redis: RedisServer) -> None:
    """Nobody waits for it, and it gives its seat to the next one."""
    who = tenant(concurrent=1)
    async with redis_store(redis) as store:
        for i in range(20):
            assert await admitted(store, i, who)
            await store.settle(rid(i), Used())


async def test_what_is_under_way_is_settled_before_the_connection_is_closed(redis: RedisServer) -> None:
    prefix, who = f"test-{uuid.uuid4().hex}", tenant(token_budget=1000)
    async with redis_store(redis, prefix=prefix) as store:
        for i in range(9):
            await store.reserve(rid(i), who, 100, 100)
        for i in range(9):
            await store.settle(rid(i), Used(completion=1))
    assert not redis.admin.exists(f"{prefix}:leases", f"{prefix}:reservations")
    async with redis_store(redis, prefix=prefix) as store:
        assert (await store.reserve(rid("next"), who, 991, 991)).refusal is None


async def test_what_failed_is_settled_before_the_connection_is_closed() -> None:
    prefix, who = f"test-{uuid.uuid4().hex}", tenant(concurrent=1)
    with redis_server() as own:
        async with redis_store(own, prefix=prefix) as store:
            assert await admitted(store, 1, who)
            own.admin.config_set("min-replicas-to-write", 1)
            await store.settle(rid(1), Used())
            await store.settled()
            assert not store.is_well
            own.admin.config_set("min-replicas-to-write", 0)
        assert not own.admin.exists(f"{prefix}:leases", f"{prefix}:reservations")


async def test_a_call_whose_caller_has_given_up_does_nothing(redis: RedisServer) -> None:
    who = tenant(concurrent=1)
    async with redis_store(redis) as store:
        link = store._links.of(ACME)
        link._ahead_ms = link._ahead_before_ms = link._ahead_before_ms - 60_000  # as if a minute ago
        with pytest.raises(StoreUnavailable, match="LATE"):
            await admitted(store, 1, who)
        await store.renew([])
        assert await admitted(store, 2, who)


@on_both_loops
async def test_an_event_loop_that_was_held_up_is_no_outage(redis: RedisServer) -> None:
    """The reply is there when the loop goes on, and its time is that of the server when it was sent."""
    who = tenant(concurrent=9)
    async with redis_store(redis, timeout_s=0.15) as store:
        for i in range(2):
            call = asyncio.ensure_future(admitted(store, i, who))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # it is sent
            time.sleep(0.3)  # noqa: ASYNC251 -- a loop that is held up is what this is about
            assert await call


async def test_a_script_that_the_server_has_forgotten_is_sent_again(redis: RedisServer) -> None:
    who = tenant(concurrent=1)
    with redis_server() as own:
        async with redis_store(own) as store:
            own.admin.script_flush()
            assert await admitted(store, 1, who)
            assert store.is_well


async def test_a_connection_that_breaks_is_made_anew_without_a_failure(redis: RedisServer) -> None:
    who = tenant(concurrent=5)
    with redis_server() as own:
        async with redis_store(own) as store:
            for i in range(3):
                own.admin.client_kill_filter(_type="normal", skipme=True)
                assert await admitted(store, i, who)
                assert store.is_well


# -- outages --------------------------------------------------------------------------------------


class Outage:
    """A server, and a guarded store whose calls are over soon, though not so soon that a busy machine is one
    that is down."""

    def __init__(self, server: RedisServer, store: RedisStore) -> None:
        self.server = server
        self.store = store
        self.guarded = GuardedStore(store, gateways=2)
        self.names = 0

    async def answers(self, fail: QuotaFail) -> str:
        """What one more request of a tenant with this fail mode gets: at most 4 at once, 2 of them here."""
        self.names += 1
        who = tenant(fail, fail, concurrent=4)
        try:
            decision = await self.guarded.enter(rid(self.names), who, needs_tokens=False)
        except QuotaUnavailable:
            return "503"
        return "admitted" if decision.refusal is None else f"429 of {decision.refusal.limit}"

    async def shows_both_fail_modes(self) -> None:
        """And keeps nobody waiting: no call reaches the connection while it is down."""
        assert await self.answers("closed") == "503"
        assert not self.guarded.is_well
        assert [await self.answers("local") for _ in range(3)] == ["admitted", "admitted", "429 of 2"]
        link = self.store._links.of(ACME)
        assert not link._waiting

    async def recovers(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.guarded.is_well:
                await self.guarded.renew([])
        assert await self.answers("closed") == "admitted"


@contextlib.asynccontextmanager
async def outage(server: RedisServer) -> AsyncIterator[Outage]:
    async with redis_store(server, timeout_s=0.4) as store:
        yield Outage(server, store)


async def test_a_redis_that_is_stopped(own: RedisServer) -> None:
    async with outage(own) as house:
        own.stop_still()
        await house.shows_both_fail_modes()
        await house.guarded.renew([])
        assert not house.guarded.is_well, "it accepts a connection, and does not answer"
        own.go_on()
        await house.recovers()


async def test_a_redis_that_is_killed_and_restarted_empty(own: RedisServer) -> None:
    async with outage(own) as house:
        assert await house.answers("closed") == "admitted"
        own.kill()
        await house.shows_both_fail_modes()
        own.start()
        await house.recovers()
        await house.guarded.settle(rid(1), Used())
        await house.store.settled()
        assert rid(1) not in house.store._held, "it is forgotten"


async def test_a_redis_that_pauses_its_clients(own: RedisServer) -> None:
    async with outage(own) as house:
        own.admin.client_pause(timeout=60_000, all=False)  # all of it would keep this one waiting, too
        await house.shows_both_fail_modes()
        own.admin.client_unpause()
        await house.recovers()


async def test_a_redis_that_is_out_of_memory(own: RedisServer) -> None:
    async with outage(own) as house:
        own.admin.config_set("maxmemory-policy", "noeviction")
        own.admin.config_set("maxmemory", "1")
        await house.shows_both_fail_modes()
        await house.guarded.renew([])
        assert not house.guarded.is_well, "it answers, and takes no writes"
        own.admin.config_set("maxmemory", "0")
        await house.recovers()


async def test_a_redis_that_has_become_a_replica(own: RedisServer, redis: RedisServer) -> None:
    async with outage(own) as house:
        own.admin.replicaof("127.0.0.1", redis.port)
        await house.shows_both_fail_modes()
        await house.guarded.renew([])
        assert not house.guarded.is_well
        own.admin.replicaof("NO", "ONE")
        await house.recovers()


async def test_a_redis_without_the_replicas_that_it_must_have(own: RedisServer) -> None:
    async with outage(own) as house:
        own.admin.config_set("min-replicas-to-write", 1)
        await house.shows_both_fail_modes()
        own.admin.config_set("min-replicas-to-write", 0)
        await house.recovers()


async def test_what_could_not_be_settled_is_settled_when_the_store_is_well(own: RedisServer) -> None:
    async with outage(own) as house:
        who = tenant("t", concurrent=4, token_budget=100)
        await house.guarded.enter(rid("r"), who, needs_tokens=True)
        await house.guarded.reserve(rid("r"), who, 100, 100)
        own.admin.config_set("min-replicas-to-write", 1)
        failures = FAILURES.value("settle")
        assert await house.guarded.settle(rid("r"), Used(completion=10)) == Settlement(100, 10)
        await house.store.settled()
        assert (house.guarded.is_well, FAILURES.value("settle")) == (False, failures + 1)
        own.admin.config_set("min-replicas-to-write", 0)
        await house.recovers()
        assert (await house.guarded.reserve(rid("next"), who, 90, 90)).refusal is None


async def test_a_call_that_a_stopped_server_finds_when_it_goes_on_does_nothing(own: RedisServer) -> None:
    async with outage(own) as house:
        own.stop_still()
        assert await house.answers("closed") == "503"
        # Later than the caller waited, by the clock that both read.
        started = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > started + 0.1)
        own.go_on()
        await house.recovers()
        keys = own.admin.keys("*:reservations")
        assert [own.admin.hlen(key) for key in keys] == [1], "the one after the recovery"


async def test_a_caller_without_limits_asks_nothing_of_redis(redis: RedisServer) -> None:
    def calls() -> int:
        asked: int = redis.admin.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        return asked

    async with redis_store(redis) as store:
        before = calls()
        seated = await store.enter(rid(1), (), needs_tokens=True)
        reserved = await store.reserve(rid(1), (), 5, 50)
        assert (seated.refusal, reserved.granted, reserved.refusal) == (None, 50, None)
        assert await store.settle(rid(1), Used(completion=20)) is None
        assert calls() == before
