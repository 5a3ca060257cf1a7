"""Which replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.whole import ModelConfig
from gateway.routing import affinity
from gateway.routing.affinity import affinity_of
from gateway.routing.health import Outcome
from gateway.routing.maglev import MEMBERS_MAX, Table, key_of
from gateway.routing.policy import LATE_MS, SLOW_START_MS, Affinity, RouteReason, View, choose, loads, nowhere
from gateway.routing.replicas import Placement, Replicas
from gateway.routing.sessions import session_of
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.completions import CompletionRequest
from shared.apis.tools import FunctionSpec, FunctionTool, Tool
from shared.wire.ids import ReplicaId
from shared.wire.load_report import DEFAULT, LoadReport
from tests.fakes import VirtualClock

KEYS = st.integers(0, 2**64 - 1)
LENGTHS = st.lists(st.integers(0, 10_000), min_size=3, max_size=3).map(sorted)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[bool], Affinity, int | None]:
    """Loads, which replicas may be used, a request, and the owners of a prefix."""
    size = draw(st.integers(1, 12))
    prefix_len, history_len, prompt_len = draw(LENGTHS)
    return (
        draw(st.lists(st.integers(0, 50_000), min_size=size, max_size=size)),
        draw(st.lists(st.booleans(), min_size=size, max_size=size)),
        Affinity(draw(KEYS), draw(KEYS), prefix_len, history_len, prompt_len),
        draw(st.none() | st.integers(1, 6)),
    )


def table(size: int) -> Table:
    return Table([f"engine-{i}:8001" for i in range(size)])


# -- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 40, 64])
def test_every_member_has_the_same_number_of_slots_to_one(size: int) -> None:
    slots = Counter(table(size)._slots)
    assert len(slots) == size
    assert max(slots.values()) - min(slots.values()) <= 1


@pytest.mark.parametrize("size", [3, 8, 40, 150])
def test_a_member_that_leaves_moves_little_but_its_share(size: int) -> None:
    names = [f"engine-{i}:8001" for i in range(size)]
    keys = [key_of(b"%d" % i) for i in range(5_000)]
    before, left = Table(names), Table(names[1:])
    moved = sum(
        first != 0 and names[1:][next(left.walk(key))] != names[first]
        for key in keys
        for first in [next(before.walk(key))]
    )
    assert moved / len(keys) < 0.05


@given(st.permutations(range(6)), KEYS)
def test_the_order_of_the_names_plays_no_part(order: list[int], key: int) -> None:
    names = [f"engine-{i}" for i in range(6)]
    shuffled = [names[i] for i in order]
    assert [names[i] for i in Table(names).walk(key)] == [shuffled[i] for i in Table(shuffled).walk(key)]


def test_a_walk_meets_every_member_once() -> None:
    assert sorted(table(40).walk(key_of(b"any"))) == list(range(40))


def test_a_pool_too_large_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        table(MEMBERS_MAX + 1)


# -- the choice -----------------------------------------------------------------------------------


@given(worlds())
def test_no_queue_is_longer_than_what_moving_would_save(
    world: tuple[list[int], list[bool], Affinity, int | None],
) -> None:
    """No replica is chosen whose load exceeds the least by more than all that can be computed twice."""
    loads_, usable, request, owners = world
    choice = choose(table(len(loads_)), loads_, request, owners, usable)
    if not any(usable):
        assert choice is None
        return
    assert choice is not None
    assert usable[choice.replica]
    least = min(load for load, may in zip(loads_, usable, strict=True) if may)
    most = request.stray_len + request.prefix_len
    assert loads_[choice.replica] <= least + most


@given(KEYS, st.integers(1, 12))
def test_a_conversation_comes_home_at_every_turn(session: int, size: int) -> None:
    turns = [Affinity(1, session, 100, 100 + 500 * turn, 600 + 500 * turn) for turn in range(5)]
    homes = {choose(table(size), [0] * size, turn, None, [True] * size) for turn in turns}
    assert {(home.route, home.computed_len) for home in homes if home} == {(RouteReason.AFFINITY, 500)}
    assert len({home.replica for home in homes if home}) == 1


def test_a_busy_home_is_left_once_its_queue_exceeds_what_it_saves() -> None:
    turn = Affinity(1, 7, 100, 1000, 1200)
    home = choose(table(4), [0] * 4, turn, None, [True] * 4)
    assert home is not None
    stray_len = (1000 - 100) + (1200 - 100)
    queues = [0] * 4
    queues[home.replica] = stray_len
    assert choose(table(4), queues, turn, None, [True] * 4) == home
    queues[home.replica] += 1
    moved = choose(table(4), queues, turn, None, [True] * 4)
    assert moved is not None
    assert (moved.replica != home.replica, moved.route, moved.computed_len) == (True, RouteReason.LOAD, 1100)


def test_a_home_that_costs_as_much_as_another_owner_is_kept() -> None:
    """Where the least loaded replica is no owner, and computes the prefix too."""
    turn, pool = Affinity(1, 7, 1000, 1000, 1100), table(6)
    free = choose(pool, [0] * 6, turn, 2, [True] * 6)
    assert free is not None
    queues = [9_000] * 6
    queues[free.replica] = 5_000
    queues[(free.replica + 1) % 6] = 5_000 - turn.stray_len - 1
    owners = [i for i, _ in zip(pool.walk(1), range(2), strict=False)]
    assert (free.replica + 1) % 6 not in owners
    assert choose(pool, queues, turn, 2, [True] * 6) == free


def test_a_home_is_kept_whose_queue_is_shorter_than_what_all_others_would_compute_twice() -> None:
    """The prefix, too, where the other owner is busy."""
    turn, pool = Affinity(1, 7, 4_000, 5_000, 6_000), table(6)
    owners = [i for i, _ in zip(pool.walk(1), range(2), strict=False)]
    home = choose(pool, [0] * 6, turn, 2, [True] * 6)
    assert home is not None
    queues = [1_000_000 if i in owners else 0 for i in range(6)]
    queues[home.replica] = turn.stray_len + 4_000
    assert choose(pool, queues, turn, 2, [True] * 6) == home
    queues[home.replica] += 1
    moved = choose(pool, queues, turn, 2, [True] * 6)
    assert moved is not None
    assert moved.replica not in owners


def test_conversations_with_one_prefix_stay_with_its_owners() -> None:
    sessions, twelve = [key_of(b"%d" % i) for i in range(300)], table(12)
    chosen = Counter(
        choice.replica
        for session in sessions
        if (choice := choose(twelve, [0] * 12, Affinity(5, session, 900, 900, 1000), 3, [True] * 12))
    )
    assert len(chosen) == 3
    assert min(chosen.values()) > 70


def test_strays_do_not_all_go_to_one_idle_replica() -> None:
    """Many gateways see the same loads: what they send away must not meet again."""
    busy, pool = [50_000, *[0] * 9], table(10)
    choices = [
        choose(pool, busy, Affinity(1, key_of(b"%d" % i), 0, 0, 50), None, [True] * 10) for i in range(3000)
    ]
    strays = Counter(choice.replica for choice in choices if choice and choice.route is RouteReason.LOAD)
    assert len(strays) == 9
    assert max(strays.values()) < 3 * min(strays.values())


# -- what is known of loads -----------------------------------------------------------------------


def told(tokens: int, now_ms: int) -> View:
    """The view of a replica that has said so."""
    view = View(-SLOW_START_MS)
    view.report(LoadReport((0, tokens, 0)), now_ms)
    return view


def test_a_replica_that_stops_reporting_fades_to_the_median_and_never_to_zero() -> None:
    views = [told(reported, 100_000) for reported in (4_000, 6_000, 8_000)]
    silent = told(0, 100_000 - LATE_MS)
    seen = [loads([*views, silent], 100_000 + late_ms)[3] for late_ms in (0, LATE_MS // 2, LATE_MS)]
    assert seen == [0, 3_000, 6_000]


def test_engines_that_do_not_report_have_no_part_in_the_median() -> None:
    """Their load of nothing would draw the whole pool's requests to the one that is cut off."""
    silent = told(0, 100_000 - LATE_MS)
    foreign = [View(-SLOW_START_MS) for _ in range(3)]
    assert loads([silent, told(6_000, 100_000), *foreign], 100_000 + LATE_MS)[0] == 6_000


