"""Limits of a model over all tenants in a Cluster: one node counts for all, and the others may die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import pytest
from redis.crc import key_slot

from gateway.admission.quota import Scope, StoreUnavailable, Subject
from gateway.admission.redis_store import ONE_TAG, RedisStore
from gateway.admission.usage import Totals
from gateway.config.quotas import QuotaLimits
from shared.wire.ids import KeyId, TenantId
from tests.gateway.admission.test_redis_store import admitted, rid, tenant
from tests.gateway.redis_cluster import Cluster, formed_cluster
from tests.gateway.redis_server import redis_store


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with formed_cluster() as formed:
        yield formed


def one_node(cluster: Cluster, **settings: Any) -> AbstractAsyncContextManager[RedisStore]:
    """A store whose keys are all on one node, so that a model can have limits over all tenants."""
    options = {"url": cluster.url, "cluster": True, "one_node": True, "prefix": "test", **settings}
    return redis_store(cluster.nodes[0], **options)


ALL_SLOT: Final = key_slot(ONE_TAG.encode())


def limited_model(tenant_id: str, concurrent: int) -> tuple[Subject, ...]:
    """A request's subjects: its tenant, and a model that all share."""
    limits = QuotaLimits(concurrent=concurrent)
    model = Subject(Scope.MODEL, "tiny", limits, TenantId(tenant_id))
    return (*tenant(tenant_id, concurrent=concurrent), model)


async def test_a_models_limit_over_all_tenants_is_counted_on_one_node(cluster: Cluster) -> None:
    async with one_node(cluster) as a, one_node(cluster) as b:
        subjects = {name: limited_model(name, 10) for name in cluster.tenants}
        asked = [
            reserved((a, b)[i % 2], f"{name}{i}", who) for name, who in subjects.items() for i in range(50)
        ]
        assert sum(await asyncio.gather(*asked)) == 10
        assert a.is_well
        assert b.is_well
        for number, name in enumerate(cluster.tenants, 1):
            await a.post("gateway", number, TenantId(name), 30_000, {(KeyId("k"), "m"): Totals(1)})
        assert await b.payers(30_000, 30_000) == set(cluster.tenants)
        [first, *_] = cluster.tenants
        assert [row.tenant async for row in b.usage(TenantId(first), 30_000, 30_000)] == [first]
    with_keys = [node for node in cluster.nodes if node.admin.keys("*")]
    assert with_keys == [cluster.node_of(ALL_SLOT)]
    assert "test:{all}:model:tiny" in with_keys[0].admin.keys("*")


async def reserved(store: RedisStore, name: str, who: tuple[Subject, ...]) -> bool:
    if not await admitted(store, name, who[:1]):
        return False
    return (await store.reserve(rid(name), who, 0, 0)).refusal is None


async def test_nodes_that_count_for_nobody_may_die(cluster: Cluster) -> None:
    """Where one node counts for all, the others are none of the quotas' business; that one is everybody's."""
    counts = cluster.node_of(ALL_SLOT)
    async with one_node(cluster) as store:
        for node in cluster.nodes:
            if node is not counts:
                node.kill()
        await store.renew([])
        for name in cluster.tenants:
            assert await admitted(store, name, limited_model(name, 10))
        counts.kill()
        with pytest.raises(StoreUnavailable):
            await admitted(store, "late", limited_model("t0", 10))
        assert not store.is_well


async def test_the_one_nodes_slot_is_followed(cluster: Cluster) -> None:
    counts = cluster.node_of(ALL_SLOT)
    other = next(node for node in cluster.nodes if node is not counts)
    async with one_node(cluster) as store:
        assert await reserved(store, "before", limited_model("t0", 10))
        counts.admin.flushall()
        cluster.assign(ALL_SLOT, other)
        who = [limited_model(name, 10) for name in cluster.tenants]
        assert sum(await asyncio.gather(*(reserved(store, f"{i}", who[i % 3]) for i in range(50)))) == 10
        assert store.is_well
        await store.renew([])
        assert {address.port for address in store._links._links} == {other.port}  # type: ignore[attr-defined]
        assert await admitted(store, "other", tenant("other", concurrent=1)), "it is still asked"
