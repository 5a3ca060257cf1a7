"""The console in a real browser, against a real `penstock up`: `python -m tests.ship.console [FOLDER]`.

It logs in, chats, opens that answer's waterfall and compares its numbers with the log lines of both services,
tries what a tenant can put on the page, follows a session, fills the gateway with live requests and measures
the page's longest task, logs out, and takes pictures into FOLDER, light and dark, narrow and wide, to be
looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from gateway.operators.gate import SESSION
from tests.ship.browser import Page, opened

UP_S: Final = 240.0
LIVE: Final = 1000
WATCHED_S: Final = 10.0
TASK_MS_MAX: Final = 50.0
SIZES: Final = {"wide": (1440, 900), "narrow": (390, 844)}
EVIL: Final = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'


@dataclass(frozen=True)
class Up:
    """A running `penstock up`."""

    url: str
    key: str
    console: str
    admin_key: str
    logs: Path

    def line(self, service: str, request_id: str) -> dict[str, Any]:
        """The completed line of a request."""
        for text in (self.logs / f"{service}.log").read_text().splitlines():
            if "request.completed" in text and request_id in text:
                found: dict[str, Any] = json.loads(text[text.index("{") :])
                return found
        raise AssertionError(f"{service} has no line of {request_id}")


@asynccontextmanager
async def up(folder: Path) -> AsyncIterator[Up]:
    """Start it, and stop it at the end."""
    argv = [str(Path(sys.executable).with_name("penstock")), "up", "--port", "0", "--data-dir", str(folder)]
    env = os.environ | {"XDG_CACHE_HOME": str(folder)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
    assert process.stdout is not None
    try:
        printed = ""
        async with asyncio.timeout(UP_S):
            while "In another terminal" not in printed:
                line = await asyncio.to_thread(process.stdout.readline)
                assert line, printed
                printed += line
        names = ("Base URL", "API key", "Console", "Admin key")
        url, key, console, admin_key = (_told(printed, name) for name in names)
        yield Up(url, key, console, admin_key, folder)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _told(printed: str, name: str) -> str:
    """The value that `penstock up` prints behind a name."""
    match = re.search(rf"{name}\s+(\S+)", printed)
    assert match is not None, printed
    return match[1]


async def log_in(page: Page, here: Up) -> None:
    await page.until("document.querySelector('#key') !== null")
    await page.js(
        "document.querySelector('#key').value = 'wrong'; document.querySelector('form').requestSubmit()"
    )
    await page.until("document.querySelector('#login-problem').textContent.includes('no operator')")
    await page.js(f"document.querySelector('#key').value = {json.dumps(here.admin_key)};"
                  "document.querySelector('form').requestSubmit()")  # fmt: skip
    await page.until("!document.querySelector('#nav').hidden")
    assert await page.js("document.cookie") == "", "a script must not see the session"


async def chat(page: Page, here: Up) -> str:
    """Chat, and return the request's id."""
    await page.js("location.hash = '#/chat'")
    await page.until("document.querySelector('#chat-model') && document.querySelector('#chat-model').value")
    await page.js(f"document.querySelector('#chat-key').value = {json.dumps(here.key)};"
                  "document.querySelector('#chat-words').value = 'What is a penstock?';"
                  "document.querySelector('#chat-max').value = '48';"
                  "document.querySelector('form.ask').requestSubmit()")  # fmt: skip
    await page.until("document.querySelector('.side .stages') !== null")
    text = await page.js("document.querySelector('.message.assistant .words').textContent")
    print(f"chat: {text[:60]!r}")
    assert text
    assert await page.js("document.querySelectorAll('.side .ticks').length") == 1
    return str(await page.js("document.querySelector('.message.assistant').dataset.request"))


async def log_out(page: Page, here: Up) -> None:
    """Whoever logs in next on the same page finds nothing of this chat."""
    for why, ended in (
        ("logged out", "document.querySelector('#logout').click()"),
        (
            "has ended",
            f"fetch('{SESSION}', {{method: 'DELETE'}}).then(() => {{ location.hash = '#/requests'; }})",
        ),
    ):
        await chat(page, here)
        await page.js(ended)
        await page.until("document.querySelector('#key') !== null")
        assert why in await page.js("document.querySelector('#login-problem').textContent")
        await log_in(page, here)
        await page.js("location.hash = '#/chat'")
        await page.until("document.querySelector('#chat-key option') !== null")
        assert await page.js("document.querySelectorAll('.message').length") == 0


