"""What every store of responses does, in memory and in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.config.redis import RedisConfig
from gateway.config.responses import ResponsesConfig
from gateway.stored.memory import MemoryResponses
from gateway.stored.redis import RedisResponses, open_responses
from gateway.stored.responses import OVERHEAD_LEN, PAGE_LEN, KeptResponse, NoRoom, ResponseStore
from shared.process.setting_values import ConfigError
from shared.wire.errors import ResponsesUnavailable
from shared.wire.ids import TenantId
from tests.fakes import VirtualClock
from tests.gateway.redis_server import PATIENT_S, RedisServer
from tests.waiting import until

ACME, OTHER = TenantId("acme"), TenantId("other")
TTL_S = 60.0
SIZE = 8 * 1024
BOUNDS: dict[str, Any] = {"ttl_s": TTL_S, "response_len_max": SIZE, "tenant_len_max": 8 * SIZE}
FEW_MS = 40


def kept(id_: str, previous: str = "", size: int = SIZE) -> KeptResponse:
    head, output = b'{"id":"%b"}' % id_.encode(), b"[%b]" % id_.encode()
    fill = size - OVERHEAD_LEN - len(head) - len(output)
    return KeptResponse(id_, previous, head, output, b"[%b]" % (b" " * (fill - 2)), 7)


class Kept:
    """A store, and what tests do to it."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def ids(self, *ids: str, tenant: TenantId = ACME) -> list[str]:
        """Those of them that are there."""
        return [one for one in ids if await self.store.get(tenant, one) is not None]


def in_redis(server: RedisServer, **bounds: Any) -> RedisResponses:
    settings: dict[str, Any] = {"url": server.url, "key_prefix": f"test-{uuid.uuid4().hex}"}
    return open_responses(ResponsesConfig("redis", **{**BOUNDS, **bounds}), RedisConfig(**settings), {})


