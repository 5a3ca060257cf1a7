"""A response that is kept for one tenant is found, and pushed out, by no other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import aiohttp

from tests.bench.gateway.attack import MODEL, Who
from tests.bench.gateway.attackers import named
from tests.neighbours.conftest import House

FLOOD = "600 responses of 16 KiB that are kept"
GUESSES = 256
AT_ONCE = 16


async def test_a_flood_of_responses_pushes_out_its_own_alone(house: House) -> None:
    async with aiohttp.ClientSession() as client:
        own = await answered(client, house)
        first = await answered(client, house, Who.ATTACKER)
        outcomes = await house.attacked(named(FLOOD))
        assert sum(outcome.status == 200 for outcome in outcomes) > 300, "more than a tenant has room for"
        assert await status_of(client, house, own) == 200
        assert await status_of(client, house, first, Who.ATTACKER) == 404
        await answered(client, house, previous_response_id=own)


async def test_ids_are_guessed_in_vain(house: House) -> None:
    async with aiohttp.ClientSession() as client:
        own = await answered(client, house)
        digits = len(own) - len("resp_")
        made_up = [f"resp_{secrets.token_hex(digits // 2)}" for _ in range(GUESSES)]
        near = [f"resp_{int(own[5:], 16) + step:0{digits}x}" for step in range(-16, 17) if step]
        odd = [own.upper(), f"{own}0", own[:-1], f"{Who.VICTIM}:{own}", f"{{{Who.VICTIM}}}:responses:{own}"]
        for ids in (made_up, near, odd, [own]):
            assert await statuses(client, house, ids) == {404}
        assert await status_of(client, house, own) == 200


async def answered(
    client: aiohttp.ClientSession, house: House, who: Who = Who.VICTIM, **fields: object
) -> str:
    """The id of a response that is kept."""
    body = {"model": MODEL, "input": "Hello!", "max_output_tokens": 1, **fields}
    async with client.post(f"{house.url}/v1/responses", json=body, headers=key_of(who)) as answer:
        told = await answer.json()
        assert (answer.status, told["store"]) == (200, True), told
        id_: str = told["id"]
        return id_


async def statuses(client: aiohttp.ClientSession, house: House, ids: Sequence[str]) -> set[int]:
    """What an attacker is answered about these ids, some at a time."""
    found: set[int] = set()
    for at in range(0, len(ids), AT_ONCE):
        asked = (status_of(client, house, id_, Who.ATTACKER) for id_ in ids[at : at + AT_ONCE])
        found.update(await asyncio.gather(*asked))
    return found


async def status_of(client: aiohttp.ClientSession, house: House, id_: str, who: Who = Who.VICTIM) -> int:
    async with client.get(f"{house.url}/v1/responses/{id_}", headers=key_of(who)) as answer:
        return answer.status


def key_of(who: Who) -> dict[str, str]:
    return {"authorization": f"Bearer {who}"}
