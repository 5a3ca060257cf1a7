"""The admin listener: its table of routes, and what it answers to all else."""

from __future__ import annotations

from typing import Any

import pytest

from gateway import admin
from tests.gateway.conftest import House, Open


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
    def broken() -> bytes:
        raise RuntimeError("a canary")

    monkeypatch.setattr(admin, "metrics_text", broken)
    async with ask(house, "GET", "/metrics") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal_error")
        assert "canary" not in await answer.text()
    async with ask(house, "GET", "/livez") as answer:
        assert answer.status == 200
