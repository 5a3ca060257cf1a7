"""Sessions: by which keys their requests are known, and who is told of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest

from gateway.config.whole import ModelConfig
from gateway.request.record import TOKENS
from gateway.routing.affinity import affinity_of
from gateway.routing.health import Outcome
from gateway.routing.policy import RouteReason
from gateway.routing.replicas import Placement, Replicas
from gateway.routing.sessions import KEY_LEN_MAX, SESSION_HEADERS, session_of
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.completions import CompletionRequest
from shared.wire.ids import SESSION_HEADER
from tests.fakes import VirtualClock
from tests.gateway.conftest import CHAT, House, Open
from tests.gateway.fake_engine import chunk, closing, stream, unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys


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


# -- hostile keys ---------------------------------------------------------------------------------


def strays(keys: Callable[[int], tuple[str | None, str]]) -> int:
    """The turns that a tenant's conversations spend away from home beside long prompts of others, of which
    ten are waiting at a time. `keys` has the key and the tenant of each prompt."""
    pool = Replicas([ModelConfig("m", tuple(f"http://{name}:1" for name in "abcd"))], VirtualClock())
    waiting, prompts, away = deque[Placement](), count(), 0

    def place(tenant: str, key: str | None, tokens: int, *texts: str) -> Placement:
        roles: tuple[Any, ...] = ("user", "assistant", "user")
        messages = [ChatMessage(role, text) for role, text in zip(roles, texts, strict=False)]
        request = ChatRequest(model="m", messages=messages, prompt_cache_key=key)
        session = session_of({}, request, tenant)
        placed = pool.place("m", affinity_of(request, "m", tenant, tokens, 1, session))
        assert placed is not None
        return placed

    for turn in range(10 * 16):
        for number in islice(prompts, 3):
            key, tenant = keys(number)
            waiting.append(place(tenant, key, 16_000, f"{number}"))
        while len(waiting) > 10:
            pool.release(waiting.popleft(), Outcome.NEUTRAL)
        own = place("victim", f"{turn % 16}", 3_300, "q", "a" * 3_000, "q" * 300)
        away += own.route is not RouteReason.AFFINITY
        pool.release(own, Outcome.NEUTRAL)
    return away


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(lambda number: (f"{number}", "a"), id="a new key with each request"),
        pytest.param(lambda _: ("k", "a"), id="one key for everything"),
        pytest.param(lambda number: ("k", f"t{number % 200}"), id="one key of many tenants"),
        pytest.param(lambda number: ("0123"[number % 4], "a"), id="other tenants' keys"),
    ],
)
def test_no_keys_send_another_tenants_conversations_from_home(
    keys: Callable[[int], tuple[str | None, str]],
) -> None:
    """Oftener than as many prompts without keys do."""
    assert 0 < strays(keys) < 1.2 * strays(lambda _: (None, "a")) < 160


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


@pytest.mark.parametrize("streams", [False, True])
async def test_operators_are_told_the_session_and_what_was_cached_of_it(
    open_house: Open, streams: bool
) -> None:
    house = await open_house(admin=operator_keys())
    house.engine.script = stream(chunk("a"), end=closing(10, 1)) if streams else unary(end=closing(10, 1))
    kinds = ("prompt", "cached", "session_prompt", "session_cached")
    before = [TOKENS.value("tiny", "acme", kind) for kind in kinds]
    async with house.chat(stream=streams, headers={"session-id": "joe@example.org"}) as answer:
        await answer.read()
    async with house.chat(stream=streams) as answer:
        await answer.read()
    with_, without = await house.lines(2)
    assert (with_["session"], with_["cached_tokens"]) == (named("joe@example.org"), 4)
    assert "session" not in without
    assert "example.org" not in house.log.getvalue()
    after = [TOKENS.value("tiny", "acme", kind) for kind in kinds]
    assert [late - early for late, early in zip(after, before, strict=True)] == [20, 8, 10, 4]
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/requests"
    for asked in (with_["session"], "joe@example.org"):
        async with house.client.get(url, params={"session": asked}, headers=OPERATOR) as answer:
            [one] = (await answer.json())["data"]
        assert (one["session"], one["prompt_tokens"], one["cached_tokens"]) == (with_["session"], 10, 4)


async def test_a_callers_own_word_for_the_hash_goes_nowhere(house: House) -> None:
    forged = {SESSION_HEADER: "0" * 16}
    assert await told(house, headers=forged) == []
    assert await told(house, headers=forged, prompt_cache_key="mine") == [named("mine")]


async def test_an_engine_of_another_make_is_told_nothing(open_house: Open) -> None:
    house = await open_house(bundle=None)
    assert await told(house, headers={"session-id": "mine", SESSION_HEADER: "0" * 16}) == []
    assert "session-id" not in house.engine.seen[-1].headers
