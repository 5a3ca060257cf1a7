"""The world in which rules of choosing a replica are compared: small, and with a known outcome."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

from gateway.routing import policy
from gateway.routing.policy import ReplicaChoice, RouteReason, View
from shared.wire.load_report import DEFAULT, LoadReport
from tests.bench.gateway.routing_live import Seen, figures_of
from tests.bench.gateway.routing_rules import BLIND, RULES
from tests.bench.gateway.routing_world import (
    AWAY_MS,
    REPORT_MS,
    Agents,
    Fleet,
    Result,
    Style,
    Traffic,
    Turn,
    simulate,
)

SMALL = Traffic(
    "small", replicas=4, prefixes=4, decode_ms=5, think_ms=500, cache_tokens=200_000, conversations=150
)
AGENTS = replace(
    SMALL,
    name="small agents",
    utilization=0.4,
    cache_tokens=400_000,
    agents=Agents(
        sessions=6, rounds=1, stagger_ms=3_000, style=Style("agents", 25, (500, 3_500), (100, 400), 2_000)
    ),
)
"""Prompts of up to 65,000 tokens."""


def result(rule: str, traffic: Traffic = SMALL) -> Result:
    return simulate(traffic, RULES[rule](), 2, reports=rule not in BLIND)


def test_rules_are_as_good_as_what_they_know() -> None:
    own, index, blind = result("own"), result("index"), result("round robin")
    assert index.cached_share >= own.cached_share > 1.2 * blind.cached_share
    assert own.p99_ms < blind.p99_ms
    assert own.herd is None


def test_sessions_of_agents_find_what_they_had_computed() -> None:
    own, blind, least = (result(rule, AGENTS).by_style for rule in ("own", "round robin", "least load"))
    assert own["agents"].cached >= 0.95 * own["agents"].possible
    assert 0.9 < own["agents"].possible_share < 0.97, "nearly all of a prompt repeats the turn before"
    for other in (blind, least):
        for style in ("agents", "chats"):
            assert own[style].cached_share > 1.1 * other[style].cached_share
            assert own[style].p50_ms < other[style].p50_ms
            assert own[style].p99_ms < other[style].p99_ms


def test_one_key_for_all_conversations_would_leave_none_at_home() -> None:
    own, named = result("own"), result("home by name")
    assert own.cached_share > 1.2 * named.cached_share
    assert 3 * own.p99_ms < named.p99_ms


def test_all_that_is_possible_is_cached_where_one_replica_forgets_nothing() -> None:
    traffic = replace(AGENTS, replicas=1, conversations=60, cache_tokens=1 << 40)
    seen = simulate(traffic, RULES["round robin"](), 1).by_style
    assert seen.keys() == {"chats", "agents", "sub-agents", "titles"}
    assert all(one.cached == one.possible for one in seen.values())
    assert seen["titles"].cached == 0 < seen["sub-agents"].cached


def test_a_replica_that_restarts_takes_nothing_and_has_forgotten_all() -> None:
    chosen: list[tuple[float, int]] = []
    own, fleets = RULES["own"](), set[Fleet]()

    def watched(turn: Turn, fleet: Fleet, worker: int) -> ReplicaChoice:
        choice = own(turn, fleet, worker)
        chosen.append((fleet.now_ms, choice.replica))
        fleets.add(fleet)
        return choice

    at_ms = 8_000
    traffic = replace(AGENTS, replicas=2, conversations=100, restarts_ms=at_ms)
    seen = simulate(traffic, watched, 2)
    assert all(replica for now_ms, replica in chosen if at_ms <= now_ms < at_ms + AWAY_MS)
    assert not all(replica for now_ms, replica in chosen if at_ms + AWAY_MS <= now_ms)
    undisturbed = simulate(replace(traffic, restarts_ms=None), RULES["own"](), 2)
    assert seen.cached_share < undisturbed.cached_share
    for fleet in fleets:
        fleet.stop(0)
        fleet.start(0)
        assert (fleet.held[0], len(fleet.caches[0])) == (0, 0)
        assert all(0 not in holders for holders in fleet.holders.values())


def test_what_a_worker_knows_is_what_its_views_would_tell() -> None:
    fleet, random, turns = Fleet(SMALL, 2, 0), Random(1), 0
    views = [[View(-policy.SLOW_START_MS) for _ in range(4)] for _ in range(2)]
    for _ in range(400):
        replica, worker = random.randrange(4), random.randrange(2)
        if random.random() < 0.3:
            fleet.free_ms[replica] = fleet.now_ms + random.randrange(3 * REPORT_MS)
            fleet.report(replica)
            for one in views:
                report = LoadReport((0, fleet.told[replica], 0), interval_ms=policy.NEVER_MS)
                one[replica].report(report, 0)
                one[replica].count(DEFAULT, one[replica].sent[DEFAULT] // 1000)
        else:
            turns += 1
            choice = ReplicaChoice(replica, RouteReason.LOAD, random.randrange(1, 5_000))
            fleet.send(worker, choice)
            views[worker][replica].enter(DEFAULT, choice.computed_len)
            views[worker][replica].leave()
        for at in range(2):
            assert fleet.loads(at) == policy.loads(views[at], 0)
    assert turns > 100


def test_a_new_replica_is_believed_little_by_little_here_too() -> None:
    fleet = Fleet(SMALL, 1, 0)
    fleet.known[0][:] = [4_000] * 4
    fleet.now_ms = 1_000.0
    fleet.join()
    seen = []
    for age_ms in (0, policy.SLOW_START_MS // 2, policy.SLOW_START_MS):
        fleet.now_ms = 1_000.0 + age_ms
        seen.append(fleet.loads(0)[4])
    assert seen[0] == 4_000
    assert all(before > after for before, after in pairwise(seen))
    assert seen[2] == 0


# -- live -----------------------------------------------------------------------------------------


def test_the_live_targets_come_from_a_perfect_placement() -> None:
    shares = {"own": 60, "round robin": 45, "least load": 30}
    conversations = {rule: Seen(100, cached, 66, [2.0]) for rule, cached in shares.items()}
    singles = {rule: Seen(100, 0, 0, [1.0]) for rule in shares}
    found = {one.name: one for one in figures_of(conversations, singles)}
    assert found["live conversations: cached share / perfect"].value == 0.9091
    over = found["live conversations: cached share / round robin"]
    assert (over.target, over.ok) == (">= 1.222", True)
    shares = {"own": 60, "round robin": 0, "least load": 0}
    nothing = {rule: Seen(100, cached, 66, [2.0]) for rule, cached in shares.items()}
    over = {one.name: one for one in figures_of(nothing, singles)}[over.name]
    assert (over.target, over.ok) == (">= 1.6", True)
