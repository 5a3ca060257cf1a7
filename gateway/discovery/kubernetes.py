"""Members from Kubernetes: the EndpointSlices of a Service, listed once and then watched.

Rules (https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes):

1. A watch goes on from the version that was seen last: of the list, of each object, of bookmarks. After a
   connection that broke it goes on from there, and nothing is listed again.
2. 410 Gone, as a status or as an event, says that the version is too old: all is listed again.
3. A watch is ended by the server after `WATCH_S`, and by this side soon after, so that a connection that
   nobody serves any more is noticed. It is begun anew at once; after an error, after a time that doubles up
   to `BACKOFF_S_MAX`, of which chance takes up to a half.
4. What fails changes nothing: the members stay. An empty list is taken at its word, though: the API server
   knows of nobody, and other than DNS it says so by success.
5. Bodies, events and slices are bounded. The token is read for every request, as Kubernetes replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Final

import aiohttp

from gateway.config.discovery import DiscoveryConfig, KubernetesConfig
from gateway.discovery.endpoint_slices import (
    Event,
    Slices,
    TooManySlices,
    decode_event,
    decode_list,
    decode_slice,
    decode_status,
)
from gateway.discovery.source import SourceProgress
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.renewable_tls import TrustedAuthorities
from shared.process.setting_values import ConfigError
from shared.process.tls import UnusableTls
from shared.wire.undecodable import UNDECODABLE

API: Final = "/apis/discovery.k8s.io/v1"
WATCH_S: Final = 60
"""The time after which the server ends a watch, in seconds."""
OVERTIME_S: Final = 15.0
"""The time that it has for that, and within which a list must be there, in seconds."""
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The directory in which a pod finds its namespace, and its service account's token and authorities."""
CONNECT_S: Final = 5.0
LIST_LEN_MAX: Final = 16 * 1024 * 1024
EVENT_LEN_MAX: Final = 2 * 1024 * 1024
"""Bytes of an event. etcd holds objects of 1.5 MiB at most."""
FILE_LEN_MAX: Final = 64 * 1024
"""Bytes of the token, and of the namespace."""
BACKOFF_S_MIN: Final = 0.5
BACKOFF_S_MAX: Final = 30.0
STEADY_S: Final = 5.0
"""The time after which a watch that told nothing counts as one that worked, in seconds."""
PAUSE_S: Final = 0.1
"""The time between two watches when nothing failed, in seconds."""
_HINTS: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "the token is not accepted",
    HTTPStatus.FORBIDDEN: "the service account may not list and watch endpointslices",
    HTTPStatus.NOT_FOUND: "the API server has no discovery.k8s.io/v1",
}


class Gone(Exception):
    """The version from which a watch was to go on is too old."""


class BadListing(Exception):
    """The API server's answer cannot be used."""


_FAILURES: Final = (
    BadListing,
    TooManySlices,
    UnusableTls,
    aiohttp.ClientError,
    *UNDECODABLE,
    OSError,
    TimeoutError,
    ValueError,
)


