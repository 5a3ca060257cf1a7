"""One request's part in responses that are kept: what it goes on with, and its own answer, if that is to be
kept.

Rules

1. The conversation that a request goes on with is put before its input before any token is counted: what is
   charged is what is computed. It is read as if the caller had sent it, within the same bounds, and what is
   read of it is held with the tenant before it comes.
2. What is kept is what the answer's last event has whole, or the answer where it is no stream. That event,
   and what is behind it, is sent once the response is kept: a caller that has it can refer to it, at any
   gateway. Where it could not be kept, within a time, its caller has the answer all the same, and is told
   `"store": false`.
3. An answer is held for that within `response_len_max`, as a part of the tenant's memory. Of one that is
   longer, or finds no memory, what was held is passed on, and the rest as it comes.
4. Nothing of this is done for a request that is not to be kept, and goes on with none: its events are relayed
   as they are. Of others, each chunk is searched once for the events that hold the response.
5. An answer that fails, or whose caller leaves before its end, is not kept.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.client.deadlines import Watch
from gateway.client.interface import Outlet
from gateway.config.responses import ResponsesConfig
from gateway.stored.responses import (
    LINKS_MAX,
    OVERHEAD_LEN,
    PAGE_LEN,
    KeptResponse,
    NoRoom,
    ResponseStore,
    TurnsPage,
)
from shared.apis.holding import Holding, weigh, weigh_long
from shared.apis.responses.request import (
    InputTokensRequest,
    ResponsesRequest,
    check_unstored,
    put_behind,
)
from shared.apis.responses.stored import conversation_of, kept_items
from shared.apis.validation import INLINE_LEN_MAX, Parsed, parse, parse_slices, with_fields
from shared.fairness.fair_share import FairShare
from shared.fairness.fair_threads import FairThreads, in_one_slice
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import Counter
from shared.wire.completed_line import Keeping
from shared.wire.errors import ApiError, InvalidRequest, PreviousResponseNotFound, ResponsesUnavailable
from shared.wire.ids import TenantId
from shared.wire.shapes import BODY_LEN_MAX
from shared.wire.undecodable import UNDECODABLE

KEPT: Final = Counter(
    "penstock_gateway_responses_kept",
    "Responses that were to be kept, by what became of that: kept, or why not.",
    ("outcome",),
)
KEPT_BYTES: Final = Counter(
    "penstock_gateway_responses_kept_bytes", "Bytes of the responses that were kept, with their own input."
)
ENDING_LEN: Final = 4 * 1024
"""Bytes of an answer's end beside the response in it."""
_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Ids of responses that can be asked for."""
_LIFE: Final = re.compile(
    rb"(?:\A|\n\n)event: ?response\.(created|queued|in_progress|completed|incomplete)\n"
)
"""The beginnings of events that hold the response."""
_OWN: Final = ("store", "previous_response_id")
"""The fields that no engine is sent."""
_LAST: Final = (b"completed", b"incomplete")
_BOUNDARY: Final = b"\n\n"
_DATA: Final = b"\ndata: "
PIECE_LEN: Final = 64 * 1024
"""Bytes of a long answer that are written at once."""
_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class KeptResponses:
    """The responses that are kept, as requests meet them."""

    def __init__(
        self,
        config: ResponsesConfig,
        store: ResponseStore | None,
        memory: FairShare,
        threads: FairThreads,
        clock: Clock = SYSTEM_CLOCK,
        body_len_max: int = BODY_LEN_MAX,
    ) -> None:
        """`store` is None where none are kept. `memory` is the share of bytes that requests hold, whose
        bodies are no longer than `body_len_max`."""
        self.config: Final = config
        self.store: Final = store
        self.memory: Final = memory
        self.threads: Final = threads
        self.clock: Final = clock
        self.body_len_max: Final = body_len_max

    def asked(self, request: object, tenant: TenantId) -> Kept | None:
        """The part that a request has in them; None for one that has none. Raises UnsupportedParameter for
        one that would need them, where none are kept."""
        assert isinstance(request, ResponsesRequest | InputTokensRequest)
        if self.store is None:
            check_unstored(request)
            return None
        answers = isinstance(request, ResponsesRequest)
        stores = isinstance(request, ResponsesRequest) and request.store is not False
        if not stores and request.previous_response_id is None:
            return None
        return Kept(self, self.store, tenant, request.previous_response_id or "", stores, answers=answers)


class Kept:
    """One request's part in them. `close` must follow."""

    def __init__(
        self,
        all_: KeptResponses,
        store: ResponseStore,
        tenant: TenantId,
        previous: str,
        stores: bool,
        *,
        answers: bool,
    ) -> None:
        """`previous` is the response that it goes on with, empty for none. `answers` is true if its answer is
        a response, and `stores` if that is to be kept."""
        self._answers: Final = answers
        self._all: Final = all_
        self._store: Final = store
        self._tenant: Final = tenant
        self._previous: Final = previous
        self._items = b""
        self._holding: Final = Holding(all_.memory, tenant)
        self.stores = stores
        """True as long as the answer may be kept."""
        self.outcome: Keeping | None = None
        """What became of that. None before it is known, and where it was not asked for."""
        self.took_s = 0.0
        """The time that the store took so far, in seconds."""
        self.response_id = ""
        """The id of the response. Empty until it is known."""
        self.is_within_event = False
        """True while the client has a part of an event, so that no other may be appended."""

    def close(self) -> None:
        """Give back what is held."""
        self._holding.hold(0)

    # -- the request ------------------------------------------------------------------------------

    async def read(self, parsed: Parsed[Any], holding: Holding) -> Parsed[Any]:
        """The request as engines are to be sent it: without what asks for a store, and behind the
        conversation that it goes on with. Raises PreviousResponseNotFound, ResponsesUnavailable, and what the
        reading of a body does."""
        request, given = parsed.request, parsed.fields["input"]
        fields = {name: value for name, value in parsed.fields.items() if name not in _OWN}
        if self.stores:
            await self._keep_items(request.input, len(given))
        if not self._previous:
            request.store = None
            return msgspec.structs.replace(parsed, fields=fields)
        parts = await self._conversation()
        body = with_fields(fields, input=conversation_of(parts, given))
        ignored, shape = parsed.ignored, type(request)
        own_items = 1 if isinstance(request.input, str) else len(request.input)
        del parsed, request, given, fields, parts
        self._holding.hold(len(self._items))
        if len(body) > self._all.body_len_max:
            raise _too_long()
        if len(body) <= INLINE_LEN_MAX:
            read: Parsed[Any] = parse(body, shape, weigh(body, holding))
        else:
            await weigh_long(body, holding, self._all.threads, self._tenant)
            read = await self._all.threads.run(self._tenant, parse_slices(body, shape), holds=True)
        put_behind(read.request, len(read.request.input) - own_items)
        return msgspec.structs.replace(read, ignored=ignored)

    async def _keep_items(self, given: Any, length: int) -> None:
        """Hold the request's own input until its answer is there."""
        if length > self._all.config.response_len_max:
            self._give_up("too_long")
            return
        try:
            self._holding.hold(2 * length)
            keep = partial(kept_items, given, secrets.token_hex(12))
            if length <= INLINE_LEN_MAX:
                self._items = keep()
            else:
                work = in_one_slice(keep)
                self._items = await self._all.threads.run(self._tenant, work, holds=True)
            self._holding.hold(len(self._items))
        except ApiError:
            self._give_up("no_room")

    async def _conversation(self) -> list[bytes]:
        """The items of the conversation, in lists, the first turn's first."""
        found: list[bytes] = []
        at, length, turns = self._previous, 0, 0
        while at:
            self._holding.hold(len(self._items) + length + PAGE_LEN + self._all.config.response_len_max)
            page = await self._page(at)
            if page.lost:
                raise _not_found(self._previous, page.lost)
            for turn in page.turns:
                found += turn.output, turn.items
                length += len(turn.output) + len(turn.items)
            turns += len(page.turns)
            if length > self._all.body_len_max or turns > LINKS_MAX:
                raise _too_long()
            at = page.before
        return found[::-1]

    async def _page(self, at: str) -> TurnsPage:
        began_s = self._all.clock.monotonic()
        try:
            return await self._store.turns(self._tenant, at)
        finally:
            self.took_s += self._all.clock.monotonic() - began_s

    # -- the answer -------------------------------------------------------------------------------

    def outlet(self, client: Outlet, watch: Watch) -> Outlet:
        """The way back of the answer, on which it is kept."""
        if not self._answers:
            return client
        return KeepingOutlet(client, watch, self)

    def hold(self, held_len: int) -> bool:
        """Hold so many bytes of the answer's. Returns False where there is no room for them (rule 3)."""
        if held_len + len(self._items) > self._all.config.response_len_max + ENDING_LEN:
            return self._give_up("too_long")
        try:
            self._holding.hold(len(self._items) + 3 * held_len)  # with what is made of them
        except ApiError:
            return self._give_up("no_room")
        return True

    def opened(self, data: bytes) -> bytes:
        """The JSON of an event that says that the response has begun, as its caller is to have it."""
        event, response = _fields(data), {}
        try:
            response = _fields(event["response"])
            self.response_id = msgspec.json.decode(response.get("id", b'""'), type=str)
        except (*UNDECODABLE, KeyError):
            return data
        event["response"] = self._told(response, is_kept=self.stores)
        return msgspec.json.encode(event)

    async def ended(self, data: bytes, *, is_event: bool) -> bytes:
        """The JSON of a response that is complete, or of the event that has it, as its caller is to have it,
        kept if it is to be."""
        try:
            event = _fields(data) if is_event else {}
            response = _fields(event["response"] if is_event else data)
            id_ = self.response_id = msgspec.json.decode(response.get("id", b'""'), type=str)
            number = msgspec.json.decode(event.get("sequence_number", b"0"), type=int)
            output = bytes(response["output"])
            is_readable = _ID.fullmatch(id_) is not None and output.startswith(b"[")
        except (*UNDECODABLE, KeyError):
            is_readable = False
            response, event = {}, {}
        if not is_readable:
            self._give_up("unreadable")
        elif self.stores:
            head = self._told({n: v for n, v in response.items() if n != "output"}, is_kept=True)
            await self._put(KeptResponse(id_, self._previous, bytes(head), output, self._items, number))
        if not response:
            return data
        told = self._told(response, is_kept=self.outcome == "kept")
        return msgspec.json.encode({**event, "response": told}) if is_event else bytes(told)

    async def _put(self, kept: KeptResponse) -> None:
        if kept.size - OVERHEAD_LEN > self._all.config.response_len_max:
            self._give_up("too_long")
            return
        began_s = self._all.clock.monotonic()
        try:
            await self._store.put(self._tenant, kept)
        except ResponsesUnavailable:
            self._give_up("unavailable")
        except NoRoom:
            self._give_up("no_room")
        else:
            self.outcome = "kept"
            KEPT.inc("kept")
            KEPT_BYTES.inc(by=kept.size)
        finally:
            self.took_s += self._all.clock.monotonic() - began_s

    def has_ended(self) -> None:
        """Note that the answer ended without a response that could be kept."""
        self._give_up("unreadable")

    def _told(self, response: Mapping[str, Raw], *, is_kept: bool) -> Raw:
        """A response with what engines do not know of it."""
        own = {"store": is_kept, "previous_response_id": self._previous or None}
        return Raw(msgspec.json.encode({**response, **own}))

    def _give_up(self, why: Keeping) -> bool:
        """Note that the answer is not kept. Returns False."""
        if self.stores:
            self.stores, self.outcome = False, why
            KEPT.inc(why)
        return False


