"""Keys of issuers that are fetched: rotation, and servers that are slow, silent, wrong or gone. Beside each
another tenant's caller is served."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from gateway.identity import jwks, jwt
from gateway.identity.jwks import POLL_S, RETRY_S
from gateway.identity.key_set import SET_LEN_MAX
from tests.fakes import VirtualClock
from tests.gateway.conftest import Open, until
from tests.gateway.identity.idp import GRANTS, NEW, OLD, RARE_S, Idp
from tests.gateway.identity.issuers import Key, KeyServer, jwk_set, nameless_set

pytestmark = [
    pytest.mark.usefixtures("patience"),
    pytest.mark.parametrize("protocol", ["http2"]),  # it does not matter what engines speak
]


@pytest.fixture(autouse=True)
def _proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy. Keys come from their server alone."""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")


async def test_keys_are_there_before_the_first_request(idp: Idp) -> None:
    assert idp.server.asked == 1
    assert await idp.status(idp.token(OLD)) == 200
    assert await idp.status(idp.token(NEW)) == 401
    assert await idp.victim() == 200


async def test_keys_are_fetched_again_in_time(idp: Idp) -> None:
    idp.server.keys = (OLD, NEW)
    await idp.fetched(jwks.REFRESH_S)
    assert idp.server.asked == 2
    assert [await idp.status(idp.token(key)) for key in (OLD, NEW)] == [200, 200]
    idp.server.keys = (NEW,)
    await idp.fetched(jwks.REFRESH_S)
    assert [await idp.status(idp.token(key)) for key in (OLD, NEW)] == [401, 200]


async def test_a_reload_by_hand_fetches_at_once(idp: Idp) -> None:
    idp.server.keys = (OLD, NEW)
    await idp.house.gateway.reload()
    await until(lambda: idp.server.asked == 2 and idp.task.done())
    assert await idp.status(idp.token(NEW)) == 200


async def test_an_issuer_without_key_ids_rotates_and_refuses_nobody(idp: Idp) -> None:
    """Its tokens say nothing of their key. Beside them others are forged."""
    forger, nameless = Key("forger", number=2), {"kid": ...}

    def token(key: Key) -> str:
        return key.token(idp.clock.wall(), header=nameless, jti=next(idp._count))

    async def publish(*keys: Key) -> None:
        async def answered(request: web.BaseRequest) -> web.Response:
            return web.Response(body=nameless_set(*keys))

        idp.server.answer = answered

    await publish(OLD)
    await idp.fetched(jwks.REFRESH_S)
    assert await idp.status(token(OLD)) == 200
    await publish(OLD, NEW)
    assert [await idp.status(token(key)) for key in (NEW, OLD, NEW)] == [200, 200, 200]
    idp.clock.advance(POLL_S / 2)  # after the fetch, and before another may begin
    forged = token(forger)
    waits = asyncio.create_task(idp.status(forged))
    await until(lambda: len(idp.source.waiting) == 1)
    assert [await idp.victim(), await idp.status(token(OLD))] == [200, 200]
    await publish(NEW)
    await idp.sought(waits)
    assert await waits == 401
    assert [await idp.status(one) for one in (forged, token(NEW))] == [401, 200]


ROTATIONS = 4
CALLERS = 8
BETWEEN = 100
"""Requests that are answered between two steps of a rotation."""


async def test_a_rotation_under_load_refuses_nobody(idp: Idp) -> None:
    """Keys are used in the moment in which they are published, which nobody tells the gateway; tokens of the
    key before are used until it goes away."""
    keys = [OLD, *(Key(f"key-{number}", number=number) for number in range(1, ROTATIONS + 1))]
    held = [idp.token(OLD) for _ in range(CALLERS)]
    statuses: Counter[int] = Counter()
    current, is_over = OLD, False

    async def call(number: int) -> None:
        while not is_over:
            statuses[await idp.status(held[number])] += 1
            statuses[await idp.status(idp.token(current))] += 1

    async def so_many_more() -> None:
        wanted = statuses.total() + BETWEEN
        await until(lambda: statuses.total() >= wanted)

    async with asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            group.create_task(call(number))
        for before, after in itertools.pairwise(keys):
            idp.clock.advance(jwks.REFETCH_S)
            idp.server.keys = (before, after)
            current = after
            await so_many_more()
            held[:] = [idp.token(after) for _ in range(CALLERS)]
            await so_many_more()
            idp.server.keys = (after,)
            await so_many_more()
        is_over = True
    assert set(statuses) == {200}
    assert statuses.total() >= 3 * ROTATIONS * BETWEEN
    assert idp.server.asked == 1 + ROTATIONS, "one fetch for each, whoever asked"


