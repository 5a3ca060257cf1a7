"""A client's connection, in what aiohttp leaves open: it is read in turns, its heads are bounded and checked,
and it must itself be read in time.

Bodies are read in turns, shared fairly between tenants. A large body is read in pieces of 256 KiB, and a loop
that finds a piece on each of a hundred connections is held for as long as all of them take. So a connection
that has received a large piece reads on in its tenant's turn (`shared.fairness.fair_turns`). That holds for
what is dropped of a refused request's body as well.

A client must read what is written to its connection, whoever writes it. A request that is handled has a time
of its own (`gateway.client.answer`). But aiohttp writes some answers by itself: errors, probes. It waits
until they are read, for ever, and a connection that is closed ends once they are. So a connection of which
nothing is read is cut off after its time.

aiohttp's parser is given what was received in pieces that end behind a head, and parses. Beyond that a head
is refused that a proxy in front may read otherwise (`check_request`). A proxy's path rules, its routing by
host and its framing must see the request that is served here. So there is one spelling of a path, a host is a
host, and a body has one of two framings. A target in absolute form (`http://host/path`, RFC 9112 section
3.2.2) names the host of the header, and its path is spelled as any.

The gateway can be its own client, too, over a pair of sockets within the process: `Inward`. Such a request is
like any other, from its headers to its completed line, and there is no port that others could reach.

All of aiohttp's private names that the gateway rests on are in this file. A minor version of aiohttp may
change any of them, so each is tried before pyproject.toml lets it in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Protocol, cast

from aiohttp import BaseConnector, ClientRequest, ClientTimeout, StreamReader, web
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage
from aiohttp.tracing import Trace
from aiohttp.web_protocol import RequestHandler

from shared.fairness.fair_turns import FairTurns
from shared.http2 import frames
from shared.http2.connection_errors import ErrorCode
from shared.process.listening import LINGER_S
from shared.process.sockets import bound_transport
from shared.process.tls import HTTP2
from shared.wire.errors import InvalidRequest, forget_frames

BUFFER_LEN: Final = 32 * 1024
"""Half of the bytes beyond which what was received of a body pauses its connection."""
WRITE_BUFFER_LEN: Final = 16 * 1024
"""The gateway's own buffer of a connection: with more bytes than this unsent, the relay stops reading from
the engine."""
LARGE_LEN: Final = 16 * 1024
"""Bytes received at once, above which a connection's TLS has large buffers. One record has as many."""
CHUNK_LEN_MIN: Final = 8
"""The fewest bytes of a chunked body for each line end in it, on average over what is received at a time."""
CRLFS_LOOKED_AT: Final = 4096
"""The number of bytes at the beginning of what is received in which line ends are not counted."""
HEAD_LEN_MAX: Final = 32 * 1024
"""Bytes of a request's line and headers together. The bounds of each add up to half a megabyte, which no
client needs, and which any client could send without a key."""
HEAD_PARSED_MAX: Final = 2 * HEAD_LEN_MAX
"""The most bytes of a head that are parsed: of one that is a little too long it can be said what is wrong."""
_MALFORMED: Final = b"\0" * 2 * CHUNK_LEN_MIN
"""Bytes that cannot occur in a head, nor in a chunk of less than their number."""
_HTTP1_REQUIRED: Final = frames.settings({}) + frames.goaway(0, ErrorCode.HTTP_1_1_REQUIRED)

AHEAD_MAX: Final = 8
"""Requests that a connection may send before the answer to the first; with more it is closed. No client of
this API does that, and a packet may hold thousands."""
HEAD_END: Final = b"\r\n\r\n"
_CONTENT_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: *(\d{1,12})\r\n")
"""The header as clients write it; other spellings only cost a second piece."""

