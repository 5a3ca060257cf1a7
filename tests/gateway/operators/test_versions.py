"""Answers that a page asks for again and again: who has one is told that it is the same."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import House, Open
from tests.gateway.operators.test_admin import OPERATOR, operator_keys


async def poll(house: House, path: str, known: str = "") -> tuple[int, str, bytes]:
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/{path}"
    headers = {**OPERATOR, **({"if-none-match": known} if known else {})}
    async with house.client.get(url, headers=headers) as answer:
        return answer.status, answer.headers.get("etag", ""), await answer.read()


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("usage", True),
        ("limits?limit=200", False),
        ("key_uses?tenant=acme", True),
        ("keys?tenant=acme", False),
        ("tenants", False),
        ("tenants/acme", False),
        ("keys/k1", False),
        ("engines", False),
        ("overview", True),
    ],
)
async def test_what_has_not_changed_is_not_told_again(open_house: Open, path: str, changes: bool) -> None:
    house = await open_house(admin=operator_keys())
    status, etag, body = await poll(house, path)
    assert (status, etag != "", body != b"") == (200, True, True)
    assert await poll(house, path, etag) == (304, etag, b"")
    assert (await poll(house, path, '"another"'))[::2] == (200, body) or path == "engines"
    async with house.chat() as answer:
        assert answer.status == 200
    await house.lines(1)
    status, newest, _ = await poll(house, path, etag)
    assert (status, newest != etag) == ((200, True) if changes else (304, False))
