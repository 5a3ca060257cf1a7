"""The console in a real browser, against a real `penstock up`: `python -m tests.ship.console [FOLDER]`.

It logs in, chats, opens that answer's waterfall and compares its numbers with the log lines of both services,
tries what a tenant can put on the page, follows a session, compares what is said of drafts, fills the gateway
with live requests and measures the page's longest task, logs out, and takes pictures into FOLDER, light and
dark, narrow and wide, to be looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp

from gateway.operators.gate import SESSION
from tests.ship.browser import Page, opened

UP_S: Final = 240.0
LIVE: Final = 1000
WATCHED_S: Final = 10.0
TASK_MS_MAX: Final = 50.0
SIZES: Final = {"wide": (1440, 900), "narrow": (375, 812)}
AXE: Final = "axe-core@4.10.3"
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
        "document.querySelector('#key').value = 'wrong'; document.querySelector('form.login').requestSubmit()"
    )
    await page.until("document.querySelector('#login-problem').textContent.includes('no operator')")
    await page.js(f"document.querySelector('#key').value = {json.dumps(here.admin_key)};"
                  "document.querySelector('form.login').requestSubmit()")  # fmt: skip
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
        await page.until("document.querySelector('#models option') !== null")
        assert await page.js("document.querySelectorAll('.message').length") == 0


async def compare(page: Page, here: Up, request_id: str) -> None:
    """Compare the waterfall's numbers with the log lines of both services."""
    await page.js(f"location.hash = '#/request/{request_id}'")
    await page.until("document.querySelector('h1.id') && document.querySelector('.stages tbody tr')")
    rows = await page.js(
        "[...document.querySelectorAll('.stages tbody tr[data-stage]')].map(row => [row.dataset.service,"
        " row.dataset.stage, parseFloat(row.querySelector('.takes').title)])"
    )
    assert await page.js("document.querySelectorAll('.tokens .ticks').length") == 1
    total = await page.js("parseFloat(document.querySelector('[data-fact=total] span').title)")
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
    told = await page.js("document.querySelector('[data-fact=ended] time').textContent")
    assert told.endswith(" UTC"), told
    ended = datetime.fromisoformat(f"{told.removesuffix(' UTC')}Z")
    assert abs(ended - datetime.fromisoformat(gateway["ts"])) < timedelta(milliseconds=5), (
        told,
        gateway["ts"],
    )
    state = await page.js("document.querySelector('[data-fact=state]').textContent")
    assert state == "200 ok in relay: the client has its whole answer", state
    await page.js("document.querySelector('[data-fact=tenant] a').click()")
    await page.until(f"location.hash === '#/requests?tenant={gateway['tenant']}'")
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
        await page.until("document.title.startsWith('Overview')")
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
    await page.until(f"{IDS} === 'turn-1,turn-0'")
    await fill(page, "session", "")
    await page.until(f"{IDS}.includes('evil-1')")
    print(f"session {line['session']}: {share} cached")


