"""An API server of Kubernetes as far as EndpointSlices go: lists, watches, bookmarks, 410, failures."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
SERVICE = "kubernetes.io/service-name=engines"


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions or {"ready": True}}


def endpoint_slice(
    name: str, endpoints: Sequence[dict[str, Any]] | None, port: int = 8001, **fields: Any
) -> dict[str, Any]:
    """A slice as the server sends it, with fields that nobody here reads."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"app": "engine"}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        **fields,
    }


@dataclass
class FakeKubernetes:
    """`async with FakeKubernetes() as api:`; `put` and `delete` tell all who watch."""

    tls: ssl.SSLContext | None = None
    token: str = "first"
    version: int = 100
    oldest: int = 0
    """The version before which nothing is remembered: a watch from there is answered with 410."""
    gone_by_status: bool = False
    statuses: list[int] = field(default_factory=list)
    """Statuses with which the next requests are answered."""
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[int, bytes]] = field(default_factory=list)
    lists: int = 0
    watches: list[str] = field(default_factory=list)
    """The versions from which was watched."""
    headers: dict[str, str] = field(default_factory=dict)
    _open: dict[int, tuple[asyncio.Queue[bytes | None], web.BaseRequest]] = field(default_factory=dict)

    async def __aenter__(self) -> FakeKubernetes:
        self._runner = web.ServerRunner(web.Server(self._handle))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end_watches()
        await self._runner.cleanup()

    # -- what the test does -----------------------------------------------------------------------

    def put(self, one: dict[str, Any]) -> None:
        name = one["metadata"]["name"]
        self._change("MODIFIED" if name in self.slices else "ADDED", one)
        self.slices[name] = one

    def delete(self, name: str) -> None:
        self._change("DELETED", self.slices.pop(name))

    def bookmark(self) -> None:
        self._change("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}}, is_kept=False)

    def forget(self) -> None:
        """Remember nothing of before, as after a compaction."""
        self.version += 1
        self.oldest = self.version
        self.events.clear()

    def say(self, line: bytes) -> None:
        """Send these bytes to all who watch."""
        for queue, _ in self._open.values():
            queue.put_nowait(line)

    def end_watches(self) -> None:
        """End all watches, as the server does after their time."""
        for queue, _ in self._open.values():
            queue.put_nowait(None)

    def cut(self) -> None:
        """Break the connections of all who watch."""
        for queue, request in self._open.values():
            assert request.transport is not None
            request.transport.abort()
            queue.put_nowait(None)

    @property
    def watching(self) -> int:
        return len(self._open)

    # -- what it answers --------------------------------------------------------------------------

    def _change(self, kind: str, one: dict[str, Any], *, is_kept: bool = True) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        line = msgspec.json.encode({"type": kind, "object": one}) + b"\n"
        if is_kept:
            self.events.append((self.version, line))
        self.say(line)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.headers = dict(request.headers)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="{}")
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if request.path != PATH or request.query["labelSelector"] != SERVICE:
            return web.Response(status=404)
        if request.query.get("watch") != "1":
            self.lists += 1
            found = {
                "kind": "EndpointSliceList",
                "metadata": {"resourceVersion": str(self.version)},
                "items": list(self.slices.values()),
            }
            return web.json_response(body=msgspec.json.encode(found))
        return await self._watch(request)

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        since = request.query["resourceVersion"]
        assert request.query["allowWatchBookmarks"] == "true"
        self.watches.append(since)
        is_old = int(since) < self.oldest
        if is_old and self.gone_by_status:
            return web.Response(status=410)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        if is_old:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await response.write(msgspec.json.encode({"type": "ERROR", "object": status}) + b"\n")
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, line in self.events:
            if version > int(since):
                queue.put_nowait(line)
        key = id(queue)
        self._open[key] = queue, request
        try:
            while (line_ := await queue.get()) is not None:
                for at in range(0, len(line_), 100_000):  # an event may come in pieces
                    await response.write(line_[at : at + 100_000])
        finally:
            del self._open[key]
        return response
