"""The admin listener of several workers, in the supervisor.

It answers probes and metrics itself, and passes everything else on to workers, which know and decide: they
authenticate the operator, change keys, and leave the audit lines. Which workers are asked, and what becomes
of their answers, stands at the operation (`gateway.operators.operations`). What is asked is told by its
method and its path, as a worker tells it; what there is not, one worker refuses. A worker that does not
answer within `channel.ANSWER_S` holds up nobody longer, and is named.

Only operators' requests are counted (`ASKING_MAX`), and only while they are passed on: the key is asked for
before a body is read. What strangers may ask for holds a connection and no more.

`/readyz` says yes as long as one worker is ready: a worker that starts again is no reason to send nothing
here. On the public port each worker answers probes for itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cache, partial
from http import HTTPStatus
from re import Pattern
from typing import Final

import msgspec
from aiohttp import web

from gateway.client.connection import path_of, serves
from gateway.client.responses import id_of, probe_response
from gateway.operators.asking import Ask, ask_each, whole_of, without_known
from gateway.operators.chats import Chats
from gateway.operators.engines import EnginesApi
from gateway.operators.gate import Gate
from gateway.operators.key_uses import KeyUsesApi
from gateway.operators.keys import DirectoryRoutes, read_operator_body
from gateway.operators.openapi import PATH as DOCUMENT
from gateway.operators.operations import Asks, Operation, operation_of, pattern_of, table_of
from gateway.operators.overview import OverviewApi
from gateway.operators.peers import PROOF_HEADER
from gateway.operators.replicas import REPLICAS, ReplicaRoutes
from gateway.operators.requests import RequestsApi
from gateway.operators.server import (
    ASKED_HEADER,
    DIGEST_HEADER,
    OPERATOR,
    OPERATORS,
    OTHERS_HEADER,
    RELOAD,
    Admin,
    answered,
)
from gateway.operators.stored import StoredApi
from gateway.operators.tenant_limits import LimitsApi
from gateway.operators.together import OperatorAnswer, limit_of, together
from gateway.operators.usage import UsageReports
from gateway.operators.versions import KNOWN
from gateway.workers.channel import heard
from gateway.workers.metrics import registry_of
from gateway.workers.place import Place
from gateway.workers.supervisor import Supervisor
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.listening import SERVER
from shared.process.probes import PROBES
from shared.telemetry.stages import exposition
from shared.wire.errors import (
    ApiError,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    RouteNotFound,
    Unauthenticated,
)
from shared.wire.ids import REQUEST_ID_HEADER

ASKING_MAX: Final = 32
"""Operators' requests that are passed on at a time."""
SILENT_HEADER: Final = "x-penstock-silent-workers"
"""Names the workers whose metrics are not as new as the scrape."""
_PATH: Final = re.compile(r"/admin/v1/[A-Za-z0-9._~:%\[\]/-]{1,640}")
"""The paths that are passed on: none that only the supervisor may ask for."""
_PASSED: Final = (
    *("authorization", "content-type", "if-match", "if-none-match", "traceparent"),
    PROOF_HEADER,
)
_DROPPED: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date", REQUEST_ID_HEADER}
)
"""Headers of an answer that are this listener's own."""

HANDLERS: Final = (
    Admin, DirectoryRoutes, UsageReports, LimitsApi, ReplicaRoutes, RequestsApi, EnginesApi, Chats,
    OverviewApi, KeyUsesApi, StoredApi,
)  # fmt: skip
"""Those whose tables a worker has."""


