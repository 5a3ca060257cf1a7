"""Responses in Redis, for all gateways together: `stored.lua` says which keys they have there, and each
operation is one call of it.

Rules

1. It has connections of its own, so that what waits here makes no quota late. A call of a tenant's waits for
   the one before it, so that a tenant has one at a time from each gateway, however many responses it stores;
   and with that wait it ends within `CALL_S`.
2. A server that does not answer is down for all until a probe succeeds, which `watch` makes.
3. Every operation may be done twice, as its answer may be lost.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from gateway.config.redis import RedisConfig
from gateway.config.responses import ResponsesConfig
from gateway.redis.link import RedisLink, RedisUnavailable, ScriptMissing, SlotMoved, Word, packed
from gateway.redis.links import Links, links_of, tag_of
from gateway.stored.responses import (
    EVICTED,
    FORGOTTEN_AT_ONCE,
    LINKS_MAX,
    PAGE_LEN,
    KeepingBounds,
    KeptResponse,
    KeptTurn,
    TurnsPage,
    unavailable,
)
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.ids import TenantId

SCRIPT: Final = (Path(__file__).parent / "stored.lua").read_text()
SCRIPT_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Its name among the scripts that a server has cached."""
TIMEOUT_S: Final = 1.0
"""The time limit of a call to a server, in seconds."""
CALL_S: Final = 2.0
"""That of a call with its wait, in seconds: an answer's last event waits for it."""
PROBE_S: Final = 0.5
"""The time between two looks at whether all servers are up, in seconds."""


def open_responses(
    config: ResponsesConfig, redis: RedisConfig, env: Mapping[str, str], clock: Clock = SYSTEM_CLOCK
) -> RedisResponses:
    """The responses on the server of `[redis]`, not yet connected. Raises ConfigError."""
    links = links_of(replace(redis, timeout_s=TIMEOUT_S), env)
    return RedisResponses(KeepingBounds.of(config), links, redis.key_prefix, clock)


class RedisResponses:
    """A `ResponseStore`."""

    def __init__(self, bounds: KeepingBounds, links: Links, prefix: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """`prefix` begins every key in Redis."""
        self._bounds: Final = bounds
        self._links: Final = links
        self._prefix: Final = prefix
        self._clock: Final = clock
        self._turns: Final[WeakValueDictionary[TenantId, asyncio.Lock]] = WeakValueDictionary()
        """What the calls of each tenant wait for (rule 1), as long as there are any."""
        self._knows_servers = False

    async def put(self, tenant: TenantId, kept: KeptResponse) -> None:
        bounds = self._bounds.ttl_ms, self._bounds.tenant_len_max, kept.size, LINKS_MAX
        parts = kept.previous, kept.head, kept.output, kept.items, kept.last_number
        [_, evicted] = await self._ask(tenant, "put", *bounds, kept.id, *parts)
        EVICTED.inc(by=evicted)

    async def get(self, tenant: TenantId, id_: str) -> KeptResponse | None:
        [_, *found] = await self._ask(tenant, "get", id_)
        if not found:
            return None
        previous, head, output, items, last_number = found
        return KeptResponse(id_, previous.decode(), head, output, items, int(last_number))

    async def turns(self, tenant: TenantId, id_: str) -> TurnsPage:
        [_, before, is_lost, *words] = await self._ask(tenant, "turns", PAGE_LEN, id_)
        told = zip(words[::3], words[1::3], words[2::3], strict=True)
        found = [KeptTurn(one.decode(), items, output) for one, items, output in told]
        following = before.decode()
        return TurnsPage(found, "" if is_lost else following, following if is_lost else "")

    async def delete(self, tenant: TenantId, id_: str) -> bool:
        [_, gone] = await self._ask(tenant, "delete", id_)
        return bool(gone)

    async def forget(self, tenant: TenantId) -> int:
        gone: int = 0
        while True:
            [_, deleted, looked_at] = await self._ask(tenant, "forget", FORGOTTEN_AT_ONCE)
            gone += int(deleted)
            if looked_at < FORGOTTEN_AT_ONCE:
                return gone

    async def begin(self) -> None:
        try:
            if not self._knows_servers:
                await self._links.refresh()
                self._knows_servers = True
        except RedisUnavailable:
            return
        down = [link for link in self._links.all() if not link.is_up]
        probes = (link.probe(*self._probe(self._links.tag_of(link))) for link in down)
        for problem in await asyncio.gather(*probes, return_exceptions=True):
            if isinstance(problem, RedisUnavailable):
                self._knows_servers = False  # it may have moved
            elif problem is not None:
                raise problem

    async def watch(self) -> None:
        while True:
            await self._clock.sleep(PROBE_S)
            await self.begin()

    async def aclose(self) -> None:
        await self._links.aclose()

    # -- calls ------------------------------------------------------------------------------------

    async def _ask(self, tenant: TenantId, *words: Word) -> list[Any]:
        """The reply to one operation. Raises ResponsesUnavailable."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(CALL_S), turn:
                return await self._call(tenant, *words)
        except TimeoutError:
            raise unavailable(f"no turn within {CALL_S:g} s") from None
        except RedisUnavailable as error:
            raise unavailable(str(error)) from None

    async def _call(self, tenant: TenantId, *words: Word) -> list[Any]:
        """Raises RedisUnavailable."""
        keys = self._keys(tag_of(tenant))
        asked: tuple[Word, ...] = (len(keys), *keys, *words)
        try:
            return await _asked(self._links.of(tenant), asked)
        except SlotMoved as moved:  # so nothing was done
            self._knows_servers = False
            tag = tag_of(tenant)
            return await _asked(await self._links.follow(moved, tag, self._probe(tag)), asked)

    def _keys(self, tag: str) -> tuple[str, str]:
        order = f"{self._prefix}:{{{tag}}}:responses"
        return order, f"{order}-sizes"

    def _probe(self, tag: str) -> tuple[Word, ...]:
        keys = self._keys(tag)
        return "EVAL", SCRIPT, len(keys), *keys, "probe"


async def _asked(link: RedisLink, words: tuple[Word, ...]) -> list[Any]:
    """Raises RedisUnavailable."""
    link.require_up()
    try:
        reply: list[Any] = await link.call(packed(("EVALSHA", SCRIPT_SHA, *words)))
    except ScriptMissing:  # so nothing was done
        reply = await link.call(packed(("EVAL", SCRIPT, *words)))
    return reply
