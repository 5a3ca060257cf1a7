"""What callers ask of responses that are kept: to have one, its input's items, its deletion, its end.

    GET    /v1/responses/{id}               as it was answered; with `stream` its events
    GET    /v1/responses/{id}/input_items   with those of the conversation before it
    DELETE /v1/responses/{id}
    POST   /v1/responses/{id}/cancel        ends one that is still streamed

Rules

1. Where none are kept, there is none of any id, and that is said.
2. No quota counts them, so each tenant has a pace, and what it is sent is a part of its memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct

from gateway.request.exchange import Exchange
from gateway.request.pace import Pace
from gateway.stored.keeping import KeptResponses
from gateway.stored.responses import LINKS_MAX, PAGE_LEN, KeptResponse, ResponseStore
from shared.apis.holding import Holding
from shared.apis.responses.answer import outline
from shared.apis.responses.stored import (
    DeletedResponse,
    ItemsQuery,
    RetrieveQuery,
    not_kept,
    page_of,
    query_of,
    replay,
)
from shared.apis.validation import INLINE_LEN_MAX
from shared.fairness.fair_threads import in_one_slice
from shared.wire import sse
from shared.wire.errors import InvalidRequest, RateLimited
from shared.wire.ids import RequestId, TenantId, is_id

PER_S: Final = 64.0
"""Calls about responses that are kept, of a tenant at one process, for each second."""
AT_ONCE: Final = 1024
"""Those that it may make at once."""
JSON: Final = "application/json"


class StoredAnswer(Struct, frozen=True):
    """An answer."""

    body: bytes
    content_type: str = JSON

    def __repr__(self) -> str:
        """Nothing of the answer."""
        return f"<{type(self).__name__}>"


Tells = Callable[[Exchange, str, Holding], Awaitable[StoredAnswer]]
"""Answers what is asked of the response of an id. What it tells is held."""


EndsElsewhere = Callable[[TenantId, RequestId], Awaitable[int]]
"""Ends a tenant's requests of an id at other processes, and returns how many."""


class StoredResponses:
    """The answers."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept: Final = kept
        self._pace: Final = Pace(PER_S, AT_ONCE)

    def holding(self, exchange: Exchange) -> Holding:
        """What the answer is held in. Raises RateLimited (rule 2)."""
        tenant = _tenant_of(exchange)
        if (wait_s := self._pace.wait_s(tenant, exchange.clock.monotonic())) > 0:
            raise RateLimited("Too many calls about stored responses.", retry_after_s=wait_s)
        return Holding(self._kept.memory, tenant)

    async def show(self, exchange: Exchange, id_: str, holding: Holding) -> StoredAnswer:
        query = query_of(exchange.query, RetrieveQuery)
        kept = await self._get(exchange, id_, holding)
        if not query.stream:
            return StoredAnswer(kept.response)
        again = partial(replay, kept.response, kept.last_number, query.starting_after)
        return StoredAnswer(await self._made(exchange, kept.size, again), sse.CONTENT_TYPE)

    async def list_items(self, exchange: Exchange, id_: str, holding: Holding) -> StoredAnswer:
        query = query_of(exchange.query, ItemsQuery)
        kept = await self._get(exchange, id_, holding)
        parts, at, length = [kept.items], kept.previous, kept.size
        while at and len(parts) < 2 * LINKS_MAX and length < self._kept.body_len_max:
            holding.hold(4 * (length + PAGE_LEN + self._kept.config.response_len_max))
            page = await self._store(id_).turns(_tenant_of(exchange), at)
            for turn in page.turns:  # those that are not kept any more are not told
                parts += turn.output, turn.items
                length += len(turn.output) + len(turn.items)
            at = page.before
        asked = query.limit, query.after, query.order == "desc"
        return StoredAnswer(await self._made(exchange, length, partial(page_of, parts[::-1], *asked)))

    async def delete(self, exchange: Exchange, id_: str, holding: Holding) -> StoredAnswer:
        if not await self._store(id_).delete(_tenant_of(exchange), id_):
            raise not_kept(id_)
        return StoredAnswer(msgspec.json.encode(DeletedResponse(id_)))

    async def cancelled(
        self, exchange: Exchange, id_: str, holding: Holding, ended: int, elsewhere: EndsElsewhere
    ) -> StoredAnswer:
        """The answer to a cancellation by which so many requests were ended here. Where none was, and it is
        not complete, it is ended `elsewhere`."""
        if not ended:
            tenant = _tenant_of(exchange)
            holding.hold(self._kept.config.response_len_max)
            if await self._store(id_).get(tenant, id_) is not None:
                raise InvalidRequest("Cannot cancel a response that is complete.", param="id")
            if not (is_id(id_) and await elsewhere(tenant, RequestId(id_))):
                raise not_kept(id_)
        response = msgspec.structs.replace(outline(), id=id_, status="cancelled")
        return StoredAnswer(msgspec.json.encode(response))

    async def _made(self, exchange: Exchange, length: int, make: Callable[[], bytes]) -> bytes:
        """What is made of so many bytes: of many, on a thread, in its tenant's turn."""
        if length <= INLINE_LEN_MAX:
            return make()
        return await self._kept.threads.run(_tenant_of(exchange), in_one_slice(make), holds=True)

    async def _get(self, exchange: Exchange, id_: str, holding: Holding) -> KeptResponse:
        """Raises NotFound, and ResponsesUnavailable."""
        store = self._store(id_)
        holding.hold(4 * self._kept.config.response_len_max)  # with what is made of it
        kept = await store.get(_tenant_of(exchange), id_)
        if kept is None:
            raise not_kept(id_)
        holding.hold(4 * kept.size)
        return kept

    def _store(self, id_: str) -> ResponseStore:
        """Raises NotFound where none are kept (rule 1)."""
        if self._kept.store is None:
            raise not_kept(id_, ": none is kept here")
        return self._kept.store


def _tenant_of(exchange: Exchange) -> TenantId:
    assert exchange.principal is not None
    return exchange.principal.tenant
