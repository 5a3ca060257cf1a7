"""The gate of the console: its files, log-in and logout, and what a request's cookie stands for.

    GET    /console...                   the page and its files, for everybody who reaches the listener
    POST   /admin/v1/console/session     {"key": "..."}: log in; the answer has the cookie
    DELETE /admin/v1/console/session     log out

Rules:

1. The key is sent once. Afterwards a cookie stands for it: HttpOnly, SameSite=Strict, Secure behind TLS, for
   the admin API's paths alone.
2. A cookie opens what the key opens, and no longer than the key does: whoever admits a request looks the key
   up again (`Gate.digest`), and forgets the session once it does not work any more.
3. A request that may change something counts only from the page itself: with a cookie, and at log-in, its
   `Origin` must be this listener's, as it must where any other has one. Other ports of this host are the same
   site to a browser, so that SameSite alone would let them in.
4. The listener is called by an address, as localhost, or by a name that its configuration has. A page in an
   operator's browser may have any other name point here, and would read what is for everybody.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.connection import host_of, is_address, path_of
from gateway.client.responses import json_response
from gateway.identity.caller import network_of
from gateway.identity.keys import KEY_LEN_MAX, digest_of, hash_key, key_problem
from gateway.operators.files import HEADERS, PAGE, file_response, is_console
from gateway.operators.keys import read_operator_body
from gateway.operators.sessions import Attempts, Sessions
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import (
    InvalidRequest,
    MethodNotAllowed,
    PermissionDenied,
    RateLimited,
    RouteNotFound,
    Unauthenticated,
)
from shared.wire.undecodable import UNDECODABLE

SESSION: Final = "/admin/v1/console/session"
COOKIE: Final = "penstock_console"
_OWN: Final = re.compile(rf"(?:^|; ?){COOKIE}=([A-Za-z0-9_-]{{32,64}})(?:;|$)")
_SAFE: Final = ("GET", "HEAD")
LOGIN_S: Final = 2.0
"""How long the few bytes of a log-in may take, in seconds: whoever sends them is not known yet."""

Operator = Callable[[str], Awaitable[str]]
"""The id of the operator whose key this is. Raises Unauthenticated, or that nobody can tell."""


class Login(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a log-in."""

    key: str


class LoggedIn(Struct, frozen=True):
    """The answer to a log-in, and to a logout."""

    operator: str | None
    """The id of the operator's key. None after a logout."""


