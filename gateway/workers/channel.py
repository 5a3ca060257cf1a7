"""The channel between the supervisor and a worker: HTTP over a socket in a directory that only their user can
enter (`shared.process.socket_directory`).

The worker serves on it what the admin listener of a single gateway serves, with the same handlers and the
same authentication of operators, and for the supervisor and the other workers alone:

    GET  /worker/status     a `WorkerStatus`: the heartbeat
    GET  /worker/metrics    its metrics in numbers (`gateway.workers.metrics`)
    POST /worker/refresh    read again what another worker has changed of keys and tenants
    POST /worker/drained    drain these replicas and no others, as operators told the other workers
    POST /worker/ended      end these requests, as callers told other workers (`gateway.workers.siblings`)

The supervisor passes on what is below `/admin/v1` alone. What a worker starts with comes over its standard
input, since a command line is bounded and everybody can read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import BinaryIO, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.connection import path_of
from gateway.client.responses import json_response
from gateway.operators.asking import read_answer
from gateway.operators.together import OperatorAnswer
from gateway.routing.replicas import Replicas
from gateway.workers import metrics
from shared.process import logs
from shared.process.listening import CLOSE_GRACE_S, http1_options
from shared.process.probes import Health
from shared.process.setting_values import FILE_LEN_MAX
from shared.wire.ids import RequestId, TenantId

T = TypeVar("T")
Answer = Callable[[web.BaseRequest], Awaitable[web.Response]]
"""Answers what operators ask."""
STATUS: Final = "/worker/status"
METRICS: Final = "/worker/metrics"
REFRESH: Final = "/worker/refresh"
DRAINED: Final = "/worker/drained"
ENDED: Final = "/worker/ended"
ANSWER_S: Final = 5.0
"""How long a worker may take to answer the supervisor, in seconds."""
ANSWER_LEN_MAX: Final = 64 * 1024 * 1024
"""Bytes of an answer that the supervisor reads."""
IDLE_S: Final = 3600.0
"""The time for which the supervisor's connection is kept while nothing is asked, in seconds."""

log = logs.get(__name__)


class WorkerStart(Struct, frozen=True):
    """The message with which a worker starts."""

    config: str
    """The configuration as TOML: with what variables and options said when the supervisor started, so that
    all workers have the same, whatever became of the file, and with what was accepted of the file since."""
    index: int
    """Its place among the workers."""
    port: int
    """The public port."""
    socket: str
    """The path of its end of the channel."""
    drained: Sequence[str] = ()
    """The ids of the replicas that operators have drained."""
    salts: str = ""
    """The secret of cached prefixes' salts where none is configured, the same for all workers."""

    def __repr__(self) -> str:
        """Nothing of the secrets in it."""
        return f"<{type(self).__name__} {self.index}>"


class WorkerStatus(Struct, frozen=True):
    """How a worker is."""

    phase: str
    """Its `shared.process.lifecycle.Phase`."""
    ready: bool
    """True if new requests are welcome."""
    problems: list[str]
    live: int
    """Requests in progress."""
    drained: Sequence[str] = ()
    """The ids of the replicas that operators have drained, in order."""


class Ending(Struct, frozen=True):
    """A caller's wish to end its requests of one id."""

    tenant: TenantId
    request_id: RequestId
    """The id that its requests carry."""


class WorkerSilent(Exception):
    """A worker did not answer in time, or broke off."""


async def heard(asked: Awaitable[T], **worker: int) -> T | None:
    """What a worker answers; None where it does not, which is logged."""
    try:
        return await asked
    except WorkerSilent as error:
        log.warning("worker.silent", **worker, reason=str(error))
        return None


def read_start(stdin: BinaryIO) -> WorkerStart:
    """Read what the supervisor has written to a worker's standard input. Raises msgspec.DecodeError."""
    return msgspec.json.decode(stdin.read(2 * FILE_LEN_MAX), type=WorkerStart)


# -- the worker's end -----------------------------------------------------------------------------


