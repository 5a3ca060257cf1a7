"""The engine's end of a request: send it, read the answer, close it.

The seam to the wire is `Transport`: HTTP/2 by `shared.http2`, and HTTP/1.1 by `relay.http1` for engines that
speak nothing else. Its errors are those of httpx, whose requests and responses are not made, as each pair
costs more than the hop itself. The `Watch` keeps all timeouts except for connecting, which only the transport
can tell apart.

Closing an unfinished answer resets its stream, or closes its HTTP/1.1 connection, which is what tells
the engine to stop.
"""

from __future__ import annotations

import asyncio
import ssl
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Final

import httpx
import msgspec

from gateway.config import HopProtocol, ModelConfig
from gateway.edge_config import HopConfig
from gateway.relay.http1 import AcceptChunk, Http1Transport
from shared import errors
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import (
    ApiError,
    ConnectTimeout,
    NotReady,
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnreachable,
)
from shared.http2.client import (
    CLIENT_WATCH,
    Draining,
    Http2Transport,
    NotHttp2,
    Origin,
    RequestUnprocessed,
    Timeouts,
)
from shared.http2.config import PulseConfig
from shared.http2.report import Report
from shared.ids import TOKENIZER_HEADER
from shared.load_report import LoadReport, parse_load
from shared.renewable_tls import RenewableTls
from shared.shield import shielded
from shared.sse import CLOSING_HEADER, Closing, parse_closing
from shared.tls import client_context

BOUNDS_MAX: Final = 1024
DRAIN_RETRY_S: Final = 1.0
"""The `Retry-After` of a request whose only replica shuts down, in seconds."""
ERROR_LEN_MAX: Final = 64 * 1024
FETCH_LEN_MAX: Final = 4 * 1024 * 1024
"""Bytes of an answer to the gateway's own requests."""

HeaderPairs = tuple[tuple[bytes, bytes], ...]
"""Headers in order, names and values as bytes."""


OnLoad = Callable[[str, str, int, LoadReport], None]
"""A function that takes the load of an engine, by the scheme, host and port of its connection."""


def ignore_load(_scheme: str, _host: str, _port: int, _report: LoadReport) -> None:
    """An `OnLoad` for those that do not choose among engines."""


class Outbound(msgspec.Struct, frozen=True):
    """A request as it is sent to the replica that is chosen."""

    method: str
    path: str
    headers: HeaderPairs
    content: bytes = b""
    asks_for_usage: bool = False
    """True if the gateway asks an engine of another make for usage that the client did not ask for."""

    def __repr__(self) -> str:
        """Nothing of the headers, which have the engine's key, nor of the content."""
        return f"<{type(self).__name__} {self.method} {self.path}>"


class Response(typing.Protocol):
    """A response whose head has been read, and whose body is still to come."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, looked up without regard to case."""
        ...

    async def read(self) -> bytes | None: ...

    async def pass_on(
        self, accept: Callable[[bytes], bool], accept_chunk: AcceptChunk | None = None
    ) -> bool: ...

    async def aclose(self) -> None: ...


class Transport(typing.Protocol):
    async def exchange(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes,
        *,
        timeouts: Timeouts,
        connected: Callable[[], None] | None,
        report: Report | None,
    ) -> Response: ...

    async def aclose(self) -> None: ...


class Answer:
    """A replica's answer, its body unread. Its holder must close it."""

    __slots__ = ("_stream", "content_type", "finished", "headers", "status", "tokenizer")

    def __init__(self, response: Response) -> None:
        self.status: Final = response.status
        self.headers: Final = response.headers
        self.content_type: Final[str] = self.headers.get("content-type", "")
        self.tokenizer: Final = self.headers.get(TOKENIZER_HEADER)
        """The hash of the engine's tokenizer. An engine of ours always sends it; None of another make."""
        self.finished = False
        """True if the whole answer was read."""
        self._stream: Final = response

    @property
    def closing(self) -> Closing | None:
        """The report of our engine in the head of a unary answer. None where there is none."""
        closing = self.headers.get(CLOSING_HEADER)
        return parse_closing(closing) if closing else None

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    async def read(self) -> bytes:
        """The bytes that have come, at least one; empty at the end. Raises UpstreamFailed when cut off."""
        try:
            data = await self._stream.read()
        except httpx.HTTPError as error:
            raise _ours(error) from error
        if data is None:
            self.finished = True
            return b""
        return data

    async def pass_on(self, accept: Callable[[bytes], bool], accept_chunk: AcceptChunk | None = None) -> bool:
        """Call `accept` with all bytes as they come, until it returns False. Returns True when there may be
        more, False at the end. Raises UpstreamFailed when cut off, and what `accept` raises.

        `accept_chunk` is asked first about what came as a chunk of its own."""
        try:
            more = await self._stream.pass_on(accept, accept_chunk)
        except httpx.HTTPError as error:
            raise _ours(error) from error
        self.finished = not more
        return more

    async def read_all(self, len_max: int) -> bytes:
        body = bytearray()
        await self.read_into(body.extend, len_max)
        return bytes(body)

    async def read_into(self, take: Callable[[bytes], object], len_max: int) -> None:
        """Call `take` with all bytes as they come."""
        length = 0
        while chunk := await self.read():
            length += len(chunk)
            if length > len_max:
                raise UpstreamFailed("The engine's answer is too large.", detail=f"over {len_max} bytes")
            take(chunk)

    def aclose(self) -> Awaitable[None]:
        """Give the connection back or, when the answer is unfinished, end its stream at once."""
        return self._stream.aclose() if self.finished else shielded(self._stream.aclose())

    async def error(self) -> ApiError:
        """The error of an answer with an error status, as one of our own tree."""
        body = await self.read_all(ERROR_LEN_MAX)
        return read_back(self.status, body, self.headers.get("retry-after"))


