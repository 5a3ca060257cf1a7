"""A quota store that fails or hangs, and background work that crashes: requests end as they should, and the
gateway goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from gateway.admission.guarded_store import GuardedStore
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import QuotaStore, ReservationId
from gateway.background import RESTART_S_MAX, RESTART_S_MIN, Background
from gateway.identity.caller import Caller, Principal
from shared.errors import QuotaUnavailable
from tests.fakes import VirtualClock
from tests.gateway.conftest import Open, until

CALLS = ("enter", "reserve", "settle", "renew", "windows")


class BrokenStore:
    """A `QuotaStore` in memory that answers later; chosen calls fail, or never come back."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.fails: set[str] = set()
        self.hangs: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            if name in self.hangs:
                await asyncio.Event().wait()
            if name in self.fails:
                raise ConnectionError("the store is gone")
            return await getattr(self.store, name)(*args, **kwargs)

        call.__name__ = name
        return call


def broken(store: BrokenStore) -> QuotaStore:
    return cast(QuotaStore, store)


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_every_call_is_over_in_time_and_only_those_that_reserve_raise(how: str) -> None:
    store = BrokenStore()
    getattr(store, how).update(CALLS)
    guarded = GuardedStore(broken(store), timeout_s=0.01)
    reservation = ReservationId("r")
    with pytest.raises(QuotaUnavailable):
        await guarded.enter(reservation, [], needs_tokens=True)
    with pytest.raises(QuotaUnavailable):
        await guarded.reserve(reservation, [], 1, 2)
    assert await guarded.settle(reservation, 1) is None
    await guarded.renew([reservation])
    assert (await guarded.windows([])).requests is None
    assert not guarded.is_well
    getattr(store, how).clear()
    await guarded.renew([])
    assert guarded.is_well


@pytest.mark.parametrize("call", ["enter", "reserve"])
async def test_a_request_that_cannot_reserve_is_503_and_not_dispatched(open_house: Open, call: str) -> None:
    store = BrokenStore()
    store.fails = {call, "windows", "settle"}
    house = await open_house(quotas=broken(store))
    async with house.chat() as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "quota_unavailable"
        assert answer.headers["retry-after"] == "1"
    line = await house.line()
    assert (line["error_code"], line["attempts"]) == ("quota_unavailable", 0)


async def test_a_settlement_that_fails_does_not_spoil_the_answer(open_house: Open) -> None:
    store = BrokenStore()
    store.fails = {"settle"}
    house = await open_house(quotas=broken(store))
    async with house.chat() as answer:
        assert answer.status == 200
        await answer.read()
    line = await house.line()
    assert (line["status"], line["end_reason"], line["settled_tokens"]) == (200, "ok", 0)


async def test_a_refusal_is_one_line_though_its_windows_cannot_be_asked_for(open_house: Open) -> None:
    store = BrokenStore()
    store.fails = {"windows"}
    house = await open_house(quotas=broken(store))
    async with house.get("/v1/models/none") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "model_not_found"
    assert (await house.line())["status"] == 404


async def test_readyz_says_that_the_store_does_not_answer_and_that_it_does_again(open_house: Open) -> None:
    store = BrokenStore()
    house = await open_house(quotas=broken(store), admin={"port": 0})
    store.fails = set(CALLS)
    async with house.chat() as answer:
        assert answer.status == 503
    async with house.client.get(house.url + "/readyz") as probe:
        assert (probe.status, await probe.json()) == (503, {"phase": "ready", "ok": False})
    async with house.client.get(f"http://127.0.0.1:{house.gateway.admin_port}/readyz") as probe:
        assert (await probe.json())["problems"] == ["quota store"]
    async with house.client.get(house.url + "/livez") as probe:
        assert probe.status == 200, "a restart would not help"
    store.fails = set()
    async with house.chat() as answer:
        assert answer.status == 200
    async with house.client.get(house.url + "/readyz") as probe:
        assert probe.status == 200


async def test_background_work_that_crashes_is_restarted_with_backoff() -> None:
    clock = VirtualClock()
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun <= 9:
            raise RuntimeError("a bug")
        await asyncio.Event().wait()

    async def other() -> None:
        await asyncio.Event().wait()

    async with Background({"work": work, "other": other}, clock) as background:
        pauses_s = []
        for count in range(1, 10):
            await until(lambda count=count: begun == count and clock.sleeping == 1)  # type: ignore[misc]
            assert background.down == ["work"]
            pause_s = min(RESTART_S_MAX, RESTART_S_MIN * 2 ** (count - 1))
            clock.advance(pause_s - 0.01)
            await asyncio.sleep(0)
            assert begun == count
            clock.advance(0.01)
            pauses_s.append(pause_s)
        await until(lambda: begun == 10)
        assert background.down == []
        assert pauses_s[-1] == RESTART_S_MAX


async def test_a_failed_renewal_does_not_end_renewals() -> None:
    """The gateway's loop of renewals asks again soon, and every time."""
    store = BrokenStore()
    store.fails = {"renew"}
    guarded = GuardedStore(broken(store))
    for _ in range(3):
        await guarded.renew([])
    store.fails = set()
    await guarded.renew([])
    assert guarded.is_well


class SilentIdentity:
    """An identity that asks somebody who never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def identify(self, caller: Caller, now_s: float) -> Principal:
        self.asked.set()
        return await asyncio.Future()


async def test_an_identity_that_does_not_answer_is_a_503(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.IDENTITY_S", 0.02)
    house = await open_house(identity_of=lambda _: SilentIdentity())
    async with house.chat() as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "identity_unavailable"
    assert not house.engine.seen
    await house.at_rest()


async def test_a_disconnect_during_identification_leaks_nothing(open_house: Open) -> None:
    identity = SilentIdentity()
    house = await open_house(identity_of=lambda _: identity)
    asking = asyncio.create_task(house.client.get(f"{house.url}/v1/models", headers=house.headers))
    await identity.asked.wait()
    asking.cancel()
    line = await house.line()
    assert (line["end_reason"], line["stage"]) == ("client_cancel", "auth")
    await house.at_rest()
