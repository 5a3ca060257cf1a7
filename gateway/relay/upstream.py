"""The engine's end of a request: show it a key, send the request, read the answer, close it.

The seam to the wire is `Transport`: HTTP/2 by `shared.http2`, and HTTP/1.1 by `relay.http1` for engines that
speak nothing else. The `Watch` keeps all timeouts except for connecting, which only the transport can tell
apart.

Closing an unfinished answer resets its stream, or closes its HTTP/1.1 connection, which is what tells
the engine to stop.

An engine that asks for a key is shown the gateway's own: one per model, from the environment or a file. It is
never in a log, an error or a `repr`. The caller's key is no credential here, and goes nowhere.
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

import msgspec

from gateway.config.edge import HopConfig
from gateway.config.secret import RenewableSecret, file_of
from gateway.config.whole import HopProtocol, ModelConfig
from gateway.relay.engine_errors import ERROR_LEN_MAX, read_back, says_error
from gateway.relay.hop_errors import (
    Draining,
    HopError,
    LostTwice,
    NoConnection,
    NoConnectionInTime,
    NotHttp2,
    Unsendable,
)
from gateway.relay.http1 import AcceptChunk, Http1Transport
from gateway.relay.http2_client import CLIENT_WATCH, Http2Transport, Origin
from shared.http2.connection_config import PulseConfig
from shared.http2.connection_errors import StreamFailed, StreamRefused
from shared.http2.stream import Report
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.renewable_tls import RenewableTls
from shared.process.setting_values import ConfigError
from shared.process.shield import shielded
from shared.process.tls import client_context
from shared.wire import engine_words, errors
from shared.wire.errors import (
    ApiError,
    ConnectTimeout,
    NotReady,
    UpstreamFailed,
    UpstreamLost,
    UpstreamLostTwice,
    UpstreamUnreachable,
)
from shared.wire.ids import TOKENIZER_HEADER
from shared.wire.load_report import LoadReport, parse_load
from shared.wire.sse import CLOSING_HEADER, Closing, parse_closing

POLL_S: Final = 1.0
"""The time between two looks at the files, in seconds. No request waits for a disk."""


class Credentials:
    """The tokens by model."""

    __slots__ = ("_by_model", "_clock", "_files")

    def __init__(
        self, models: Iterable[ModelConfig], env: Mapping[str, str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Raises ConfigError, which lists all problems."""
        self._clock: Final = clock
        self._by_model: Final[dict[str, RenewableSecret]] = {}
        self._files: Final[dict[str, RenewableSecret]] = {}
        """Those that may be renewed, by their file, which models may share."""
        problems: list[str] = []
        for model in models:
            file = file_of(model.api_key)
            try:
                secret = RenewableSecret(model.api_key, env)
            except ValueError as error:
                problems.append(f"models.{model.name}: {error}")
                continue
            self._by_model[model.name] = secret if file is None else self._files.setdefault(file, secret)
        if problems:
            raise ConfigError(problems)

    async def watch(self) -> None:
        """Read the files again and again, until cancelled. Returns where there are none."""
        while self._files:
            await self._clock.sleep(POLL_S)
            for secret in self._files.values():
                await secret.now()

    def headers(self, model: ModelConfig) -> tuple[tuple[bytes, bytes], ...]:
        """The headers for requests to this model's replicas; empty without a token."""
        secret = self._by_model.get(model.name)
        if secret is None or secret.text is None:
            return ()
        return ((b"authorization", f"Bearer {secret.text}".encode()),)


TYPES_MAX: Final = 256
"""Content types whose media type is cached."""
PULSE: Final = PulseConfig()
DRAIN_RETRY_S: Final = 1.0
"""The `Retry-After` of a request whose only replica shuts down, in seconds."""
FETCH_LEN_MAX: Final = 4 * 1024 * 1024
"""Bytes of an answer to the gateway's own requests."""

HeaderPairs = tuple[tuple[bytes, bytes], ...]
"""Headers in order, names and values as bytes."""

_NO_CODING: Final = (b"accept-encoding", b"identity")
"""Without it a server may choose any coding (RFC 9110, 12.5.3)."""
_OK: Final = int(HTTPStatus.OK)
"""Looking it up in its enum costs a call."""
_JSON_TYPES: Final = ("application/json", "")
_STREAM_TYPES: Final = ("text/event-stream", "")
"""The types of answers. Where a server names none, the body tells."""
_NO_SUCH_PATH: Final[dict[int, type[ApiError]]] = {404: errors.RouteNotFound, 405: errors.MethodNotAllowed}

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
    names_tenant: bool = False
    """True if it tells the engine the tenant, by which one of ours keeps cached prefixes apart."""
    is_salted: bool = False
    """True if it has a salt by which an engine of another make does."""

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

    def read(self) -> Awaitable[bytes | None]: ...

    def pass_on(
        self, accept: Callable[[bytes], bool], accept_chunk: AcceptChunk | None = None
    ) -> Awaitable[bool]: ...

    async def aclose(self) -> None: ...


