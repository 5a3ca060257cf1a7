"""One command from a cluster to the first token, and streams during an upgrade and its way back.

The chart is installed as it is, its images run as pods (`tests.ship.kubelet`), and a key that the chart made
gets an answer of the demo model through the Service. Then callers stream without a pause while `helm upgrade`
replaces every gateway and every engine, and `helm rollback` does it again: no stream may be cut, and none
refused.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx

from tests.ship.kubelet import PERIOD_S, Kubelet, podman

CALLERS: Final = 12
TOKENS: Final = 300
PATIENCE_S: Final = 900.0
IMAGES: Final = ("penstock-gateway", "penstock-engine")
NEXT: Final = "next"


def chat(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me of a river."}]
    return {"model": "demo", "stream": True, "messages": messages, "max_tokens": tokens, "ignore_eos": True}


async def stream(http: httpx.AsyncClient, url: str, key: str, tokens: int, begins: Callable[[], None]) -> str:
    """How a stream ended: `done`, or what happened to it."""
    events = 0
    head = {"authorization": f"Bearer {key}"}
    try:
        asked = http.stream("POST", f"{url}/v1/chat/completions", json=chat(tokens), headers=head)
        async with asked as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "done"
                if line.startswith("data: "):
                    events += 1
                    if events == 1:
                        begins()
                    if "error" in json.loads(line[6:]):
                        return f"cut after {events} events: {line[:200]}"
    except httpx.HTTPError as error:
        return f"{type(error).__name__} after {events} events: {error}"
    return f"cut after {events} events"


class Load:
    """`with Load(url, key) as load:` has callers who stream, one answer after the other."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._begun = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self.ends: Counter[str] = Counter()

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let open streams end."""
        self._stop.set()
        self._thread.join()

    @property
    def begun(self) -> int:
        """Streams that have had a first token."""
        return self._begun

    def _begins(self) -> None:
        self._begun += 1

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=CALLERS)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._caller(http) for _ in range(CALLERS)))

    async def _caller(self, http: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            self.ends[await stream(http, self._url, self._key, TOKENS, self._begins)] += 1


def tagged(version: str) -> None:
    """Have the images that were built under the chart's version, and under another one."""
    for image in IMAGES:
        for tag in (version, NEXT):
            podman("tag", f"localhost/{image}:dev", f"localhost/{image}:{tag}")


async def first_token(url: str, key: str) -> str:
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        return await stream(http, url, key, 16, lambda: None)


def serve(
    helm: Callable[..., str], kubeconfig: Path, where: str, folder: Path, chart: Path, off: str,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Do it all. `off` is what the API server is too old for."""
    given = ("penstock", str(chart), "-n", where, "--wait", "--timeout", f"{PATIENCE_S:.0f}s")
    values = f"{off},global.imageRegistry=localhost"
    with Kubelet(kubeconfig, where, folder, "penstock-gateway") as node:
        helm("install", *given, "--set", values)
        url, key = node.serve(), node.secret("penstock-keys")["api-key"]
        end = asyncio.run(first_token(url, key))
        assert end == "done", end
        say("served: one command installed it, and a token came with the key that the chart made")
        helm("test", "penstock", "-n", where, "--timeout", f"{PATIENCE_S:.0f}s")
        say("served: helm test streamed an answer through the Service")
        values += ",engine.replicas=2"
        helm("upgrade", *given, "--set", values)
        with Load(url, key) as load:
            for how, command in {
                "an upgrade": ("upgrade", *given, "--set", f"{values},{_tags(NEXT)}"),
                "a rollback": ("rollback", "penstock", "2", "-n", where, *given[4:]),
            }.items():
                replaced(node, load, lambda command=command: helm(*command))  # type: ignore[misc]
                say(f"served: {how} replaced every pod; {load.begun} streams until now")
                assert set(load.ends) <= {"done"}, load.ends
        assert set(load.ends) == {"done"}, load.ends
        assert not node.failures, node.failures
        assert not [pod.name for pod in node.ended if pod.was_killed], "killed"
        say(f"served: {load.ends['done']} streams of {TOKENS} tokens, none cut and none refused")


def _tags(tag: str) -> str:
    return f"gateway.image.tag={tag},engine.image.tag={tag}"


def replaced(node: Kubelet, load: Load, change: Callable[[], object]) -> None:
    """Make a change once all callers stream, and see all pods replaced."""
    begun = load.begun
    while load.begun < begun + CALLERS:
        time.sleep(PERIOD_S)
    before = node.uids()
    change()
    after = node.uids()
    assert not set(before.values()) & set(after.values()), (before, after)
    assert len(after) == len(before), (before, after)
