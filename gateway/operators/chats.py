"""The console's chats: an operator's own, each a request like any other, with a caller's key that is pasted.

The page asks again and again, so that an answer needs no connection of its own, and works through several
workers, too.

Rules:

1. A chat is shown its key by the operator, as any request by its caller, and has that key's quotas, models
   and deadlines. The key is kept for as long as the request is on its way, and is in no log.
2. Its text is shown to the operator who began it, and to nobody else. It is kept in memory until it is
   forgotten, for `KEPT_S` at most.
3. `CHATS_MAX` are kept, and of them any number may run. One for which nobody asks in `UNSEEN_S` is ended: its
   page was closed. An answer is cut at `TEXT_LEN_MAX`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta, Struct

from gateway.client.connection import Inward
from gateway.client.responses import JSON, json_response
from gateway.directory.entries import decode_object
from gateway.identity.keys import KEY_LEN_MAX
from gateway.operators.chat_reading import LINE_LEN_MAX, TEXT_LEN_MAX, ChatReading, error_text
from gateway.operators.keys import read_operator_body
from gateway.operators.operations import (
    Asks,
    Merge,
    Operation,
    OperationBody,
    OperatorRequest,
)
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import InvalidRequest, NotFound, Overloaded
from shared.wire.ids import REQUEST_ID_HEADER, KeyId, RequestId, mint_request_id

CHATS: Final = "/admin/v1/console/chats"
CHAT: Final = f"{CHATS}/{{id}}"
PATH: Final = "/v1/chat/completions"
CHATS_MAX: Final = 64
KEPT_S: Final = 600.0
UNSEEN_S: Final = 30.0
WATCH_S: Final = 5.0
"""The time between two looks at whether somebody still asks, in seconds."""
MESSAGES_MAX: Final = 256
ERROR_LEN_MAX: Final = 64 * 1024
"""Bytes of a refusal that are read."""
_NUMBER_MAX: Final = 10**9

log = logs.get(__name__)

Role = Annotated[str, Meta(pattern="^(system|user|assistant)$")]


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """The body that begins a chat."""

    key: Annotated[str, Meta(min_length=1, max_length=KEY_LEN_MAX, pattern="^[ -~]+$")] = field(repr=False)
    """The whole key of a caller."""
    model: Annotated[str, Meta(min_length=1, max_length=512)]
    """The model's name, or an alias."""
    messages: Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MESSAGES_MAX)]
    """The conversation so far."""
    max_tokens: Annotated[int, Meta(ge=1, le=_NUMBER_MAX)] | None = None
    """Tokens of the answer, at most."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    """How much chance there is in the answer."""


_REQUIRED: Final = frozenset(("key", "model", "messages"))
_FIELDS: Final = frozenset(field.name for field in fields(ChatAsked))
_ASKED: Final = OperationBody("ChatAsked", ChatAsked, _FIELDS, _REQUIRED)


class ChatView(Struct, frozen=True, kw_only=True):
    """A chat, as far as it came since the page asked last."""

    id: str
    """The request's id, by which its record is found."""
    is_over: bool
    status: int | None
    """The answer's status. None until its head is there."""
    text: str
    """The answer, after the characters that are known."""
    text_len: int
    """Its characters so far."""
    ticks_ms: Sequence[float]
    """When its pieces came, in milliseconds since it was begun, after those that are known."""
    problem: str | None
    """Why there is no whole answer."""


Whole = Annotated[int, Meta(ge=0, le=99_999_999)]


@dataclass(frozen=True, slots=True)
class KnownOfChat:
    """What the page has of a chat."""

    text: Whole = 0
    """Characters of the answer that are known."""
    ticks: Whole = 0
    """Times of pieces that are known."""


_OfOne: Final = partial(Operation, errors=(NotFound,), asks=Asks.EVERY, merges={"ticks_ms": Merge.FIRST})


class _Chat:
    """One chat."""

    def __init__(self, operator: KeyId, now_s: float) -> None:
        self.id: Final = mint_request_id()
        self.operator: Final = operator
        self.began_s: Final = now_s
        self.seen_s = now_s
        self.reading = ChatReading()
        self.status: int | None = None
        self.problem: str | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()


