"""The admin listener: what operators may ask and change, and clients may not.

It has an address of its own (`[admin]`, by default of this machine alone). A request goes by a table: method
and path name a handler; those of keys and tenants are in `gateway.directory`. Every answer has the request's
id, and every error the envelope that clients know.

Rules:

1. Probes, metrics and the API's description are for everybody who reaches the listener. Whatever changes
   something, or tells of single requests or keys, is for operators alone. They have keys of their own
   (`[[admin.keys]]`): a tenant's key opens nothing here, and an operator's key opens nothing on the public
   port.
2. Each change leaves an audit line, `admin.change`: which operator, what, and with which result.
3. A change that is refused has changed nothing, and the answer names all that is wrong with it.
4. A change that has begun is made, whether or not its operator waits for the answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.connection import check_request, path_of, serves
from gateway.client.responses import error_response, id_of, json_response, probe_response
from gateway.directory.accounts import AccountsReader
from gateway.identity.caller import Principal
from gateway.operators.files import HEADERS
from gateway.operators.gate import Gate
from gateway.operators.keys import refusal
from gateway.operators.openapi import PATH as DOCUMENT
from gateway.operators.openapi import document
from gateway.operators.operations import (
    Asks,
    Handler,
    Merge,
    Operation,
    OperatorRequest,
    Table,
    operation_of,
    pattern_of,
    query_of,
    table_of,
)
from gateway.operators.peers import PROOF_HEADER, Peers
from gateway.request.exchange import LiveRequests
from shared.apis.requests import AbortResponse
from shared.process import logs
from shared.process.build import version
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.listening import SERVER
from shared.process.probes import PROBES, Health
from shared.process.setting_values import ConfigError
from shared.telemetry.stages import exposition
from shared.wire.errors import (
    ApiError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    PermissionDenied,
    RequestAborted,
    RouteNotFound,
    Unauthenticated,
    forget_frames,
)
from shared.wire.ids import REQUEST_ID_HEADER, RequestId, mint_request_id

RELOAD: Final = "/admin/v1/reload"
REQUEST: Final = "/admin/v1/requests/{id}"
OPERATOR: Final = "/admin/v1/console/operator"
OPERATORS: Final = "operators"
"""The name, in place of a tenant's, of those who have a key, for the bounds of the listener."""
DIGEST_HEADER: Final = "x-penstock-operator-digest"
"""Names the operator's key in what a supervisor passes on: the browser has shown it a session's cookie."""
OTHERS_HEADER: Final = "x-penstock-ask-others"
"""Says to a worker that it is to ask the other gateways, too: one of several does."""
ASKED_HEADER: Final = "x-penstock-asked"
"""Says to a worker, which is asked who asks, what is asked: a proof is for that."""
PROBLEMS_LEN_MAX: Final = 8 * 1024
"""Characters of what is wrong with a configuration, in an answer; the log has all of it."""

Open = Callable[[web.BaseRequest], web.Response]
"""Answers anybody. Raises ApiError."""
_DIGEST: Final = re.compile("[0-9a-f]{64}")

log = logs.get(__name__)


class ReloadResponse(Struct):
    """The answer to a reload that was taken."""

    reloaded: bool = True


@dataclass(frozen=True, slots=True)
class AbortQuery:
    """Whose requests are ended."""

    tenant: str | None = None
    """Only this tenant's."""


class OperatorView(Struct):
    """The operator who asks, and what the console shows of the gateway itself."""

    operator: str
    """The id of the operator's key."""
    version: str


async def answered(
    request: web.BaseRequest,
    request_id: str,
    gate: Gate | None,
    answer: Callable[[web.BaseRequest], Awaitable[web.Response]],
) -> web.Response:
    """The answer to a request on an admin listener, whatever happens. `gate` is None where a supervisor
    asks, which has looked already."""
    try:
        check_request(request)
        if gate is not None:
            gate.check(request)
        response = await answer(request)
    except ApiError as error:
        response = error_response(error, {})
        response.force_close()  # a head that was refused may not be all that there is of the request
        forget_frames(error)
    except ConfigError as error:
        response = refusal(error)
        forget_frames(error)
    except Exception:
        log.exception("admin.crashed", path=path_of(request))
        response = error_response(InternalError("The gateway failed; its log says how."), {})
    if not request.content.is_eof():
        response.force_close()  # nothing more is read of its body
    response.headers[REQUEST_ID_HEADER] = request_id
    secure(response)
    return response


