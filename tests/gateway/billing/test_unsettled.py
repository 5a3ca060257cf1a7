"""Billing lines for what nobody settled: each lapsed reservation has one, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from gateway.admission import redis_calls
from gateway.admission.guarded_store import GuardedStore
from gateway.admission.quota import LEASE_TTL_MS, Scope, Subject
from gateway.admission.redis_store import RedisStore
from gateway.admission.usage import Payer, Used
from gateway.billing import unsettled
from gateway.billing.lines import Billing, BillingLine
from gateway.billing.unsettled import Unsettled
from gateway.config.accounting import AccountingConfig
from gateway.config.quotas import QuotaLimits
from shared.wire.ids import KeyId, TenantId
from tests.fakes import VirtualClock
from tests.gateway.admission.quota_calls import rid
from tests.gateway.admission.test_accounting import used_by
from tests.gateway.billing.test_billing import note, read
from tests.gateway.conftest import until
from tests.gateway.redis_cluster import formed_cluster
from tests.gateway.redis_server import RedisServer, redis_store

TENANT: Final = TenantId("t {1}:%é")
GIVEN_S: Final = 60.0
"""As `quota.lua` has it."""


class Gateway:
    """What one gateway has of all this: a file, and turns."""

    def __init__(self, store: RedisStore, file: Path, *tenants: TenantId) -> None:
        self.file = file
        self.billing = Billing(AccountingConfig(file=str(file)))
        self.unsettled = Unsettled(GuardedStore(store), self.billing, lambda: tenants)

    async def turn(self) -> None:
        writing = asyncio.create_task(self.billing.write())
        await self.unsettled.turn()
        writing.cancel()
        await asyncio.wait([writing])

    async def dies_in_its_turn(self, queued: int = 1) -> None:
        """It has been given what there is, and its disk takes nothing."""
        turn = asyncio.create_task(self.unsettled.turn())
        await until(lambda: len(self.billing._queue) == queued)
        turn.cancel()
        await asyncio.wait([turn])

    @property
    def lines(self) -> list[BillingLine]:
        return read(self.file)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(redis: RedisServer, clock: VirtualClock) -> AsyncIterator[RedisStore]:
    async with redis_store(redis, clock=clock) as opened:
        yield opened


async def abandon(
    store: RedisStore, clock: VirtualClock, *names: object, tenant: TenantId = TENANT, tokens: int = 100
) -> None:
    """Requests whose gateway dies: their leases run out."""
    who = [Subject(Scope.TENANT, tenant, QuotaLimits(token_budget=10**9), tenant)]
    for name in names:
        await store.enter(rid(name), who, needs_tokens=True)
        await store.reserve(rid(name), who, tokens, tokens, Payer(tenant, KeyId("k/ 1"), "org/m x"))
    clock.advance(LEASE_TTL_MS / 1000)


async def test_what_lapsed_has_a_line_each_and_one_gateway_writes_it(
    store: RedisStore, clock: VirtualClock, tmp_path: Path
) -> None:
    reserved_s = clock.wall()
    await abandon(store, clock, "a", "b")
    first, second = (Gateway(store, tmp_path / name, TENANT) for name in "12")
    await first.turn()
    await second.turn()
    assert sorted(line.id for line in first.lines) == ["a", "b"]
    assert second.lines == []
    line = first.lines[0]
    assert (line.tenant, line.key_id, line.model) == (TENANT, "k/ 1", "org/m x")
    assert (line.estimated_tokens, line.prompt_tokens, line.completion_tokens) == (100, 0, 0)
    assert line.request_id is None
    assert line.day.toordinal() == int(reserved_s // 86_400) + 719_163
    clock.advance(GIVEN_S)
    await second.turn()
    await first.turn()
    assert (len(first.lines), second.lines) == (2, [])


async def test_what_a_gateway_was_given_before_it_died_is_given_to_another(
    store: RedisStore, clock: VirtualClock, tmp_path: Path
) -> None:
    await abandon(store, clock, "a")
    dead, living = (Gateway(store, tmp_path / name, TENANT) for name in ("dead", "living"))
    await dead.dies_in_its_turn()
    await living.turn()
    assert living.lines == []
    clock.advance(GIVEN_S)
    await living.turn()
    assert [line.id for line in living.lines] == ["a"]


async def test_a_line_is_said_to_be_written_once_it_is_in_the_file_whatever_is_queued(
    store: RedisStore, clock: VirtualClock, tmp_path: Path
) -> None:
    await abandon(store, clock, "a")
    full, other = (Gateway(store, tmp_path / name, TENANT) for name in ("full", "other"))
    note(full.billing, 0)
    turn = asyncio.create_task(full.unsettled.turn())
    await until(lambda: len(full.billing._queue) == 2)
    note(full.billing, 1)
    clock.advance(GIVEN_S)
    await other.turn()
    assert [line.id for line in other.lines] == ["a"], "its disk takes nothing"
    assert full.billing.spool is not None
    writing = asyncio.create_task(full.billing.write())
    await turn  # though there is always another line behind
    writing.cancel()
    await asyncio.wait([writing])
    assert "a" in [line.id for line in full.lines]


async def test_what_was_settled_after_all_has_its_settlements_line_alone(
    store: RedisStore, clock: VirtualClock, tmp_path: Path
) -> None:
    await abandon(store, clock, "a", "b")
    gateway = Gateway(store, tmp_path / "lines", TENANT)
    await used_by(store, "notices", Used())
    await store.settle(rid("a"), Used(prompt=3, completion=4))
    await store.settled()
    await gateway.turn()
    assert [line.id for line in gateway.lines] == ["b"]


async def test_a_question_that_nobody_waits_for_gives_nothing(
    redis: RedisServer, clock: VirtualClock, tmp_path: Path
) -> None:
    """A server that was stopped finds it when it goes on."""
    async with redis_store(redis, clock=clock, prefix="test-late") as store:
        await abandon(store, clock, "a")
        async with redis_store(redis, prefix="test-late") as asks:
            link = asks._links.of(TENANT)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(link), "deadline_ms", 1.0)
                assert await asks.lapsed([TENANT], []) == []
        gateway = Gateway(store, tmp_path / "lines", TENANT)
        await gateway.turn()
        assert [line.id for line in gateway.lines] == ["a"]


async def test_what_is_settled_or_was_never_admitted_has_none(
    store: RedisStore, clock: VirtualClock, tmp_path: Path
) -> None:
    who = [Subject(Scope.TENANT, TENANT, QuotaLimits(concurrent=5), TENANT)]
    await store.enter(rid("refused later"), who, needs_tokens=True)
    await store.reserve(rid("settled"), who, 10, 10, Payer(TENANT, KeyId("k"), "m"))
    await store.settle(rid("settled"), Used(prompt=3))
    clock.advance(LEASE_TTL_MS / 1000)
    gateway = Gateway(store, tmp_path / "lines", TENANT)
    await gateway.turn()
    assert gateway.lines == []


async def test_a_turn_takes_all_that_there_are(
    store: RedisStore, clock: VirtualClock, tmp_path: Path
) -> None:
    """A gateway with a thousand requests was killed; one call gives a hundred."""
    await abandon(store, clock, *range(1000))
    gateway = Gateway(store, tmp_path / "lines", TENANT)
    await gateway.turn()
    assert len(gateway.lines) == len({line.id for line in gateway.lines}) == 1000


async def test_they_are_bounded_and_all_are_counted(
    redis: RedisServer, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = redis_calls.SCRIPT.replace("local LAPSED_MAX = 10000", "local LAPSED_MAX = 5")
    assert small != redis_calls.SCRIPT
    monkeypatch.setattr(redis_calls, "SCRIPT", small)
    monkeypatch.setattr(redis_calls, "SCRIPT_SHA", "1" * 40)
    async with redis_store(redis, clock=clock) as store:
        await abandon(store, clock, *range(4))
        await abandon(store, clock, *range(4, 8))
        gateway = Gateway(store, tmp_path / "lines", TENANT)
        await gateway.turn()
        assert len(gateway.lines) == 5
        day = int(clock.wall() // 86_400)
        (row,) = [row async for row in store.usage(TENANT, day - 1, day)]
        assert (row.totals.requests, row.totals.estimated_tokens) == (8, 800)


async def test_a_record_that_is_none_stops_no_other(
    redis: RedisServer, clock: VirtualClock, tmp_path: Path
) -> None:
    async with redis_store(redis, clock=clock, prefix="test-odd") as store:
        odd: dict[bytes, float] = {b"": 0, b"a b": 0, b"\xff 1 2 3 4": 0, b"a x 1 {t}: k/m": 0}
        redis.admin.zadd("test-odd:lapsed", odd)
        await abandon(store, clock, "a")
        gateway = Gateway(store, tmp_path / "lines", TENANT)
        await gateway.turn()
        assert [line.id for line in gateway.lines] == ["a"]


async def test_of_many_tenants_each_has_its_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unsettled, "TENANTS_MAX", 4)
    asked: list[set[TenantId]] = []

    class Store:
        is_well = True

        async def lapsed(self, tenants: set[TenantId], written: object) -> list[object]:
            asked.append(tenants)
            return []

    tenants = [TenantId(f"t{number}") for number in range(10)]
    gateway = Gateway(Store(), tmp_path / "lines", *tenants)  # type: ignore[arg-type]
    for _ in range(5):
        await gateway.turn()
    assert all(len(turn) == 4 for turn in asked)
    assert set.union(*asked[:3]) == set(tenants)
    await Gateway(Store(), tmp_path / "none").turn()  # type: ignore[arg-type]
    assert asked[-1] == set()


async def test_in_a_cluster_a_node_that_is_down_keeps_its_own_alone(
    clock: VirtualClock, tmp_path: Path
) -> None:
    async with formed_cluster() as cluster:
        names = [TenantId(name) for name in cluster.tenants]
        at = cluster.nodes[0]
        async with redis_store(at, clock=clock, url=cluster.url, cluster=True) as store:
            for name in names:
                await abandon(store, clock, f"of {name}".replace(" ", "-"), tenant=name)
            cluster.nodes[0].kill()
            gateway = Gateway(store, tmp_path / "lines", *names)
            await gateway.turn()
            assert {line.tenant for line in gateway.lines} == set(names[1:])
            await gateway.turn()
            clock.advance(GIVEN_S)
            await gateway.turn()
            assert len(gateway.lines) == len(names) - 1
