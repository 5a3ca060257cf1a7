"""The list of models, which costs no quota: worked out once, in its tenant's turn, and bounded in readers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gateway.config.whole import ModelConfig, TenantConfig
from gateway.identity.tenant import TenantPolicy
from gateway.relay.checked_bundles import CheckedBundle
from gateway.relay.engines import EngineProfile, Engines
from gateway.request.model_lists import KEPT_LEN_MAX, ModelLists
from shared.apis.models import ModelList
from shared.fairness.fair_turns import FairTurns
from shared.wire.room import Room
from tests.fakes import VirtualClock
from tests.gateway.conftest import House, Open, error_of, until
from tests.gateway.identity.test_identity import principal

MODELS = (
    ModelConfig(name="big", replicas=("http://a",), aliases=("*",)),
    ModelConfig("small", ("http://a",)),
)
TENANTS = [TenantConfig(id="all"), TenantConfig(id="also"), TenantConfig(id="one", models=("small",))]
LONG = b"x" * 4_000_000
"""More than the kernel holds for a client."""
pytestmark = pytest.mark.hop("http2")


class Nobody:
    """No replicas to ask."""

    async def profile(self, model: ModelConfig) -> tuple[EngineProfile, Sequence[str]]:
        raise NotImplementedError

    async def bundle(self, model: ModelConfig, urls: Sequence[str], hash_: str) -> CheckedBundle | str:
        raise NotImplementedError


class World:
    """Lists, and an engine that tells of itself what a test says."""

    def __init__(self, kept_len_max: int = 10_000) -> None:
        self.engines = Engines(MODELS, Nobody(), VirtualClock())
        self.lists = ModelLists(self.engines, 7, kept_len_max)
        self.policy = TenantPolicy(MODELS, TENANTS)

    async def tell(self, created: int, room: Room | None = None) -> None:
        """Let the engine of one model tell this."""
        await self.engines.adopt("small", EngineProfile(None, room, created), [])

    def of(self, tenant: str, *models: str) -> bytes:
        return self.lists.all(self.policy, principal(tenant, *models))


def ids(encoded: bytes) -> list[str]:
    return [model.id for model in msgspec.json.decode(encoded, type=ModelList).data]


async def test_a_list_is_worked_out_once_for_all_with_the_same_rights() -> None:
    world = World()
    assert ids(world.of("all")) == ["big", "small"]
    assert world.of("also") is world.of("all")
    assert ids(world.of("one")) == ids(world.of("all", "small")) == ["small"]
    assert ids(world.of("one", "big")) == []
    assert world.of("one") is world.of("one")


async def test_a_list_is_worked_out_again_when_an_engine_or_the_configuration_says_something_else() -> None:
    world = World()
    assert b'"created":7' in world.of("one")
    await world.tell(8)
    first = world.of("one")
    assert b'"created":8' in first
    await world.tell(8, Room(4096))
    assert b'"max_model_len":4096' in world.of("one")
    before = world.of("one")
    await world.tell(8, Room(4096))
    assert world.of("one") is before, "it is the same"
    world.policy = world.policy.changed([TenantConfig(id="one", models=("big",))], [])
    assert ids(world.of("one")) == ["big"]
    world.policy = TenantPolicy(MODELS[1:], TENANTS)
    assert ids(world.of("all")) == ["small"]


async def test_the_lists_that_are_kept_are_bounded() -> None:
    world = World(kept_len_max=0)
    both = world.of("all")
    assert world.of("all") is both, "the newest is kept, however long it is"
    world.of("one")
    assert len(world.lists._kept) == 1
    assert world.of("all") is not both
    assert ModelLists(world.engines, 7)._kept_len_max == KEPT_LEN_MAX


async def test_every_answer_begins_in_its_tenants_turn(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = [], FairTurns.ask

    def noted(turns: FairTurns, tenant: str) -> Any:
        asked.append((turns, tenant))
        return ask(turns, tenant)

    monkeypatch.setattr(FairTurns, "ask", noted)
    for path in ("/v1/models", "/v1/models/tiny"):
        asked.clear()
        async with house.get(path) as answer:
            assert answer.status == 200
        assert (house.gateway._turns, "acme") in asked


async def test_those_who_read_a_long_list_slowly_are_bounded_and_ended(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelLists, "all", lambda *_: LONG)
    house: House = await open_house(limits={"live_max": 1}, timeouts={"slow_client_s": 0.2})
    _, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, limit=1)
    head = "GET /v1/models HTTP/1.1\r\nhost: here\r\nauthorization: {}\r\n\r\n"
    writer.write(head.format(house.headers["authorization"]).encode())
    await until(lambda: len(house.gateway.live) == 1)
    async with house.get("/v1/models") as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (503, "queue_full")
    async with house.get("/v1/models/tiny") as answer:
        assert answer.status == 200
    await until(lambda: not len(house.gateway.live))
    async with house.get("/v1/models") as answer:
        assert await answer.read() == LONG
    writer.transport.abort()
    assert [line.get("error_code") for line in await house.lines(4)].count("slow_client") == 1