async def compare(page: Page, here: Up, request_id: str) -> None:
    """Compare the waterfall's numbers with the log lines of both services."""
    await page.js(f"location.hash = '#/request/{request_id}'")
    await page.until("document.querySelector('h1.id') && document.querySelector('.stages tbody tr')")
    rows = await page.js(
        "[...document.querySelectorAll('.stages tbody tr[data-stage]')].map(row => [row.dataset.service,"
        " row.dataset.stage, Number(row.querySelector('.takes').textContent)])"
    )
    assert await page.js("document.querySelectorAll('.tokens .ticks').length") == 1
    total = await page.js("parseFloat(document.querySelector('[data-fact=total]').textContent)")
    gateway, engine = here.line("gateway", request_id), here.line("engine", request_id)
    assert total == gateway["total_ms"], (total, gateway["total_ms"])
    sums: dict[tuple[str, str], float] = {}
    for service, stage, takes in rows:
        sums[service, stage] = sums.get((service, stage), 0.0) + takes
    compared = 0
    for (service, stage), takes in sums.items():
        line = gateway if service == "gateway" else engine
        assert abs(takes - line[f"{stage}_ms"]) < 0.01, (service, stage, takes, line[f"{stage}_ms"])
        compared += 1
    own = sum(takes for (service, _), takes in sums.items() if service == "gateway")
    assert abs(own - total) < 1.0, (own, total)
    assert {"queue", "prefill", "decode"} <= {stage for service, stage in sums if service == "engine"}
    print(
        f"waterfall: {compared} stages as in both logs; the gateway's add up to {own:.3f} of {total:.3f} ms"
    )