async def drafts(page: Page, here: Up) -> None:
    """What a request's page says of its drafts, and of what its caller predicted, is what both lines have."""
    messages = [{"role": "user", "content": "What is a penstock?"}]
    answers: dict[str, str] = {}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {here.key}"}) as session:
        async with session.get(f"{here.url}/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0}
        for name in ("alone", "predicted"):
            if (known := answers.get("alone")) is not None:
                told = f"{known[: len(known) * 2 // 3]} 0 0 0 0 0 0"  # right, and then wrong
                body["prediction"] = {"type": "content", "content": told}
            headers = {"x-request-id": name}
            async with session.post(f"{here.url}/chat/completions", json=body, headers=headers) as answer:
                answers[name] = (await answer.json())["choices"][0]["message"]["content"]
    assert answers["predicted"] == answers["alone"] != ""
    facts = "Object.fromEntries([...document.querySelectorAll('[data-fact]')].map(one =>"
    facts += " [one.dataset.fact, one.textContent]))"
    for name in answers:
        line, engine = here.line("gateway", name), here.line("engine", name)
        await page.js(f"location.hash = '#/request/{name}'")
        await page.until(f"document.querySelector('h1.id')?.textContent.includes('{name}')"
                         " && document.querySelector('[data-fact=charged]')")  # fmt: skip
        shown, drafted = await page.js(facts), line.get("drafted_tokens", 0)
        assert drafted == engine.get("drafted_tokens", 0)
        assert ("drafts" in shown) == bool(drafted), shown
        assert ("prediction" in shown) == (name == "predicted"), shown
        if drafted:
            saved = line["accepted_tokens"]
            right = f"{100 * saved / drafted:.0f} %"
            steps = "step" if saved == 1 else "steps"
            assert shown["drafts"] == f"{saved} {steps} saved ({right} of {drafted} right)", shown
    right, wrong = line["accepted_prediction_tokens"], line["rejected_prediction_tokens"]
    assert shown["prediction"] == f"{right} right, {wrong} wrong", shown
    assert right > 0
    assert wrong > 0
    assert line["completion_tokens"] >= right + wrong, "what is wrong is charged"
    print(f"drafts: {shown['drafts']}; prediction: {shown['prediction']}")


async def fill(page: Page, name: str, value: str) -> None:
    """Fill in a filter."""
    await page.js(
        f"(field => {{ field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('change', { bubbles: true })); })"
        f"(document.querySelector('form.filters [name={name}]'))"
    )


async def seek(page: Page, text: str) -> None:
    """Look for an id, by keyboard."""
    await page.js("document.activeElement.blur(); true")
    await page.press("k", 75, ctrl=True)
    await page.until("document.activeElement.id === 'find-text'")
    await page.send("Input.insertText", text=text)
    await page.press("Enter", 13)


async def take_along(page: Page, here: Up) -> None:
    """A request as `penstock trace` prints it, and a list as files. What is copied and saved is caught."""
    await page.js(
        "window.taken = []; navigator.clipboard.writeText = async text => { taken.push(text); };"
        "URL.createObjectURL = blob => { blob.text().then(text => taken.push(text)); return '#'; }; true"
    )
    await page.js("document.querySelectorAll('.above button').forEach(one => one.click())")
    await page.until("taken.length === 2")
    csv, rows = await page.js("taken.sort((a, b) => a.startsWith('request_id') ? -1 : 1)")
    assert csv.startswith("request_id,trace_id,began_at,")
    assert {row["request_id"] for row in json.loads(rows)} == {
        row.partition(",")[0] for row in csv.split("\r\n")[1:-1]
    }
    await page.js("taken.length = 0; location.hash = '#/request/turn-1'")
    await page.until("document.querySelector('.above .buttons:not([hidden])')")
    await page.js("document.querySelector('.above button').click()")
    await page.until("taken.length === 1")
    argv = [str(Path(sys.executable).with_name("penstock")), "trace", "turn-1"]
    argv += ["--admin-url", here.console.removesuffix("/console")]
    env = os.environ | {"PENSTOCK_ADMIN_KEY": here.admin_key}
    printed = await asyncio.to_thread(
        subprocess.run, argv, env=env, capture_output=True, text=True, check=True
    )
    assert await page.js("taken[0]") == printed.stdout


IDS: Final = "[...document.querySelectorAll('td.id a')].map(one => one.textContent).join()"


async def search(page: Page, here: Up) -> None:
    """From an id to its page, and what can be taken along from there."""
    line = here.line("gateway", "turn-1")
    for text, there in (
        ("turn-1", "#/request/turn-1"),
        (line["trace_id"], "#/request/turn-1"),
        (f"00-{line['trace_id']}-{line['span_id']}-01", "#/request/turn-1"),
        ("mine", "#/requests?session=mine"),
    ):
        await seek(page, text)
        await page.until(f"location.hash === {json.dumps(there)}")
        await page.js("location.hash = '#/engines'")
    await seek(page, EVIL)
    await page.until("!document.querySelector('#notice').hidden")
    assert EVIL in await page.js("document.querySelector('#notice').textContent")
    for fragment, there in (
        (f"#/requests/{line['session']}", f"#/requests?session={line['session']}"),
        ("#/requests/turn-0", "#/request/turn-0"),
    ):
        await page.js(f"location.hash = {json.dumps(fragment)}")
        await page.until(f"location.hash === {json.dumps(there)}")
    await narrow(page)
    await take_along(page, here)
    print("search: by id, trace, traceparent and session; the address keeps filters, range and sort")


async def overview(page: Page, here: Up) -> None:
    """What has happened is in the figures, and an error leads to its requests."""
    await page.js("location.hash = '#/overview'")
    await page.until("document.querySelector('[data-total=Requests]') !== null")
    totals = await page.js(
        "Object.fromEntries([...document.querySelectorAll('[data-total]')].map(one =>"
        " [one.dataset.total, one.textContent]))"
    )
    assert int(totals["Requests"].replace(",", "")) >= 6, totals
    assert "-" not in totals.values(), totals
    assert await page.js("document.querySelectorAll('.plot canvas').length") == 7
    await page.js(
        "[...document.querySelectorAll('th a')].find(one => one.textContent === 'invalid_value').click()"
    )
    await page.until(f"{IDS} === 'evil-1'")
    print(f"overview: {totals}")


async def tenants(page: Page, here: Up) -> None:
    """A tenant and its key, from their making to their end: the key is shown once, and works until then."""
    await page.js("location.hash = '#/tenants'")
    await page.until("document.querySelector('#new-tenant') !== null")
    await page.js(
        "document.querySelector('#new-tenant').value = 'made';"
        "document.querySelector('.making form [name=concurrent]').value = '3';"
        "document.querySelector('.making form').requestSubmit()"
    )
    await page.until("location.hash === '#/tenant/made' && document.querySelector('#tenant-limits')")
    assert await page.js("document.querySelector('#tenant-limits').textContent") == "At once 3"
    await page.js(
        f"document.querySelector('#key-labels').value = {json.dumps(EVIL)};"
        "document.querySelector('.making form').requestSubmit()"
    )
    await page.until("document.querySelector('#minted') && document.querySelector('tr[data-key]')")
    key = await page.js("document.querySelector('#minted').textContent")
    text = await page.js("document.querySelector('tr[data-key]').textContent")
    assert EVIL in text, text
    assert "not since" in text, text

    async def status() -> int:
        headers = {"authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{here.url}/models") as answer,
        ):
            return answer.status

    assert await status() == 200
    await page.until("document.querySelector('tr[data-key] td:nth-of-type(3) time') !== null")
    await limit_and_revoke(page)
    assert await status() == 401
    await page.js(
        "[...document.querySelectorAll('button')].find(one => one.textContent === 'I have it').click()"
    )
    assert key not in await page.js("document.body.textContent")
    await page.js(
        "[...document.querySelectorAll('main a')].find(one => one.textContent === 'Its requests').click()"
    )
    await page.until("location.hash === '#/requests?tenant=made' && document.querySelector('td.id a')")
    await delete_tenant(page)
    print("tenants: made, limited, a key shown once, used, limited, revoked and deleted")


