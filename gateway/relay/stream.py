"""The relay: bytes from the engine to the client, and how far they have come.

The engine's events are passed on as they come; nothing parses them but the first, which may be an
error in an envelope of success, and the closing comment at the very end. So may a unary answer be.

Rules:

1. Nothing is sent to the client before the first event (or a unary answer's first bytes), so that
   until then an error can have a status of its own. Comments are none.
2. The next chunk is read only when the client's buffers have room, so that backpressure reaches the engine.
   While they have room, the bytes of one turn of the loop are written in that turn, as one piece: no task is
   woken for them, and no byte waits for more.
3. A stream that fails after its first byte ends with an error event and no `[DONE]`. Its client is sent whole
   events alone (`shared.wire.sse`), so that one can be appended at any moment. Within an event that is too
   long to be withheld none can, and the connection is cut. It never ends cleanly as if it were whole.
4. Some APIs' streams open before there is a token (`Dialect.silent`). What opens one is passed on, and begins
   the answer: an error behind it is an event, and no other replica is asked. Deadlines, figures and the
   replica's health wait for the first event that tells of the answer, and keep-alives count for none of them.
5. The times at which events were passed on are noted, as the waterfall shows them: `TICKS_MAX` ticks at most.
   When they are full, every second one is dropped, and from then on twice as many events lie between two of
   them: an answer of any length has its ticks over all of its length.
6. There is a tick for a read from the engine at most, however many events it brought. As long as none is due,
   a read costs the comparison of two ints, and no look at the clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from gateway.client.deadlines import Watch
from gateway.client.interface import Outlet
from gateway.config.timeouts import TimeoutsConfig
from gateway.endpoints.dialect import Dialect
from gateway.relay.engine_errors import event_is_error, read_back
from gateway.relay.foreign import (
    BlankingScanner,
    Blanks,
    FoldingScanner,
    Folds,
    ForeignScanner,
    UsageFinder,
    look_into,
)
from gateway.relay.upstream import Answer
from shared.http2.stream import Report
from shared.process.clock import SYSTEM_CLOCK
from shared.wire.errors import ApiError, FirstTokenTimeout, InterTokenTimeout, UpstreamLost
from shared.wire.sse import CONTENT_TYPE, Closing, TailScanner, parse_closing

HEAD_LEN_MAX: Final = 256 * 1024
"""Bytes that are held until the status to answer with is decided: a whole unary answer, if it fits."""

_BOUNDARY: Final = b"\n\n"
_DATA: Final = b"data:"
_NO_HEADERS: Final[Mapping[str, str]] = {}
_STREAM_HEADERS: Final = {
    "content-type": CONTENT_TYPE,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
STOPPED: Final = "The engine stopped sending."
LATE: Final = "The engine produced no token in time."
TICKS_MAX: Final = 64
"""Ticks of one answer."""
TICK_LEN: Final = 16
"""Bytes that a tick takes."""


def _floats() -> array[float]:
    return array("d")


def _ints() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class Ticks:
    """When events were passed on, and how many there were by then (rules 5 and 6)."""

    at_s: array[float] = field(default_factory=_floats)
    """The times, in seconds on the clock."""
    events: array[int] = field(default_factory=_ints)
    """The events that were passed on by then, this read's included."""
    stride: int = 1
    """The least number of events between two ticks."""
    due: int = 1
    """The number of events at which the next tick is due."""

    def __len__(self) -> int:
        return len(self.events)

    def note(self, events: int, now_s: float) -> None:
        """Note that so many events were passed on by now, `due` of them or more."""
        if len(self.events) == TICKS_MAX:
            self.at_s, self.events, self.stride = self.at_s[::2], self.events[::2], self.stride * 2
        self.at_s.append(now_s)
        self.events.append(events)
        self.due = events + self.stride

    def since(self, began_s: float) -> list[tuple[float, int]]:
        """Each tick in milliseconds from then on, with its events."""
        return [
            (round((at_s - began_s) * 1e3, 3), events)
            for at_s, events in zip(self.at_s, self.events, strict=True)
        ]