def _not_found(previous: str, lost: str) -> PreviousResponseNotFound:
    which = "It" if lost == previous else "A response before it"
    message = f"Previous response with id {previous[:128]!r} not found. {which} is not kept, or not any more."
    return PreviousResponseNotFound(message, param="previous_response_id")


def _too_long() -> InvalidRequest:
    message = "The conversation that previous_response_id goes on with is longer than a request may be."
    return InvalidRequest(message, param="previous_response_id")


class KeepingOutlet:
    """The way back of an answer that is to be kept, or that goes on with another, before the client's."""

    is_chunked = False
    """Chunks are looked into, so none is passed on with its framing."""

    def __init__(self, client: Outlet, watch: Watch, kept: Kept) -> None:
        self._client: Final = client
        self._watch: Final = watch
        self._kept: Final = kept
        self._held: bytearray | None = None
        """An event that holds the response, or that and all behind it (`_is_last`), or an answer that is no
        stream. None while nothing is held."""
        self._is_last = False
        """True if what is held is the end of the answer."""
        self._is_let_go = False
        """True if it is to be passed on as it is."""
        self._head: tuple[int, Mapping[str, str]] | None = None
        """The status and the headers of an answer that is no stream, as long as it is held."""

    async def begin(self, status: int, headers: Mapping[str, str], body: bytes, *, whole: bool) -> None:
        if headers["content-type"].startswith("text/event-stream"):
            await self._client.begin(status, headers, self._passed(body), whole=False)
        else:
            self._held, self._is_last, self._head = bytearray(), True, (status, headers)
            self._passed(body)
        if self._is_let_go:
            await self._let_go()

    def write_nowait(self, data: bytes) -> bool:
        passed = self._passed(data)
        has_room = not passed or self._client.write_nowait(passed)
        return has_room and not self._is_let_go

    def write_framed(self, data: bytes) -> bool:
        raise AssertionError("nothing is passed on with its framing")

    async def write(self, data: bytes) -> None:
        if not self.write_nowait(data):
            await self.drain()

    async def drain(self) -> None:
        await self._client.drain()
        if self._is_let_go:
            await self._let_go()

    async def finish(self) -> None:
        if self._is_let_go:
            await self._let_go()
        if self._held is not None:
            self._watch.relax()  # the engine has said all
            held, self._held = bytes(self._held), None
            if self._head is not None:
                body = await self._kept.ended(held, is_event=False)
                await self._client.begin(*self._head, body, whole=True)
            else:
                event, boundary, rest = held.partition(_BOUNDARY)
                name, line, told = event.partition(_DATA)
                told = await self._kept.ended(told, is_event=True)
                await self._write_all(b"".join((name, line, told, boundary, rest)))
        else:
            self._kept.has_ended()
        await self._client.finish()

    def _passed(self, data: bytes) -> bytes:
        """Take bytes of the answer. Returns those that may be passed on."""
        passed: list[bytes] = []
        while data:
            if self._held is None:
                if self._is_last or (found := _LIFE.search(data)) is None:
                    passed.append(data)
                    break
                start = found.end() - len(found[0].lstrip(b"\n"))
                passed.append(data[:start])
                self._held, self._is_last, data = bytearray(), found[1] in _LAST, data[start:]
            looked_at = max(0, len(self._held) - 1)
            self._held += data
            if not self._kept.hold(len(self._held)):
                self._is_let_go = True
            if self._is_last or self._is_let_go or (end := self._held.find(_BOUNDARY, looked_at)) < 0:
                break
            name, line, told = bytes(self._held[:end]).partition(_DATA)
            data, self._held = bytes(self._held[end:]), None
            passed += name, line, self._kept.opened(told)
        return b"".join(passed)

    async def _let_go(self) -> None:
        """Pass on what was held, and from now on what comes."""
        held, self._held = bytes(self._held or b""), None
        self._is_last, self._is_let_go = True, False
        if self._head is not None:
            (status, headers), self._head = self._head, None
            await self._client.begin(status, headers, b"", whole=False)
        await self._write_all(held)

    async def _write_all(self, data: bytes) -> None:
        self._kept.is_within_event = True
        for at in range(0, len(data), PIECE_LEN):
            if not self._client.write_nowait(data[at : at + PIECE_LEN]):
                await self._client.drain()
        self._kept.is_within_event = False
