"""The admin listener: what operators may ask and change, and clients may not.

It has an address of its own (`[admin]`, by default of this machine alone). A request goes by a table: method
and path name a handler. Every answer has the request's id, and every error the envelope that clients know.

Rules:

1. Probes and metrics are for everybody who reaches the listener. Whatever changes something, or tells of
   single requests or keys, is for operators alone. They have keys of their own (`[[admin.keys]]`): a tenant's
   key opens nothing here, and an operator's key opens nothing on the public port.
2. Each change leaves an audit line, `admin.change`: which operator, what, and with which result.
3. A change that is refused has changed nothing, and the answer names all that is wrong with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.accounts import AccountsReader
from gateway.client.responses import error_response, json_response
from gateway.exchange import LiveRequests
from gateway.hygiene import check, path_of
from gateway.identity.caller import Caller, Principal
from gateway.usage_api import USAGE, UsageReports
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import (
    ApiError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RequestAborted,
    RouteNotFound,
    forget_frames,
)
from shared.ids import REQUEST_ID_HEADER, RequestId, accept_request_id
from shared.listening import SERVER
from shared.openai import AbortResponse
from shared.probes import PROBES, Health, answer_probe
from shared.telemetry import METRICS_CONTENT_TYPE, metrics_text

RELOAD: Final = "/admin/v1/reload"
REQUESTS: Final = "/admin/v1/requests/"
PROBLEMS_LEN_MAX: Final = 8 * 1024
"""Characters of what is wrong with a configuration, in an answer; the log has all of it."""

Open = Callable[[web.BaseRequest], web.Response]
"""Answers anybody. Raises ApiError."""
Change = Callable[[web.BaseRequest, Principal], web.Response | Awaitable[web.Response]]
"""Answers an operator. Raises ApiError, here or in the awaitable."""

log = logs.get(__name__)


class ReloadResponse(Struct):
    """The answer to a reload that was taken."""

    reloaded: bool = True


class Admin:
    """The handlers of the admin listener."""

    def __init__(
        self,
        health: Health,
        accounts: AccountsReader,
        reload: Callable[[], list[str]],
        live: LiveRequests,
        usage: UsageReports,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`reload` reads the configuration again, and returns what is wrong with it."""
        self._read_again = reload
        self._health = health
        self._accounts = accounts
        self._live = live
        self._clock = clock
        self._open: Final[Mapping[str, Open]] = {**dict.fromkeys(PROBES, self._probe), "/metrics": _metrics}
        """By path, for GET and HEAD."""
        self._changes: Final[Mapping[str, tuple[str, Change]]] = {
            RELOAD: ("POST", self._reload),
            REQUESTS: ("DELETE", self._abort),
            USAGE: ("GET", usage.answer),
        }
        """By path, or by its beginning where that ends with a slash: the method, and what it does."""

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, whatever happens."""
        try:
            check(request)
            response = await self._answer(request)
        except ApiError as error:
            response = error_response(error, {})
            forget_frames(error)
        except Exception:
            log.exception("admin.crashed", path=path_of(request))
            response = error_response(InternalError("The gateway failed; its log says how."), {})
        if not request.content.is_eof():
            response.force_close()  # no handler reads a body
        response.headers[REQUEST_ID_HEADER] = _id_of(request)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Raises RouteNotFound, MethodNotAllowed, and what the handler raises."""
        path = path_of(request)
        if (handler := self._open.get(path)) is not None:
            _check_method(request, "GET")
            return handler(request)
        found = None if path.endswith("/") else self._changes.get(path) or self._changes.get(_folder(path))
        if found is None:
            raise RouteNotFound(f"There are {', '.join([*self._open, *self._changes])}.")
        return await self._change(request, *found)

    async def _change(self, request: web.BaseRequest, method: str, change: Change) -> web.Response:
        """Rule 1: who calls is asked before what for."""
        caller = Caller(request.headers.get("authorization"), request.transport)
        operator = await self._accounts.now.operators.identify(caller, self._clock.wall())
        _check_method(request, method)
        answer = change(request, operator)
        return answer if isinstance(answer, web.Response) else await answer

    def _probe(self, request: web.BaseRequest) -> web.Response:
        return probe_response(self._health, request, tells_problems=True)

    def _reload(self, request: web.BaseRequest, operator: Principal) -> web.Response:
        problems = self._read_again()
        log.info("admin.change", operator=operator.key, action="reload", problems=len(problems))
        if problems:
            told = "\n".join(problems)[:PROBLEMS_LEN_MAX]
            raise InvalidRequest(f"The configuration was not taken:\n{told}")
        return json_response(HTTPStatus.OK, msgspec.json.encode(ReloadResponse()), {})

    def _abort(self, request: web.BaseRequest, operator: Principal) -> web.Response:
        request_id = RequestId(path_of(request).removeprefix(REQUESTS))
        ended = self._live.end(None, request_id, _aborted)
        log.info("admin.change", operator=operator.key, action="abort", aborted=request_id, ended=ended)
        return json_response(HTTPStatus.OK, msgspec.json.encode(AbortResponse(request_id, ended)), {})


def _folder(path: str) -> str:
    """The path up to its last slash, and with it."""
    return path[: path.rfind("/") + 1]


def _aborted() -> ApiError:
    return RequestAborted("It was aborted by an operator.")


def _check_method(request: web.BaseRequest, method: str) -> None:
    """`GET` answers `HEAD`, too. Raises MethodNotAllowed."""
    asked = "GET" if request.method == "HEAD" else request.method
    if asked != method:
        raise MethodNotAllowed(f"{path_of(request)} takes {method}.")


def _metrics(_: web.BaseRequest) -> web.Response:
    headers = {"content-type": METRICS_CONTENT_TYPE, "server": SERVER}
    return web.Response(body=metrics_text(), headers=headers)


def probe_response(health: Health, request: web.BaseRequest, *, tells_problems: bool = False) -> web.Response:
    """The answer to a request for one of `PROBES`. What is wrong is told to operators alone."""
    headers = {REQUEST_ID_HEADER: _id_of(request)}
    if request.method not in ("GET", "HEAD"):
        return error_response(MethodNotAllowed(f"{path_of(request)} takes GET."), headers)
    status, body = answer_probe(path_of(request), health, tells_problems=tells_problems)
    return json_response(status, body, headers)


def _id_of(request: web.BaseRequest) -> str:
    return accept_request_id(request.headers.get(REQUEST_ID_HEADER))