@dataclass(slots=True, eq=False)  # it is written for every event, and a write to a Struct takes twice as long
class Progress:
    """The progress of an answer. It is consistent at every moment, so that the request may be cancelled at
    any."""

    scanner: TailScanner = field(default_factory=TailScanner)
    events: int = 0
    """The events passed on: about the tokens that the client was sent."""
    ticks: Ticks | None = None
    """When they were passed on. None before the first."""
    tick_due: int = 1
    """The number of events at which the next tick is due."""
    body_len: int = 0
    header_closing: Closing | None = None
    foreign: ForeignScanner | None = None
    """The scanner, of a stream of an engine of another make. None for any other answer."""
    foreign_usage: Closing | None = None
    """The usage in a unary answer of an engine of another make, as far as it was read. None for any other
    answer, and without one."""
    blanks_cached: bool = False
    """True if the client is not to see what the engine found cached: it may be another tenant's."""
    complete: bool = False
    """True if all bytes are on their way to the client."""
    dispatched: bool = False
    """True if a replica was sent the request, or part of it."""
    refused: bool = False
    """True if the engine answered with an error of its own. Unless it reports otherwise, nothing was
    computed."""
    lost: bool = False
    """True if a replica broke off after it was sent the request, so that what it computed is unknown."""
    report: Report = field(default_factory=Report)
    """The engine's report on the request, which comes even when the answer was cut off."""

    def anew(self, dialect: Dialect, *, lost: bool = False) -> Progress:
        """The progress at another replica. `lost`: the one before was sent the request, and broke off."""
        return Progress(dialect.scanner(dialect.done), lost=self.lost or lost)

    def note(self, now_s: float) -> None:
        """Note that its events, `tick_due` of them or more, were passed on by now."""
        if self.ticks is None:
            self.ticks = Ticks()
        self.ticks.note(self.events, now_s)
        self.tick_due = self.ticks.due

    @property
    def closing(self) -> Closing | None:
        """The engine's report at the end of the answer. None as long as there is none."""
        if (reported := self.header_closing or self.scanner.closing) is not None:
            return reported
        if (payload := self.report.payload) is not None:
            return parse_closing(payload)
        return self.foreign.usage if self.foreign is not None else self.foreign_usage

    @property
    def awaits_report(self) -> bool:
        """True if a report on what was computed has not come, and still may."""
        return self.dispatched and self.report.is_due and self.closing is None

    @property
    def delivered(self) -> bool:
        """True if the client was sent all that there is, so that a disconnect is no cancellation. SDKs
        disconnect at the last event."""
        return self.complete or self.scanner.saw_done or self.broken

    @property
    def broken(self) -> bool:
        """True if the engine ended its stream with an error event of its own, which was passed on."""
        return self.scanner.closing is not None and not self.scanner.saw_done


class Opened(Struct, frozen=True, eq=False):
    """An answer that has begun."""

    answer: Answer
    """Its holder must close it."""
    head: bytes
    """The bytes of a stream up to the end of its first event, or beyond. Of any other answer all, or the
    first `HEAD_LEN_MAX`."""
    streams: bool
    is_opening: bool = False
    """True if the head tells nothing of the answer: its first token is still to come."""

    def __repr__(self) -> str:
        """Nothing of the answer."""
        return f"<{type(self).__name__} {self.answer.status}>"


async def open_answer(
    answer: Answer,
    progress: Progress,
    dialect: Dialect,
    watch: Watch,
    inter_token_s: float,
    *,
    streams: bool,
    hides_usage: bool,
) -> Opened:
    """Read an answer up to its beginning: a stream's first event, or what is held of any other. Raises the
    error that the engine answers with, or UpstreamFailed.

    `hides_usage`: the engine was asked for usage that the client did not ask for."""
    if not answer.is_what_was_asked_for(streams=streams):
        progress.refused = True
        progress.header_closing = answer.closing
        raise await answer.error()
    if not streams:
        progress.header_closing = answer.closing
        watch.expect(inter_token_s, InterTokenTimeout, STOPPED)
        return Opened(answer, await _unary_head(answer, progress, watch), streams)
    kind: type[ForeignScanner] = ForeignScanner
    if progress.blanks_cached:
        kind = FoldingScanner if dialect.folds_cached else BlankingScanner
    if answer.tokenizer is None:
        progress.scanner = progress.foreign = kind(dialect.done, hides_usage=hides_usage, ends=dialect.ends)
    elif hides_usage or progress.blanks_cached:  # one of ours that is not taken for one
        progress.scanner = kind(dialect.done, hides_usage=hides_usage, ends=dialect.ends)
    head, first = await _first_event(answer, progress)
    told = dialect.told(head) if dialect.silent else []
    if told:
        first = _read_event(told[0]) or first
    if first.is_error:
        raise await _failed(answer, progress, first)
    return Opened(answer, head, streams, is_opening=bool(dialect.silent) and not told)