class Transport(typing.Protocol):
    async def exchange(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes,
        *,
        connect_s: float | None,
        connected: Callable[[], None] | None,
        report: Report | None,
        is_repeated: bool,
    ) -> Response: ...

    async def aclose(self) -> None: ...


class Answer:
    """A replica's answer, its body unread. Its holder must close it."""

    __slots__ = (
        "_stream",
        "content_type",
        "finished",
        "headers",
        "is_coded",
        "media_type",
        "status",
        "tokenizer",
    )

    def __init__(self, response: Response) -> None:
        self.status: Final = response.status
        self.headers: Final = response.headers
        self.content_type: Final[str] = self.headers.get("content-type", "")
        self.media_type: Final = _media_type(self.content_type)
        self.is_coded: Final = self.headers.get("content-encoding", "").lower() not in ("", "identity")
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

    def is_what_was_asked_for(self, *, streams: bool) -> bool:
        """True if this is an answer by its head: a 200 of the type that was asked for, in no coding."""
        return (
            self.status == _OK
            and self.media_type in (_STREAM_TYPES if streams else _JSON_TYPES)
            and not self.is_coded
        )

    async def read(self) -> bytes:
        """The bytes that have come, at least one; empty at the end. Raises UpstreamFailed when cut off."""
        try:
            data = await self._stream.read()
        except (HopError, StreamFailed) as error:
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
        except (HopError, StreamFailed) as error:
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
        """The error that this is in place of an answer, as one of our own tree."""
        headers = self.headers
        is_error = self.status >= HTTPStatus.BAD_REQUEST
        if is_error or (self.status == HTTPStatus.OK and self.media_type in _JSON_TYPES):
            body = b"" if self.is_coded else await self._body_of_error()
            if is_error or says_error(body):
                after = headers.get("retry-after")
                return read_back(self.status, body, self.media_type, after, headers.get("date"))
        coding = f" in {headers.get('content-encoding')!r}" if self.is_coded else ""
        detail = f"engine answered {self.status} with {self.media_type!r}{coding}"
        return UpstreamFailed("The engine sent what is no answer.", detail=detail)

    async def _body_of_error(self) -> bytes:
        """Empty where it is too long, or cut off: the status tells enough."""
        try:
            return await self.read_all(ERROR_LEN_MAX)
        except UpstreamFailed:
            return b""


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

        self._http2: Final = Http2Transport(
            ssl_context=context("http2"), watch=replace(CLIENT_WATCH, pulse=PULSE), on_load=load_told
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
        *,
        is_repeated: bool = False,
    ) -> Answer:
        """Dispatch a request, and wait for the answer's headers.

        `connected` is called once there is a connection. `report` takes the engine's report on the request.
        `is_repeated`: another engine was sent it before, and may have died of it.

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
                (*outbound.headers, _NO_CODING, (b"content-length", b"%d" % len(content))),
                content,
                connect_s=connect_s,
                connected=connected,
                report=report,
                is_repeated=is_repeated,
            )
        except (HopError, StreamFailed) as error:
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
        there is no such path, whatever the body says, and ApiError for any other status than 200."""
        answer = await self.send(protocol, base_url, Outbound("GET", path, headers), connect_s)
        try:
            if (kind := _NO_SUCH_PATH.get(answer.status)) is not None:
                raise kind("The engine has no such path.", detail=f"{path}: {answer.status}")
            if answer.status != HTTPStatus.OK:
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


@lru_cache(maxsize=TYPES_MAX)
def _media_type(content_type: str) -> str:
    """The media type without its parameters; types are compared without regard to case (RFC 9110, 8.3.1)."""
    return content_type.partition(";")[0].strip().lower()


# -- errors ---------------------------------------------------------------------------------------


def _ours(error: HopError | StreamFailed) -> ApiError:
    detail = f"{type(error).__name__}: {error}"
    match error:
        case NoConnectionInTime():
            return ConnectTimeout("The engine did not accept a connection in time.", detail=detail)
        case Draining():
            return NotReady(engine_words.STOPPING, detail=detail, retry_after_s=DRAIN_RETRY_S)
        case NotHttp2():
            hint = 'if it speaks HTTP/1.1 alone, set protocol = "http1" for its models'
            return UpstreamUnreachable("The engine cannot be reached.", detail=f"{detail}; {hint}")
        case NoConnection() | StreamRefused():
            return UpstreamUnreachable("The engine cannot be reached.", detail=detail)
        case Unsendable():
            return UpstreamFailed("The engine cannot be asked.", detail=detail)
        case LostTwice():
            return UpstreamLostTwice("The engine's answer broke off, twice.", detail=detail)
        case _:
            return UpstreamLost("The engine's answer broke off.", detail=detail)