class Admin:
    """The handlers of the admin listener."""

    def __init__(
        self,
        health: Health,
        accounts: AccountsReader,
        reload: Callable[[], Awaitable[list[str]]],
        live: LiveRequests,
        apis: Iterable[object],
        clock: Clock = SYSTEM_CLOCK,
        *,
        names: Collection[str] = (),
        is_worker: bool = False,
        peers: Peers | None = None,
        shares_usage: bool = False,
    ) -> None:
        """`reload` reads the configuration again, and returns what is wrong with it. `apis` answer
        operators' other requests. `names` are the listener's (`Gate`). `is_worker` is true if a
        supervisor alone can ask: it keeps the console's sessions then, and names the operator
        (`DIGEST_HEADER`). `peers` are the other gateways, where there may be any, and
        `shares_usage` is true if each of them knows the usage of all."""
        self._shares_usage: Final = shares_usage
        self._peers: Final = peers
        self._is_worker: Final = is_worker
        self._gate = None if is_worker else Gate(self._operator_of, names, clock)
        self._read_again = reload
        self._health = health
        self._accounts = accounts
        self._live = live
        self._clock = clock
        self._open: Final[dict[str, Open]] = {**dict.fromkeys(PROBES, self._probe), "/metrics": _metrics}
        """The handlers of GET and HEAD, by path."""
        self._operators: Final[Table] = table_of((self, *apis))
        """The operators' handlers by method, by path."""
        self._document: bytes | None = None
        """Their description. None until it is asked for."""
        self._open[DOCUMENT] = self._describe
        self._patterns: Final = [(pattern_of(path), methods) for path, methods in self._operators.items()]

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, whatever happens."""
        return await answered(request, id_of(request), self._gate, self._answer)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Raises RouteNotFound, MethodNotAllowed, and what the handler raises."""
        path = path_of(request)
        if (handler := self._open.get(path)) is not None:
            if path not in PROBES and _method(request) != "GET":
                raise MethodNotAllowed(f"{path} takes GET.", allow="GET, HEAD")
            return handler(request)
        if self._gate is not None and (own := await self._gate.answer(request)) is not None:
            return own
        for pattern, methods in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                operator = self._operator(request)
                serves(request, OPERATORS)
                if (answer := methods.get(_method(request))) is None:
                    allow = ", ".join(methods)
                    raise MethodNotAllowed(f"{path} takes {allow}.", allow=allow)
                _check_query(request)
                query = query_of(operation_of(answer).query, request.query)
                id_ = match[1] if match.groups() else ""
                return await self._of_all(OperatorRequest(request, operator, id_, query), answer)
        raise RouteNotFound(f"There are {', '.join([*self._open, *self._operators])}.")

    async def _of_all(self, asked: OperatorRequest, answer: Handler) -> web.Response:
        """The answer of this gateway, or of all. Raises PermissionDenied, and what `answer` raises."""
        request, operation = asked.request, operation_of(answer)
        if PROOF_HEADER in request.headers:
            if not operation.is_of_all and not (self._is_worker and ASKED_HEADER in request.headers):
                raise PermissionDenied("Another gateway may not ask this: use an operator's key.")
            return await answer(asked)
        asks_others = not self._is_worker or OTHERS_HEADER in request.headers
        is_shared = operation.asks is Asks.UNSHARED and self._shares_usage
        if self._peers is None or not operation.is_of_all or is_shared or not asks_others:
            return await answer(asked)

        async def own(request: web.BaseRequest) -> web.Response:
            return await answer(msgspec.structs.replace(asked, request=request))

        return await self._peers.together(request, operation, asked.operator.key, own)

    def _operator(self, request: web.BaseRequest) -> Principal:
        """The operator, whose own key opens what is not for everybody (rule 1). Raises Unauthenticated,
        PermissionDenied."""
        if (proof := request.headers.get(PROOF_HEADER)) is not None and self._peers is not None:
            method, target = request.method, request.raw_path
            if self._is_worker and ASKED_HEADER in request.headers:
                method, _, target = request.headers[ASKED_HEADER].partition(" ")
            return self._peers.operator(proof, method, target)
        authorization = request.headers.get("authorization")
        if authorization is None and (digest := self._digest(request)) is not None:
            try:
                return self._accounts.now.operators.of_digest(digest, self._clock.wall())
            except Unauthenticated:
                if self._gate is not None:
                    self._gate.forget(request)
                raise
        try:
            return self._accounts.now.operators.authenticate(authorization, self._clock.wall())
        except Unauthenticated:
            if self._accounts.keys.has(authorization):
                message = "This key is a tenant's: it opens the public port alone."
                raise PermissionDenied(message) from None
            raise

    def _describe(self, _: web.BaseRequest) -> web.Response:
        if self._document is None:
            self._document = document(self._operators)
        return json_response(HTTPStatus.OK, self._document, {})

    def _digest(self, request: web.BaseRequest) -> bytes | None:
        """The digest of the key for which the console's session stands; None without one."""
        if self._gate is not None:
            return self._gate.digest(request)
        told = request.headers.get(DIGEST_HEADER, "")
        return bytes.fromhex(told) if _DIGEST.fullmatch(told) else None

    async def _operator_of(self, key: str) -> str:
        """Raises Unauthenticated."""
        return self._accounts.now.operators.authenticate(f"Bearer {key}", self._clock.wall()).key

    @Operation(f"GET {OPERATOR}", "Tell who asks.", OperatorView, asks=Asks.ONE)
    async def _who(self, asked: OperatorRequest) -> web.Response:
        view = OperatorView(asked.operator.key, version())
        return json_response(HTTPStatus.OK, msgspec.json.encode(view), {})

    def _probe(self, request: web.BaseRequest) -> web.Response:
        return probe_response(self._health, request, tells_problems=True)

    @Operation(f"POST {RELOAD}", "Read the configuration again.", ReloadResponse, asks=Asks.EVERY)
    async def _reload(self, asked: OperatorRequest) -> web.Response:
        problems = await self._read_again()
        _audit(asked, {"action": "reload", "problems": len(problems)})
        if problems:
            told = "\n".join(problems)[:PROBLEMS_LEN_MAX]
            raise InvalidRequest(f"The configuration was not taken:\n{told}")
        return json_response(HTTPStatus.OK, msgspec.json.encode(ReloadResponse()), {})

    @Operation(
        f"DELETE {REQUEST}",
        "End the requests of this id, whoever sent them.",
        AbortResponse,
        AbortQuery,
        is_of_all=True,
        asks=Asks.EVERY,
        merges={"aborted": Merge.SUM},
    )
    async def _abort(self, asked: OperatorRequest) -> web.Response:
        request_id, tenant = RequestId(asked.id), asked.query.tenant
        by_its_own = tenant is not None and PROOF_HEADER in asked.request.headers
        ended = self._live.end(tenant, request_id, _cancelled if by_its_own else _aborted)
        if not by_its_own:  # who cancels its own is no operator
            _audit(asked, {"action": "abort", "aborted": request_id, "ended": ended})
        return json_response(HTTPStatus.OK, msgspec.json.encode(AbortResponse(request_id, ended)), {})