async def _unary_head(answer: Answer, progress: Progress, watch: Watch) -> bytes:
    """The body of an answer, or the first `HEAD_LEN_MAX` of it. Where an engine of another make sends
    something else with a 200, raises the error that this is."""
    chunks: list[bytes] = []
    room = HEAD_LEN_MAX

    def keep(chunk: bytes) -> bool:
        nonlocal room
        watch.again()
        chunks.append(chunk)
        room -= len(chunk)
        return room > 0

    await answer.pass_on(keep)
    head = b"".join(chunks)
    if answer.tokenizer is None:
        is_answer, progress.foreign_usage = look_into(head)
        if not is_answer:
            progress.refused = True
            raise read_back(answer.status, head)
    return head


class _Event(Struct, frozen=True):
    """An event as a client reads it."""

    data: bytes
    is_error: bool


def _read_event(event: bytes) -> _Event | None:
    """The event by WHATWG's rules (lines end with LF here). None for a comment, and for any other without
    data. Some servers write `error:` where others name the event so."""
    data, is_error = [], False
    for line in event.removeprefix(_BYTE_ORDER_MARK).split(b"\n"):
        name, _, value = line.partition(b":")
        if name in (b"data", b"error"):
            data.append(value.removeprefix(b" "))
        is_error |= name == b"error" or (name == b"event" and value.strip() == b"error")
    if not data:
        return None
    joined = b"\n".join(data)
    return _Event(joined, is_error or event_is_error(joined))


async def _first_event(answer: Answer, progress: Progress) -> tuple[bytes, _Event]:
    """All bytes up to the end of the first event or beyond, still under the first-token deadline; and that
    event."""
    head, start = b"", 0
    while True:
        while (end := head.find(_BOUNDARY, start)) >= 0:
            if (first := _read_event(head[start:end])) is not None:
                return head, first
            start = end + len(_BOUNDARY)
        if len(head) > HEAD_LEN_MAX or not (chunk := await answer.read()):
            raise UpstreamLost("The engine's answer broke off.", detail="it ended before an event")
        head += progress.scanner.feed(chunk)


async def _failed(answer: Answer, progress: Progress, event: _Event) -> ApiError:
    """The error of a stream that tells nothing but this event."""
    await _read_to_end(answer, progress)
    progress.refused = True
    return read_back(answer.status, event.data)


async def _read_to_end(answer: Answer, progress: Progress) -> None:
    """Read a failed stream of our engine to its end, where the closing comment says what it cost."""
    room = HEAD_LEN_MAX
    while progress.foreign is None and room > 0 and (chunk := await answer.read()):
        progress.scanner.feed(chunk)
        room -= len(chunk)