class Chats:
    """The handlers."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock: Final = clock
        self._chats: Final[dict[RequestId, _Chat]] = {}
        self.serve: Callable[[], asyncio.Protocol] | None = None
        """Makes the public listener's protocol of a connection. None until there is one."""

    async def aclose(self) -> None:
        """End all of them."""
        tasks = [chat.task for chat in self._chats.values() if chat.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._chats.clear()

    @Operation(
        f"POST {CHATS}",
        "Begin a chat with a caller's key.",
        ChatView,
        body=_ASKED,
        errors=(Overloaded,),
        asks=Asks.ONE,
    )
    async def _begin(self, asked: OperatorRequest) -> web.Response:
        """Raises InvalidRequest, Overloaded."""
        body = await read_operator_body(asked.request)
        try:
            told = decode_object(body)
            if unknown := sorted(told.keys() - _FIELDS):
                raise InvalidRequest("There is no such field in a chat.", param=unknown[0][:64])
            wanted = msgspec.convert(told, ChatAsked)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"The chat cannot be read: {str(error)[:200]}") from None
        self._make_room()
        chat = _Chat(asked.operator.key, self._clock.monotonic())
        self._chats[chat.id] = chat
        chat.task = asyncio.create_task(self._run(chat, wanted), name="console's chat")
        return _answer(chat, 0, 0)

    @_OfOne(f"GET {CHAT}", "Tell what came of a chat.", ChatView, KnownOfChat)
    async def _show(self, asked: OperatorRequest) -> web.Response:
        chat = self._find(asked)
        chat.seen_s = self._clock.monotonic()
        return _answer(chat, asked.query.text, asked.query.ticks)

    @_OfOne(f"DELETE {CHAT}", "End a chat, and forget it.", ChatView)
    async def _end(self, asked: OperatorRequest) -> web.Response:
        chat = self._find(asked)
        del self._chats[chat.id]
        assert chat.task is not None
        chat.task.cancel()
        await asyncio.wait((chat.task,))
        chat.problem = chat.problem or "It was ended."
        return _answer(chat, chat.reading.text_len, len(chat.reading.ticks_ms))

    def _find(self, asked: OperatorRequest) -> _Chat:
        """The chat, for the operator who began it and nobody else (rule 2). Raises NotFound."""
        chat = self._chats.get(RequestId(asked.id))
        if chat is None or chat.operator != asked.operator.key:
            raise NotFound("There is no such chat of this operator's.")
        return chat

    def _make_room(self) -> None:
        """Forget old chats. Raises Overloaded when none can be."""
        now_s = self._clock.monotonic()
        over = [chat for chat in self._chats.values() if chat.is_over]
        for at, chat in enumerate(over):
            if now_s - chat.seen_s > KEPT_S or (at == 0 and len(self._chats) >= CHATS_MAX):
                del self._chats[chat.id]
        if len(self._chats) >= CHATS_MAX:
            raise Overloaded(f"{CHATS_MAX} chats run already.", retry_after_s=5.0)

    # -- one chat ---------------------------------------------------------------------------------

    async def _run(self, chat: _Chat, wanted: ChatAsked) -> None:
        """Send the request, and read its answer for as long as somebody asks for it."""
        asking = asyncio.create_task(self._ask(chat, wanted))
        try:
            while not (await asyncio.wait((asking,), timeout=WATCH_S))[0]:
                if self._clock.monotonic() - chat.seen_s > UNSEEN_S:
                    chat.problem = "Nobody asked for its answer any more."
                    break
        finally:
            asking.cancel()
            await asyncio.wait((asking,))

    async def _ask(self, chat: _Chat, wanted: ChatAsked) -> None:
        assert self.serve is not None, "chats begin once the gateway serves"
        sent = {"stream": True, **{name: getattr(wanted, name) for name in _FIELDS - {"key"}}}
        body = msgspec.json.encode({name: value for name, value in sent.items() if value is not None})
        session = aiohttp.ClientSession(
            "http://gateway",
            connector=Inward(self.serve),
            timeout=aiohttp.ClientTimeout(total=None),  # the pipeline has the deadlines
            read_bufsize=LINE_LEN_MAX,
        )
        try:
            headers = {"authorization": f"Bearer {wanted.key}"} | {
                "content-type": JSON,
                REQUEST_ID_HEADER: chat.id,
            }
            async with session, session.post(PATH, data=body, headers=headers) as answer:
                await self._read(chat, answer)
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
            chat.problem = f"The answer broke off: {type(error).__name__}."
        except Exception:
            chat.problem = "The gateway failed; its log says how."
            log.exception("console.chat_crashed")

    async def _read(self, chat: _Chat, answer: aiohttp.ClientResponse) -> None:
        chat.status = answer.status
        if answer.status != HTTPStatus.OK:
            chat.problem = error_text(await answer.content.read(ERROR_LEN_MAX))
            return
        async for line in answer.content:
            chat.reading.take(line, (self._clock.monotonic() - chat.began_s) * 1e3)
            if chat.reading.text_len > TEXT_LEN_MAX:
                chat.problem = f"The answer was cut after {TEXT_LEN_MAX:,} characters."
                return
        chat.problem = chat.reading.problem


def _answer(chat: _Chat, text_from: int, ticks_from: int) -> web.Response:
    view = ChatView(
        id=chat.id,
        is_over=chat.is_over,
        status=chat.status,
        text=chat.reading.text_after(text_from),
        text_len=chat.reading.text_len,
        ticks_ms=chat.reading.ticks_ms[ticks_from:],
        problem=chat.problem,
    )
    return json_response(HTTPStatus.OK, msgspec.json.encode(view), {})