class Front:
    """The handlers."""

    def __init__(
        self,
        supervisor: Supervisor,
        read_again: Callable[[], Awaitable[None]],
        *,
        shares_usage: bool,
        names: Collection[str] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`read_again` has the supervisor read the file again, whose configuration the workers that it starts
        later have. `shares_usage` is true if every worker knows the usage of all. `names` are the listener's
        (`Gate`)."""
        self._supervisor: Final = supervisor
        self._read_again: Final = read_again
        self._shares_usage: Final = shares_usage
        self._gate: Final = Gate(self._operator_of, names, clock)
        self._asking = 0
        """The number of operators' requests that are passed on."""
        self._counting: asyncio.Future[list[bool | None]] | None = None
        """The look at all workers' metrics that was begun last."""

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, whatever happens."""
        request_id = id_of(request)
        return await answered(request, request_id, self._gate, partial(self._answer, request_id))

    async def _answer(self, request_id: str, request: web.BaseRequest) -> web.Response:
        path = path_of(request)
        if path in PROBES:
            return probe_response(self._supervisor.health, request, tells_problems=True)
        if path == "/metrics":
            return await self._metrics(request)
        if (own := await self._gate.answer(request)) is not None:
            return own
        if path != DOCUMENT and (_PATH.fullmatch(path) is None or "/.." in path):
            raise RouteNotFound(
                f"There are {', '.join([*PROBES, '/metrics', DOCUMENT])} and what begins with /admin/v1/."
            )
        given = request.headers
        headers = {name: ", ".join(given.getall(name)) for name in _PASSED if name in given}
        headers[REQUEST_ID_HEADER] = request_id
        if path == DOCUMENT:  # for everybody
            return _response(await self._ask(request, path, headers, b""))
        digest = None if "authorization" in headers else self._gate.digest(request)
        if digest is not None:
            headers[DIGEST_HEADER] = digest.hex()
        else:
            asked = {**headers, ASKED_HEADER: f"{request.method} {request.raw_path}"}
            if (known := await self._who(asked)).status != HTTPStatus.OK:
                return _response(known)
        serves(request, OPERATORS)
        body = await read_operator_body(request)
        if self._asking >= ASKING_MAX:
            raise Overloaded("Too many operators ask at the moment.", retry_after_s=1.0)
        self._asking += 1
        try:
            answer = await self._ask(request, path, headers, body)
        finally:
            self._asking -= 1
        if digest is not None and answer.status == HTTPStatus.UNAUTHORIZED:
            self._gate.forget(request)
        return _response(answer)

    async def _who(self, headers: Mapping[str, str]) -> OperatorAnswer:
        """A worker's answer to who asks. Raises NotReady."""
        places = [place for place in self._supervisor.places if place.client is not None]
        return await self._one(places, ("GET", OPERATOR, headers, b""))

    async def _operator_of(self, key: str) -> str:
        """The operator's id, as a worker knows it. Raises Unauthenticated, NotReady."""
        answer = await self._who({"authorization": f"Bearer {key}"})
        if answer.status != HTTPStatus.OK:
            raise Unauthenticated("This is no operator's key.")
        return str(msgspec.json.decode(answer.body)["operator"])

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        """The metrics of all; of a worker that does not answer those that it told last."""
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed("/metrics takes GET.", allow="GET, HEAD")
        if self._counting is None or self._counting.done():
            counts = (heard(one.count(), worker=one.index) for one in self._supervisor.places)
            self._counting = asyncio.gather(*counts)
        counted = await asyncio.shield(self._counting)  # scrapes at one time share a look
        silent = ",".join(
            str(place.index) for place, ok in zip(self._supervisor.places, counted, strict=True) if not ok
        )
        told = exposition(request.headers.get("accept"), registry_of(self._supervisor.metrics()))
        headers = {"content-type": told.content_type, "server": SERVER}
        if silent:
            headers[SILENT_HEADER] = silent
        return web.Response(body=told.body, headers=headers)

    async def _ask(
        self, request: web.BaseRequest, path: str, headers: Mapping[str, str], body: bytes
    ) -> OperatorAnswer:
        """Raises NotReady where no worker answers."""
        method = "GET" if request.method == "HEAD" else request.method
        places = [place for place in self._supervisor.places if place.client is not None]
        target = f"{path}?{query}" if (query := request.rel_url.raw_query_string) else path
        asked = method, target, headers, body
        operation = operation_at(method, path)
        match asks := asks_of(operation, shares_usage=self._shares_usage):
            case Asks.EVERY:
                assert operation is not None
                answer = await self._every(asked, operation, limit_of(request.rel_url.query))
            case Asks.CHANGE:
                answer = await self._change(places, asked)
            case _:
                answer = await self._one(places, asked)
        if (asks is Asks.CHANGE or path == RELOAD) and answer.status < HTTPStatus.BAD_REQUEST:
            await self._read_again()  # else a worker that starts next may not know of the change
        return answer

    async def _one(self, places: Sequence[Place], asked: _Asked) -> OperatorAnswer:
        for place in places:
            if (answer := await _asked(place, asked)) is not None:
                return answer
        raise _nobody()

    async def _change(self, places: Sequence[Place], asked: _Asked) -> OperatorAnswer:
        if not places:
            raise _nobody()
        answer = await _asked(places[0], asked)
        if answer is None:
            raise NotReady(f"Worker {places[0].index} did not answer: look whether the change was made.")
        others = [place for place in self._supervisor.places if place is not places[0]]
        refreshed = await asyncio.gather(*(heard(one.refresh(), worker=one.index) for one in others))
        silent = [place.index for place, ok in zip(others, refreshed, strict=True) if not ok]
        return together({places[0].index: answer}, silent, {})

    async def _every(self, asked: _Asked, operation: Operation, limit: int) -> OperatorAnswer:
        """The answer of all. The first asks the other gateways, too."""
        places = {place.index: place for place in self._supervisor.places}
        serving = {index for index, place in places.items() if place.client is not None}
        asks: dict[int, Ask] = {index: partial(_asked, place, asked) for index, place in places.items()}
        if serving:
            method, target, headers, body = asked
            others = method, target, {**headers, OTHERS_HEADER: "1"}, body
            asks[min(serving)] = partial(_asked, places[min(serving)], others)
        answers = await ask_each(asks)
        while late := await self._late(asked, serving):
            serving |= late
            answers |= await ask_each({index: asks[index] for index in late})
        known = asked[2].get(KNOWN, "")
        whole = await whole_of(asks, answers, operation.merges, limit, known)
        if whole is None:
            raise _nobody()
        return whole

    async def _late(self, asked: _Asked, known: Collection[int]) -> set[int]:
        """The workers that have begun to serve while replicas were changed. The supervisor learns of the
        change first, so that one which begins after this knows it."""
        method, target, *_ = asked
        if method == "GET" or not target.startswith(f"{REPLICAS}/"):
            return set()
        await asyncio.gather(*(heard(one.look(), worker=one.index) for one in self._supervisor.places))
        return {place.index for place in self._supervisor.places if place.client} - {*known}


_Asked = tuple[str, str, Mapping[str, str], bytes]
"""What `WorkerClient.ask` takes."""


async def _asked(place: Place, asked: _Asked, anew: bool = False) -> OperatorAnswer | None:
    """A worker's answer; None where it does not answer. With `anew` it tells what is known, too."""
    client = place.client
    if client is None:
        return None
    method, target, headers, body = asked
    known = without_known(headers) if anew else headers
    return await heard(client.ask(method, target, known, body), worker=place.index)


def _nobody() -> ApiError:
    return NotReady("No worker answers at the moment.", retry_after_s=1.0)


def _response(answer: OperatorAnswer) -> web.Response:
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in _DROPPED}
    return web.Response(
        status=HTTPStatus(answer.status), headers={**headers, "server": SERVER}, body=answer.body
    )


# -- who is asked ---------------------------------------------------------------------------------


def operation_at(method: str, path: str) -> Operation | None:
    """The operation that is asked for. None where there is none."""
    for pattern, methods in operations():
        if method in methods and pattern.fullmatch(path) is not None:
            return methods[method]
    return None


@cache
def operations() -> Sequence[tuple[Pattern[str], Mapping[str, Operation]]]:
    """All, by the patterns of their paths and by their methods."""
    return [
        (pattern_of(path), {method: operation_of(handler) for method, handler in methods.items()})
        for path, methods in table_of(HANDLERS).items()
    ]


def asks_of(operation: Operation | None, *, shares_usage: bool) -> Asks:
    """The workers that are asked. `shares_usage` is true if every worker knows the usage of all."""
    asks = Asks.ONE if operation is None else operation.asks
    if asks is Asks.UNSHARED:
        return Asks.ONE if shares_usage else Asks.EVERY
    return asks