class Upstream:
    """The transports to the engines, made in a running loop. Raises UnusableTls."""

    def __init__(
        self,
        hop: HopConfig,
        models: Iterable[ModelConfig],
        on_load: OnLoad = ignore_load,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        secure = {model.protocol for model in models if _is_secure(model)}

        self._tls: Final[list[RenewableTls]] = []

        def context(protocol: HopProtocol) -> ssl.SSLContext | None:
            """A TLS context for one protocol, as they differ in what ALPN offers. None where no engine needs
            one and no file has to be checked: making a context reads the system's authorities."""
            if protocol not in secure and (hop.ca, hop.cert) == (None, None):
                return None
            load = partial(client_context, ca=hop.ca, cert=hop.cert, key=hop.key)
            renewable = RenewableTls((hop.ca, hop.cert, hop.key), load, is_server=False, clock=clock)
            self._tls.append(renewable)
            return renewable.context

        def load_told(origin: Origin, payload: bytes) -> None:
            if (report := parse_load(payload)) is not None:
                on_load(*origin, report)

        pulse = PulseConfig(hop.ping_interval_s, hop.ping_timeout_s)
        self._http2: Final = Http2Transport(
            ssl_context=context("http2"), watch=replace(CLIENT_WATCH, pulse=pulse), on_load=load_told
        )
        self._transports: Final[dict[HopProtocol, Transport]] = {
            "http1": Http1Transport(context("http1")),
            "http2": self._http2,
        }

    async def watch_tls(self) -> None:
        """Take over certificates and authorities that change, until cancelled."""
        await asyncio.gather(*(renewable.watch() for renewable in self._tls))

    @property
    def streams(self) -> int:
        """The number of open HTTP/2 streams."""
        return self._http2.streams

    def is_mute(self, protocol: HopProtocol, base_url: str) -> bool:
        """True if a replica has streams, and owes a sign of life. HTTP/1.1 has no way to ask for one."""
        return protocol == "http2" and self._http2.is_mute(base_url)

    async def send(
        self,
        protocol: HopProtocol,
        base_url: str,
        outbound: Outbound,
        connect_s: float,
        connected: Callable[[], None] = lambda: None,
        report: Report | None = None,
    ) -> Answer:
        """Dispatch a request, and wait for the answer's headers.

        `connected` is called once there is a connection. `report` takes the engine's report on the request.

        Raises:
            ConnectTimeout, UpstreamUnreachable, NotReady: nothing was dispatched.
            UpstreamLost: the connection or the stream broke after that.
            UpstreamFailed: anything else.
        """
        content = outbound.content
        try:
            response = await self._transports[protocol].exchange(
                outbound.method,
                base_url + outbound.path,
                (*outbound.headers, (b"content-length", b"%d" % len(content))),
                content,
                timeouts=_bounds(connect_s),
                connected=connected,
                report=report,
            )
        except httpx.HTTPError as error:
            raise _ours(error) from error
        return Answer(response)

    async def fetch(
        self,
        protocol: HopProtocol,
        base_url: str,
        path: str,
        connect_s: float,
        headers: HeaderPairs = (),
    ) -> tuple[Mapping[str, str], bytes]:
        """The headers and body of the answer to a GET of the gateway's own. Raises what `fetch_into` does."""
        body = bytearray()
        return await self.fetch_into(
            body.extend, FETCH_LEN_MAX, protocol, base_url, path, connect_s, headers
        ), bytes(body)

    async def fetch_into(
        self,
        take: Callable[[bytes], object],
        len_max: int,
        protocol: HopProtocol,
        base_url: str,
        path: str,
        connect_s: float,
        headers: HeaderPairs = (),
    ) -> Mapping[str, str]:
        """The headers of the answer to a GET of the gateway's own. `take` is called with its body's bytes as
        they come; where there may be none, it is not read. Raises RouteNotFound and MethodNotAllowed where
        there is no such path, whatever the body says, and ApiError for any other error status."""
        answer = await self.send(protocol, base_url, Outbound("GET", path, headers), connect_s)
        try:
            if (kind := _NO_SUCH_PATH.get(answer.status)) is not None:
                raise kind("The engine has no such path.", detail=f"{path}: {answer.status}")
            if answer.status >= HTTPStatus.BAD_REQUEST:
                raise await answer.error()
            if len_max:
                await answer.read_into(take, len_max)
            return answer.headers
        finally:
            await answer.aclose()

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


def _is_secure(model: ModelConfig) -> bool:
    """True if some replica of the model is reached by https."""
    if model.discovery is not None:
        return model.discovery.scheme == "https"
    return any(url.startswith("https:") for url in model.replicas)


@lru_cache(maxsize=BOUNDS_MAX)
def _bounds(connect_s: float) -> Timeouts:
    return Timeouts(connect_s=connect_s, pool_s=connect_s)


# -- errors ---------------------------------------------------------------------------------------


def _ours(error: httpx.HTTPError) -> ApiError:
    detail = f"{type(error).__name__}: {error}"
    match error:
        case httpx.ConnectTimeout() | httpx.PoolTimeout():
            return ConnectTimeout("The engine did not accept a connection in time.", detail=detail)
        case Draining():
            return NotReady("The engine is shutting down.", detail=detail, retry_after_s=DRAIN_RETRY_S)
        case NotHttp2():
            hint = 'if it speaks HTTP/1.1 alone, set protocol = "http1" for its models'
            return UpstreamUnreachable("The engine cannot be reached.", detail=f"{detail}; {hint}")
        case httpx.ConnectError() | RequestUnprocessed():
            return UpstreamUnreachable("The engine cannot be reached.", detail=detail)
        case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
            return UpstreamFailed("The engine cannot be asked.", detail=detail)
        case _:
            return UpstreamLost("The engine's answer broke off.", detail=detail)


class _Error(msgspec.Struct):
    """The error in an envelope. Other engines put a status where OpenAI puts a code."""

    message: str
    param: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    """OpenAI's error envelope, or a form that other engines send: its fields without the envelope, or a text
    alone within it."""

    error: _Error | str | None = None
    message: str | None = None
    param: str | None = None
    code: str | int | None = None


_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode


def _decode_error(body: bytes) -> _Error:
    envelope = _decode_envelope(body)
    if isinstance(envelope.error, _Error):
        return envelope.error
    message = envelope.error or envelope.message
    if message is None:
        raise msgspec.ValidationError("there is no message")
    return _Error(message, envelope.param, envelope.code)


def _tree(root: type[ApiError]) -> dict[str, type[ApiError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update({code: kind for code, kind in _tree(child).items() if code not in found})
    return found


_BY_CODE: Final = _tree(ApiError)
_BY_STATUS: Final[dict[int, type[ApiError]]] = {
    400: errors.InvalidRequest,
    404: errors.ModelNotFound,
    413: errors.BodyTooLarge,
    422: errors.InvalidRequest,
    503: Overloaded,
}
"""The errors for statuses of engines whose codes are not known here."""
_TAKES_NO_MORE: Final = "The engine takes no more requests at the moment."
_NO_SUCH_PATH: Final[dict[int, type[ApiError]]] = {404: errors.RouteNotFound, 405: errors.MethodNotAllowed}
_OURS_ALONE: Final = (errors.Unauthenticated.status, errors.PermissionDenied.status)
"""Statuses that are never passed on: that an engine refuses the gateway is no fault of the caller's."""


def _seconds(retry_after: str | None) -> float | None:
    """An engine's `Retry-After`, where it is a number of seconds of a day at most."""
    if retry_after is None or len(retry_after) > 5 or not retry_after.isdecimal():
        return None
    return float(retry_after)


def read_back(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """An engine's error answer as an error of ours: the same code, message and param where it has OpenAI's
    envelope, and UpstreamFailed where it has not.

    A 429 is Overloaded, whatever its code and body: what is used up is the gateway's own account there, and
    no quota of the caller's, who is not shown what is said of it. Other replicas and fallbacks may have
    room."""
    detail = f"engine answered {status}"
    retry_after_s = _seconds(retry_after)
    try:
        error = _decode_error(body)
    except msgspec.DecodeError:
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return Overloaded(_TAKES_NO_MORE, detail=detail, retry_after_s=retry_after_s)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:  # sent by a proxy, or a bare server
            return NotReady("The engine is not ready.", detail=detail, retry_after_s=retry_after_s)
        return UpstreamFailed("The engine failed to answer.", detail=detail)
    if isinstance(error.code, int):
        status = error.code
    kind = _BY_CODE.get(str(error.code)) or _BY_STATUS.get(status)
    if HTTPStatus.TOO_MANY_REQUESTS in (status, kind and kind.status):
        detail = f"{detail}, code {error.code!r}"
        return Overloaded(_TAKES_NO_MORE, detail=detail, retry_after_s=retry_after_s)
    if kind is None or kind.status in _OURS_ALONE:
        return UpstreamFailed("The engine failed to answer.", detail=f"{detail}, code {error.code!r}")
    return kind(error.message, param=error.param, detail=detail, retry_after_s=retry_after_s)
