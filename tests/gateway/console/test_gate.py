"""The console's gate on the admin listener: its files, its sessions and what they open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.config.whole import load
from gateway.identity.keys import hash_key
from gateway.operators.files import CSP
from gateway.operators.gate import COOKIE, SESSION
from gateway.operators.sessions import FAILURES_MAX, FAILURES_PER_NETWORK_MAX, IDLE_S
from tests.fakes import VirtualClock
from tests.gateway.conftest import House, Open, settings
from tests.gateway.operators.test_admin import operator_keys

KEY = "the operator's"


class Page:
    """A browser's page of the console: it keeps the cookie, and sends its origin."""

    def __init__(self, port: int | None, client: aiohttp.ClientSession) -> None:
        self.origin = f"http://127.0.0.1:{port}"
        self.client = client
        self.cookie = ""

    async def ask(
        self, method: str, path: str, *, status: int = 200, json: Any = None, **headers: str
    ) -> tuple[Any, aiohttp.ClientResponse]:
        own = {"cookie": self.cookie} if self.cookie else {}
        if method not in ("GET", "HEAD"):
            own["origin"] = self.origin
        sent = {name: value for name, value in (own | headers).items() if value}
        async with self.client.request(method, self.origin + path, json=json, headers=sent) as answer:
            told = await answer.read()
            assert answer.status == status, told
            is_json = answer.content_type == "application/json"
            return (await answer.json() if is_json and told else told), answer

    async def log_in(self, key: str = KEY, status: int = 200, **headers: str) -> aiohttp.ClientResponse:
        _, answer = await self.ask("POST", SESSION, status=status, json={"key": key}, **headers)
        if status == 200:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer


def page_of(house: House) -> Page:
    return Page(house.gateway.admin_port, house.client)


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house(admin=operator_keys())
    assert isinstance(house, House)
    return house


pytestmark = pytest.mark.parametrize("protocol", ["http2"], indirect=True)


async def test_the_page_is_for_everybody_and_says_what_it_may_load(house: House) -> None:
    page = page_of(house)
    for path in ("/console", "/console/app.css", "/console/main.js", "/console/vendor/uPlot.esm.js"):
        body, answer = await page.ask("GET", path)
        assert body
        assert answer.headers["content-security-policy"] == CSP
        assert "unsafe" not in CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        etag = answer.headers["etag"]
        await page.ask("GET", path, status=304, **{"if-none-match": etag})
    for path in ("/console/nothing.js", "/console/../admin.py", "/console/%2e%2e/gate.py", "/console/vendor"):
        await page.ask("GET", path, status=404)
    await page.ask("POST", "/console", status=405)
    _, answer = await page.ask("GET", "/admin/v1/requests", status=401)
    assert answer.headers["content-security-policy"] == CSP
    assert answer.headers["cache-control"] == "no-store"


async def test_the_other_spelling_leads_to_the_page(house: House) -> None:
    url = f"{page_of(house).origin}/console/"
    async with house.client.get(url, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["location"]) == (302, "/console")


async def test_a_login_gives_a_cookie_that_opens_the_api_until_logout(house: House) -> None:
    page = page_of(house)
    answer = await page.log_in()
    cookie = answer.headers["set-cookie"]
    assert "; Path=/admin/v1; HttpOnly; SameSite=Strict" in cookie
    assert "Secure" not in cookie
    assert KEY not in cookie
    assert len(page.cookie.partition("=")[2]) >= 43
    told, _ = await page.ask("GET", "/admin/v1/console/operator")
    assert told["operator"] == "ops"
    assert (await page.ask("GET", "/admin/v1/requests"))[0]["data"] == []
    _, answer = await page.ask("DELETE", SESSION)
    assert "Max-Age=0" in answer.headers["set-cookie"]
    await page.ask("GET", "/admin/v1/requests", status=401)


async def test_behind_tls_the_cookie_is_for_tls_alone(house: House) -> None:
    answer = await page_of(house).log_in(KEY, 200, **{"x-forwarded-proto": "https"})
    assert answer.headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize("origin", ["", "null", "http://127.0.0.1:1", "http://evil.example", "http://[", "x"])