def _audit(asked: OperatorRequest, fields: Mapping[str, object]) -> None:
    """Write the audit line of a change (rule 2)."""
    logs.audit("admin.change", {"logger": __name__, "operator": asked.operator.key, **fields})


def _cancelled() -> ApiError:
    return RequestAborted("It was cancelled.")


def _aborted() -> ApiError:
    return RequestAborted("It was aborted by an operator.")


def refuse_unparsed(cause: str) -> web.Response:
    """The answer to what is no well-formed request, or has too long a head."""
    error = InvalidRequest("The request is not well-formed HTTP, or its headers are too large.", detail=cause)
    response = error_response(error, {REQUEST_ID_HEADER: mint_request_id()})
    response.force_close()
    secure(response)
    return response


def secure(response: web.Response) -> None:
    """Say to a browser that an answer is data, to be kept by nobody and shown in no frame."""
    response.headers.setdefault("cache-control", "no-store")
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _check_query(request: web.BaseRequest) -> None:
    """Raises InvalidRequest where a parameter is given twice: which one was meant is not for us to say."""
    for name, count in Counter(name for name, _ in request.query.items()).items():
        if count > 1:
            raise InvalidRequest(f"The parameter {name[:64]!r} is given {count} times.", param=name[:64])


def _method(request: web.BaseRequest) -> str:
    """`GET` answers `HEAD`, too."""
    return "GET" if request.method == "HEAD" else request.method


def _metrics(request: web.BaseRequest) -> web.Response:
    told = exposition(request.headers.get("accept"))
    return web.Response(body=told.body, headers={"content-type": told.content_type, "server": SERVER})
