"""The admin listener: what operators may ask and clients may not.

It has an address of its own (`[admin]`, by default of this machine alone), and so far nothing that changes
anything. A request goes by a table: method and path name a handler. Every answer has the request's id, and
every error the envelope that clients know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from gateway.client.responses import error_response, json_response
from gateway.hygiene import path_of
from shared import logs
from shared.errors import ApiError, InternalError, MethodNotAllowed, RouteNotFound
from shared.ids import REQUEST_ID_HEADER, accept_request_id
from shared.listening import SERVER
from shared.probes import PROBES, Health, answer_probe
from shared.telemetry import METRICS_CONTENT_TYPE, metrics_text

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]
"""Answers a request. Raises ApiError."""

log = logs.get(__name__)


class Admin:
    """The handlers of the admin listener."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._routes: Final[Mapping[str, Mapping[str, Handler]]] = {
            **{path: {"GET": self._probe} for path in PROBES},
            "/metrics": {"GET": _metrics},
        }
        """By path, then by method. `GET` answers `HEAD`, too."""

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, whatever happens."""
        try:
            response = await self._handler(request)(request)
        except ApiError as error:
            response = error_response(error, {})
        except Exception:
            log.exception("admin.crashed", path=path_of(request))
            response = error_response(InternalError("The gateway failed; its log says how."), {})
        response.headers[REQUEST_ID_HEADER] = _id_of(request)
        return response

    def _handler(self, request: web.BaseRequest) -> Handler:
        """Raises RouteNotFound and MethodNotAllowed."""
        methods = self._routes.get(path_of(request))
        if methods is None:
            raise RouteNotFound(f"There are {', '.join(self._routes)}.")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            raise MethodNotAllowed(f"{path_of(request)} takes {', '.join(methods)}.")
        return methods[method]

    async def _probe(self, request: web.BaseRequest) -> web.Response:
        return probe_response(self._health, request, tells_problems=True)


async def _metrics(_: web.BaseRequest) -> web.Response:
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