class Door:
    """The handlers of a worker's end."""

    def __init__(
        self,
        health: Health,
        live: Callable[[], int],
        refresh: Callable[[], Awaitable[None]],
        replicas: Replicas,
        end: Callable[[TenantId, RequestId], int],
        admin: Answer,
    ) -> None:
        """`live` returns the number of requests in progress. `end` ends a tenant's requests of an id, and
        returns how many. `admin` answers what operators ask."""
        self._health: Final = health
        self._live: Final = live
        self._refresh: Final = refresh
        self._replicas: Final = replicas
        self._end: Final = end
        self._admin: Final = admin

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request."""
        match path_of(request):
            case "/worker/status":
                return json_response(HTTPStatus.OK, msgspec.json.encode(self._status()), {})
            case "/worker/metrics":
                return web.Response(body=metrics.encode(metrics.snapshot()))
            case "/worker/refresh":
                await self._refresh()
                return web.Response(status=HTTPStatus.NO_CONTENT)
            case "/worker/drained":
                self._replicas.take_drained(msgspec.json.decode(await request.read(), type=list[str]))
                return web.Response(status=HTTPStatus.NO_CONTENT)
            case "/worker/ended":
                endings = msgspec.json.decode(await request.read(), type=list[Ending])
                return json_response(HTTPStatus.OK, msgspec.json.encode(await self._ended(endings)), {})
            case _:
                return await self._admin(request)

    async def _ended(self, endings: Sequence[Ending]) -> Sequence[int]:
        counts = []
        for one in endings:
            counts.append(self._end(one.tenant, one.request_id))
            await asyncio.sleep(0)  # each looks through all live requests
        return counts

    def _status(self) -> WorkerStatus:
        life, problems = self._health.lifecycle, self._health.problems()
        is_ready, drained = life.is_ready and not problems, sorted(self._replicas.drained)
        return WorkerStatus(life.phase.value, is_ready, problems, self._live(), drained)


async def listen_on(stack: AsyncExitStack, door: Door, path: str) -> None:
    """Serve a worker's end until `stack` is closed. Raises OSError."""
    runner = web.ServerRunner(
        web.Server(door.handle, **http1_options(IDLE_S)), shutdown_timeout=CLOSE_GRACE_S
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.UnixSite(runner, path).start()


# -- the supervisor's end -------------------------------------------------------------------------


class WorkerClient:
    """The supervisor's end of the channel to one worker. Each call raises WorkerSilent."""

    def __init__(self, path: str) -> None:
        self._session: Final = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=path),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            auto_decompress=False,
        )

    async def aclose(self) -> None:
        await self._session.close()

    async def status(self) -> WorkerStatus:
        return await self._told("GET", STATUS, lambda body: msgspec.json.decode(body, type=WorkerStatus))

    async def metrics(self) -> metrics.Snapshot:
        return await self._told("GET", METRICS, metrics.decode)

    async def refresh(self) -> None:
        await self._tell(REFRESH, b"")

    async def drain(self, replicas: Sequence[str]) -> None:
        await self._tell(DRAINED, msgspec.json.encode(replicas))

    async def end(self, endings: Sequence[Ending]) -> Sequence[int]:
        """End requests. Returns how many it had for each."""
        body = msgspec.json.encode(endings)
        counts = await self._told("POST", ENDED, lambda told: msgspec.json.decode(told, type=list[int]), body)
        if len(counts) != len(endings):
            raise WorkerSilent("its answer is not of what it was asked for")
        return counts

    async def _tell(self, path: str, body: bytes) -> None:
        answer = await self.ask("POST", path, {}, body)
        if answer.status != HTTPStatus.NO_CONTENT:
            raise WorkerSilent(f"it answered {answer.status} to {path}")

    async def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> OperatorAnswer:
        """Send a request. `target` is the path and the query as they were sent."""
        url = f"http://worker{target}"
        try:
            return await read_answer(self._session, method, url, ANSWER_LEN_MAX, headers=headers, data=body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise WorkerSilent(f"{type(error).__name__}: {error}") from None

    async def _told(self, method: str, path: str, read: Callable[[bytes], T], body: bytes = b"") -> T:
        answer = await self.ask(method, path, {}, body)
        try:
            if answer.status == HTTPStatus.OK:
                return read(answer.body)
        except msgspec.MsgspecError as error:
            raise WorkerSilent(str(error)) from None
        raise WorkerSilent(f"it answered {answer.status}")