async def test_an_issuer_may_rotate_in_haste(rare: Idp) -> None:
    """Each fetch finds a key, so that the next one need not wait for the gap; made-up ids gain nothing."""
    idp = rare
    keys = [Key(f"key-{number}", number=number) for number in range(1, ROTATIONS + 1)]
    for before, after in itertools.pairwise([OLD, *keys]):
        idp.server.keys = (before, after)
        assert await idp.status(idp.token(after)) == 200
        idp.clock.advance(POLL_S)
    assert ROTATIONS * POLL_S < RARE_S
    assert idp.server.asked == 1 + ROTATIONS
    assert await idp.status(idp.token(Key("made-up", number=1))) == 401
    idp.clock.advance(POLL_S)
    assert await idp.status(idp.token(Key("made-up-too", number=1))) == 503
    assert idp.server.asked == 2 + ROTATIONS, "the fetch before found nothing"


async def test_a_key_that_is_published_before_it_is_used_keeps_nobody_waiting(idp: Idp) -> None:
    idp.server.keys = (OLD, NEW)
    await idp.fetched(jwks.REFRESH_S)
    idp.server.gate.clear()
    assert await idp.status(idp.token(NEW)) == 200
    assert idp.server.asked == 2


async def test_a_silent_server_is_waited_for_within_bounds(idp: Idp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt, "REFETCH_WAIT_S", 0.01)
    monkeypatch.setattr(jwks, "FETCH_S", 0.2)
    idp.server.gate.clear()
    assert await idp.status(idp.token(NEW)) == 503, "nobody knows yet"
    await asyncio.wait({idp.task})
    assert await idp.status(idp.token(NEW)) == 503, "nobody could tell"
    assert await idp.status(idp.token(OLD)) == 200
    assert await idp.victim() == 200
    assert "TimeoutError" in str(await idp.rejected())
    assert jwks.REFETCH_WAIT_S <= 1, "but for this test's patience"


async def test_keys_outlive_their_server_for_so_long_and_no_longer(idp: Idp) -> None:
    token = idp.token(OLD, exp=int(idp.clock.wall()) + 10_000)
    assert await idp.status(token) == 200
    stale_s = jwks.STALE_S
    await idp.server.__aexit__()
    await idp.fetched(stale_s - 1)
    assert [await idp.status(token), await idp.status(idp.token(OLD))] == [200, 200]
    assert await idp.status(idp.token(NEW)) == 503, "an unknown key may exist by now"
    await idp.fetched(RETRY_S)
    for one in (token, idp.token(OLD), idp.token(NEW)):
        assert await idp.status(one) == 503, "none is trusted any more, known or not"
    assert await idp.victim() == 200
    async with idp.house.client.get(f"{idp.house.url}/readyz") as probe:
        assert probe.status == 200, "others are served"
    async with idp.server:
        await idp.fetched(RETRY_S)
        assert [await idp.status(token), await idp.status(idp.token(OLD))] == [200, 200]
        assert await idp.status(idp.token(NEW)) == 401
    line = next(line for line in (await idp.house.lines(11)) if line["status"] == 503)
    assert (line["error_code"], "key_id" in line) == ("identity_unavailable", False)


