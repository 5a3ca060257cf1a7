"""The webhook that takes billing lines at least once."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import hmac
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trustme
from aiohttp import web

from gateway.app import Gateway
from gateway.background import Background
from gateway.billing import lines, webhook
from gateway.billing.lines import Billing, BillingLine
from gateway.billing.spool import Spool
from gateway.billing.webhook import Webhook, signed_headers, webhook_secret, webhook_tls
from gateway.config.accounting import AccountingConfig
from gateway.config.whole import load
from shared.process.setting_values import ConfigError
from tests.fakes import VirtualClock
from tests.gateway.billing.test_billing import note, read, waiting_bytes
from tests.gateway.conftest import Open, settings, until
from tests.gateway.fake_engine import unary

SECRET: Final = b"0123456789abcdef01234567"
WHSEC: Final = f"whsec_{base64.b64encode(SECRET).decode()}"
NEW_SECRET: Final = SECRET[::-1]
NEW_WHSEC: Final = f"whsec_{base64.b64encode(NEW_SECRET).decode()}"
pytestmark = pytest.mark.hop("http2")


@pytest.fixture(autouse=True)
def _proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy. No line may go there."""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


class Receiver:
    """A webhook that answers with what the test says."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.location: str | None = None
        """Where it sends whoever posts."""
        self.posts: list[tuple[dict[str, str], bytes]] = []

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.posts.append((dict(request.headers), await request.read()))
        headers = {} if self.location is None else {"location": self.location}
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204, headers=headers)

    @property
    def ids(self) -> list[str]:
        """The ids of the lines that were taken, in order."""
        return [line.id for _, body in self.posts for line in map(_line, body.splitlines())]


def _line(data: bytes) -> BillingLine:
    return msgspec.json.decode(data, type=BillingLine)


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Receiver, str]]:
    receiver, loop = Receiver(), asyncio.get_running_loop()
    server = await loop.create_server(web.Server(receiver.handle), "127.0.0.1", 0, ssl=tls)
    async with server:
        scheme, port = "http" if tls is None else "https", server.sockets[0].getsockname()[1]
        yield receiver, f"{scheme}://127.0.0.1:{port}/hook"


def with_webhook(file: Path, url: str, **more: Any) -> AccountingConfig:
    return AccountingConfig(file=str(file), webhook=url, webhook_secret="env:HOOK", **more)


def sender(config: AccountingConfig, spool: Spool, clock: VirtualClock) -> Webhook:
    assert config.webhook is not None
    secret, tls = webhook_secret(config, {"HOOK": WHSEC}), webhook_tls(config)
    return Webhook(config.webhook, secret, tls, spool, clock)


def _is_signed(post: tuple[Mapping[str, str], bytes], secret: bytes) -> bool:
    headers, posted = post
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + posted
    digest = base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
    return headers["webhook-signature"] == f"v1,{digest}"


async def test_lines_are_posted_signed_and_in_order(
    open_house: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", WHSEC)
    monkeypatch.setattr(webhook, "POLL_S", 0.01)
    async with receiving() as (receiver, url):
        section = {"file": str(file), "webhook": url, "webhook_secret": "env:HOOK"}
        house = await open_house(accounting=section)
        house.engine.script = unary()
        for _ in range(3):
            async with house.chat():
                pass
        await until(lambda: len(receiver.ids) == 3)
    assert _is_signed(receiver.posts[0], SECRET)
    assert receiver.ids == [line.id for line in read(file)]


async def one_line_is_sent(
    config: AccountingConfig, clock: VirtualClock
) -> tuple[Billing, Spool, asyncio.Task[None]]:
    """A file with one line, and the task that sends it."""
    billing = Billing(config, clock)
    assert billing.spool is not None
    note(billing, 1)
    await billing._write(billing.spool)
    return billing, billing.spool, asyncio.create_task(sender(config, billing.spool, clock).send())


async def test_a_webhook_that_fails_gets_the_same_batch_until_it_takes_it(file: Path) -> None:
    clock = VirtualClock()
    async with receiving() as (receiver, url):
        receiver.statuses = [500, 302, 429]
        billing, spooled, sending = await one_line_is_sent(with_webhook(file, url), clock)

        def waits_after(posts: int) -> bool:
            return len(receiver.posts) == posts and clock.sleeping == 1

        for attempt in range(1, 4):
            await until(partial(waits_after, attempt))
            note(billing, attempt + 1)
            await billing._write(spooled)
            longest_s = webhook.RETRY_S_MIN * 2 ** (attempt - 1)
            clock.advance(0.9 * (1 - webhook.JITTER) * longest_s)
            assert clock.sleeping == 1, "each wait is twice as long as the one before"
            clock.advance(longest_s)
        await until(lambda: len(receiver.posts) == 5 and spooled.waiting == 0)
        ids = [headers["webhook-id"] for headers, _ in receiver.posts]
        assert len(set(ids[:4])) == 1
        assert receiver.ids == ["r1"] * 4 + ["r2", "r3", "r4"]
        sending.cancel()
        await asyncio.wait([sending])
        await billing.aclose()


async def test_a_webhook_that_takes_the_lines_and_never_says_so_gets_them_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "POST_S", 0.05)
    clock = VirtualClock()
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        config = with_webhook(file, f"http://127.0.0.1:{hangs.getsockname()[1]}/hook")
        billing, spooled, sending = await one_line_is_sent(config, clock)
        await until(lambda: clock.sleeping == 1)
        assert spooled.waiting
        sending.cancel()
        await asyncio.wait([sending])
        await billing.aclose()


async def test_a_redirect_is_not_followed(file: Path) -> None:
    """Whoever answers for the webhook could have the lines sent to anybody, also within the network."""
    clock, redirects = VirtualClock(), [301, 302, 303, 307, 308]
    async with receiving() as (receiver, url), receiving() as (other, other_url):
        receiver.statuses, receiver.location = [*redirects], other_url
        billing, spooled, sending = await one_line_is_sent(with_webhook(file, url), clock)

        def waits_after(posts: int) -> bool:
            return len(receiver.posts) == posts and clock.sleeping == 1

        for attempt in range(1, len(redirects) + 1):
            await until(partial(waits_after, attempt))
            clock.advance(webhook.RETRY_S_MAX)
        await until(lambda: spooled.waiting == 0)
        assert receiver.ids == ["r1"] * (len(redirects) + 1), "it is tried again where it was"
        assert not other.posts
        sending.cancel()
        await asyncio.wait([sending])
        await billing.aclose()


async def test_a_secret_that_is_renewed_signs_what_is_posted_next(file: Path, tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "secret"
    path.write_text(WHSEC)
    async with receiving() as (receiver, url):
        receiver.statuses = [500, 500]
        config = AccountingConfig(file=str(file), webhook=url, webhook_secret=f"file:{path}")
        billing, _, sending = await one_line_is_sent(config, clock)

        def waits_after(posts: int) -> bool:
            return len(receiver.posts) == posts and clock.sleeping == 1

        for attempt, text in enumerate(("whsec_short", NEW_WHSEC), 1):
            await until(partial(waits_after, attempt))
            path.write_text(text)
            clock.advance(webhook.RETRY_S_MIN * 2**attempt)
        await until(lambda: len(receiver.posts) == 3)
        signers = [SECRET, SECRET, NEW_SECRET]
        assert all(map(_is_signed, receiver.posts, signers)), "a file that is no secret changes nothing"
        sending.cancel()
        await asyncio.wait([sending])
        await billing.aclose()


async def test_an_authority_that_is_renewed_is_trusted_from_the_next_post_on(
    file: Path, tmp_path: Path
) -> None:
    clock, path, own, other = VirtualClock(), tmp_path / "ca.pem", trustme.CA(), trustme.CA()
    other.cert_pem.write_to_path(path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.issue_cert("127.0.0.1").configure_cert(tls)
    async with receiving(tls) as (receiver, url):
        config = with_webhook(file, url, webhook_ca=str(path))
        billing, spooled, sending = await one_line_is_sent(config, clock)
        await until(lambda: clock.sleeping == 1)
        assert not receiver.posts, "it is another authority's"
        own.cert_pem.write_to_path(path)
        clock.advance(webhook.RETRY_S_MIN)
        await until(lambda: spooled.waiting == 0)
        assert receiver.ids == ["r1"]
        sending.cancel()
        await asyncio.wait([sending])
        await billing.aclose()


async def test_a_disk_that_is_full_fails_no_webhook_and_has_nothing_posted_twice(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    written = Spool._write_sent

    def full(_: Spool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with receiving() as (receiver, url):
        config = with_webhook(file, url)
        billing = Billing(config, clock)
        spooled = billing.spool
        assert spooled is not None
        monkeypatch.setattr(Spool, "_write_sent", full)
        async with Background({"webhook": sender(config, spooled, clock).send}, clock) as background:
            for number in range(3):
                await until(lambda: clock.sleeping == 1)
                assert background.down == []
                note(billing, number)
                await billing._write(spooled)
                clock.advance(webhook.POLL_S)
            await until(lambda: clock.sleeping == 1)
            monkeypatch.setattr(Spool, "_write_sent", written)
            clock.advance(webhook.POLL_S)
            await until(lambda: clock.sleeping == 1)
        await billing.aclose()
    assert receiver.ids == ["r0", "r1", "r2"]
    assert Spool(file, 10**6).waiting == 0


async def test_a_dead_webhook_holds_up_no_request_and_what_waits_is_shown(
    open_house: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", WHSEC)
    section = {"file": str(file), "webhook": "http://127.0.0.1:1/hook", "webhook_secret": "env:HOOK"}
    house = await open_house(accounting=section)
    house.engine.script = unary()
    for _ in range(3):
        async with house.chat() as answer:
            assert answer.status == 200
    await house.lines(3)
    await until(lambda: len(read(file)) == 3)
    assert lines.WAITING._read() == waiting_bytes(file)


def test_a_signature_is_that_of_the_standards_example() -> None:
    """From the specification of Standard Webhooks: the same message, by its own formula."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    headers = signed_headers(secret, 1614265330, body)
    text = f"{headers['webhook-id']}.1614265330.".encode() + body
    expected = base64.b64encode(hmac.new(secret, text, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"webhook": "https://x"}, "accounting: webhook needs file"),
        ({"webhook": "https://x", "file": "f"}, "needs webhook_secret"),
        ({"webhook": "http://x", "file": "f", "webhook_secret": "env:A"}, "must be an https URL"),
        ({"webhook": "https://u:p@x", "file": "f", "webhook_secret": "env:A"}, "must be an https URL"),
        ({"days": 0}, "accounting.days: must be a whole number from 1 to 400"),
    ],
)
def test_a_mistake_in_the_settings_is_named(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://engine", accounting=section), {})
    assert problem in str(caught.value)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2VjcmV0", "whsec_not+base64", "c2VjcmV0"])
def test_a_secret_that_is_none_is_named_at_the_start_and_not_shown(file: Path, secret: str) -> None:
    section = {"file": str(file), "webhook": "https://x", "webhook_secret": "env:HOOK"}
    with pytest.raises(ConfigError, match="accounting") as caught:
        Gateway(load(settings("http://engine", accounting=section), {}), env={"HOOK": secret})
    assert "c2VjcmV0" not in str(caught.value)


def test_authorities_that_cannot_be_read_are_named_at_the_start(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "none.pem"
    section = {"file": str(file), "webhook": "https://x", "webhook_secret": "env:HOOK", "webhook_ca": str(ca)}
    with pytest.raises(ConfigError, match=f"accounting.webhook_ca: cannot use {ca}: "):
        Gateway(load(settings("http://engine", accounting=section), {}), env={"HOOK": WHSEC})