class Gate:
    """The sessions of one admin listener."""

    def __init__(self, operator: Operator, names: Collection[str] = (), clock: Clock = SYSTEM_CLOCK) -> None:
        """`names` are those by which the listener may be called (rule 4); `*` is any."""
        self._operator: Final = operator
        self._names: Final = frozenset(("", "localhost", *names))
        self._clock: Final = clock
        self._sessions: Final = Sessions()
        self._attempts: Final = Attempts()

    def check(self, request: web.BaseRequest) -> None:
        """Check the name by which the listener is called (rule 4), and an `Origin` where there is one (rule
        3). `request` has a sound head. Raises PermissionDenied."""
        name = host_of(request).rstrip(".").lower()
        if not (is_address(name) or name in self._names or "*" in self._names):
            raise PermissionDenied(
                f"This listener is not called {name[:64]}: it answers to addresses, to localhost and to the "
                "names that [admin] has.",
                param="host",
            )
        if request.method not in _SAFE and "origin" in request.headers:
            _check_origin(request)

    async def answer(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to what is the console's own. None for any other request. Raises ApiError."""
        path = path_of(request)
        if is_console(path):
            if request.method not in _SAFE:
                raise MethodNotAllowed(f"{PAGE} takes GET.", allow="GET, HEAD")
            found = file_response(path, request.headers.get("if-none-match"))
            if found is None:
                raise RouteNotFound(f"The console is at {PAGE}.")
            return found
        if path != SESSION:
            return None
        match request.method:
            case "POST":
                return await self._log_in(request)
            case "DELETE":
                return self._log_out(request)
        raise MethodNotAllowed(f"{SESSION} takes POST and DELETE.", allow="POST, DELETE")

    def digest(self, request: web.BaseRequest) -> bytes | None:
        """The digest of the key that a request's cookie stands for. None without a session. Raises
        PermissionDenied where the request is not the page's own (rule 3)."""
        if (text := _cookie(request)) is None:
            return None
        digest = self._sessions.find(text, self._clock.monotonic())
        if digest is not None and request.method not in _SAFE:
            _check_origin(request)
        return digest

    def forget(self, request: web.BaseRequest) -> None:
        """End the session of a request: its key does not work any more."""
        if (text := _cookie(request)) is not None:
            self._sessions.end(text)

    async def _log_in(self, request: web.BaseRequest) -> web.Response:
        _check_origin(request)
        network, now_s = network_of(request.remote or ""), self._clock.monotonic()
        if (wait_s := self._attempts.wait_s(network, now_s)) > 0:
            message = "Too many log-ins have failed. Wait a minute, or ask with the key itself."
            raise RateLimited(message, retry_after_s=wait_s)
        self._attempts.failed(network, now_s)  # until it has not: others may come while this one is read
        key = await _key_of(request)
        try:
            operator = await self._operator(key)
        except Unauthenticated:
            _audit("console.login_refused", None)
            raise Unauthenticated("This is no operator's key, or it does not work any more.") from None
        self._attempts.succeeded(network)
        self.forget(request)
        text = self._sessions.begin(digest_of(hash_key(key)), self._clock.monotonic())
        _audit("console.login", operator)
        return _answer(operator, f"{COOKIE}={text}", request)

    def _log_out(self, request: web.BaseRequest) -> web.Response:
        _check_origin(request)
        self.forget(request)
        return _answer(None, f"{COOKIE}=; Max-Age=0", request)


async def _key_of(request: web.BaseRequest) -> str:
    """The key in a log-in's body. Raises ApiError."""
    if request.content_type != "application/json":
        raise InvalidRequest("A log-in is JSON: send content-type application/json.", param="content-type")
    body = await read_operator_body(request, LOGIN_S)
    try:
        key = msgspec.json.decode(body, type=Login).key
    except UNDECODABLE:  # its text may show the key
        raise InvalidRequest('A log-in reads {"key": "..."}.', param="key") from None
    if len(key) > KEY_LEN_MAX or key_problem(key) is not None:
        raise Unauthenticated("This is no operator's key.")
    return key


def _check_origin(request: web.BaseRequest) -> None:
    """Check that the `Origin` is this listener's (rule 3). Raises PermissionDenied. The scheme is not
    compared: TLS may end before this listener."""
    try:
        origin = urlsplit(request.headers.get("origin", "")).netloc
    except ValueError:
        origin = ""
    if not origin or origin.lower() != request.headers.get("host", "").lower():
        raise PermissionDenied("This comes from another page than the console's, or from none.")


def _cookie(request: web.BaseRequest) -> str | None:
    """The session's id in a request's cookies."""
    match = _OWN.search(request.headers.get("cookie", ""))
    return None if match is None else match[1]


def _is_secure(request: web.BaseRequest) -> bool:
    """True if the browser speaks TLS. The header is of whoever sends it, and binds only his own cookie."""
    return request.secure or request.headers.get("x-forwarded-proto", "").lower() == "https"


def _answer(operator: str | None, cookie: str, request: web.BaseRequest) -> web.Response:
    secure = "; Secure" if _is_secure(request) else ""
    attributes = f"; Path=/admin/v1; HttpOnly; SameSite=Strict{secure}"
    headers = {**HEADERS, "cache-control": "no-store", "set-cookie": cookie + attributes}
    return json_response(HTTPStatus.OK, msgspec.json.encode(LoggedIn(operator)), headers)


def _audit(action: str, operator: str | None) -> None:
    logs.audit("admin.change", {"logger": __name__, "operator": operator, "action": action})