_HOST: Final = re.compile(r"[A-Za-z0-9._~-]*(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
_ABSOLUTE: Final = re.compile(r"(?P<scheme>[^/?#]*)://(?P<authority>[^/?#]*)")
"""The beginning of a target in absolute form, up to its path."""
HOSTS_MAX: Final = 64
"""The number of values of `host` whose check is cached: there are few of them."""
_SINGLE: Final = ("authorization", "x-api-key", "host", "content-encoding")
"""Headers that must not be repeated, because proxies and servers differ in which of them counts."""

Received = tuple[RawRequestMessage, StreamReader]
"""A request's head and its body, as aiohttp's parser gives them."""

Refuse = Callable[[str], web.StreamResponse]
"""The answer to what is no well-formed request, given the name of what is wrong with it."""


class ReadsInTurn(RequestHandler):
    """A connection of which bodies are read in turns."""

    __slots__ = ("_turn", "_turns", "tenant")

    def __init__(self, server: web.Server, turns: FairTurns, **options: Any) -> None:
        super().__init__(server, read_bufsize=BUFFER_LEN, **options)
        self.tenant = ""
        """The tenant whose request the connection serves, or served last; empty until it is known."""
        self._turns = turns
        self._turn: asyncio.Future[None] | None = None
        """The turn that the connection waits for. None where it waits for none."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading in the tenant's turn, if it was paused. aiohttp calls this after every read of a
        body, and would run its parser over nothing each time."""
        if not self._reading_paused or self._turn is not None:
            return
        self._turn = self._turns.ask(self.tenant)
        if self._turn is None:
            super().resume_reading(resume_parser)
        else:
            self._turn.add_done_callback(self._read_on)

    def _read_on(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if self.transport is not None and not turn.cancelled():
            super().resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._turn is not None:
            self._turn.cancel()
        super().connection_lost(exc)


def serves(request: web.BaseRequest, tenant: str) -> None:
    """Take what the request's connection has still to do for it in this tenant's turns."""
    if isinstance(request.protocol, ReadsInTurn):
        request.protocol.tenant = tenant


def close_after(request: web.BaseRequest) -> None:
    """Have a request's connection closed after the answer."""
    request._message = request._message._replace(should_close=True)


def answer_in_http11(request: web.BaseRequest) -> None:
    """Have a request answered in HTTP/1.1: aiohttp would repeat the version that it was sent."""
    request._version = HttpVersion11
    request._cache.pop("version", None)


class EndsUnread(ReadsInTurn):
    """A connection that is cut off when its client does not read."""

    __slots__ = ("_are_handlers_timed", "_is_over", "_unread_s", "_unread_timer")

    def __init__(
        self,
        server: web.Server,
        turns: FairTurns,
        unread_s: float,
        *,
        are_handlers_timed: bool,
        **options: Any,
    ) -> None:
        """`are_handlers_timed` is true if the handler of a request limits this time by itself."""
        super().__init__(server, turns, **options)
        self._are_handlers_timed: Final = are_handlers_timed
        self._unread_s: Final = unread_s
        self._unread_timer: asyncio.TimerHandle | None = None
        """Cuts the connection off. None while nothing waits to be read."""
        self._is_over = False
        """True once the connection is closed, and ends when the rest was read."""

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._set_unread_timer(self.transport)

    def resume_writing(self) -> None:
        if not self._is_over:  # else part of the rest was read, and nobody would wait for the other
            self._end_unread_timer()
        super().resume_writing()

    async def start(self) -> None:
        """Answer the connection's requests, and close it."""
        transport = self.transport
        await super().start()
        self._bound_rest(transport)

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        self._bound_rest(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_unread_timer()
        super().connection_lost(exc)

    def _bound_rest(self, transport: asyncio.Transport | None) -> None:
        """Bound the time of a connection that is closed, and ends once the rest was read."""
        self._is_over = True
        if transport is not None and self._unread_timer is None and _is_unread(transport):
            self._set_unread_timer(transport)

    def _set_unread_timer(self, transport: asyncio.Transport) -> None:
        self._unread_timer = self._loop.call_later(self._unread_s, self._cut_off, transport)

    def _end_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _cut_off(self, transport: asyncio.Transport) -> None:
        if self._are_handlers_timed and self._current_request is not None:
            self._set_unread_timer(transport)
        else:
            transport.abort()


def _is_unread(transport: asyncio.Transport) -> bool:
    try:
        return transport.get_write_buffer_size() > 0
    except AttributeError:  # asyncio's TLS, closed twice, has no buffer left, and says so in this way
        return False


class Connections(Protocol):
    """The part of a server that a connection needs: it keeps the connection among the others."""

    @property
    def turns(self) -> FairTurns:
        """The turns in which bodies are read."""
        ...

    @property
    def ends(self) -> FairTurns:
        """The turns in which the requests of callers who have left are ended."""
        ...

    def note(self, connection: BoundedConnection) -> None:
        """Hear that a connection may hold something, or does so no more: half a head, requests ahead."""
        ...

    def grew(self, connection: BoundedConnection) -> None:
        """Hear that a connection's buffers of TLS have become large."""
        ...

    def forget(self, connection: BoundedConnection) -> None:
        """Hear that a connection's buffers are gone."""
        ...


class BrokenBody(web.RequestPayloadError, TimeoutError):
    """A request's body broke off within something malformed. It is a TimeoutError too because aiohttp, which
    reads what a handler left of a body, expects no other error there: it would log one as a crash."""


class BoundedConnection(EndsUnread):
    """A connection of a listener, whose heads are bounded."""

    __slots__ = (
        "_connections",
        "_head_end",
        "_head_len",
        "_head_s",
        "_head_timer",
        "_held",
        "_is_refused",
        "_large_len",
        "_received",
        "_refuse",
    )

    def __init__(
        self,
        server: web.Server,
        connections: Connections,
        refuse: Refuse,
        head_s: float,
        **options: Any,
    ) -> None:
        super().__init__(server, connections.turns, **options)
        self._connections = connections
        self._refuse = refuse
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None
        """Closes the connection. None while no head is incomplete: most come whole, and need none. Nor while
        no HTTP/2 is refused."""
        self._head_len = 0
        """The number of bytes received of a head that is not complete yet."""
        self._head_end = b""
        """The last of them, as many as may belong to the empty line that completes it."""
        self._received: Received | None = None
        """The request of which the body is being received. None while what comes is part of a head, or begins
        one."""
        self._held = False
        """True if `holds` was true when something was last received."""
        self._is_refused = False
        """True if something malformed was received, so that nothing more is read."""
        self._large_len = sys.maxsize
        """Bytes received at once, above which its buffers become large: of TLS, which have not yet."""

    def data_received(self, data: bytes) -> None:
        """Parse what was received, a head within its bounds and nothing after what is malformed (rule 2).

        aiohttp bounds the lines of a head and their number, but not the head; and of what follows something
        malformed it would keep every piece, each with an error of its own. A body in chunks of a few bytes
        counts as malformed: parsing each takes microseconds, so that one packet of them would hold up the
        loop. So does the beginning of a head that is too long, which takes as much.

        Requests that came whole before something malformed are answered before it is refused.

        The usual packet, one whole request of a client that waits for its answer, is parsed without a look
        for all this: nothing of it can be too long, malformed behind a request, or left over.
        """
        if len(data) > self._large_len:
            self._large_len = sys.maxsize
            self._connections.grew(self)
        if self._is_refused:
            return
        before = self._received
        is_one = not (before or self._messages or self._held or self._head_len) and is_one_request(data)
        if not is_one and (self._begins_long_head(data) or self._has_small_chunks(data)):
            self._is_refused = True
            data = _MALFORMED
        count, received_len = self._request_count, before[1].total_bytes if before is not None else 0
        for piece in (data,) if is_one else cut_behind_heads(data):
            super().data_received(piece)
            if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
                self._is_refused = True
                break
        else:
            if is_one and self._messages and self._messages[-1][1].is_eof():
                return
            self._follow(data, self._request_count - count, received_len)
        if self._head_len > HEAD_LEN_MAX:
            self._is_refused = True
            super().data_received(_MALFORMED)
        if self._is_refused:
            self._end_head()
            self._break_off_body()
        if len(self._messages) > AHEAD_MAX:
            self._messages.clear()
            self.force_close()
        if self.holds or self._held:
            self._held = self.holds
            self._connections.note(self)

    def _follow(self, data: bytes, count: int, received_len: int) -> None:
        """See what is incomplete behind what was received, with which the heads of `count` requests ended.
        Of the body that was being received `received_len` bytes were there before."""
        before = self._received
        requests = cast("list[Received]", [self._messages[i] for i in range(-count, 0)])
        last = requests[-1] if requests else before
        self._received = None if last is None or last[1].is_eof() else last
        if self._received is not None:
            self._end_head()
        elif last is None:
            self._begin_head(self._head_len + len(data), data)
        else:
            data = self._head_end + data
            at = 0 if before is None else None if before[0].chunked else before[1].total_bytes - received_len
            self._end_head()
            if half_len := open_len(data, at, requests):
                self._begin_head(half_len, data)

    def _begin_head(self, head_len: int, data: bytes) -> None:
        """There is half a head of so many bytes, the last of them at the end of `data`."""
        self._head_len = head_len
        self._head_end = (self._head_end + data)[-len(HEAD_END) + 1 :]
        if self._head_timer is None and head_len:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        """Close the connection, or look again later where an answer is due first."""
        self._head_timer = None
        if self._current_request is None and not self._messages:
            self.force_close()
        else:
            self._begin_head(self._head_len, b"")

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return self._current_request is None

    def end(self) -> None:
        """Close the connection if it has no request, else after its answer.

        aiohttp's `close` leaves the transport of an idle connection open, and drops what comes. It would do
        so to one that was accepted a moment ago, too, whose task has not begun: that one is left, and its
        request is refused like any other while the gateway drains.
        """
        transport, waiter = self.transport, self._waiter
        waits = waiter is not None and not waiter.done()
        if waiter is not None or self._current_request is not None:
            self.close()
        if transport is not None and waits:
            transport.close()

    def abort(self) -> None:
        """Close the connection at once, and drop what is not sent."""
        if self.transport is not None:
            self.transport.abort()

    @property
    def holds(self) -> bool:
        """True if there is half a head, or requests that were sent ahead of an answer."""
        return self._head_len > 0 or len(self._messages) > 1

    def _end_head(self) -> None:
        self._head_len, self._head_end = 0, b""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _break_off_body(self) -> None:
        """Fail the body that is being received, of which nothing more is read. aiohttp's parser forgets a
        body within which it meets something malformed, and its reader would wait until its time limit."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(BrokenBody("what follows is malformed"))
        elif len(self._messages) > 1 and not self._messages[-2][1].is_eof():
            del self._messages[-2]  # what is malformed lies within this request, and is the answer to it

    def _begins_long_head(self, data: bytes) -> bool:
        most = HEAD_PARSED_MAX
        return len(data) > most and self._received is None and data.find(HEAD_END, 0, most) < 0

    def _has_small_chunks(self, data: bytes) -> bool:
        request = self._received
        if request is not None and not request[0].chunked:
            return False
        if data.count(b"\r\n", CRLFS_LOOKED_AT) * CHUNK_LEN_MIN <= len(data):
            return False
        return request is not None or b"hunked" in data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None  # uvloop's transport is no subclass of asyncio's
        bound_transport(self.transport, WRITE_BUFFER_LEN)
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        if tls is not None:
            self._large_len = LARGE_LEN
        if tls is not None and tls.selected_alpn_protocol() == HTTP2:
            self._is_refused = True
            self.transport.write(_HTTP1_REQUIRED)
            self._head_timer = self._loop.call_later(LINGER_S, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_head()
        self._received = None
        self._messages.clear()
        self._connections.forget(self)
        if self._held:
            self._connections.note(self)
        forget_frames(exc)  # aiohttp keeps the error of a failed write, and its frames keep the request
        if self._current_request is None or (turn := self._connections.ends.ask(self.tenant)) is None:
            super().connection_lost(exc)
        else:
            turn.add_done_callback(lambda _: EndsUnread.connection_lost(self, exc))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp refuses by itself: malformed request lines, headers and framing. No other error
        comes here, because the edge answers them all."""
        forget_frames(exc)  # its frames hold the bytes that were read
        if request.writer.output_size > 0 or self.transport is None:
            raise ConnectionResetError("an answer has begun, or the client has left")
        return self._refuse(type(exc).__name__)


class Inward(BaseConnector):
    """A client's connector whose connections are all to this process."""

    def __init__(self, serve: Callable[[], asyncio.Protocol]) -> None:
        """`serve` makes the server's protocol of a connection."""
        super().__init__(force_close=True)
        self._serve: Final = serve

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        with _closed_on_failure(ours):
            with _closed_on_failure(theirs):
                await loop.connect_accepted_socket(self._serve, theirs)
            _, protocol = await loop.create_unix_connection(self._factory, sock=ours)
        assert isinstance(protocol, ResponseHandler)
        return protocol


@contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    """Close a socket that no transport has taken over, as when the client is ended meanwhile."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def is_one_request(data: bytes) -> bool:
    """True if this is one request and nothing else, by the length that its head states: the usual packet."""
    end = data.find(HEAD_END, 0, HEAD_LEN_MAX) + len(HEAD_END)
    return end >= len(HEAD_END) and _behind(data, 0, end) == len(data)


def cut_behind_heads(data: bytes) -> list[bytes]:
    """The pieces of what was received, each ending behind a head, and the last one of what is left: aiohttp's
    parser drops the requests that it has read of a piece in which something malformed follows. The usual
    packet, one request with its body, is one piece. A head is looked for as far as one may go, behind the
    body of the one before where its length is stated, and no more are than may be sent ahead."""
    pieces: list[bytes] = []
    begin = at = 0
    for _ in range(AHEAD_MAX):
        end = data.find(HEAD_END, at, at + HEAD_LEN_MAX) + len(HEAD_END)
        if end < at + len(HEAD_END) or (at := _behind(data, at, end)) >= len(data):
            break
        pieces.append(data[begin:end])
        begin = end
    return [*pieces, data[begin:]]


def _behind(data: bytes, begin: int, end: int) -> int:
    """The place behind the request whose head lies there; behind its head alone if its body's length is not
    stated."""
    length = _CONTENT_LENGTH.search(data, begin, end) if end < len(data) else None
    return end if length is None else end + int(length[1])


def open_len(data: bytes, at: int | None, requests: Iterable[Received]) -> int:
    """The number of bytes at the end of what was received that belong to a head which is not complete.

    `at` is where the first head begins, behind the body before it; None if that was in chunks. `requests` are
    those whose heads ended here, with bodies that did, too. A head ends at the first empty line behind its
    beginning, and a body of stated length is as long as what came of it; chunks and a trailer end with an
    empty line, and nothing behind the last one of those is complete.
    """
    for message, body in requests:
        if at is None or message.chunked:
            at = None
            break
        at = data.find(HEAD_END, at) + len(HEAD_END) + body.total_bytes
    if at is None:
        at = data.rfind(HEAD_END) + len(HEAD_END)
    return max(0, len(data) - at)


# -- heads, beyond what is parsed -----------------------------------------------------------------


@lru_cache(maxsize=HOSTS_MAX)
def _is_host(host: str) -> bool:
    return _HOST.fullmatch(host) is not None


def path_of(request: web.BaseRequest) -> str:
    """The path as it was sent, without the query. An escaped letter makes it another path."""
    raw = request.raw_path
    if not raw.startswith("/") and (found := _ABSOLUTE.match(raw)) is not None:
        raw = raw[found.end() :]
    return raw.partition("?")[0]


def host_of(request: web.BaseRequest) -> str:
    """The host that a request is sent to, without the port. Its head is sound (`check_request`)."""
    host = request.headers.get("host", "")
    return host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]


def is_address(host: str) -> bool:
    """True if it is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_request(request: web.BaseRequest) -> None:
    """Check a request's head, beyond what aiohttp's parser does. Raises InvalidRequest."""
    headers = request.headers
    if sum(map(len, chain.from_iterable(request.raw_headers))) > HEAD_LEN_MAX:
        raise InvalidRequest("The request's headers are too large.")
    if request.version not in (HttpVersion10, HttpVersion11):
        answer_in_http11(request)
        raise InvalidRequest("The request's version must be HTTP/1.0 or HTTP/1.1.")
    if request.method == "CONNECT":  # aiohttp reads no body of it, so its body would be the next request
        raise InvalidRequest("This is no proxy: there is no CONNECT.")
    for name in _SINGLE:
        if len(headers.getall(name, ())) > 1:
            raise InvalidRequest(f"The header {name} is given more than once.", param=name)
    if not _is_host(headers.get("host", "")):
        raise InvalidRequest("The header host names no host.", param="host")
    if not request.raw_path.startswith("/"):
        _check_absolute(request.raw_path, headers.get("host"))
    if (coding := headers.get("transfer-encoding")) is not None and coding.lower() != "chunked":
        raise InvalidRequest("The only transfer-encoding is chunked.", param="transfer-encoding")


def _check_absolute(target: str, host: str | None) -> None:
    """Check a target that is no path. `host` is the header. Raises InvalidRequest."""
    if (found := _ABSOLUTE.match(target)) is None:
        return  # the asterisk of OPTIONS, which names nothing
    authority = found["authority"]
    if found["scheme"].lower() not in ("http", "https"):
        raise InvalidRequest("The request's target must be a path, or a URL with http or https.")
    if "@" in authority:
        raise InvalidRequest("The request's target must name no user.")
    if not _is_host(authority):
        raise InvalidRequest("The request's target names no host.")
    if host is not None and authority.lower() != host.lower():
        raise InvalidRequest("The request's target names another host than the header host.", param="host")