class Relay(Struct, frozen=True, eq=False):
    """The relay of one answer, to its end."""

    client: Outlet
    watch: Watch
    timeouts: TimeoutsConfig
    progress: Progress
    dialect: Dialect
    first_byte: Callable[[], None]
    """A function that is called when the first byte is there that tells of the answer."""
    headers: Callable[[], Mapping[str, str]]
    """Makes the headers that the gateway adds."""
    monotonic: Callable[[], float] = SYSTEM_CLOCK.monotonic
    """The clock of the request's stages, in seconds."""

    async def run(self, opened: Opened) -> None:
        """Pass the answer on. Raises UpstreamFailed or ClientGone."""
        await (self._stream(opened) if opened.streams else self._unary(opened))
        self.progress.complete = True
        await self.client.finish()

    async def _stream(self, opened: Opened) -> None:
        scanner, answer = self.progress.scanner, opened.answer
        if opened.is_opening:
            await self._open(opened)
        else:
            self.progress.events += self._told(opened.head)
            self.first_byte()
            await self._begin(answer, opened.head, _STREAM_HEADERS)
        self._expect_more()
        accept_chunk = self._pass_chunk if self._passes_chunks else None
        while await answer.pass_on(self._pass, accept_chunk):
            await self.client.drain()
            self._expect_more()
        if rest := scanner.finish():
            self.progress.body_len += len(rest)
            await self.client.write(rest)
        if scanner.closing is None and not scanner.saw_done:
            raise UpstreamLost("The engine's answer broke off.", detail="no last event, no closing comment")

    async def _open(self, opened: Opened) -> None:
        """Pass on what tells nothing of the answer, and the first that does, which may be the engine's error.
        Until then the first token is awaited. Raises that error."""
        answer, progress, client = opened.answer, self.progress, self.client
        data, told = b"", list[bytes]()

        def accept(chunk: bytes) -> bool:
            nonlocal data, told
            data = progress.scanner.feed(chunk)
            if told := self.dialect.told(data):
                return False
            progress.body_len += len(data)
            return not data or client.write_nowait(data)

        await self._begin(answer, opened.head, _STREAM_HEADERS)
        while not told:
            self.watch.expect(self.timeouts.first_token_s, FirstTokenTimeout, LATE)
            if not await answer.pass_on(accept):
                return  # it broke off
            if not told:
                await client.drain()
        if (first := _read_event(told[0])) is not None and first.is_error:
            raise await _failed(answer, progress, first)
        self.first_byte()
        progress.events += len(told)
        progress.note(self.monotonic())
        progress.body_len += len(data)
        await client.write(data)

    def _pass(self, chunk: bytes) -> bool:
        """Pass a chunk on. Returns whether the client has room for more. A keep-alive comment does not count
        as a token."""
        progress = self.progress
        if progress.scanner.takes(chunk):
            data = chunk
            self.watch.again()
            progress.events += 1
        elif data := progress.scanner.feed(chunk):
            if data.find(_DATA) >= 0 and (told := self._told(data)):
                self.watch.again()
                progress.events += told
        else:
            return True
        if progress.events >= progress.tick_due:
            progress.note(self.monotonic())
        progress.body_len += len(data)
        return self.client.write_nowait(data)

    def _told(self, events: bytes) -> int:
        """The number of whole events that tell of the answer."""
        return len(self.dialect.told(events)) if self.dialect.silent else events.count(_BOUNDARY)

    @property
    def _passes_chunks(self) -> bool:
        """True if a chunk of the engine's may be the client's as well."""
        return self.progress.foreign is not None and self.client.is_chunked

    def _pass_chunk(self, data: bytes, start: int) -> bool | None:
        """Pass on a chunk as it came, with its framing. None where it is not an event as most are."""
        progress = self.progress
        if not progress.scanner.takes(data[start:-2]):
            return None
        self.watch.again()
        progress.events += 1
        if progress.events >= progress.tick_due:
            progress.note(self.monotonic())
        progress.body_len += len(data) - start - 2
        return self.client.write_framed(data)

    async def _unary(self, opened: Opened) -> None:
        answer = opened.answer
        blanks: Blanks | Folds | None = None
        if self.progress.blanks_cached:
            blanks = Folds() if self.dialect.folds_cached else Blanks()
        head = opened.head if blanks is None else blanks.feed(opened.head, ended=answer.finished)
        self.first_byte()
        await self._begin(answer, head)
        if answer.finished:
            return
        self._expect_more()
        if answer.tokenizer is not None:
            await self._pass_rest(answer, self._pass_as_it_is)
            return
        finder = UsageFinder()
        finder.feed(opened.head)

        def pass_on(chunk: bytes) -> bool:
            finder.feed(chunk)
            return self._pass_as_it_is(chunk if blanks is None else blanks.feed(chunk))

        await self._pass_rest(answer, pass_on)
        if blanks is not None:
            self._pass_as_it_is(blanks.feed(b"", ended=True))
        self.progress.foreign_usage = finder.usage

    async def _pass_rest(self, answer: Answer, accept: Callable[[bytes], bool]) -> None:
        while await answer.pass_on(accept):
            await self.client.drain()
            self._expect_more()

    def _pass_as_it_is(self, chunk: bytes) -> bool:
        self.watch.again()
        if not chunk:
            return True
        self.progress.body_len += len(chunk)
        return self.client.write_nowait(chunk)

    def _begin(
        self, answer: Answer, body: bytes, headers: Mapping[str, str] = _NO_HEADERS
    ) -> Awaitable[None]:
        headers = {"content-type": answer.content_type or "application/json", **headers, **self.headers()}
        if self.progress.events:
            self.progress.note(self.monotonic())
        self.progress.body_len += len(body)
        return self.client.begin(answer.status, headers, body, whole=answer.finished)

    def _expect_more(self) -> None:
        self.watch.expect(self.timeouts.inter_token_s, InterTokenTimeout, STOPPED)