async def attack(page: Page, here: Up) -> None:
    """What a tenant chooses stays text: the model's name, the path, the id and the agent."""
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {here.key}", "user-agent": EVIL, "x-request-id": "evil-1"}
        body = {"model": EVIL, "messages": [{"role": EVIL, "content": EVIL}], EVIL: 1}
        async with session.post(f"{here.url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status in (400, 404)
        async with session.get(
            f"{here.url}/{EVIL}", headers=headers | {"x-request-id": "javascript:1"}
        ) as answer:
            assert answer.status in (400, 404)
    await page.js("location.hash = '#/requests'")
    await page.until("[...document.querySelectorAll('td.id a')].some(one => one.textContent === 'evil-1')")
    await page.js("location.hash = '#/request/' + encodeURIComponent('evil-1')")
    await page.until("document.querySelector('.stages tbody tr')")
    await page.js("location.hash = '#/request/' + encodeURIComponent('<img src=x onerror=window.pwned=1>')")
    await page.until("!document.querySelector('#notice').hidden")
    assert await page.js("window.pwned === undefined && document.querySelectorAll('main img').length === 0")
    for name in ("constructor", "__proto__", "toString/x"):
        await page.js(f"location.hash = '#/{name}'")
        await page.until("document.title.startsWith('Requests')")
    print("attack: nothing but text")


async def follow(page: Page, here: Up) -> None:
    """From a request to the others of its session."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {here.key}"}) as session:
        async with session.get(f"{here.url}/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "water " * 200}], "max_tokens": 1}
        for turn in range(2):
            headers = {"x-request-id": f"turn-{turn}", "x-session-id": "mine"}
            async with session.post(f"{here.url}/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
    await page.js("location.hash = '#/request/turn-1'")
    await page.until("document.querySelector('[data-fact=session] a') !== null")
    line = here.line("gateway", "turn-1")
    assert await page.js("document.querySelector('[data-fact=session]').textContent") == line["session"]
    share = f"{100 * line['cached_tokens'] / line['prompt_tokens']:.0f} %"
    assert f"cached, {share})" in await page.js("document.querySelector('[data-fact=prompt]').textContent")
    await page.js("document.querySelector('[data-fact=session] a').click()")
    ids = "[...document.querySelectorAll('td.id a')].map(one => one.textContent).join()"
    await page.until(f"{ids} === 'turn-1,turn-0'")
    await page.js(
        "document.querySelector('[name=session]').value = '';"
        "document.querySelector('form.filters').dispatchEvent(new Event('change'))"
    )
    await page.until(f"{ids}.includes('evil-1')")
    print(f"session {line['session']}: {share} cached")


@asynccontextmanager
async def crowd(here: Up) -> AsyncIterator[None]:
    """Requests that live as long as their bodies do not come."""
    host, _, port = here.url.removeprefix("http://").partition("/")[0].partition(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {here.key}\r\n"
        "content-type: application/json\r\ncontent-length: 100\r\n\r\n"
    ).encode()
    async with AsyncExitStack() as stack:
        for _ in range(LIVE):
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(head)
        yield


async def lag(page: Page, here: Up, folder: Path) -> None:
    """The page's longest task, and what its questions cost, while there are many live requests."""
    await page.js("location.hash = '#/requests'")
    async with crowd(here):
        many = LIVE * 9 // 10
        await page.until(f"parseInt(document.querySelector('#count').textContent.replace(',', '')) >= {many}")
        async with page.timed() as tasks:
            began = time.monotonic()
            while time.monotonic() - began < WATCHED_S:
                await page.js("document.querySelector('.scroll').scrollBy(0, 700); true")
                await asyncio.sleep(0.1)
        told = await page.js("document.querySelector('#count').textContent")
        rows = await page.js("document.querySelectorAll('.requests tbody tr').length")
        took_ms, length = await cost(here)
        await page.picture(folder / "requests-live-narrow.png")
    worst = sorted(tasks)[-3:]
    print(f"lag: {told}; {rows} rows in the page; of {len(tasks)} tasks the longest took {worst} ms")
    print(f"cost: a page of rows takes {took_ms:.1f} ms of the gateway with the way there, {length:,} bytes")
    assert rows < 120, rows
    assert len(tasks) > 10
    assert worst[-1] <= TASK_MS_MAX, worst


async def cost(here: Up) -> tuple[float, int]:
    """The median time of a page of rows, and its length."""
    url = here.console.replace("/console", f"/admin/v1/requests?limit={LIVE}")
    times, length = [], 0
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {here.admin_key}"}) as session:
        for _ in range(15):
            began = time.perf_counter()
            async with session.get(url) as answer:
                length = len(await answer.read())
            times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[len(times) // 2], length


async def pictures(page: Page, folder: Path, request_id: str) -> None:
    views = {"requests": "requests", "request": f"request/{request_id}", "engines": "engines"}
    views |= {"tenants": "tenants", "chat": "chat"}
    ready = {
        "requests": "td.id a",
        "request": ".stages tbody tr",
        "engines": ".u-wrap",
        "tenants": "tbody tr",
    }
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            await page.look(width, height, scheme)
            for name, fragment in views.items():
                await page.js(f"location.hash = '#/{fragment}'")
                await page.until(
                    f"document.querySelector({json.dumps(ready.get(name, '#chat-key option'))}) !== null"
                )
                await asyncio.sleep(2.5 if name == "engines" else 0.4)
                is_wide = await page.js("document.documentElement.scrollWidth > innerWidth")
                assert not is_wide, f"{name} is wider than the window when {size}"
                await page.picture(folder / f"{name}-{size}-{scheme}.png")


async def check(folder: Path) -> None:
    """All of it. Raises AssertionError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        async with up(Path(logs)) as here, opened(here.console) as page:
            await page.look(*SIZES["wide"], "light")
            await page.until("document.querySelector('#key') !== null")
            await page.picture(folder / "login-wide-light.png")
            await log_in(page, here)
            request_id = await chat(page, here)
            for scheme in ("light", "dark"):
                await page.look(*SIZES["wide"], scheme)
                await page.picture(folder / f"chat-answer-{scheme}.png")
            await compare(page, here, request_id)
            await attack(page, here)
            await follow(page, here)
            await pictures(page, folder, request_id)
            await lag(page, here, folder)
            await log_out(page, here)
            assert page.complaints == [], page.complaints
    print(f"pictures are in {folder}")


def main() -> int:
    asyncio.run(
        check(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="penstock-console-")))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
