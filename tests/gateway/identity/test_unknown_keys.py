"""Tokens whose key is not known: who waits for it, for how long, and at whose cost. Beside each another
tenant's caller is served."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.identity import jwks
from gateway.identity.jwks import AGAIN_S, POLL_S, REFETCH_WITHIN_S, RemoteKeys
from gateway.identity.waiting import Waiting
from tests.fakes import VirtualClock
from tests.gateway.conftest import Open, error_of, until
from tests.gateway.identity.idp import NEW, OLD, RARE_S, Idp, as_issuer
from tests.gateway.identity.issuers import ALGORITHMS, Key, KeyServer

pytestmark = [
    pytest.mark.usefixtures("patience"),
    pytest.mark.parametrize("protocol", ["http2"]),  # it does not matter what engines speak
]


async def test_a_flood_of_unknown_keys_is_two_fetches_and_holds_up_nobody(idp: Idp) -> None:
    """The first id causes one, and those that came meanwhile the next."""
    assert await idp.status(idp.token(OLD)) == 200
    idp.server.gate.clear()
    flood = [asyncio.create_task(idp.status(idp.token(Key(f"kid-{n}", number=1)))) for n in range(50)]
    await until(lambda: idp.server.asked == 2)
    for _ in range(10):
        assert await idp.victim() == 200
        assert await idp.status(idp.token(OLD)) == 200, "of the same issuer, with a key that is known"
    assert not any(task.done() and task.result() == 401 for task in flood), "they wait, none is refused"
    idp.server.gate.set()
    await until(lambda: any(task.done() for task in flood))
    await idp.sought()
    assert Counter(await asyncio.gather(*flood)) == {401: 50}
    later = [idp.status(idp.token(Key(f"kid-{n}", number=1))) for n in range(50)]
    assert Counter(await asyncio.gather(*later)) == {401: 50}
    assert idp.server.asked == 3, "they waited for nothing"
    assert await idp.victim() == 200


async def test_a_flood_that_goes_on_is_one_fetch_in_each_gap(rare: Idp) -> None:
    """Each id is another one, and many come at any moment."""
    idp = rare
    made_up = (Key(f"kid-{n}", number=1) for n in itertools.count())
    gaps, moments = 8, 3
    for _ in range(gaps * moments):
        flood = [idp.status(idp.token(next(made_up))) for _ in range(5)]
        statuses = [*await asyncio.gather(*flood, idp.victim(), idp.status(idp.token(OLD)))]
        assert set(statuses[:-2]) <= {401, 503}
        assert statuses[-2:] == [200, 200]
        await until(lambda: idp.clock.sleeping > 0)
        idp.clock.advance(RARE_S / moments)
        await until(lambda: idp.clock.sleeping > 0 and idp.source.in_progress is None)
    assert gaps * RARE_S < jwks.REFRESH_S, "none was due for another reason"
    assert gaps <= idp.server.asked - 1 <= gaps + 1, "the first one begins the first gap"


FLOODS = 12


async def test_whoever_makes_up_keys_keeps_nobody_from_a_new_one(idp: Idp) -> None:
    """Its first tokens come beside a flood that never ends. They wait for the next fetch, and for no more."""
    made_up = (Key(f"kid-{n}", number=1) for n in itertools.count())
    current = OLD
    for number in range(FLOODS):
        flood = [asyncio.create_task(idp.status(idp.token(next(made_up)))) for _ in range(20)]
        await until(lambda: idp.source.in_progress is not None or idp.clock.sleeping > 1)
        if number % 2:  # by now, whatever has been fetched was fetched for the flood
            before, current = current, Key(f"key-{number}", number=number)
            idp.server.keys = (before, current)
        first = [asyncio.create_task(idp.status(idp.token(current))) for _ in range(3)]
        assert [await idp.victim(), await idp.status(idp.token(OLD if number < 2 else before))] == [200, 200]
        while not all(task.done() for task in (*first, *flood)):
            idp.clock.advance(jwks.REFETCH_S / 4)
            await asyncio.sleep(0)
        assert [task.result() for task in first] == [200] * 3
        assert {task.result() for task in flood} == {401}
    spent_s = idp.clock.monotonic() - VirtualClock().monotonic()
    assert idp.server.asked <= 2 + spent_s / jwks.REFETCH_S, "one fetch in each second, however many ask"
    assert spent_s < jwks.REFRESH_S, "none was due for another reason"


async def test_the_wait_for_a_new_key_is_bounded_by_one_fetch_after_the_next_second(idp: Idp) -> None:
    """A made-up id has just caused a fetch."""
    assert jwks.REFETCH_S <= REFETCH_WITHIN_S, "it is waited for"
    assert await idp.status(idp.token(Key("made-up", number=1))) == 401
    idp.clock.advance(0.1)
    idp.server.keys = (OLD, NEW)
    first = asyncio.create_task(idp.status(idp.token(NEW)))
    await idp.sought(first)
    assert await first == 200
    assert idp.server.asked == 3


async def test_who_waits_has_no_seat_and_no_body(idp: Idp) -> None:
    idp.server.gate.clear()
    headers = {"authorization": f"Bearer {idp.token(NEW)}"}
    url = f"{idp.house.url}/v1/chat/completions"
    waits = asyncio.create_task(idp.house.client.post(url, headers=headers, data=b"{" * 100_000))
    await until(lambda: len(idp.source.waiting) == 1)
    gateway = idp.house.gateway
    assert gateway.live.reservations() == []
    assert not gateway.live._claims
    assert gateway._edge._pipeline._memory.held == 0
    assert await idp.victim() == 200
    idp.server.gate.set()
    async with await waits as answer:
        assert answer.status == 401
    await until(lambda: len(idp.source.waiting) == 0)


async def test_a_caller_that_leaves_gives_its_place_back(idp: Idp) -> None:
    idp.server.gate.clear()
    waits = asyncio.create_task(idp.status(idp.token(NEW)))
    await until(lambda: len(idp.source.waiting) == 1)
    waits.cancel()
    await until(lambda: len(idp.source.waiting) == 0)
    idp.server.gate.set()
    assert await idp.victim() == 200


async def test_a_caller_that_is_put_off_is_told_when_to_come_again(rare: Idp) -> None:
    """It comes at that time and no earlier, without a request of anybody else in between."""
    idp = rare
    assert await idp.status(idp.token(Key("made-up", number=1))) == 401
    idp.clock.advance(0.5)
    idp.server.keys = (OLD, NEW)
    headers = {"authorization": f"Bearer {idp.token(NEW)}"}
    async with idp.house.client.get(f"{idp.house.url}/v1/models", headers=headers) as answer:
        assert answer.status == 503
        assert (await error_of(answer))["code"] == "identity_unavailable"
        retry_after_s = float(answer.headers["retry-after"])
    assert retry_after_s == math.ceil(RARE_S - 0.5 + POLL_S)
    await idp.fetched(retry_after_s)
    assert await idp.status(idp.token(NEW)) == 200
    assert await idp.status(idp.token(Key("made-up", number=1))) == 401, "it was looked for twice"


async def test_an_id_that_comes_while_keys_are_fetched_is_not_refused_by_that_fetch(idp: Idp) -> None:
    """The server may have answered before the key was published."""
    idp.server.gate.clear()
    first = asyncio.create_task(idp.status(idp.token(Key("made-up", number=1))))
    await until(lambda: idp.server.asked == 2)
    idp.clock.advance(0.1)
    second = asyncio.create_task(idp.status(idp.token(NEW)))
    await until(lambda: idp.source._seen.get(NEW.kid) is not None)
    idp.server.gate.set()
    assert await first == 401
    idp.server.keys = (OLD, NEW)
    await idp.sought(second)
    assert await second == 200


async def test_a_key_that_was_not_there_is_looked_for_again_and_nobody_waits_for_that(idp: Idp) -> None:
    """It was used before it was published, or is one that is gone: then its tokens are refused at once."""
    assert await idp.status(idp.token(NEW)) == 401
    idp.server.gate.clear()
    for _ in range(3):
        idp.clock.advance(AGAIN_S / 4)
        assert await idp.status(idp.token(NEW)) == 401
    assert idp.server.asked == 2
    idp.clock.advance(AGAIN_S / 4)
    idp.server.keys = (OLD, NEW)
    assert await idp.status(idp.token(NEW)) == 401, "at once, though a fetch has begun"
    await until(lambda: idp.server.asked == 3)
    idp.server.gate.set()
    await asyncio.wait({idp.task})
    assert await idp.status(idp.token(NEW)) == 200


async def test_key_ids_that_are_remembered_are_bounded(open_house: Open, server: KeyServer) -> None:
    source = RemoteKeys(as_issuer(server), VirtualClock())
    for number in range(jwks.SEEN_MAX + 100):
        source.seek(f"kid-{number}")
    assert len(source._seen) == jwks.SEEN_MAX
    await source.aclose()


async def test_so_many_may_wait_and_no_more(idp: Idp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idp.source, "waiting", Waiting(1))
    idp.server.gate.clear()
    first = asyncio.create_task(idp.status(idp.token(NEW)))
    await until(lambda: idp.server.asked == 2)
    assert await idp.status(idp.token(NEW)) == 503
    assert await idp.victim() == 200
    idp.server.keys = (OLD, NEW)
    idp.server.gate.set()
    assert await first == 200


async def test_places_are_shared_so_that_a_flood_leaves_some_to_those_who_were_served(
    idp: Idp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come from one address, as behind a proxy, the victim on a connection that it has used before."""
    monkeypatch.setattr(idp.source, "waiting", Waiting(8))
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(aiohttp.ClientSession())
        victim = Idp(idp.server, replace(idp.house, client=own), idp.clock)
        assert await victim.status(idp.token(OLD)) == 200
        idp.server.gate.clear()
        sessions = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(9)]
        others = [Idp(idp.server, replace(idp.house, client=one), idp.clock) for one in sessions]
        flood = [
            asyncio.create_task(one.status(idp.token(Key(f"kid-{n}", number=1))))
            for n, one in enumerate(others)
        ]
        await until(lambda: sum(task.done() for task in flood) == 3)
        assert len(idp.source.waiting) == 6, "three quarters of the places"
        first = asyncio.create_task(victim.status(idp.token(NEW)))
        await until(lambda: len(idp.source.waiting) == 7)
        idp.server.keys = (OLD, NEW)
        idp.server.gate.set()
        while not all(task.done() for task in (first, *flood)):
            idp.clock.advance(jwks.REFETCH_S / 4)
            await asyncio.sleep(0)
        assert await first == 200
        assert Counter(await asyncio.gather(*flood)) == {401: 6, 503: 3}


