"""The admin listener: its table of routes, and what it answers to all else."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.app import Gateway
from gateway.config.whole import load
from gateway.identity.keys import hash_key
from gateway.operators import server
from tests.gateway.conftest import CHAT, House, Open, error_of, until
from tests.gateway.fake_engine import Script

OPERATOR = {"authorization": "Bearer the operator's"}


def operator_keys(text: str = "the operator's") -> dict[str, Any]:
    return {"port": 0, "keys": [{"id": "ops", "hash": hash_key(text)}]}


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house(admin={"port": 0})
    assert isinstance(house, House)
    return house


def ask(house: House, method: str, path: str, **headers: str) -> Any:
    url = f"http://127.0.0.1:{house.gateway.admin_port}{path}"
    return house.client.request(method, url, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/livez", 200, None),
        ("HEAD", "/readyz", 200, None),
        ("OPTIONS", "/readyz", 200, None),
        ("OPTIONS", "/metrics", 405, "method_not_allowed"),
        ("HEAD", "/metrics", 200, None),
        ("POST", "/readyz", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/metrics/", 404, "unknown_url"),
        ("GET", "/v1/models", 404, "unknown_url"),
    ],
)
async def test_a_request_goes_by_its_path_and_its_method(
    house: House, method: str, path: str, status: int, code: str | None
) -> None:
    async with ask(house, method, path, **{"x-request-id": "operator.1"}) as answer:
        assert answer.status == status
        assert answer.headers["x-request-id"] == "operator.1"
        assert answer.headers["server"] == "penstock"
        if code is not None:
            assert (await answer.json())["error"]["code"] == code


async def test_a_handler_that_crashes_is_answered_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(accept: str | None) -> bytes:
        raise RuntimeError("a canary")

    monkeypatch.setattr(server, "exposition", broken)
    async with ask(house, "GET", "/metrics") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal_error")
        assert "canary" not in await answer.text()
    async with ask(house, "GET", "/livez") as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/admin/v1/reload", {}, 401),
        ("/admin/v1/reload", {"authorization": "Bearer wrong"}, 401),
        ("/admin/v1/requests/x", {}, 401),
        ("/admin/v1/requests/", OPERATOR, 404),
        ("/admin/v1/reload", OPERATOR, 405),
    ],
)
async def test_a_change_needs_an_operators_key(
    open_house: Open, path: str, headers: dict[str, str], status: int
) -> None:
    house = await open_house(admin=operator_keys())
    async with ask(house, "PUT", path, **headers) as answer:
        assert answer.status == status


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("usage?tenant=acme&tenant=other", "tenant"),
        ("keys?limit=1&tenant=acme&limit=2", "limit"),
        ("limits?after=a&after=a", "after"),
    ],
)
async def test_a_parameter_that_is_given_twice_is_refused_by_name(
    open_house: Open, path: str, param: str
) -> None:
    house = await open_house(admin=operator_keys())
    async with ask(house, "GET", f"/admin/v1/{path}", **OPERATOR) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, param)


async def test_a_tenants_key_changes_nothing_and_an_operators_key_asks_no_model(open_house: Open) -> None:
    house = await open_house(admin=operator_keys())
    async with ask(house, "POST", "/admin/v1/reload", **house.headers) as answer:
        assert answer.status == 403
        assert "is a tenant's" in (await answer.json())["error"]["message"]
    async with house.client.get(f"{house.url}/v1/models", headers=OPERATOR) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (403, "permission_denied")


async def test_without_operators_keys_nothing_can_be_changed(house: House) -> None:
    async with ask(house, "POST", "/admin/v1/reload", **OPERATOR) as answer:
        assert answer.status == 401


async def test_a_reload_takes_new_keys_and_refuses_a_file_that_is_wrong(
    tmp_path: Path, log: io.StringIO
) -> None:
    file = tmp_path / "gateway.toml"
    tenant = '[[tenants]]\nid = "acme"\n[[keys]]\nid = "{id}"\nhash = "{hash}"\ntenant = "acme"\n'
    base = (
        '[listen]\nport = 0\n[admin]\nport = 0\n[[admin.keys]]\nid = "ops"\n'
        f'hash = "{operator_keys()["keys"][0]["hash"]}"\n'
        '[[models]]\nname = "tiny"\nreplicas = ["http://127.0.0.1:1"]\n'
    )
    file.write_text(base + tenant.format(id="k1", hash=hash_key("one")))
    async with Gateway(load(file, {}), path=file) as gateway, aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{gateway.admin_port}/admin/v1/reload"
        file.write_text(base + tenant.format(id="k2", hash=hash_key("two")))
        async with client.post(url, headers=OPERATOR) as answer:
            assert (answer.status, await answer.json()) == (200, {"reloaded": True})
        models = f"http://127.0.0.1:{gateway.port}/v1/models"
        for key, status in (("one", 401), ("two", 200)):
            async with client.get(models, headers={"authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status
        before = gateway.accounts.now
        file.write_text(base.replace('name = "tiny"', 'name = ""') + "[[tenants]]\nid = 7\n")
        async with client.post(url, headers=OPERATOR) as answer:
            told = (await answer.json())["error"]["message"]
            assert (answer.status, "models[0].name" in told, "tenants[0].id" in told) == (400, True, True)
        assert gateway.accounts.now is before

    def changes() -> list[dict[str, Any]]:
        lines = map(msgspec.json.decode, log.getvalue().splitlines())
        return [line for line in lines if line["event"] == "admin.change"]

    await until(lambda: len(changes()) == 2)
    assert [(line["operator"], line["action"], line["problems"] > 0) for line in changes()] == [
        ("ops", "reload", False),
        ("ops", "reload", True),
    ]


async def test_an_operator_aborts_any_tenants_request(open_house: Open) -> None:
    house = await open_house(admin=operator_keys())
    house.engine.script = Script([asyncio.Event()])
    asking = asyncio.create_task(
        house.client.post(
            f"{house.url}/v1/chat/completions", json=CHAT, headers={**house.headers, "x-request-id": "run-1"}
        ).__aenter__()
    )
    await until(lambda: bool(house.engine.active))
    async with ask(house, "DELETE", "/admin/v1/requests/run-1", **OPERATOR) as answer:
        assert await answer.json() == {"id": "run-1", "aborted": 1}
    assert (await asking).status == 499
    await house.at_rest()
