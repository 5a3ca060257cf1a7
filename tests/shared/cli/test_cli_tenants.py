"""`penstock tenants`, on a gateway's file, on the Redis that it names, and on a running gateway; and what
`penstock keys list` tells of keys' limits and uses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared import cli
from shared.cli.admin import KEY_VARIABLE
from tests.gateway.directory.directory_world import OPERATOR, World
from tests.shared.cli.test_cli_keys import Out, configured, effective, keys, log, redis, world

__all__ = ["configured", "log", "redis", "world"]


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


async def tenants(*words: str) -> int:
    """Run the command, beside the gateway in this process."""
    return await asyncio.to_thread(cli.main, ["tenants", *words])


async def shown(world: tuple[World, list[str]], capsys: Out, id_: str) -> dict[str, Any]:
    """A tenant as the list tells it."""
    await effective(world[0])
    capsys.readouterr()
    assert await tenants("list", *world[1], "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return next(one for one in found if one["id"] == id_)


async def test_a_tenant_is_created_limited_and_deleted(world: tuple[World, list[str]], capsys: Out) -> None:
    where = world[1]
    limit = ("--limit", "requests_per_min=60", "--limit", "tokens_per_day=1000")
    assert await tenants("create", "beta", *where, *limit, "--service-tier", "flex") == 0
    made = await shown(world, capsys, "beta")
    assert (made["limits"]["requests_per_min"], made["limits"]["tokens_per_day"]) == (60, 1000)
    assert made["service_tier"] == "flex"

    assert await tenants("limit", "beta", *where, "--limit", "requests_per_min=5") == 0
    assert await tenants("limit", "beta", *where, "--limit", "tokens_per_day=none") == 0
    changed = await shown(world, capsys, "beta")
    assert (changed["limits"]["requests_per_min"], changed["limits"]["tokens_per_day"]) == (5, None)
    assert changed["service_tier"] == "flex"

    assert await tenants("list", *where) == 0
    assert any(
        "beta" in line and "requests_per_min=5" in line for line in capsys.readouterr().out.split("\n")
    )
    assert await tenants("delete", "beta", *where) == 0
    await effective(world[0])
    assert await tenants("limit", "beta", *where, "--limit", "concurrent=1") == 1
    assert "beta" in capsys.readouterr().err


async def test_a_limit_for_one_model_is_set_and_taken_away(
    world: tuple[World, list[str]], capsys: Out
) -> None:
    where = world[1]
    assert await tenants("create", "beta", *where) == 0
    await effective(world[0])
    assert await tenants("limit", "beta", *where, "--model-limit", "tiny:concurrent=2") == 0
    made = await shown(world, capsys, "beta")
    assert [(one["model"], one["limits"]["concurrent"]) for one in made["model_limits"]] == [("tiny", 2)]
    assert await tenants("limit", "beta", *where, "--model-limit", "tiny:concurrent=none") == 0
    assert (await shown(world, capsys, "beta"))["model_limits"] == []


async def test_a_tenant_that_is_there_is_not_created_again(
    world: tuple[World, list[str]], capsys: Out
) -> None:
    where = world[1]
    assert await tenants("create", "beta", *where, "--limit", "concurrent=3") == 0
    await effective(world[0])
    capsys.readouterr()
    assert await tenants("create", "beta", *where) == 1
    assert "penstock tenants limit" in capsys.readouterr().err
    assert (await shown(world, capsys, "beta"))["limits"]["concurrent"] == 3


async def test_keys_are_listed_with_their_limits_and_when_they_were_made(
    world: tuple[World, list[str]], capsys: Out
) -> None:
    where = world[1]
    assert await tenants("create", "beta", *where) == 0
    await effective(world[0])
    assert await keys("create", "--tenant", "beta", *where, "--limit", "concurrent=7") == 0
    await effective(world[0])
    capsys.readouterr()
    assert await keys("list", "--tenant", "beta", *where) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert "concurrent=7" in row
    assert row[head.index("created") :][:4].isdecimal()
    is_asked = "--admin-url" in where
    assert ("not since" in row) == is_asked
    assert await keys("list", "--tenant", "beta", *where, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert ("last_used" in told) == is_asked
