"""The description of the operators' API: every operation is in it, and what it says holds."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis

from gateway.operators import openapi
from gateway.operators.operations import operation_of
from gateway.workers.front import operation_at
from tests.gateway.directory.directory_world import OPERATOR, World, directory_world
from tests.gateway.endpoints.described import asked_of

EXAMPLES: Final = 6
API: Final = Path(__file__).parents[3] / "shared/API.md"


@pytest.fixture
async def world(tmp_path: Path, log: io.StringIO) -> AsyncIterator[World]:
    async with directory_world(tmp_path, log, None) as world:
        await world.open()
        yield world


async def described(world: World) -> dict[str, Any]:
    url = f"http://127.0.0.1:{world.gateways[0].admin_port}{openapi.PATH}"
    async with world.client.get(url) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        document: dict[str, Any] = await answer.json()
    async with world.client.get(url) as answer:
        assert await answer.json() == document, "made once"
    async with world.client.post(url) as answer:
        assert answer.status == 405
    return document


async def test_every_operation_is_described_without_a_key(world: World) -> None:
    document = await described(world)
    table = world.gateways[0]._admin(None)._operators
    told = {(path, method.upper()) for path, ways in document["paths"].items() for method in ways}
    assert {(path, method) for path, methods in table.items() for method in methods} <= told
    for path, methods in table.items():  # several workers have the same
        for method, handler in methods.items():
            at = path.replace("{id}", "a").replace("{replica}", "a")
            assert operation_at(method, at) is operation_of(handler)
    for path in table:
        named = [one["name"] for one in document["paths"][path].get("parameters", ())]
        assert re.findall(r"\{(\w+)\}", path) == named


async def test_a_field_is_described_with_its_bounds_and_its_meaning(world: World) -> None:
    schemas = (await described(world))["components"]["schemas"]
    labels = schemas["NewKey"]["properties"]["labels"]
    assert labels["description"].startswith("Texts for operators")
    assert labels["anyOf"][0]["maxItems"] == 16
    assert schemas["NewKey"]["required"] == ["tenant"]
    assert {"hash", "previous_hash"}.isdisjoint(
        schemas["NewKey"]["properties"] | schemas["KeyView"]["properties"]
    )
    assert "disabled" in schemas["KeyChange"]["properties"], "which revokes a key"
    assert "is_live" in schemas["RequestSummary"]["required"]
    assert schemas["ReplicaView"]["properties"]["requests"]["description"].startswith("The requests of this")


@pytest.mark.slow
@pytest.mark.parametrize("mode", schemathesis.GenerationMode, ids=str)
async def test_answers_are_as_described(world: World, mode: schemathesis.GenerationMode) -> None:
    document = await described(world)
    made = await world.key()
    url = f"http://127.0.0.1:{world.gateways[0].admin_port}"
    asked = await asyncio.to_thread(asked_of, document, url, OPERATOR, mode, EXAMPLES)
    assert asked > 15 * EXAMPLES
    assert made["key"] not in str(await world.ask("GET", "keys")), "a secret is told once"
