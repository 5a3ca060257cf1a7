"""A headless Chromium, driven by its DevTools protocol: only as much of it as the console's check needs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

START_S: Final = 60.0
WAIT_S: Final = 60.0
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
OPTIONS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--remote-debugging-port=0", "--disable-background-networking", "--hide-scrollbars"),
)


def chromium() -> str:
    """The browser's path; Debian's is installed where there is none."""
    if (found := next(filter(None, map(shutil.which, NAMES)), None)) is not None:
        return found
    install = ["apt-get", "install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return "/usr/bin/chromium"


class Page:
    """One page. Each call returns when the browser has done it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self._traced: list[dict[str, Any]] = []
        self._is_traced = asyncio.Event()
        self.complaints: list[str] = []
        """Errors in the page: exceptions, refusals of its policy, dialogs."""

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if (waiting := self._waiting.pop(told.get("id", 0), None)) is not None:
                waiting.set_result(told)
            elif told.get("method") in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.complaints.append(json.dumps(told["params"])[:500])
            elif told.get("method") == "Tracing.dataCollected":
                self._traced += told["params"]["value"]
            elif told.get("method") == "Tracing.tracingComplete":
                self._is_traced.set()
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["source"] == "security":
                self.complaints.append(told["params"]["entry"]["text"])

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        told = await asyncio.wait_for(waiting, WAIT_S)
        assert "error" not in told, (method, told)
        result: dict[str, Any] = told["result"]
        return result

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        told = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(WAIT_S):
            while not await self.js(f"Boolean({expression})"):
                await asyncio.sleep(0.05)

    async def look(self, width: int, height: int, scheme: str) -> None:
        """Set the window's size, and what the user prefers of light and dark."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str, code: int, *, ctrl: bool = False) -> None:
        """Press a key and let it go. `code` is its virtual key code."""
        text = {} if ctrl else {"text": "\r" if key == "Enter" else key}
        told = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **told)

    async def picture(self, path: Path) -> None:
        """Write a screenshot."""
        told = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))

    @asynccontextmanager
    async def timed(self) -> AsyncIterator[list[float]]:
        """Measure the tasks of the page's main thread: the processor's time of each, in milliseconds, is in
        the list after the block. The clock's time would be that of all who share the machine."""
        self._traced.clear()
        self._is_traced.clear()
        await self.send("Tracing.start", categories="toplevel,__metadata", transferMode="ReportEvents")
        tasks: list[float] = []
        yield tasks
        await self.send("Tracing.end")
        await asyncio.wait_for(self._is_traced.wait(), WAIT_S)
        main = {
            (one["pid"], one["tid"])
            for one in self._traced
            if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
        }
        tasks += [
            one["tdur"] / 1e3
            for one in self._traced
            if one["name"].endswith("RunTask") and "tdur" in one and (one["pid"], one["tid"]) in main
        ]

    async def aclose(self) -> None:
        self._reading.cancel()
        await self._socket.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Page]:
    """A page that shows `url`, in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        argv = [chromium(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                target = next(one for one in targets if one["type"] == "page")
                socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                await page.send("Page.navigate", url=url)
                yield page
                await page.aclose()
        finally:
            process.terminate()
            process.wait(30)


async def _port(file: Path) -> int:
    async with asyncio.timeout(START_S):
        while not file.exists() or "\n" not in (text := file.read_text()):
            await asyncio.sleep(0.05)
    return int(text.splitlines()[0])
