"""A quota store that fails, and background work that crashes: requests end as they should, and the
gateway goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, cast

import pytest

from gateway.admission.guarded_store import GuardedStore, SharedStore
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import Meter, ReservationId, Scope, Settlement, StoreUnavailable, Subject, day_of
from gateway.admission.usage import Payer, Sheet, Used
from gateway.app import PROBE_S
from gateway.background import RESTART_S_MAX, RESTART_S_MIN, Background
from gateway.config.quotas import QuotaFail, QuotaLimits
from gateway.config.whole import TenantConfig, load
from gateway.directory.accounts import AccountsReader
from gateway.identity.caller import Caller, Principal
from gateway.identity.tenant import TenantPolicy
from shared.process.clock import SYSTEM_CLOCK
from shared.process.shield import Done
from shared.wire.errors import QuotaUnavailable
from shared.wire.ids import KeyId, TenantId
from tests.fakes import VirtualClock
from tests.gateway.conftest import OTHER_KEY, Open, until

pytestmark = pytest.mark.both_protocols

TURNS = 100
"""Turns of the loop in which everything is done that needs no time."""
CALLS = ("enter", "reserve", "settle", "renew", "windows")


class BrokenStore:
    """A `SharedStore` in memory that answers later; chosen calls fail. It is down once a call failed, and up
    when a renewal succeeds."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.fails: set[str] = set()
        self.is_well = True

    @property
    def is_partly_well(self) -> bool:
        """It is one server."""
        return self.is_well

    def reaches(self, tenant: TenantId) -> bool:
        """No tenant has a server of its own."""
        return self.is_well

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            if name in self.fails:
                self.is_well = False
                raise StoreUnavailable("the store is gone")
            self.is_well = self.is_well or name == "renew"
            return await getattr(self.store, name)(*args, **kwargs)

        return call

    def settle(self, reservation: ReservationId, used: Used) -> Done[Settlement | None]:
        """Tells nobody when it fails."""
        if "settle" not in self.fails:
            return self.store.settle(reservation, used)
        self.is_well = False
        return Done(Settlement(0, used.tokens))

    async def post(self, source: str, number: int, tenant: TenantId, day: int, sheet: Sheet) -> None:
        """What is posted is not looked at here."""
        if "post" in self.fails:
            raise StoreUnavailable("the store is full")


def broken(store: BrokenStore) -> SharedStore:
    return cast(SharedStore, store)


def limited(fail: QuotaFail, tenant: str = "acme", **limits: int) -> list[Subject]:
    return [Subject(Scope.TENANT, tenant, QuotaLimits(**limits), TenantId(tenant), fail)]


async def test_only_calls_that_reserve_raise() -> None:
    store = BrokenStore()
    store.fails.update(CALLS)
    guarded = GuardedStore(broken(store))
    reservation, closed = ReservationId("r"), limited("closed", concurrent=1)
    with pytest.raises(QuotaUnavailable):
        await guarded.enter(reservation, closed, needs_tokens=True)
    with pytest.raises(QuotaUnavailable):
        await guarded.reserve(reservation, closed, 1, 2)
    await guarded.settle(reservation, Used(completion=1))
    await guarded.renew([reservation])
    assert (await guarded.windows(closed)).requests is None
    assert not guarded.is_well
    store.fails.clear()
    await guarded.renew([])
    assert guarded.is_well


async def test_a_tenant_whose_fail_mode_is_local_has_its_part_of_each_limit() -> None:
    store = BrokenStore()
    store.fails.update(CALLS)
    guarded = GuardedStore(broken(store), gateways=3)
    local = limited("local", requests_per_min=10, tokens_per_min=300, concurrent=9)
    decisions = [await guarded.enter(ReservationId(str(i)), local, needs_tokens=True) for i in range(5)]
    assert [d.refusal is None for d in decisions] == [True] * 3 + [False] * 2
    refusal = decisions[3].refusal
    assert refusal is not None
    assert (refusal.meter, refusal.limit) == (Meter.REQUESTS, 3)
    assert (await guarded.reserve(ReservationId("0"), local, 60, 60)).granted == 60
    with pytest.raises(QuotaUnavailable):  # the whole limit would allow it, so this is no refusal for good
        await guarded.reserve(ReservationId("1"), local, 150, 150)
    with pytest.raises(QuotaUnavailable):
        await guarded.enter(ReservationId("x"), limited("closed", "other", concurrent=1), needs_tokens=False)