def test_when_all_reports_are_late_the_pool_is_as_it_was() -> None:
    views = [told(reported, 0) for reported in (4_000, 6_000, 8_000)]
    assert loads(views, 3 * LATE_MS + SLOW_START_MS) == [6_000] * 3


def test_a_new_replica_is_believed_little_by_little() -> None:
    views = [View(-SLOW_START_MS), View(-SLOW_START_MS), View(0)]
    for view, tokens in zip(views, (8_000, 6_000), strict=False):
        view.enter(DEFAULT, tokens)
        view.leave()
    seen = [loads(views, age_ms)[2] for age_ms in (0, SLOW_START_MS // 2, SLOW_START_MS)]
    assert seen == [6_000, 3_000, 0]


# -- affinity of requests -------------------------------------------------------------------------


def chat(*texts: str, named: str | None = None) -> Affinity:
    """The affinity of a chat of 1 token per character that begins with a system message."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    messages = [ChatMessage(role, text) for role, text in zip(roles, texts, strict=False)]  # type: ignore[arg-type]
    request = ChatRequest(model="m", messages=messages, prompt_cache_key=named)
    session = session_of({}, request, "acme")
    return affinity_of(request, "m", "acme", sum(map(len, texts)), 1, session)


def test_the_turns_of_a_chat_share_their_keys_and_add_to_its_history() -> None:
    first, second = chat("sys", "Hello?"), chat("sys", "Hello?", "Hi!", "More")
    assert (first.prefix, first.session) == (second.prefix, second.session)
    assert (first.prefix_len, first.history_len, first.prompt_len) == (3, 3, 9)
    assert (second.prefix_len, second.history_len, second.prompt_len) == (3, 12, 16)


def test_other_chats_have_other_sessions_and_other_system_prompts_other_prefixes() -> None:
    one, other, apart = chat("sys", "Hello?"), chat("sys", "Bye?"), chat("else", "Hello?")
    assert one.prefix == other.prefix != apart.prefix
    assert len({one.session, other.session, apart.session}) == 3


def test_tools_are_a_part_of_a_chats_prefix() -> None:
    def of(*names: str, system: str = "sys") -> Affinity:
        tools: list[Tool] = [FunctionTool(FunctionSpec(name, "d")) for name in names]
        messages = [ChatMessage("system", system), ChatMessage("user", "Hello?")]
        request = ChatRequest(model="m", messages=messages, tools=tools or None)
        return affinity_of(request, "m", "acme", 1000, 1)

    one, same, other, none = of("f", "g"), of("f", "g"), of("g", "f"), of()
    assert (one.prefix, one.session) == (same.prefix, same.session)
    assert (
        len({one.prefix, other.prefix, none.prefix}) == len({one.session, other.session, none.session}) == 3
    )
    assert one.prefix_len > none.prefix_len, "templates write them before the conversation"
    assert of("f", system="else").prefix != of("f").prefix


def test_sessions_that_begin_alike_are_told_apart_by_their_names() -> None:
    one, other, unnamed = chat("sys", "a", named="k"), chat("sys", "a", named="l"), chat("sys", "a")
    assert len({one.session, other.session, unnamed.session}) == 3
    assert one.prefix == other.prefix == unnamed.prefix


def test_a_named_conversation_stays_at_home_whatever_its_system_prompt_and_tools() -> None:
    assert chat("sys", "a", named="k").session == chat("sys of today", "a", "b", "c", named="k").session
    assert chat("sys", "a").session != chat("sys of today", "a").session


def test_one_key_for_all_conversations_leaves_them_their_homes() -> None:
    assert len({chat("sys", f"{i}", named="app").session for i in range(50)}) == 50


def test_what_is_hashed_is_bounded_however_many_messages_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(*parts: bytes) -> int:
        hashed.append(sum(map(len, parts)) + len(parts))
        return key_of(*parts)

    monkeypatch.setattr(affinity, "key_of", counted)
    for text in ("x" * 1000, ""):
        system = [ChatMessage("system", text) for _ in range(20_000)]
        tools: list[Tool] = [FunctionTool(FunctionSpec("f", text)) for _ in range(1024)]
        request = ChatRequest(
            model="m", messages=[*system, ChatMessage("user", "x" * 1_000_000)], tools=tools if text else None
        )
        affinity_of(request, "m", "acme", 5_000_000, 1)
    assert max(hashed) <= 2 * affinity.TEXT_LEN_MAX + 64  # of tools, and of messages


def test_requests_without_a_prompt_go_round() -> None:
    turns = [affinity_of(None, "m", "a", 0, turn) for turn in range(50)]
    assert {turn.prompt_len for turn in turns} == {0}
    assert len({turn.session for turn in turns}) == 50


def test_tenants_do_not_share_keys() -> None:
    request = CompletionRequest(model="m", prompt="Once")
    one, other = (affinity_of(request, "m", tenant, 1, 1) for tenant in "ab")
    assert one.session != other.session
    chat = ChatRequest(model="m", messages=[ChatMessage("user", "Once")])
    assert [one.tenant, other.tenant, affinity_of(chat, "n", "a", 1, 1).tenant] == ["a", "b", "a"]


@pytest.mark.parametrize("prompt", ["x" * 3000, ["x" * 3000, "y"], [7] * 3000, [[7] * 3000, [8]]])
def test_completions_that_begin_alike_are_one_conversation(prompt: Any) -> None:
    longer = prompt + prompt[:1]
    one, two = (CompletionRequest(model="m", prompt=text) for text in (prompt, longer))
    assert affinity_of(one, "m", "a", 9, 1).session == affinity_of(two, "m", "a", 9, 2).session


@given(st.lists(st.text(max_size=20), max_size=6))
def test_lengths_are_always_in_order(texts: list[str]) -> None:
    of_chat = chat(*texts)
    assert 0 <= of_chat.prefix_len <= of_chat.history_len <= of_chat.prompt_len


# -- the replicas of a gateway --------------------------------------------------------------------


def replicas(*urls: str) -> tuple[Replicas, VirtualClock]:
    clock = VirtualClock()
    return Replicas([ModelConfig(name="m", replicas=urls)], clock), clock


def take(pool: Replicas, tokens: int = 1, tried: Collection[ReplicaId] = (), session: int = 0) -> Placement:
    """A request of a new conversation of its own."""
    session = session or key_of(b"%d" % pool.next_turn())
    place = pool.place("m", Affinity(0, session, 0, 0, tokens), tried)
    assert place is not None
    return place


def test_one_large_prompt_weighs_more_than_many_small_ones() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    giant = take(pool, 100_000)
    assert all(take(pool, 100).replica is not giant.replica for _ in range(10))


def test_short_prompts_spread_over_idle_replicas() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    assert Counter(take(pool, 10).replica.id for _ in range(40)) == {"a:1": 20, "b:1": 20}


def test_each_replica_is_tried_once_per_request() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    first = take(pool)
    second = take(pool, tried={first.replica.id})
    assert {first.replica.id, second.replica.id} == {"a:1", "b:1"}
    assert second.route is RouteReason.RETRY
    assert pool.place("m", nowhere(), {first.replica.id, second.replica.id}) is None


def test_the_only_replica_is_tried_once_too() -> None:
    pool, _ = replicas("http://a:1/")
    only = take(pool).replica
    assert only.url == "http://a:1"
    assert pool.place("m", nowhere(), {only.id}) is None


def test_a_prompt_is_load_until_its_answer_begins_and_a_request_until_it_ends() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    place = take(pool, 50)
    view = place.replica.view
    assert (view.sent[DEFAULT], view.requests) == (50_000, 1)
    pool.counted(place)
    assert (view.sent[DEFAULT], view.requests) == (0, 1)
    pool.release(place, Outcome.NEUTRAL)
    assert (view.sent[DEFAULT], view.requests) == (0, 0)


def test_models_on_one_replica_share_its_load() -> None:
    urls = "http://a:1", "http://b:1"
    pool = Replicas([ModelConfig(name=name, replicas=urls) for name in "mn"], VirtualClock())
    request = Affinity(0, 7, 0, 0, 50)
    first, second = pool.place("m", request), pool.place("n", request)
    assert first is not None
    assert second is not None
    assert sum(replica.view.sent[DEFAULT] for replica in pool._by_url.values()) == 100_000
    assert len(pool._by_url) == 2


def test_two_replicas_behind_one_address_are_two() -> None:
    pool, _ = replicas("http://lb:80/a", "http://lb:80/b")
    first = take(pool).replica
    assert {first.id, take(pool, tried={first.id}).replica.id} == {"lb:80/a", "lb:80/b"}
