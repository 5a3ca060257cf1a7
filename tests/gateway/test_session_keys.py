"""Sessions: by which keys their requests are known, and who is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.routing.sessions import KEY_LEN_MAX, SESSION_HEADERS, session_of
from shared.apis.completions import CompletionRequest
from shared.wire.ids import SESSION_HEADER
from tests.gateway.conftest import CHAT, House, Open
from tests.gateway.fake_engine import unary


def named(key: str | None = None, tenant: str = "acme", **headers: str) -> str | None:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return session_of(sent, CompletionRequest(model="m", prompt="", prompt_cache_key=key), tenant)


# -- the key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_every_agents_header_names_a_session_as_the_field_does(header: str) -> None:
    assert named(**{header: "k"}) == named("k") != named("j")
    assert named(**{header: ""}) is named("") is named() is None


def test_a_header_counts_before_the_field_which_many_sessions_may_share() -> None:
    assert named("app", session_id="one") == named("one") != named("app", session_id="two")
    assert named(x_session_id="later", x_session_affinity="first") == named("first")


def test_tenants_with_the_same_key_have_different_sessions() -> None:
    assert len({named("k", tenant) for tenant in ("a", "b", "ak", "")}) == 4


def test_a_key_of_any_length_and_any_bytes_is_16_digits() -> None:
    for key in ("k", "x" * 10_000_000, "\udcff\udc80", "\r\n\0", "\N{SNOWMAN}" * KEY_LEN_MAX):
        session = named(session_id=key)
        assert session is not None
        assert len(session) == 16
        assert int(session, 16) >= 0
    assert named("x" * KEY_LEN_MAX) == named("x" * (KEY_LEN_MAX + 1)), "what is hashed is bounded"


# -- the engine -----------------------------------------------------------------------------------


async def told(house: House, path: str = "chat/completions", headers: Any = None, **fields: Any) -> list[str]:
    """What the engine is told of the session."""
    house.engine.script = unary()
    body = {**(CHAT if path.startswith("chat") else {"model": "tiny", "prompt": "hi"}), **fields}
    sent = {**house.headers, **(headers or {})}
    async with house.client.post(f"{house.url}/v1/{path}", json=body, headers=sent) as answer:
        assert answer.status == 200, await answer.read()
    seen: list[str] = house.engine.seen[-1].headers.getall(SESSION_HEADER, [])
    return seen


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_an_engine_of_ours_is_told_the_hash_alone(house: House, path: str) -> None:
    session = named("mine")
    assert await told(house, path, prompt_cache_key="mine") == [session]
    for header in SESSION_HEADERS:
        assert await told(house, path, {header.title(): "mine"}) == [session]
        assert header not in house.engine.seen[-1].headers
    assert await told(house, path) == []


async def test_a_callers_own_word_for_the_hash_goes_nowhere(house: House) -> None:
    forged = {SESSION_HEADER: "0" * 16}
    assert await told(house, headers=forged) == []
    assert await told(house, headers=forged, prompt_cache_key="mine") == [named("mine")]


async def test_an_engine_of_another_make_is_told_nothing(open_house: Open) -> None:
    house = await open_house(bundle=None)
    assert await told(house, headers={"session-id": "mine", SESSION_HEADER: "0" * 16}) == []
    assert "session-id" not in house.engine.seen[-1].headers