class KubernetesSource:
    """The members that a Service has."""

    def __init__(
        self,
        config: DiscoveryConfig,
        env: Mapping[str, str],
        clock: Clock = SYSTEM_CLOCK,
        seed: int | None = None,
        account: str = ACCOUNT,
    ) -> None:
        """`account` is the directory of the service account. Raises ConfigError where neither the
        configuration nor Kubernetes names an API server."""
        assert config.kubernetes is not None
        self._config: Final = config
        self._service: Final = config.kubernetes
        self._account: Final = account
        self._api: Final = _api_url(config.kubernetes, env)
        self._clock: Final = clock
        self._random: Final = Random(seed)
        self._slices: Final = Slices()
        self._version: str | None = None
        """The version from which the watch goes on. None while all must be listed."""
        self._has_moved = False
        """True if the API server told something since the last pause."""
        self._authorities: Final = TrustedAuthorities(f"{account}/ca.crt")

    async def watch(self, progress: SourceProgress) -> None:
        failures = 0
        while True:
            self._has_moved = False
            try:
                async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
                    await self._follow(session, progress)
            except Gone:
                self._version = None
                is_well = self._has_moved
            except _FAILURES as error:
                is_well = False
                progress.failed(f"{self._api}: {str(error) or type(error).__name__}")
            else:
                is_well = self._has_moved
            failures = 0 if is_well else 1 if self._has_moved else failures + 1
            await self._clock.sleep(self._backoff_s(failures) if failures else PAUSE_S)

    async def _follow(self, session: aiohttp.ClientSession, progress: SourceProgress) -> None:
        """List if need be, and watch until the server ends that."""
        if self._version is None:
            await self._list(session, progress)
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(WATCH_S),
        }
        begun_s = self._clock.monotonic()
        async with asyncio.timeout(WATCH_S + OVERTIME_S), self._get(session, query) as answer:
            progress.confirmed()
            async for lines in _lines(answer):
                for line in lines:
                    self._apply(decode_event(line))
                self._report(progress)
        self._has_moved |= self._clock.monotonic() - begun_s >= STEADY_S

    async def _list(self, session: aiohttp.ClientSession, progress: SourceProgress) -> None:
        async with asyncio.timeout(OVERTIME_S), self._get(session, {}) as answer:
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > LIST_LEN_MAX:
                    raise BadListing(f"the list is larger than {LIST_LEN_MAX} bytes")
        found = decode_list(bytes(body))
        self._slices.replace(found.items or ())
        self._version = found.metadata.resource_version
        self._report(progress)

    @asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for the Service's slices. Raises Gone, BadListing."""
        service = self._service
        namespace = service.namespace or _read(f"{self._account}/namespace")
        if not namespace:
            raise BadListing(f"namespace is not set, and there is no {self._account}/namespace")
        url = f"{self._api}{API}/namespaces/{namespace}/endpointslices"
        params = {"labelSelector": f"kubernetes.io/service-name={service.service}", **query}
        headers = {"accept": "application/json"}
        if token := _read(f"{self._account}/token"):
            headers["authorization"] = f"Bearer {token}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        tls = await self._authorities.context() if self._api.startswith("https:") else True
        async with session.get(
            url, params=params, headers=headers, ssl=tls, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status == HTTPStatus.GONE:
                raise Gone
            if answer.status != HTTPStatus.OK:
                hint = _HINTS.get(answer.status, "")
                raise BadListing(f"answered with status {answer.status} {hint}".rstrip())
            yield answer

    def _apply(self, event: Event) -> None:
        """Take over an event of the watch. Raises Gone, BadListing, TooManySlices."""
        if event.type == "ERROR":
            status = decode_status(event.object)
            if status.code == HTTPStatus.GONE:
                raise Gone
            raise BadListing(f"ended the watch: {status.code} {status.message}")
        changed = decode_slice(event.object)
        if event.type in ("ADDED", "MODIFIED"):
            self._slices.put(changed)
        elif event.type == "DELETED":
            self._slices.remove(changed.metadata.name)
        if changed.metadata.resource_version:
            self._version = changed.metadata.resource_version
        self._has_moved = True

    def _report(self, progress: SourceProgress) -> None:
        config, service = self._config, self._service
        progress.listed(self._slices.members(service.port, config.scheme, loopback=config.loopback))

    def _backoff_s(self, failures: int) -> float:
        longest_s: float = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(failures, 16))
        return longest_s * (0.5 + 0.5 * self._random.random())


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """The whole lines of each piece that comes. Raises BadListing for one that is too long."""
    rest = b""
    async for piece in answer.content.iter_any():
        *lines, last = piece.split(b"\n")
        if lines:
            lines[0], rest = rest + lines[0], b""
            yield [line for line in lines if line.strip()]
        rest += last
        if len(rest) > EVENT_LEN_MAX:
            raise BadListing(f"an event is larger than {EVENT_LEN_MAX} bytes")


def _read(path: str) -> str:
    """A small file's text; empty where there is none. Raises OSError, ValueError."""
    try:
        with Path(path).open("rb") as file:
            return file.read(FILE_LEN_MAX).decode("ascii").strip()
    except FileNotFoundError:
        return ""


def _api_url(config: KubernetesConfig, env: Mapping[str, str]) -> str:
    if config.api_url is not None:
        return config.api_url.rstrip("/")
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(["kubernetes: api_url is needed outside of Kubernetes"])
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