async def redirect(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(status=302, headers={"location": "/elsewhere"})


async def missing(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(status=404)


async def garbage(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b"<html>not a set</html>")


async def no_keys(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b'{"keys": []}')


async def huge(request: web.BaseRequest) -> web.StreamResponse:
    """Far beyond the bound."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(8):
        await response.write(b" " * SET_LEN_MAX)
    return response


async def compressed(request: web.BaseRequest) -> web.StreamResponse:
    """Against what was asked for: a bomb would be one."""
    response = web.Response(body=jwk_set(OLD, NEW))
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def cut(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"keys": [')
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (redirect, "status 302"),
        (missing, "status 404"),
        (garbage, "no JWK set"),
        (no_keys, "no key that can be used"),
        (huge, f"larger than {SET_LEN_MAX}"),
        (compressed, "no JWK set"),
        (cut, "peer closed connection"),
    ],
)
async def test_a_wrong_answer_changes_nothing_and_is_told(idp: Idp, answer: Any, problem: str) -> None:
    idp.server.answer = answer
    await idp.fetched(jwks.REFRESH_S)
    assert await idp.status(idp.token(OLD)) == 200
    assert await idp.victim() == 200
    told = (await idp.rejected())[0]
    assert idp.server.url in told
    assert problem in told
    asked = idp.server.asked
    idp.server.answer, idp.server.keys = None, (OLD, NEW)
    await idp.fetched(RETRY_S)
    assert idp.server.asked == asked + 1
    assert await idp.status(idp.token(NEW)) == 200


async def test_a_server_of_another_authority_is_not_believed(
    open_house: Open, server: KeyServer, tmp_path: Path
) -> None:
    async with KeyServer(tmp_path, (NEW,)) as wrong:
        await server.__aexit__()
        wrong_settings = server.settings(jwks_url=wrong.url)
        server.authority.cert_pem.write_to_path(server.ca)
        house = await open_house(issuers=[wrong_settings], grants=GRANTS, clock=VirtualClock())
        idp = Idp(server, house, VirtualClock())
        assert await idp.status(idp.token(NEW)) == 503
        assert await idp.victim() == 200
        assert "CERTIFICATE_VERIFY_FAILED" in str(await idp.rejected())
        assert wrong.asked == 0


async def test_the_authority_of_a_key_server_is_renewed_while_its_keys_are_in_use(
    idp: Idp, tmp_path: Path
) -> None:
    await idp.server.__aexit__()
    idp.server.authority, idp.server.keys = trustme.CA(), (OLD, NEW)
    path = tmp_path / "idp.ca"
    old = path.read_bytes()
    async with idp.server:  # writes the new one
        new = path.read_bytes()
        path.write_bytes(old)
        await idp.fetched(jwks.REFRESH_S)
        assert "CERTIFICATE_VERIFY_FAILED" in str(await idp.rejected())
        assert await idp.status(idp.token(OLD)) == 200
        path.write_bytes(new)
        await idp.fetched(RETRY_S)
        assert [await idp.status(idp.token(key)) for key in (OLD, NEW)] == [200, 200]


async def test_a_server_that_is_gone_does_not_hold_up_the_start(open_house: Open, server: KeyServer) -> None:
    await server.__aexit__()
    clock = VirtualClock()
    house = await open_house(issuers=[server.settings()], grants=GRANTS, clock=clock)
    idp = Idp(server, house, clock)
    assert [await idp.victim(), await idp.status(idp.token(OLD))] == [200, 503]
    async with server:
        await idp.fetched(RETRY_S)
        assert await idp.status(idp.token(OLD)) == 200


async def test_one_issuers_silence_does_not_hold_up_anothers_keys(
    open_house: Open, server: KeyServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock, directory = VirtualClock(), tmp_path_factory.mktemp("two")
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(KeyServer(directory, (OLD,)))
        two = other.settings(id="two", issuer="https://two.test/")
        grants = [*GRANTS, {"issuer": "two", "tenant": "other"}]
        house = await open_house(issuers=[server.settings(), two], grants=grants, clock=clock)
        idp = Idp(server, house, clock)
        server.gate.clear()
        waiting = asyncio.create_task(idp.status(idp.token(NEW)))
        await until(lambda: server.asked == 2)
        other.keys = (OLD, NEW)
        assert await idp.status(idp.token(NEW, iss="https://two.test/")) == 200
        assert not waiting.done() or waiting.result() == 503
        server.gate.set()
        assert await waiting in (401, 503)