async def test_another_page_can_neither_log_in_nor_change_anything(house: House, origin: str) -> None:
    page = page_of(house)
    await page.log_in(status=403, origin=origin)
    await page.log_in()
    for method, path in (
        ("POST", "/admin/v1/reload"),
        ("DELETE", "/admin/v1/requests/x"),
        ("DELETE", SESSION),
        ("POST", "/admin/v1/console/chats"),
    ):
        told, _ = await page.ask(method, path, status=403, origin=origin)
        assert told["error"]["code"] == "permission_denied"
    await page.ask("DELETE", "/admin/v1/requests/x")
    if origin:  # with the key itself, too
        await page.ask("POST", "/admin/v1/reload", status=403, origin=origin, authorization=f"Bearer {KEY}")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"json": {"key": "wrong"}}, 401),
        ({"json": {"key": ""}}, 401),
        ({"json": {"key": "k" * 300}}, 401),
        ({"json": {"key": "a\nb"}}, 401),
        ({"json": {"key": "dev-key"}}, 401),  # a tenant's
        ({"json": {"key": 5}}, 400),
        ({"json": {"key": KEY, "more": 1}}, 400),
        ({"data": b'{"key": "x"}', "headers": {"content-type": "text/plain"}}, 400),
        ({"data": b"{", "headers": {"content-type": "application/json"}}, 400),
    ],
)
async def test_what_is_no_operators_key_opens_nothing(
    house: House, options: dict[str, Any], status: int
) -> None:
    origin = page_of(house).origin
    headers = {"origin": origin} | options.pop("headers", {})
    async with house.client.post(origin + SESSION, headers=headers, **options) as answer:
        assert answer.status == status
        assert "set-cookie" not in answer.headers
        assert KEY not in await answer.text()
    assert KEY not in house.log.getvalue()


@pytest.mark.parametrize("key", ["", "k" * 300, "a\nb", " a"])
async def test_what_fits_no_header_is_asked_of_nobody(
    house: House, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A supervisor asks a worker by one."""
    asked: list[str] = []
    operators = type(house.gateway.accounts.now.operators)
    monkeypatch.setattr(operators, "authenticate", lambda _, shown, now_s: asked.append(shown))
    await page_of(house).log_in(key, 401)
    assert asked == []


async def test_a_login_ends_the_session_that_was_there(house: House) -> None:
    page = page_of(house)
    await page.log_in()
    before = page.cookie
    await page.log_in()
    await page.ask("GET", "/admin/v1/requests")
    page.cookie = before
    await page.ask("GET", "/admin/v1/requests", status=401)


async def test_logins_that_fail_are_bounded(house: House) -> None:
    page = page_of(house)
    for _ in range(2 * FAILURES_PER_NETWORK_MAX):
        await page.log_in()  # those that succeed do not count
    for _ in range(FAILURES_PER_NETWORK_MAX):
        await page.log_in("wrong", 401)
    answer = await page.log_in(status=429)
    assert int(answer.headers["retry-after"]) >= 1
    await page.ask("GET", "/admin/v1/requests")  # who is logged in stays so


async def test_failures_from_many_networks_keep_no_operator_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An IPv6 network of 64 bits is one; whoever has many of them guesses once in each."""
    page, remote = page_of(house), "2001:db8::1"
    monkeypatch.setattr(web.BaseRequest, "remote", property(lambda _: remote))
    for number in range(FAILURES_PER_NETWORK_MAX + 1):
        remote = f"2001:db8::{number:x}"
        await page.log_in("wrong", 401 if number < FAILURES_PER_NETWORK_MAX else 429)
    for number in range(FAILURES_MAX):
        remote = f"2001:db8:1:{number:x}::1"
        await page.log_in("wrong", 401)
    await page.log_in(status=429)
    remote = "2001:db8:2::1"
    await page.log_in()


async def test_a_session_ends_when_it_idles(open_house: Open) -> None:
    clock = VirtualClock()
    house = await open_house(admin=operator_keys(), clock=clock)
    page = page_of(house)
    await page.log_in()
    await page.ask("GET", "/admin/v1/console/operator")
    clock.advance(IDLE_S + 1)
    await page.ask("GET", "/admin/v1/console/operator", status=401)


async def test_a_session_ends_with_its_key(house: House) -> None:
    page, accounts = page_of(house), house.gateway.accounts
    await page.log_in()
    config = accounts.config

    def operators(text: str) -> None:
        other = load(settings("http://127.0.0.1:1", admin=operator_keys(text)), {})
        accounts.now = accounts._accounts_of(replace(config, admin=other.admin))

    operators("another")
    await page.ask("GET", "/admin/v1/requests", status=401)
    operators(KEY)  # the key is back, and the session is not
    await page.ask("GET", "/admin/v1/requests", status=401)
    await page.log_in()
    await page.ask("GET", "/admin/v1/requests")


@pytest.mark.parametrize(
    "cookie", [f"{COOKIE}=", f"{COOKIE}=x", f'{COOKIE}="', f"a={'b' * 7000}; {COOKIE}=x", "a"]
)
async def test_an_odd_cookie_is_none(house: House, cookie: str) -> None:
    await page_of(house).ask("GET", "/admin/v1/requests", status=401, cookie=cookie)


async def test_a_key_counts_before_a_cookie_and_a_supervisors_word_is_not_heard(house: House) -> None:
    page = page_of(house)
    await page.log_in()
    await page.ask("GET", "/admin/v1/requests", status=401, authorization="Bearer wrong")
    page.cookie = ""
    digest = hash_key(KEY).removeprefix("sha256:")
    await page.ask("GET", "/admin/v1/requests", status=401, **{"x-penstock-operator-digest": digest})
    await page.ask("PUT", SESSION, status=405)