@pytest.fixture(params=["memory", "redis"])
async def at(request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[Kept]:
    if request.param == "memory":
        yield Kept(MemoryResponses(ResponsesConfig("memory", **BOUNDS), VirtualClock()))
        return
    store = in_redis(redis)
    await store.begin()
    yield Kept(store)
    await store.aclose()


async def test_what_was_put_is_there_for_its_tenant_alone(at: Kept) -> None:
    one = kept("resp_1")
    await at.store.put(ACME, one)
    assert await at.store.get(ACME, "resp_1") == one
    assert one.response == b'{"id":"resp_1","output":[resp_1]}'
    assert await at.store.get(OTHER, "resp_1") is None
    assert (await at.store.turns(OTHER, "resp_1")).lost == "resp_1"
    assert not await at.store.delete(OTHER, "resp_1")
    assert await at.store.forget(OTHER) == 0
    assert await at.store.delete(ACME, "resp_1")
    assert await at.store.get(ACME, "resp_1") is None
    assert not await at.store.delete(ACME, "resp_1")


@pytest.mark.parametrize("id_", ["", "resp_1\n", "*", "{other}", "../other", "previous", "sizes", "é"])
async def test_any_other_id_is_one_that_there_is_not(at: Kept, id_: str) -> None:
    await at.store.put(ACME, kept("resp_1"))
    assert await at.store.get(ACME, id_) is None
    assert not await at.store.delete(ACME, id_)
    assert await at.ids("resp_1") == ["resp_1"]


async def test_the_oldest_make_room_and_no_other_tenants(at: Kept) -> None:
    await at.store.put(OTHER, kept("theirs"))
    for number in range(20):
        await at.store.put(ACME, kept(f"r{number}"))
        held = await at.ids(*(f"r{one}" for one in range(20)))
        assert held == [f"r{one}" for one in range(max(0, number - 7), number + 1)]
    assert await at.ids("theirs", tenant=OTHER) == ["theirs"]


async def test_many_small_ones_make_room_for_a_large_one(at: Kept) -> None:
    ids = [f"r{number}" for number in range(32)]
    for one in ids:
        await at.store.put(ACME, kept(one, size=2 * OVERHEAD_LEN))
    assert await at.ids(*ids) == ids
    await at.store.put(ACME, kept("large"))
    assert await at.ids(*ids, "large") == [*ids[4:], "large"]


async def test_one_that_is_put_again_counts_once(at: Kept) -> None:
    for _ in range(20):
        await at.store.put(ACME, kept("again"))
    await at.store.put(ACME, kept("other"))
    assert await at.ids("again", "other") == ["again", "other"]


async def test_a_conversation_is_told_from_its_end(at: Kept) -> None:
    for id_, previous in (("a", ""), ("b", "a"), ("c", "b")):
        await at.store.put(ACME, kept(id_, previous))
    page = await at.store.turns(ACME, "c")
    assert [turn.id for turn in page.turns] == ["c", "b", "a"]
    assert (page.before, page.lost) == ("", "")
    assert page.turns[0].output == b"[c]"
    await at.store.delete(ACME, "a")
    page = await at.store.turns(ACME, "c")
    assert ([turn.id for turn in page.turns], page.lost) == (["c", "b"], "a")


async def test_what_others_go_on_with_goes_last(at: Kept) -> None:
    await at.store.put(ACME, kept("first"))
    for number in range(30):
        await at.store.put(ACME, kept(f"single{number}"))
        await at.store.put(ACME, kept(f"next{number}", "first"))
    assert await at.ids("first") == ["first"]
    page = await at.store.turns(ACME, "next29")
    assert [turn.id for turn in page.turns] == ["next29", "first"]


async def test_a_conversation_that_is_longer_than_a_tenants_room_loses_its_beginning(at: Kept) -> None:
    ids = [f"r{number}" for number in range(20)]
    for id_, previous in zip(ids, ["", *ids], strict=False):
        await at.store.put(ACME, kept(id_, previous))
    page = await at.store.turns(ACME, "r19")
    assert page.lost
    assert page.turns[0].id == "r19"


async def test_a_tenants_are_forgotten_all_at_once(at: Kept) -> None:
    for number in range(8):
        await at.store.put(ACME, kept(f"r{number}"))
    await at.store.put(OTHER, kept("theirs"))
    assert await at.store.forget(ACME) == 8
    assert await at.ids(*(f"r{number}" for number in range(8))) == []
    assert await at.ids("theirs", tenant=OTHER) == ["theirs"]
    await at.store.put(ACME, kept("new"))
    assert await at.ids("new") == ["new"]


# -- time -----------------------------------------------------------------------------------------


async def test_in_memory_what_has_expired_is_gone() -> None:
    clock = VirtualClock()
    store = MemoryResponses(ResponsesConfig("memory", **BOUNDS), clock)
    at = Kept(store)
    sweeping = asyncio.create_task(store.watch())
    await store.put(ACME, kept("old"))
    await store.put(ACME, kept("root"))
    clock.advance(0.6 * TTL_S)
    await store.put(ACME, kept("next", "root"))
    clock.advance(0.5 * TTL_S)
    assert await at.ids("old", "root", "next") == ["root", "next"]
    await until(lambda: bool(clock.sleeping))
    clock.advance(0.6 * TTL_S)
    await until(lambda: not store._tenants)
    assert store._share.held == 0, "also where nobody asks"
    sweeping.cancel()


async def test_in_redis_what_has_expired_is_gone(redis: RedisServer) -> None:
    store = in_redis(redis, ttl_s=1.0)
    await store.begin()
    await store.put(ACME, kept("old"))
    await store.put(ACME, kept("root"))
    order, sizes = store._keys("acme")
    admin = redis.admin
    for key in (f"{order}:old", f"{order}:root", order, sizes):
        assert 0 < admin.pttl(key) <= 1000
        admin.pexpire(key, FEW_MS)
    await store.put(ACME, kept("next", "root"))
    assert admin.pttl(f"{order}:root") > FEW_MS, "one that another goes on with is kept as long as that"
    await until(lambda: not admin.exists(f"{order}:old"), pause_s=0.01)
    assert await Kept(store).ids("old", "root", "next") == ["root", "next"]
    for key in (f"{order}:root", f"{order}:next", order, sizes):
        admin.pexpire(key, FEW_MS)
    await until(lambda: not admin.keys(f"{store._prefix}:*"), pause_s=0.01)
    await store.aclose()


async def test_in_redis_the_books_are_cleared_of_what_has_expired(redis: RedisServer) -> None:
    store = in_redis(redis)
    await store.begin()
    order, sizes = store._keys("acme")
    for number in range(4):
        await store.put(ACME, kept(f"r{number}"))
        redis.admin.delete(f"{order}:r{number}")  # as it expires
        redis.admin.zadd(order, {f"r{number}": number})
    await store.put(ACME, kept("new"))
    assert redis.admin.zrange(order, 0, -1) == ["new"]
    assert redis.admin.hgetall(sizes) == {"new": str(SIZE), "": str(SIZE)}
    await store.aclose()


# -- room -----------------------------------------------------------------------------------------


async def test_in_memory_a_tenant_makes_room_of_its_own_alone() -> None:
    config = ResponsesConfig("memory", tenant_len_max=2**30, memory=2**20, response_len_max=2**18)
    store = MemoryResponses(config, VirtualClock())
    at = Kept(store)
    await store.put(OTHER, kept("theirs", size=2**17))
    for number in range(100):
        await store.put(ACME, kept(f"r{number}", size=2**17))
        assert store._share.held <= 2**20
    assert await at.ids("theirs", tenant=OTHER) == ["theirs"]
    assert await at.ids("r99") == ["r99"]
    for number in range(20):
        with contextlib.suppress(NoRoom):
            await store.put(TenantId(f"t{number}"), kept("r", size=2**16))
        assert store._share.held <= 2**20
    with pytest.raises(NoRoom):
        await store.put(TenantId("late"), kept("r", size=2**18))


async def test_a_long_conversation_is_told_in_pages(redis: RedisServer) -> None:
    bounds = {"response_len_max": PAGE_LEN, "tenant_len_max": 64 * PAGE_LEN}
    in_memory = MemoryResponses(ResponsesConfig("memory", **{**BOUNDS, **bounds}), VirtualClock())
    store = in_redis(redis, **bounds)
    await store.begin()
    for one in (in_memory, store):
        for id_, previous in (("a", ""), ("b", "a"), ("c", "b"), ("d", "c")):
            await one.put(ACME, kept(id_, previous, PAGE_LEN * 2 // 3))
        page = await one.turns(ACME, "d")
        assert ([turn.id for turn in page.turns], page.before) == (["d", "c"], "b")
        page = await one.turns(ACME, page.before)
        assert ([turn.id for turn in page.turns], page.before) == (["b", "a"], "")
    await store.aclose()


def test_a_response_has_to_fit() -> None:
    with pytest.raises(ConfigError):
        ResponsesConfig("redis", response_len_max=2**20, tenant_len_max=2**19)
    with pytest.raises(ConfigError):
        ResponsesConfig("memory", response_len_max=2**20, memory=2**20)


# -- Redis ----------------------------------------------------------------------------------------


async def test_a_redis_that_is_lost_is_an_error_and_comes_back(own: RedisServer) -> None:
    store = in_redis(own)
    with pytest.raises(ResponsesUnavailable):
        await store.get(ACME, "resp_1")
    await store.begin()
    await store.put(ACME, kept("resp_1"))
    own.kill()
    for call in (
        store.put(ACME, kept("resp_2")),
        store.get(ACME, "resp_1"),
        store.turns(ACME, "resp_1"),
        store.delete(ACME, "resp_1"),
        store.forget(ACME),
    ):
        with pytest.raises(ResponsesUnavailable):
            await call
    own.start()
    await until_up(store)
    assert await store.get(ACME, "resp_1") is None
    await store.put(ACME, kept("resp_1"))
    await store.aclose()


async def test_a_redis_that_stands_still_is_waited_for_no_longer_than_stated(
    own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.stored.redis.TIMEOUT_S", 0.05)
    store = in_redis(own)
    await store.begin()
    own.stop_still()
    with pytest.raises(ResponsesUnavailable):
        await store.put(ACME, kept("resp_1"))
    own.go_on()
    await until_up(store)
    await store.aclose()


async def test_a_tenant_has_one_call_at_a_time(redis: RedisServer) -> None:
    store = in_redis(redis)
    await store.begin()
    link, most = store._links.of(ACME), 0
    puts = [asyncio.create_task(store.put(ACME, kept(f"r{number}"))) for number in range(50)]
    gets = [asyncio.create_task(store.get(OTHER, "r1")) for _ in range(50)]
    while not all(task.done() for task in (*puts, *gets)):
        most = max(most, len(link._waiting))
        await asyncio.sleep(0)
    assert most == 2
    assert not store._turns
    await store.aclose()


async def until_up(store: RedisResponses) -> None:
    async with asyncio.timeout(10 * PATIENT_S):
        while not all(link.is_up for link in store._links.all()):
            await store.begin()