async def test_a_token_without_a_key_id_is_tried_with_new_keys_alone(
    idp: Idp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged ones would cost all signature checks again when their fetch is over."""
    tried: list[str] = []
    verify = type(ALGORITHMS["ES256"]).verify

    def counted(self: Any, message: bytes, key: Any, signature: bytes) -> bool:
        tried.append(str(key))
        return bool(verify(self, message, key, signature))

    monkeypatch.setattr(type(ALGORITHMS["ES256"]), "verify", counted)
    forged = Key("forger", number=2).token(idp.clock.wall(), header={"kid": ...})
    assert await idp.status(forged) == 401
    assert (idp.server.asked, len(tried)) == (2, 1)
    idp.server.keys = (OLD, NEW)
    forged = Key("forger", number=2).token(idp.clock.wall(), header={"kid": ...}, jti="another")
    waits = asyncio.create_task(idp.status(forged))
    await idp.sought(waits)
    assert await waits == 401
    assert len(tried) == 3, "the old key once, and the new one"


async def test_places_are_counted_over_a_reload_and_given_back_where_the_issuer_goes(
    idp: Idp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idp.server.gate.clear()
    gateway, source = idp.house.gateway, idp.source
    waits = asyncio.create_task(idp.status(idp.token(NEW)))
    await until(lambda: len(source.waiting) == 1)
    kept = gateway._key_sources.of(gateway.config.issuers)
    assert kept["idp"] is source
    gateway._key_sources.of(())
    await until(lambda: idp.clock.sleeping > 0)
    idp.clock.advance(POLL_S)
    assert await waits == 503, "nobody knows any more"
    assert len(source.waiting) == 0
    assert source._looking is None or source._looking.done()
    assert source.in_progress is None


async def test_fetches_end_with_the_gateway(open_house: Open, server: KeyServer) -> None:
    clock = VirtualClock()
    source = RemoteKeys(as_issuer(server), clock)
    server.gate.clear()
    assert source.seek("made-up") == 0.0
    fetch = source.in_progress
    assert fetch is not None
    assert source.seek("made-up") == 0.0
    assert source.in_progress is fetch, "one at a time"
    clock.advance(0.1)
    assert source.seek("another") == pytest.approx(jwks.REFETCH_S - 0.1)
    looking = source._looking
    assert looking is not None
    assert source.seek("a third one") == pytest.approx(jwks.REFETCH_S - 0.1)
    assert source._looking is looking, "one for all of them"
    await until(lambda: server.asked == 1)
    await source.aclose()
    assert fetch.cancelled()
    assert looking.cancelled()