async def limit_and_revoke(page: Page) -> None:
    """Change a key's limits, and revoke it."""
    await page.js("document.querySelector('.actions button').click()")
    await page.until("document.querySelector('.editor') !== null")
    await page.js(
        "document.querySelector('.editor [name=tokens_per_day]').value = '5000';"
        "document.querySelector('.editor').requestSubmit()"
    )
    await page.until("document.querySelector('td.limits').textContent === 'Tokens/day 5,000'")
    for _ in range(2):
        await page.js("document.querySelectorAll('.actions button')[1].click()")
    await page.until("document.querySelector('td.state').textContent === 'revoked'")


async def delete_tenant(page: Page) -> None:
    """It cannot be deleted while it has keys."""
    await page.js("location.hash = '#/tenant/made'")
    await page.until("document.querySelector('tr[data-key]')")
    assert "window.pwned" not in page.complaints
    assert await page.js("window.pwned === undefined")
    for _ in range(2):
        await page.js("document.querySelector('main > .buttons button').click()")
    await page.until("!document.querySelector('#notice').hidden")
    assert "key" in await page.js("document.querySelector('#notice').textContent"), "it has keys still"
    await page.js("location.hash = '#/requests'")
    await page.js("location.hash = '#/tenant/made'")
    await page.until("document.querySelectorAll('.actions button').length === 3")
    for _ in range(2):
        await page.js("document.querySelectorAll('.actions button')[2].click()")
    await page.until("document.querySelectorAll('tr[data-key]').length === 0")
    for _ in range(2):
        await page.js("document.querySelector('main > .buttons button').click()")
    await page.until("location.hash === '#/tenants'")


async def narrow(page: Page) -> None:
    """Filters, range and sort are in the address and there again at a reload; and a wrong filter says what is
    wrong with it."""
    await page.js("location.hash = '#/requests'")
    await fill(page, "session", "mine")
    await fill(page, "since", "2026-01-01T10:00:00")
    await page.js("document.querySelector('[data-sort=took] button').click()")
    await page.until("location.hash.includes('sort=took') && location.hash.includes('since=20')")
    await page.send("Page.reload")
    await page.until(f"document.querySelector('form.filters') !== null && {IDS} === 'turn-0,turn-1'")
    assert await page.js("document.querySelector('[aria-sort]').dataset.sort") == "took"
    assert await page.js("document.querySelector('[name=since]').value") == "2026-01-01T10:00"
    await fill(page, "until", "2026-01-01T11:00:00")
    await page.until("!document.querySelector('.empty').hidden")
    assert "times in UTC" in await page.js("document.querySelector('#count').textContent")
    for fragment, says in (
        ("status=abc", "Status: it must be one such as 429"),
        ("since=noon", "From, UTC: it must be a date and a time"),
        ("state=dead", "State: it must be one of the list"),
        ("min_ms=1.5", "At least, ms: it must be a whole number"),
        ("length=1", "There is no filter length"),
    ):
        await page.js(f"location.hash = '#/requests?{fragment}'")
        await page.until(
            f"document.querySelector('#filter-problem').textContent.includes({json.dumps(says)})"
        )
    await page.js("location.hash = '#/requests?status=4xx'")
    await page.until(f"{IDS}.includes('evil-1')")
    codes = await page.js("[...document.querySelectorAll('tr.bad .error')].map(one => one.textContent)")
    assert "invalid_value" in codes


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
        await page.picture(folder / "requests-live-narrow.png")
    await page.until("document.querySelector('#count').textContent.startsWith('0 live')")
    await costs(here)
    worst = sorted(tasks)[-3:]
    print(f"lag: {told}; {rows} rows in the page; of {len(tasks)} tasks the longest took {worst} ms")
    assert rows < 120, rows
    assert len(tasks) > 10
    assert worst[-1] <= TASK_MS_MAX, worst