async def test_a_request_that_an_outage_divides_is_settled_with_both_stores() -> None:
    store = BrokenStore()
    guarded = GuardedStore(broken(store))
    local, reservation = limited("local", concurrent=1, token_budget=100), ReservationId("r")
    await guarded.enter(reservation, local, needs_tokens=True)
    store.fails = {"reserve"}
    assert (await guarded.reserve(reservation, local, 50, 50)).granted == 50
    assert (await guarded.settle(reservation, Used(completion=30))) == Settlement(50, 30)
    store.fails = set()
    assert store.store.live == 0
    assert (await guarded.reserve(ReservationId("next"), local, 71, 71)).refusal is not None, "70 are left"


async def test_a_request_whose_seat_was_given_in_an_outage_has_its_tokens_from_there_too() -> None:
    store = BrokenStore()
    store.fails = {"enter"}
    guarded = GuardedStore(broken(store), gateways=2)
    local, reservation = limited("local", concurrent=4, tokens_per_day=100), ReservationId("r")
    await guarded.enter(reservation, local, needs_tokens=True)
    store.fails = set()
    await guarded.renew([reservation])
    assert (await guarded.reserve(reservation, local, 10, 10)).granted == 10
    assert store.store.live == 0, "the shared store has no part in it"
    assert (await guarded.settle(reservation, Used(completion=7))) == Settlement(10, 7)


async def test_a_tenant_whose_usage_cannot_be_posted_has_some_all_the_same() -> None:
    """A store that is full still reads."""
    store = BrokenStore()
    store.fails = {"post"}
    guarded, payer = GuardedStore(broken(store)), Payer(TenantId("acme"), KeyId("k"), "m")
    await guarded.reserve(ReservationId("r"), (), 10, 10, payer)
    await guarded.settle(ReservationId("r"), Used(completion=7))
    today = day_of(int(SYSTEM_CLOCK.wall() * 1000))
    for _ in range(2):
        assert await guarded.payers(today - 1, today) == {"acme"}


@pytest.mark.parametrize("call", ["enter", "reserve"])
async def test_a_request_that_cannot_reserve_is_503_and_not_dispatched(open_house: Open, call: str) -> None:
    store = BrokenStore()
    store.fails = {call, "windows", "settle"}
    house = await open_house(store=broken(store), tenant={"limits": {"concurrent": 9}})
    async with house.chat() as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "quota_unavailable"
        assert answer.headers["retry-after"] == "1"
    line = await house.line()
    assert (line["error_code"], line["attempts"]) == ("quota_unavailable", 0)


async def test_a_settlement_that_fails_does_not_spoil_the_answer(open_house: Open) -> None:
    store = BrokenStore()
    store.fails = {"settle"}
    house = await open_house(store=broken(store), tenant={"limits": {"concurrent": 9}})
    async with house.chat() as answer:
        assert answer.status == 200
        await answer.read()
    line = await house.line()
    assert (line["status"], line["end_reason"], line["settled_tokens"]) == (200, "ok", 13)


async def test_a_refusal_is_one_line_though_its_windows_cannot_be_asked_for(open_house: Open) -> None:
    store = BrokenStore()
    store.fails = {"windows"}
    house = await open_house(store=broken(store), tenant={"limits": {"concurrent": 9}})
    async with house.get("/v1/models/none") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "model_not_found"
    assert (await house.line())["status"] == 404


async def test_a_tenant_without_limits_is_served_whatever_the_store_does(open_house: Open) -> None:
    store = BrokenStore()
    store.fails = set(CALLS)
    house = await open_house(store=broken(store))
    async with house.chat() as answer:
        assert answer.status == 200
    assert (await house.line())["settled_tokens"] > 0


async def test_readyz_says_that_the_store_does_not_answer_and_that_it_does_again(open_house: Open) -> None:
    store = BrokenStore()
    tenants = [{"id": name, "limits": {"concurrent": 9}} for name in ("acme", "other")]
    house = await open_house(store=broken(store), admin={"port": 0}, tenants=tenants)
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
    await until(lambda: store.is_well)
    async with house.client.get(house.url + "/readyz") as probe:
        assert probe.status == 200


async def test_a_request_that_meets_an_outage_has_it_probed_at_once_but_not_again_and_again(
    open_house: Open,
) -> None:
    store, clock = BrokenStore(), VirtualClock()
    house = await open_house(store=broken(store), clock=clock, tenant={"limits": {"concurrent": 9}})

    async def meets_an_outage() -> None:
        store.fails = {"enter"}
        async with house.chat() as answer:
            assert answer.status == 503
        store.fails = set()

    await until(lambda: clock.sleeping > 0)
    clock.advance(PROBE_S)
    await meets_an_outage()
    await until(lambda: store.is_well)  # without any time
    await meets_an_outage()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not store.is_well, "it was probed a moment ago"
    clock.advance(PROBE_S)
    await until(lambda: store.is_well)


