"""What the engine's queue is told about a request."""

from __future__ import annotations

from shared.wire.ids import QUEUE_TIMEOUT_HEADER, REQUEST_TIMEOUT_HEADER, SERVICE_TIER_HEADER
from tests.gateway.conftest import House, Open
from tests.gateway.fake_engine import unary


async def test_the_callers_deadlines_are_passed_on(house: House) -> None:
    house.engine.script = unary()
    bounds = {QUEUE_TIMEOUT_HEADER: "1.5", REQUEST_TIMEOUT_HEADER: "30"}
    async with house.chat(headers=bounds) as answer:
        assert answer.status == 200
    async with house.chat() as answer:
        assert answer.status == 200
    told, untold = (seen.headers for seen in house.engine.seen)
    assert {name: told[name] for name in bounds} == bounds
    assert not bounds.keys() & {name.lower() for name in untold}


async def test_the_tenants_class_is_the_configurations_and_not_the_callers(open_house: Open) -> None:
    house = await open_house(tenants=[{"id": "acme", "service_tier": "flex"}, {"id": "other"}])
    house.engine.script = unary()
    async with house.chat(service_tier="priority", headers={SERVICE_TIER_HEADER: "priority"}) as answer:
        assert answer.status == 200
    [seen] = house.engine.seen
    assert seen.headers.getall(SERVICE_TIER_HEADER) == ["flex"]