async def costs(here: Up) -> None:
    """What a poll costs: of live requests, of completed ones, and of completed ones that have not changed."""
    polls = {"both": "limit=1000", "live": "state=live&limit=1000", "completed": "state=done&limit=1000"}
    for name, query in polls.items():
        took_ms, length, etag = await cost(here, query, {})
        print(f"cost: a page, {name}, takes {took_ms:.1f} ms with the way there, {length:,} bytes")
    assert etag is not None
    took_ms, length, _ = await cost(here, query, {"if-none-match": etag})
    print(f"cost: the same page that has not changed takes {took_ms:.1f} ms, {length:,} bytes")
    assert length == 0


async def cost(here: Up, query: str, headers: dict[str, str]) -> tuple[float, int, str | None]:
    """The median time of an answer, its length and its version."""
    url = here.console.replace("/console", f"/admin/v1/requests?{query}")
    times, length, etag = [], 0, None
    headers = {"authorization": f"Bearer {here.admin_key}"} | headers
    async with aiohttp.ClientSession(headers=headers) as session:
        for _ in range(15):
            began = time.perf_counter()
            async with session.get(url) as answer:
                length, etag = len(await answer.read()), answer.headers.get("etag")
            times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[len(times) // 2], length, etag


def axe() -> str:
    """The source of axe-core, fetched by npm into a cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"
    packed = cache / f"{AXE.replace('@', '-')}.tgz"
    if not packed.exists():
        cache.mkdir(parents=True, exist_ok=True)
        argv = ["npm", "pack", AXE, "--silent", "--pack-destination", str(cache)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd=cache)
    with tarfile.open(packed) as files:
        source = files.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


async def accessible(page: Page, name: str, source: str) -> None:
    """Nothing that axe-core would have otherwise."""
    await page.js(f"{source}; true")
    told = await page.js(
        "axe.run(document).then(told =>"
        " told.violations.map(one => [one.id, one.nodes.map(node => node.html)]))"
    )
    assert told == [], (name, told)


async def rules(page: Page, name: str, size: str) -> None:
    """What must be on a page, at any size."""
    is_wide = await page.js("document.documentElement.scrollWidth > innerWidth")
    assert not is_wide, f"{name} is wider than the window when {size}"
    assert await page.js("document.querySelectorAll('main h1').length") == 1, name
    assert await page.js("document.querySelector('#find-text').getBoundingClientRect().width") > 150, name
    if name == "requests":
        right = await page.js("document.querySelector('td.id').getBoundingClientRect().right")
        assert right < await page.js("innerWidth"), f"the id is out of sight when {size}"
    if name == "request":
        lane = await page.js("document.querySelector('td.lane').getBoundingClientRect().width")
        assert lane >= 100, f"the chart has {lane} px when {size}"
        for fact in ("began", "ended", "total", "state", "tenant", "trace"):
            assert await page.js(f"document.querySelector('[data-fact={fact}]').textContent"), fact


async def pictures(page: Page, folder: Path, request_id: str) -> None:
    source = axe()
    source = axe()
    views = {
        "overview": "overview",
        "requests": "requests",
        "request": f"request/{request_id}",
        "engines": "engines",
    }
    views |= {"tenants": "tenants", "tenant": "tenant/development", "chat": "chat"}
    ready = {
        "overview": "[data-total]",
        "requests": "td.id a",
        "request": ".stages tbody tr",
        "engines": ".u-wrap",
        "tenants": "tbody tr",
        "tenant": "tr[data-key]",
    }
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            await page.look(width, height, scheme)
            for name, fragment in views.items():
                await page.js(f"location.hash = '#/{fragment}'")
                await page.until(
                    f"document.querySelector({json.dumps(ready.get(name, '#models option'))}) !== null"
                )
                await asyncio.sleep(2.5 if name == "engines" else 0.4)
                await rules(page, name, size)
                await accessible(page, f"{name} when {size} and {scheme}", source)
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
            await drafts(page, here)
            await search(page, here)
            await overview(page, here)
            await tenants(page, here)
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