class PartlyBrokenStore(BrokenStore):
    """One of whose servers some are down."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[TenantId] = []

    def reaches(self, tenant: TenantId) -> bool:
        return True

    async def post(self, source: str, number: int, tenant: TenantId, day: int, sheet: Sheet) -> None:
        self.posted.append(tenant)


async def test_usage_is_posted_also_while_a_part_of_the_store_is_down(open_house: Open) -> None:
    store, clock = PartlyBrokenStore(), VirtualClock()
    store.fails = {"renew"}
    house = await open_house(store=broken(store), clock=clock)
    async with house.chat() as answer:
        assert answer.status == 200
    await house.line()
    assert (store.is_well, store.posted) == (False, [])
    await until(lambda: clock.sleeping > 0)
    clock.advance(PROBE_S)
    await until(lambda: store.posted == [TenantId("acme")])


async def test_readyz_is_well_while_some_tenant_is_served_without_the_store(open_house: Open) -> None:
    store = BrokenStore()
    tenants = [
        {"id": "acme", "limits": {"concurrent": 9}, "quota_fail": "local"},
        {"id": "other", "limits": {"concurrent": 9}},
    ]
    house = await open_house(store=broken(store), tenants=tenants)
    store.fails = set(CALLS)
    async with house.chat() as answer:
        assert answer.status == 200
    async with house.chat(headers={"authorization": f"Bearer {OTHER_KEY}"}) as answer:
        assert answer.status == 503
    async with house.client.get(house.url + "/readyz") as probe:
        assert probe.status == 200


async def test_readyz_is_503_while_every_model_has_limits_that_cannot_be_asked_for(open_house: Open) -> None:
    store = BrokenStore()
    house = await open_house(store=broken(store), model={"limits": {"concurrent": 9}})
    store.fails = set(CALLS)
    async with house.chat() as answer:
        assert answer.status == 503
    async with house.client.get(house.url + "/readyz") as probe:
        assert probe.status == 503


FREE: Final[dict[str, Any]] = {"name": "free"}
LIMITED: Final[dict[str, Any]] = {"name": "limited", "limits": {"concurrent": 9}}
LIMITS: Final[dict[str, Any]] = {"limits": {"concurrent": 9}}


@pytest.mark.parametrize(
    ("tenant", "models", "is_served"),
    [
        ({}, [FREE], True),
        ({}, [LIMITED, FREE], True),
        ({}, [LIMITED], False),
        (LIMITS, [FREE], False),
        ({**LIMITS, "quota_fail": "local"}, [LIMITED], True),
        ({"models": ["limited"]}, [LIMITED, FREE], False),
        ({"models": ["limited", "free"]}, [LIMITED, FREE], True),
        ({"model_limits": [{"model": "free", **LIMITS}]}, [LIMITED, FREE], False),
        ({"model_limits": [{"model": "free", "limits": {}}]}, [FREE], True),
        ({"models": ["free"], "model_limits": [{"model": "limited", **LIMITS}]}, [LIMITED, FREE], True),
    ],
)
def test_who_is_served_without_the_store_is_found_once(
    tenant: dict[str, Any],
    models: list[dict[str, Any]],
    is_served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks whether the gateway is ready needs no key, and may ask again and again."""
    asked: list[TenantPolicy] = []
    look = TenantPolicy.all

    def all_tenants(policy: TenantPolicy) -> Iterable[TenantConfig]:
        asked.append(policy)
        return look(policy)

    monkeypatch.setattr(TenantPolicy, "all", all_tenants)
    tenants = [{"id": "limited", **LIMITS}, {"id": "t", **tenant}]
    served = [{**model, "replicas": ["http://a"]} for model in models]
    accounts = AccountsReader(load({"models": served, "tenants": tenants}, {}), None).now
    before = len(asked)
    assert [accounts.serve_without_store for _ in range(3)] == [is_served] * 3
    assert len(asked) == before + 1
    local = TenantConfig("new", quota_fail="local")
    changed = accounts.changed(accounts.tenants.changed([local], []), accounts.identity)
    assert changed.serve_without_store, "other accounts are looked at anew"


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
    monkeypatch.setattr("gateway.request.pipeline.IDENTITY_S", 0.02)
    house = await open_house(identity_of=lambda *_: SilentIdentity())
    async with house.chat() as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "identity_unavailable"
    assert not house.engine.seen
    await house.at_rest()


async def test_a_disconnect_during_identification_leaks_nothing(open_house: Open) -> None:
    identity = SilentIdentity()
    house = await open_house(identity_of=lambda *_: identity)
    asking = asyncio.create_task(house.client.get(f"{house.url}/v1/models", headers=house.headers))
    await identity.asked.wait()
    asking.cancel()
    line = await house.line()
    assert (line["end_reason"], line["stage"]) == ("client_cancel", "auth")
    await house.at_rest()
